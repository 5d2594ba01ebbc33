"""TRL 1.16, by its own code: the same batch through its trainer and through ours, advantages, loss and gradient.

TRL's trainer is real, made from a GRPOConfig on a tiny model; only what would sample, score and forward is replaced by
numbers, so everything between rewards and loss is TRL's.  Our algorithm is what `import trl` makes of the same config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from golden import whole_batch
from models import STOP, tiny_folder

from groupwise.algorithms import Algorithm
from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.foreign import Imported
from groupwise.foreign.trl import from_trl, import_trl
from groupwise.penalties import (
    KL,
)
from groupwise.records import Rollout
from groupwise.slots import replace

with warnings.catch_warnings():  # what TRL and accelerate say while they are imported is not ours to mend
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", minversion="1.16")
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import split_tensor_dict

# TRL 1.16 asks transformers 5 for `is_gradient_checkpointing`, the old name of `is_activation_checkpointing`.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# Everything is float64, but the factor n / (n - 1) of TRL's standard deviation is float32: 1.5e-8 off.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
GROUPS, G = 2, 4
LENGTHS = (3, 5, 1, 4, 6, 2, 5, 3)
B, T, PROMPT = len(LENGTHS), max(LENGTHS), 2
MASK = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.7, 0.0], [0.3, 0.9, -0.4, 0.2, 0.0, 0.1, 0.8, 0.6]]).double().T
TRUNCATED = (False, False, False, False, False, True, False, False)

_random = torch.Generator().manual_seed(3)


def _draw(spread: float) -> torch.Tensor:
    return spread * torch.randn(B, T, generator=_random, dtype=torch.float64)


OLD = -torch.rand(B, T, generator=_random, dtype=torch.float64) * 2 - 0.1
CURRENT, REF, SAMPLED = OLD + _draw(0.4), OLD + _draw(0.3), OLD + _draw(0.2)
SAMPLED = SAMPLED.float().double()  # TRL keeps what vLLM says, and the two temperatures of SAPO, in float32
EXACT_IN_FLOAT32 = {"sapo_temperature_pos": 0.875, "sapo_temperature_neg": 1.25}
ENTROPY = torch.rand(B, T, generator=_random, dtype=torch.float64) * 3


class Numbers(GRPOTrainer):
    """TRL's trainer with numbers in place of a model's, a sampler's and the reward functions'."""

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        endings = [5 if cut else STOP for cut in TRUNCATED]
        completions = [[7] * (n - 1) + [end] for n, end in zip(LENGTHS, endings, strict=True)]
        sampled = [row[:n].tolist() for row, n in zip(SAMPLED, LENGTHS, strict=True)] if self.use_vllm else None
        return [[3] * PROMPT] * B, completions, None, [""] * B, sampled, {}, None, None

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return REWARDS[:, : len(self.reward_funcs)]

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: torch.Tensor, *_: Any, compute_entropy: bool = False, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        if not compute_entropy:
            return (REF if model is self.ref_model else OLD), ENTROPY, None
        rows = slice(self.seen, self.seen + len(ids))
        self.seen += len(ids)
        return self.current[rows], ENTROPY[rows], None


@dataclasses.dataclass(frozen=True)
class Result:
    advantages: torch.Tensor
    loss: float
    gradient: torch.Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def settings(**fields: Any) -> dict[str, Any]:
    """GRPOConfig fields: two rounds of two micro-batches, so that old log-probs are computed and weights add up."""
    return {
        "per_device_train_batch_size": B // 2,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "num_generations": G,
        "max_completion_length": 7,
        **fields,
    }


def of_trl(folder: Path, rewards: int = 1, vllm: bool = False, **fields: Any) -> Result:
    """What TRL computes."""
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": False}
    config = GRPOConfig(output_dir=str(folder / "out"), **quiet, **settings(**fields))
    rows = Dataset.from_list([{"prompt": "w3 w3"}] * B)

    def reward(**_: Any) -> list[float]:
        raise AssertionError("rewards are numbers here")

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = Numbers(model=str(folder), reward_funcs=[reward] * rewards, args=config, train_dataset=rows)
    trainer.use_vllm = vllm  # vLLM itself is not needed for what is done with its log-probs
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    trainer.current, trainer.seen = CURRENT.clone().requires_grad_(), 0
    scored = trainer._generate_and_score_completions([{"prompt": "w3 w3"}] * B)
    loss = sum(trainer._compute_loss(trainer.model, part) for part in split_tensor_dict(scored, 2))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert trainer.current.grad is not None
    return Result(scored["advantages"], loss.item(), trainer.current.grad)


def of_ours(algorithm: Algorithm, rewards: int = 1, vllm: bool = False, weights: tuple[float, ...] = ()) -> Result:
    """What we compute."""
    mu, rollouts = SAMPLED if vllm else OLD, []
    for i, n in enumerate(LENGTHS):

        def spread(values: torch.Tensor, i: int = i, n: int = n) -> np.ndarray[Any, Any]:
            return np.concatenate([np.zeros(PROMPT), values[i, :n].numpy()])

        parts = {str(k): REWARDS[i, k].item() for k in range(rewards)}
        shares = {str(k): w for k, w in enumerate(weights or (1.0,) * rewards)}
        rollouts.append(
            Rollout(
                tokens=np.arange(PROMPT + n, dtype=np.int32),
                loss_mask=np.arange(PROMPT + n) >= PROMPT,
                logprobs=spread(mu),
                group=i // G,
                finish_reason="length" if TRUNCATED[i] else "stop",
                rewards=parts,
                reward_weights=shares,
                reward=sum(shares[k] * r for k, r in parts.items()),
                old_logprobs=spread(OLD),
                ref_logprobs=spread(REF),
                entropies=spread(ENTROPY),
            )
        )
    credited = algorithm.credit(rollouts)
    batch = whole_batch(algorithm, credited)
    kept = [i for i in range(B) if not (algorithm.drop_truncated and TRUNCATED[i])]
    current = CURRENT.clone().requires_grad_()
    before = torch.zeros(len(kept), PROMPT, dtype=torch.float64)
    width = batch.tokens.shape[1]
    logprobs, entropies = (torch.cat([before, x[kept]], 1)[:, :width] for x in (current, ENTROPY))
    loss, _ = algorithm.loss(logprobs, entropies, batch)
    loss.backward()
    assert current.grad is not None
    advantages = [r.advantages[-1] for r in credited if r.advantages is not None]
    return Result(torch.tensor(advantages, dtype=torch.float64), loss.item(), current.grad)


def imported(**fields: Any) -> Algorithm:
    return Algorithm.model_validate(from_trl(settings(**fields)).tree["algorithm"])


def assert_equal(theirs: Result, ours: Result) -> None:
    np.testing.assert_allclose(ours.advantages, theirs.advantages, **CLOSE)
    np.testing.assert_allclose(ours.loss, theirs.loss, **CLOSE)
    np.testing.assert_allclose(ours.gradient, theirs.gradient, **CLOSE)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(folder: Path, scale: str) -> None:
    fields = {"loss_type": "grpo", "scale_rewards": scale}
    assert_equal(of_trl(folder, **fields), of_ours(imported(**fields)))


def test_several_rewards_are_weighed_and_summed_as_in_trl(folder: Path) -> None:
    fields = {"reward_weights": [1.0, 0.5]}
    assert_equal(of_trl(folder, rewards=2, **fields), of_ours(imported(**fields), rewards=2, weights=(1.0, 0.5)))


def test_rewards_normalised_one_by_one_differ_from_trls_by_its_1e_4_in_the_whitening(folder: Path) -> None:
    fields = {"multi_objective_aggregation": "normalize_then_sum"}
    theirs, ours = of_trl(folder, rewards=2, **fields), of_ours(imported(**fields), rewards=2)
    ratio = ours.advantages / theirs.advantages
    assert ratio.max() - ratio.min() < 1e-6
    assert 1 < ratio.mean() < 1 + 2e-4


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "luspo", "sapo", "cispo"])
def test_loss_and_gradient_are_trls(folder: Path, loss_type: str, level: str) -> None:
    fields: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level}
    fields |= EXACT_IN_FLOAT32
    fields |= {"epsilon_high": 1.3} if loss_type == "cispo" else {"epsilon": 0.1, "epsilon_high": 0.15}
    assert_equal(of_trl(folder, **fields), of_ours(imported(**fields)))


def test_vespo_is_trls(folder: Path) -> None:
    fields = {"loss_type": "vespo", "importance_sampling_level": "sequence"}
    assert_equal(of_trl(folder, **fields), of_ours(imported(**fields)))


@pytest.mark.parametrize("unbiased", [False, True], ids=["k3", "k3_is"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "luspo", "sapo"])
def test_the_kl_is_trls(folder: Path, loss_type: str, unbiased: bool) -> None:
    fields = {"loss_type": loss_type, "beta": 0.3, "use_bias_correction_kl": unbiased, **EXACT_IN_FLOAT32}
    assert_equal(of_trl(folder, **fields), of_ours(imported(**fields)))


def test_with_a_sequence_ratio_trl_weighs_the_kl_by_the_sequence_and_we_by_the_token(folder: Path) -> None:
    fields = {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.3}
    plain = {**fields, "use_bias_correction_kl": False}
    assert_equal(of_trl(folder, **plain), of_ours(imported(**plain)))
    theirs, ours = of_trl(folder, **fields), of_ours(imported(**fields))
    assert abs(theirs.loss - ours.loss) > 1e-4
    assert "by the sequence's ratio" in note(from_trl(fields), "use_bias_correction_kl")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_two_sided_clip_is_our_dual_clip(folder: Path, level: str) -> None:
    fields = {"epsilon": 0.1, "delta": 1.2, "importance_sampling_level": level}
    theirs = of_trl(folder, **fields)
    assert_equal(theirs, of_ours(imported(**fields)))
    assert theirs.loss != of_trl(folder, epsilon=0.1, importance_sampling_level=level).loss  # delta acts


def test_below_the_upper_clip_delta_is_another_thing_in_trl(folder: Path) -> None:
    """There it caps the first of the two terms alone; ours stays a bound on the loss of tokens with A < 0."""
    fields = {"epsilon": 0.3, "delta": 1.1}
    assert of_trl(folder, **fields).loss != pytest.approx(of_ours(imported(**fields)).loss, rel=1e-4)
    assert "approximated" in note(from_trl(fields), "delta")


def test_trls_default_cispo_scales_down_even_a_token_of_ratio_one(folder: Path) -> None:
    """`epsilon_high` is an absolute cap there, and its default is 0.2: a fifth of the on-policy gradient."""
    default = imported(loss_type="cispo")
    assert_equal(of_trl(folder, loss_type="cispo"), of_ours(default))
    assert default.surrogate == replace(imported(loss_type="cispo", epsilon_high=5.0).surrogate, cap=0.2)
    assert any("scales down even a token of ratio 1" in line for line in from_trl({"loss_type": "cispo"}).notes)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("bounds", [(None, 1.2), (0.8, 1.25)])
def test_the_correction_of_vllms_logprobs_is_trls(folder: Path, mode: str, bounds: tuple[float | None, float]) -> None:
    names = ("mode", "clip_min", "clip_max")
    fields = {f"vllm_importance_sampling_{k}": v for k, v in zip(names, (mode, *bounds), strict=True)}
    assert_equal(of_trl(folder, vllm=True, **fields), of_ours(imported(use_vllm=True, **fields), vllm=True))


def test_the_off_policy_mask_is_trls(folder: Path) -> None:
    fields = {"loss_type": "grpo", "off_policy_mask_threshold": 0.05}
    theirs = of_trl(folder, **fields)
    assert_equal(theirs, of_ours(imported(**fields)))
    assert theirs.loss != of_trl(folder, loss_type="grpo").loss


def test_truncated_completions_leave_dapos_denominator_as_in_trl(folder: Path) -> None:
    fields = {"mask_truncated_completions": True}
    assert_equal(of_trl(folder, **fields), of_ours(imported(**fields)))


def test_truncated_completions_stay_in_trls_other_denominators(folder: Path) -> None:
    fields = {"mask_truncated_completions": True, "loss_type": "grpo"}
    theirs, ours = of_trl(folder, **fields), of_ours(imported(**fields))
    np.testing.assert_allclose(ours.loss * (B - sum(TRUNCATED)) / B, theirs.loss, **CLOSE)
    assert "still counts in the denominator" in note(from_trl(fields), "mask_truncated_completions")


def test_high_entropy_tokens_are_ranked_in_a_micro_batch_by_trl_and_in_an_update_by_us(folder: Path) -> None:
    """Both keep the denominator of all tokens; where all tokens are ranked together they agree up to one token."""
    theirs, ours = of_trl(folder, top_entropy_quantile=0.5), of_ours(imported(top_entropy_quantile=0.5))
    for result, rows in ((theirs, (slice(0, 4), slice(4, 8))), (ours, (slice(0, 8),))):
        for part in rows:
            kept = ENTROPY[part][(result.gradient[part] != 0) & MASK[part]]
            assert kept.min() > ENTROPY[part][MASK[part]].quantile(0.4)
    assert "approximated" in note(from_trl({"top_entropy_quantile": 0.5}), "top_entropy_quantile")


def test_the_entropy_bonus_has_trls_value_where_tokens_count_the_same(folder: Path) -> None:
    """TRL's is the mean over the tokens of each micro-batch, ours weighs tokens as the loss does."""
    theirs = of_trl(folder, entropy_coef=0.1).loss - of_trl(folder).loss
    ours = of_ours(imported(entropy_coef=0.1)).loss - of_ours(imported()).loss
    halves = [(ENTROPY[part] * MASK[part]).sum() / MASK[part].sum() for part in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(theirs, -0.1 * float(sum(halves)) / 2, rtol=1e-9)
    np.testing.assert_allclose(ours, -0.1 * float((ENTROPY * MASK).sum() / MASK.sum()), rtol=1e-9)


# The importer --------------------------------------------------------------------------------------------------------


def note(found: Imported, key: str) -> str:
    """The note on a key."""
    lines = [line for line in found.notes if line.removeprefix("approximated: ").startswith(f"{key}: ")]
    assert len(lines) == 1, lines
    return lines[0]


def fields_of_trl() -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(GRPOConfig):
        known = field.default is not dataclasses.MISSING and field.default is not None
        yield field.name, field.default if known else None


def test_every_field_of_grpo_config_has_one_note_that_is_not_unknown() -> None:
    found = from_trl({**dict(fields_of_trl()), "generation_batch_size": None, "steps_per_generation": None})
    for name, _ in fields_of_trl():
        assert "has no such field" not in note(found, name)


def test_a_field_that_trl_does_not_have_is_said_with_the_nearest_one() -> None:
    line = note(from_trl({"epsilon_hihg": 0.3}), "epsilon_hihg")
    assert "has no such field (did you mean epsilon_high?)" in line


def test_our_assumptions_are_the_defaults_of_trl() -> None:
    """What the importer takes for a field that is not given is what GRPOConfig has there."""
    explicit = {k: v for k, v in fields_of_trl() if v is not None and k not in ("output_dir", "local_rank")}
    assert from_trl(explicit).tree == from_trl({}).tree


def test_a_file_and_settings_become_a_run_file_that_loads(tmp_path: Path) -> None:
    given = {
        "model_name_or_path": "some/model",
        "dataset_name": "some/rows",
        "reward_funcs": ["accuracy_reward", "mine.grading.brevity"],
        "reward_weights": [1.0, 0.2],
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "max_completion_length": 99,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "max_steps": 200,
        "learning_rate": 2e-6,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "num_processes": 2,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(given))
    found = import_trl([str(file), "beta=0.04", "use_bias_correction_kl=false", "temperature=0.9"])
    (tmp_path / "run.yaml").write_text(found.to_yaml().replace("mine.grading:brevity", "os.path:join"))
    config = Config.load(tmp_path / "run.yaml")
    assert (config.model, config.data.path) == ("some/model", "some/rows")
    assert [reward.weight for reward in config.rewards] == [1.0, 0.2]
    assert (config.prompts_per_step, config.group_size, config.updates_per_step) == (32, 8, 2)  # 16 * 2 * 8 rows
    assert (config.steps, config.optimizer.warmup_updates) == (100, 20)
    assert (config.sampling.max_tokens, config.sampling.temperature) == (99, 0.9)
    assert config.optimizer.schedule == "cosine"
    assert config.algorithm.scale is None
    assert config.algorithm.kl == KL(coef=0.04)
    for key in (*given, "beta", "temperature"):
        note(found, key)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "foo"}, "TRL knows grpo"),
        ({"scale_rewards": "foo"}, "TRL knows group, batch and none"),
        ({"importance_sampling_level": "foo"}, "TRL knows token and sequence"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "one of them, not both"),
        ({"epsilon": "wide"}, "takes a number here"),
    ],
)
def test_what_trl_refuses_late_is_refused_at_once(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_trl(fields)
