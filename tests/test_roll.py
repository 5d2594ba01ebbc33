"""ROLL, by numbers: its golden vectors through our code, with the algorithm that the importer makes of its config.

The vectors GV-1 and GV-2 were printed by ROLL's own functions (commit 8eb27cc2) in float32.  B rows, t the position in
ROLL's shifted tensors, so a token at p is ROLL's t = p - 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from golden import whole_batch

from groupwise.algorithms import Algorithm
from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.foreign import Imported
from groupwise.foreign.roll import from_roll
from groupwise.losses import Cispo, Reinforce, Topr
from groupwise.penalties import (
    KL,
    EntropyBonus,
)
from groupwise.records import Rollout
from groupwise.slots import replace
from groupwise.weights import Importance, SequenceSumNorm

CLOSE = {"rtol": 0, "atol": 1e-6}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

# The configuration of ROLL's GRPO page, with the lengths of GV-1.
SEED: dict[str, Any] = {
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8,
    "prompt_length": 3,
    "response_length": 4,
    "adv_estimator": "grpo",
    "ppo_epochs": 1,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "loss_agg_mode": "seq-mean-token-mean",
    "whiten_advantages": True,
    "advantage_clip": 2.0,
    "dual_clip_loss": True,
    "reward_clip": 10,
    "reward_norm": None,
    "reward_shift": False,
    "reward_scale": False,
    "add_token_level_kl": False,
}

# The rest of ROLL's examples/docs_examples/example_grpo.yaml.
EXAMPLE = """
hydra: {run: {dir: .}}
exp_name: qwen2.5-7B-rlvr-config
seed: 42
logging_dir: ./output/logs
output_dir: ./output
system_envs: {USE_MODELSCOPE: '1'}
checkpoint_config: {type: file_system, output_dir: '/models/${exp_name}'}
track_with: tensorboard
tracker_kwargs: {log_dir: /tensorboard}
num_gpus_per_node: 8
max_steps: 500
save_steps: 100
logging_steps: 1
eval_steps: 10
resume_from_checkpoint: false
pretrain: Qwen/Qwen2.5-7B
reward_pretrain: Qwen/Qwen2.5-7B
validation:
  data_args: {template: qwen2_5, file_name: [data/math_benchmarks.jsonl]}
  generating_args:
    {max_new_tokens: '${response_length}', top_p: 0.6, top_k: 50, num_beams: 1, temperature: 0.6,
     num_return_sequences: 1}
  eval_steps: 10
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}
  training_args:
    {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1, gradient_accumulation_steps: 32,
     warmup_steps: 20, num_train_epochs: 50}
  data_args:
    template: qwen2_5
    file_name: [data/math.jsonl, data/code.jsonl, data/judge.jsonl, data/crossthink.jsonl, data/ifeval.jsonl]
    domain_interleave_probs: {math_rule: 0.4, code_sandbox: 0.3, llm_judge: 0.1, crossthinkqa: 0.1, ifeval: 0.1}
    dataset_dir: data
    messages: messages
    interleave_probs: "1.0"
    preprocessing_num_workers: 16
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1,
       use_distributed_optimizer: true, recompute_granularity: full}
  device_mapping: list(range(0,16))
  infer_batch_size: 4
actor_infer:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16}
  generating_args:
    {max_new_tokens: '${response_length}', top_p: 0.99, top_k: 100, num_beams: 1, temperature: 0.99,
     num_return_sequences: '${num_return_sequences_in_group}'}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, max_model_len: 8000}}
  device_mapping: list(range(0,12))
reference:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16}
  strategy_args: {strategy_name: megatron_infer}
  device_mapping: list(range(0,16))
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    model_args: {model_name_or_path: '${reward_pretrain}'}
    data_args: {template: qwen2_5}
    tag_included: [deepmath_103k, aime]
    world_size: 8
    infer_batch_size: 1
  ifeval:
    worker_cls: roll.pipeline.rlvr.rewards.ifeval_rule_reward_worker.GeneralRuleRewardWorker
    reward_type: soft
    world_size: 4
"""


def imported(**changes: Any) -> Algorithm:
    """The algorithm that the importer makes of the seed with some keys changed."""
    return Algorithm.model_validate(from_roll({**SEED, **changes}).tree["algorithm"])


def full_example() -> dict[str, Any]:
    return {**SEED, "prompt_length": 2048, "response_length": 4096, **yaml.safe_load(EXAMPLE)}


# GV-1: rewards to loss -----------------------------------------------------------------------------------------------

PROMPT, LENGTHS, WIDTH = 3, (2, 3, 4, 1, 4, 2, 3, 4), 7
T = WIDTH - 1  # what ROLL's seq-mean-token-sum-norm divides by: its shifted width, prompt included


def gv1_logprobs(i: int) -> tuple[np.ndarray[Any, Any], ...]:
    """(old, current, reference) log-probs of row i at its tokens."""
    t = np.arange(WIDTH) - 1.0
    inside = (np.arange(WIDTH) >= PROMPT) & (np.arange(WIDTH) < PROMPT + LENGTHS[i])
    old = -(0.3 + 0.1 * ((3 * i + 5 * t) % 7)) * inside
    current = old + 0.05 * ((5 * i + 3 * t) % 11 - 5) * inside
    return old, current, old + 0.02 * ((2 * i + 7 * t) % 9 - 4) * inside


def gv1_rollouts(rewards: tuple[float, ...]) -> list[Rollout]:
    made: list[Rollout] = []
    for i, reward in enumerate(rewards):
        size = PROMPT + LENGTHS[i]
        old, _, ref = (values[:size] for values in gv1_logprobs(i))
        mask = np.arange(size) >= PROMPT
        tokens = np.arange(size, dtype=np.int32)
        made.append(Rollout(tokens, mask, old, i // 4, reward=reward, old_logprobs=old, ref_logprobs=ref))
    return made


RAW = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0)


def gv1_total(chosen: Algorithm) -> float:
    """ROLL's total loss on GV-1; for its sum-norm, by the documented factor from ours."""
    rollouts = chosen.credit(gv1_rollouts(RAW))
    batch = whole_batch(chosen, rollouts)
    current = torch.from_numpy(np.stack([gv1_logprobs(i)[1] for i in range(8)]))
    total = chosen.loss(current, torch.zeros_like(current), batch)[0].item()
    return total * roll_factor(chosen, rows=8, width=T)


def roll_factor(chosen: Algorithm, rows: int, width: int) -> float:
    """ROLL's loss over ours: its sum-norm leaves out the number of rows and divides by the width of the batch."""
    norm = chosen.aggregate
    return rows * norm.length / width if isinstance(norm, SequenceSumNorm) and norm.length else 1.0


def first_token(rollouts: list[Rollout]) -> list[float]:
    values = [rollout.advantages[rollout.loss_mask] for rollout in rollouts if rollout.advantages is not None]
    assert all((row == row[0]).all() for row in values)
    return [float(row[0]) for row in values]


def test_rewards_are_normalised_by_group_as_in_roll() -> None:
    z = first_token(imported(whiten_advantages=False, advantage_clip=None).credit(gv1_rollouts(RAW)))
    np.testing.assert_allclose(z, [0.8660239, -0.8660239, -0.8660239, 0.8660239, *[0.499999] * 3, -1.499997], **CLOSE)


def test_advantages_are_whitened_over_all_tokens_of_the_step_as_in_roll() -> None:
    a = first_token(imported().credit(gv1_rollouts(RAW)))
    expected = [1.2068601, -0.7253224, -0.7253224, 1.2068601, *[0.7985418] * 3, -1.4325498]
    np.testing.assert_allclose(a, expected, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "totals"),
    [
        ({}, (-0.0508039, -0.1460612, -0.3129916, -0.1947483)),
        ({"whiten_advantages": False, "advantage_clip": None}, (0.1729548, 0.4972452, -0.0571543, 0.6629936)),
        ({"add_token_level_kl": True, "init_kl_coef": 0.2}, (-0.0504604, -0.1450737, -0.3122297, -0.1934316)),
    ],
    ids=["seed", "no whitening, no clip", "KL in the reward too"],
)
def test_the_total_loss_is_rolls_in_every_aggregation(changes: dict[str, Any], totals: tuple[float, ...]) -> None:
    ours = [gv1_total(imported(loss_agg_mode=mode, **changes)) for mode in MODES]
    np.testing.assert_allclose(ours, totals, **CLOSE)


@pytest.mark.parametrize(
    ("mode", "pg", "kl", "norm"),
    [
        ("token-mean", -0.0508222, 0.0182902, 0.1655080),
        ("seq-mean-token-sum", -0.1461138, 0.0525843, 0.4758354),
        ("seq-mean-token-mean", -0.3130112, 0.0195338, 0.1477185),
        ("seq-mean-token-sum-norm", -0.1948184, 0.0701123, 0.6344472),
    ],
)
def test_policy_loss_kl_and_gradient_norm_are_rolls(mode: str, pg: float, kl: float, norm: float) -> None:
    chosen = imported(loss_agg_mode=mode)
    factor = roll_factor(chosen, rows=8, width=T)
    batch = whole_batch(chosen, chosen.credit(gv1_rollouts(RAW)))
    current = torch.from_numpy(np.stack([gv1_logprobs(i)[1] for i in range(8)])).requires_grad_()
    zero = torch.zeros_like(current)
    loss = chosen.loss(current, zero, batch)[0] * factor
    loss.backward()
    assert current.grad is not None
    np.testing.assert_allclose(current.grad.norm().item(), norm, **CLOSE)
    policy = replace(chosen, kl=None).loss(current, zero, batch)[0].item() * factor
    np.testing.assert_allclose(policy, pg, **CLOSE)
    np.testing.assert_allclose((loss.item() - policy) / 0.001, kl, rtol=0, atol=1e-5)


def test_whitening_moves_a_group_of_equal_rewards_off_zero_as_in_roll() -> None:
    """Our law holds before the whitening; who asks for whitening asks for this, as ROLL's users do."""
    equal = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    a = first_token(imported().credit(gv1_rollouts(equal)))
    expected = [1.80511, -1.27026, -1.27026, 1.80511, *[0.26742] * 4]
    np.testing.assert_allclose(a, expected, rtol=0, atol=5e-6)
    assert first_token(imported(whiten_advantages=False).credit(gv1_rollouts(equal)))[4:] == [0.0] * 4


def test_the_reward_clip_acts_on_the_normalised_reward_before_the_whitening() -> None:
    clipped = imported(whiten_advantages=False, advantage_clip=None, reward_clip=0.7)
    np.testing.assert_allclose(
        first_token(clipped.credit(gv1_rollouts(RAW))), [0.7, -0.7, -0.7, 0.7, *[0.499999] * 3, -0.7], **CLOSE
    )


def test_the_advantage_clip_acts_last() -> None:
    a = first_token(imported(advantage_clip=0.75).credit(gv1_rollouts(RAW)))
    np.testing.assert_allclose(a, [0.75, -0.7253224, -0.7253224, 0.75, *[0.75] * 3, -0.75], **CLOSE)


# GV-2: advantages to loss --------------------------------------------------------------------------------------------

ADVANTAGES = (1.0, -0.5, -1.5, 1.2)
OLD = ((-1.0, -2.0, -0.5), (-0.3, -0.7), (-1.2,), (-0.1, -0.2, -0.4))
CURRENT = ((-0.7, -2.4, -0.5), (-0.1, -1.2), (-0.7,), (-0.9, -0.2, -0.1))
REF = ((-0.9, -2.0, -0.9), (-0.3, -0.2), (-1.9,), (-0.5, -0.4, -0.2))


def gv2_loss(chosen: Algorithm) -> tuple[float, float]:
    """(policy loss, KL) of GV-2, in ROLL's scale."""
    rollouts = [
        Rollout(
            np.arange(1 + len(old), dtype=np.int32),
            np.arange(1 + len(old)) >= 1,
            np.array([0.0, *old]),
            group=0,
            old_logprobs=np.array([0.0, *old]),
            ref_logprobs=np.array([0.0, *ref]),
            advantages=np.array([0.0, *[a] * len(old)]),
        )
        for a, old, ref in zip(ADVANTAGES, OLD, REF, strict=True)
    ]
    batch = whole_batch(chosen, rollouts)
    current = torch.tensor([[0.0, *row, *[0.0] * (3 - len(row))] for row in CURRENT], dtype=torch.float64)
    factor = roll_factor(chosen, rows=4, width=4)
    policy = replace(chosen, kl=None, reward_kl_coef=0.0).loss(current, torch.zeros_like(current), batch)[0].item()
    assert chosen.kl is not None
    kl = (chosen.kl(chosen.inputs(current, current, batch)) * batch.weights).sum().item()
    return policy * factor, kl * factor


@pytest.mark.parametrize(
    ("mode", "dual", "single", "kl"),
    [
        ("token-mean", -0.3265349, -0.2850813, 0.1704972),
        ("seq-mean-token-sum", -0.7347034, -0.6414329, 0.3836188),
        ("seq-mean-token-mean", 0.1472114, 0.2404819, 0.2421141),
        ("seq-mean-token-sum-norm", -0.7347034, -0.6414329, 0.3836188),
    ],
)
def test_the_dual_clip_at_one_plus_twice_the_clip_is_rolls(mode: str, dual: float, single: float, kl: float) -> None:
    np.testing.assert_allclose(gv2_loss(imported(loss_agg_mode=mode)), (dual, kl), **CLOSE)
    np.testing.assert_allclose(gv2_loss(imported(loss_agg_mode=mode, dual_clip_loss=False)), (single, kl), **CLOSE)


def test_the_sequence_ratio_is_rolls_gspo() -> None:
    policy, kl = gv2_loss(imported(importance_sampling="seq"))
    np.testing.assert_allclose(policy + 0.001 * kl, 0.1370820, **CLOSE)
    # Without the dual clip verl and OpenRLHF agree on this one.
    single = imported(importance_sampling="seq", dual_clip_loss=False)
    np.testing.assert_allclose(gv2_loss(single)[0], 0.2301104, **CLOSE)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("vanilla", 0.07625), ("ppo", 0.1472114), ("tis", -0.0097362), ("topr", 0.1057602), ("cispo", 0.0347083)],
)
def test_the_policy_gradient_variants_are_rolls(variant: str, expected: float) -> None:
    chosen = imported(**{"actor_train": {"pg_variant": variant}})
    np.testing.assert_allclose(gv2_loss(chosen)[0], expected, **CLOSE)


def test_kimi15_is_reinforce_with_a_quadratic_kl_to_the_old_policy() -> None:
    chosen = imported(use_kl_loss=False, **{"actor_train": {"pg_variant": "kimi15"}})
    policy, kl = gv2_loss(chosen)
    np.testing.assert_allclose(policy + 0.1 * kl, 0.0852709, **CLOSE)
    assert chosen.kl == KL(coef=0.1, estimator="k2", to="old")


# The importer --------------------------------------------------------------------------------------------------------


def note(found: Imported, key: str) -> str:
    """The note on a key."""
    lines = [line for line in found.notes if line.removeprefix("approximated: ").startswith(f"{key}: ")]
    assert len(lines) == 1, lines
    return lines[0]


def test_the_example_of_roll_becomes_a_run_file_that_loads(tmp_path: Path) -> None:
    found = from_roll(full_example())
    file = tmp_path / "run.yaml"
    file.write_text(found.to_yaml())
    config = Config.load(file)
    assert (config.model, config.data.path) == ("Qwen/Qwen2.5-7B", "data/math.jsonl")
    assert (config.steps, config.prompts_per_step, config.group_size) == (500, 64, 8)
    assert config.updates_per_step == 1  # 512 rows over 16 devices * 1 * 32
    assert (config.sampling.max_tokens, config.sampling.temperature, config.sampling.top_p) == (4096, 0.99, 1.0)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_updates) == (1e-6, 20)
    assert config.evaluation.data is not None
    assert (config.evaluation.temperature, config.evaluation.every) == (0.6, 10)
    assert config.algorithm == imported()
    assert config.engine.gradient_checkpointing


def test_every_key_of_roll_has_one_note() -> None:
    found = from_roll(full_example() | {"made_up": {"by": "me"}, "positive_loss_coef": 1.0})

    def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
        pairs = [(f"{prefix}{k}", v) for k, v in tree.items()]
        return [leaf for k, v in pairs for leaf in (leaves(v, f"{k}.") if isinstance(v, dict) and v else [k])]

    for key in leaves(full_example()):
        note(found, key)
    assert "no counterpart because the importer does not know it" in note(found, "made_up.by")
    assert "dead in ROLL" in note(found, "positive_loss_coef")
    unknown = [line for line in found.notes if "does not know it" in line]
    assert len(unknown) == 1, unknown


def test_references_are_resolved_and_those_that_cannot_be_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    changes = {
        "pretrain": "${oc.env:MODELS}/${name}",
        "name": "qwen",
        "response_length": "${actor_infer.length}",
        "actor_infer": {"length": 77},
        "exp_name": "${elsewhere}",
    }
    found = from_roll(SEED | changes)
    assert found.tree["model"] == "/models/qwen"
    assert found.tree["sampling"]["max_tokens"] == 77
    assert "to do: exp_name: ${elsewhere} stands for something that this file does not say" in found.notes
    with pytest.raises(ConfigError, match="refers to itself"):
        from_roll(SEED | {"pretrain": "${name}", "name": "${pretrain}"})


def test_the_dead_reward_keys_are_named_and_imported_as_documented() -> None:
    grpo = from_roll(SEED)
    assert "dead in ROLL" in note(grpo, "reward_norm")
    assert "whatever this says" in note(grpo, "reward_norm")
    batch = from_roll(SEED | {"adv_estimator": "reinforce", "reward_norm": "batch"})
    assert (batch.tree["algorithm"]["baseline"]["type"], batch.tree["algorithm"]["scale"]["type"]) == (
        "batch_mean",
        "batch_std",
    )
    assert "it trains on the rewards as they are" in note(batch, "reward_norm")
    shift = imported(reward_shift=True)
    assert shift.baseline is not None
    assert shift.scale is None
    raw = imported(adv_estimator="reinforce")
    assert raw.baseline is None
    assert raw.scale is None


def test_todays_normalisation_keys_decide_for_reinforce_and_are_overwritten_for_grpo() -> None:
    lite = imported(adv_estimator="reinforce", norm_mean_type="group", norm_std_type="batch")
    assert [getattr(s, "type", None) for s in (lite.baseline, lite.scale)] == ["group_mean", "batch_std"]
    found = from_roll(SEED | {"norm_mean_type": "batch"})
    assert found.tree["algorithm"]["baseline"]["type"] == "group_mean"
    assert "grpo always takes the group's" in note(found, "norm_mean_type")


def test_the_aggregation_that_is_not_given_is_that_of_rolls_code_and_not_of_its_page() -> None:
    silent = from_roll({key: value for key, value in SEED.items() if key != "loss_agg_mode"})
    assert silent.tree["algorithm"]["aggregate"]["type"] == "seq-mean-token-mean"
    assert any(line.startswith("loss_agg_mode: seq-mean-token-mean (ROLL's default)") for line in silent.notes)


def test_other_keys_find_their_slots() -> None:
    assert imported(adv_estimator="gae", whiten_advantages=True, gamma=0.99, value_clip=0.5).critic is not None
    assert imported(use_kl_loss=False).kl is None
    alone = imported(use_kl_loss=False, add_token_level_kl=True)
    assert alone.kl == KL(coef=0.2, estimator="k1", placement="reward_token")
    assert alone.reward_kl_coef == 0
    assert imported(max_len_mask=True).drop_truncated
    assert imported(difficulty_mask=True).filter == "drop_zero_variance"
    filters = {"math": {"worker_cls": "x.MathRuleRewardWorker", "query_filter_config": {"type": "std_filter"}}}
    assert imported(rewards=filters).filter == "dynamic_sampling"
    weight = {"is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.2}}
    assert imported(train_infer_correction=weight).correction == Importance(high=1.2)
    assert imported(actor_train={"pg_variant": "tis"}).surrogate == Cispo(cap=1.0)
    assert imported(actor_train={"pg_variant": "topr"}).surrogate == Topr()
    assert imported(actor_train={"pg_variant": "vanilla"}).surrogate == Reinforce()
    assert imported(entropy_loss_coef=0.02, rl_loss_coef=2.0).entropy == EntropyBonus(coef=0.01)


def test_updates_of_a_step_follow_from_devices_and_batches() -> None:
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16}
    train = {"training_args": args, "device_mapping": "list(range(0,8)) + list(range(8,16))"}
    split = {"strategy_args": {"strategy_config": {"tensor_model_parallel_size": 4}}}
    assert from_roll(SEED | {"actor_train": train}).tree["updates_per_step"] == 1
    found = from_roll(SEED | {"actor_train": {**train, **split}})
    assert found.tree["updates_per_step"] == 4  # 512 rows over 16 / 4 * 2 * 16
    assert "whole groups" in note(found, "actor_train.device_mapping")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl_loss_coef": 0.0}, "the loss is then 0"),
        ({"advantage_clip": 0}, "sets every advantage to 0"),
        ({"adv_estimator": "gigpo"}, "credit turns of an agent"),
        ({"loss_agg_mode": "mean"}, "ROLL knows token-mean"),
        ({"rollout_batch_size": "many"}, "takes a number here"),
        ({"importance_sampling": "seq", "add_token_level_kl": True}, "we do not: a sequence-level ratio"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_roll(SEED | changes)


def test_a_kl_in_the_reward_beside_one_in_the_loss_asks_for_both_passes() -> None:
    both = imported(add_token_level_kl=True)
    assert both.needs(1) == {"old_logprobs", "ref_logprobs"}
    with pytest.raises(ValueError, match="beside one in the loss"):
        replace(both, kl=None)


def test_the_reward_of_a_token_is_clipped_again_after_its_kl_as_in_roll() -> None:
    chosen = imported(add_token_level_kl=True, init_kl_coef=100.0, reward_clip=1.0, whiten_advantages=False)
    chosen = replace(chosen, advantage_clip=None)
    last = chosen.credit(gv1_rollouts(RAW))[2]
    assert last.advantages is not None
    old, _, ref = gv1_logprobs(2)
    kl = (old - ref)[last.loss_mask]
    rewards = -100.0 * kl + np.array([0.0, 0.0, 0.0, -0.8660239])
    expected = np.cumsum(np.clip(rewards, -1, 1)[::-1])[::-1]
    np.testing.assert_allclose(last.advantages[last.loss_mask], expected, **CLOSE)
