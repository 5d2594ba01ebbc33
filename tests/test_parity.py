"""The whole gradient, from the same completions and rewards, is that of TRL's trainer: its rows padded, ours packed.

TRL's trainer is real and runs its own forward pass; only completions and rewards are given to it.  What it does with
numbers alone is compared more closely, in float64, in test_trl.py.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from golden import whole_batch
from models import STOP, VOCABULARY, tiny_folder
from test_packing import relative_distance
from torch import Tensor

from groupwise.adapters import Lora, attach
from groupwise.algorithms import Algorithm
from groupwise.engines import Optimizer
from groupwise.engines.local_learner import LocalLearner
from groupwise.foreign.trl import from_trl
from groupwise.model import load_model
from groupwise.records import Rollout

with warnings.catch_warnings():  # what TRL and accelerate say while they are imported is not ours to mend
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", minversion="1.16")
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

# TRL 1.16 asks transformers 5 for `is_gradient_checkpointing`, the old name of `is_activation_checkpointing`.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

G, RAGGED = 4, (13, 2, 7, 1, 5, 11, 3, 8, 6, 9, 1, 12)
PROMPTS = {"gpt2": (6, 6, 6)}
"""Tokens of the prompts, where they have to be equally long: TRL pads prompts on the left and gives no positions, so
that GPT-2, which has absolute ones, sees a shorter prompt begin later."""
REWARDS = torch.tensor([1.0, 0.0, 0.2, 0.0, 0.5, 1.0, 0.7, 0.0, 0.0, 0.0, 1.0, 0.3])[:, None]
TEMPERATURE = 0.7
LORA = Lora(rank=4, alpha=8.0)
DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
"""TRL trains with the dropout of the model's config; without it nothing is random."""


class Given(GRPOTrainer):
    """TRL's trainer with given completions and rewards."""

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        return *self.texts, None, [""] * len(RAGGED), None, {}, None, None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return REWARDS


def texts(architecture: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions, as tokens, row by row."""
    rng = np.random.default_rng(0)
    lengths = PROMPTS.get(architecture, (5, 9, 2))
    prompts = [rng.integers(5, VOCABULARY, length).tolist() for length in lengths]
    completions = [[*rng.integers(5, VOCABULARY, length - 1).tolist(), STOP] for length in RAGGED]
    return [prompts[row // G] for row in range(len(RAGGED))], completions


def fields(loss_type: str) -> dict[str, Any]:
    """GRPOConfig fields: `num_iterations` 2, so that the ratio to old log-probs matters."""
    return {
        "loss_type": loss_type,
        "per_device_train_batch_size": len(RAGGED),
        "num_iterations": 2,
        "num_generations": G,
        "max_completion_length": 16,
        "temperature": TEMPERATURE,
        "beta": 0.0,
    }


def of_trl(
    folder: Path, architecture: str, loss_type: str, lora: bool, again: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """(gradient, adapter, old log-probs) by TRL."""
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": again}
    config = GRPOConfig(output_dir=str(folder / "out"), **quiet, **fields(loss_type))
    rows = Dataset.from_list([{"prompt": "w3 w3"}] * len(RAGGED))
    conv1d = {"fan_in_fan_out": architecture == "gpt2"}
    adapter = LoraConfig(r=LORA.rank, lora_alpha=8, target_modules="all-linear", **conv1d) if lora else None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = Given(
            model=str(folder), reward_funcs=[_no_reward], args=config, train_dataset=rows, peft_config=adapter
        )
    trainer.texts, trainer.current_gradient_accumulation_steps = texts(architecture), 1
    named = {name.removeprefix("base_model.model."): p for name, p in trainer.model.named_parameters()}
    own = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in own.values() if lora else ():  # B starts at 0, where A has no gradient
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    trainer.model.train()
    scored = trainer._generate_and_score_completions([{"prompt": "w3 w3"}] * len(RAGGED))
    old = scored["old_per_token_logps"]
    old += 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(2))  # some ratios are clipped
    trainer._compute_loss(trainer.model, scored).backward()
    gradient = {name: parameter.grad.clone() for name, parameter in own.items() if parameter.grad is not None}
    return gradient, {name: parameter.detach() for name, parameter in own.items()} if lora else {}, old


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("rewards are given here")


def of_ours(
    folder: Path, architecture: str, loss_type: str, adapter: dict[str, Tensor], again: bool, old: Tensor
) -> dict[str, Tensor]:
    """The gradient by the local engine, caught where the optimizer would use it."""
    model = load_model(folder, dtype=torch.float32, device="cpu", gradient_checkpointing=again)
    if adapter:
        attach(model, LORA, seed=0)
        model.load_state_dict({**model.state_dict(), **adapter})
    algorithm = Algorithm.model_validate(from_trl(fields(loss_type)).tree["algorithm"])
    rollouts: list[Rollout] = []
    for i, (prompt, said) in enumerate(zip(*texts(architecture), strict=True)):
        before = np.concatenate([np.zeros(len(prompt)), old[i, : len(said)].numpy()])
        rollouts.append(
            Rollout(
                tokens=np.array(prompt + said, dtype=np.int32),
                loss_mask=np.arange(len(prompt + said)) >= len(prompt),
                logprobs=before,
                old_logprobs=before,
                group=i // G,
                finish_reason="stop",
                reward=REWARDS[i].item(),
            )
        )
    learner = LocalLearner(
        model, Optimizer(max_grad_norm=1e9), temperature=TEMPERATURE, microbatch_tokens=60, total_updates=1
    )
    caught: dict[str, Tensor] = {}
    learner._steps._adamw.step = lambda: caught.update(  # type: ignore[method-assign]
        {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    )
    learner.update(whole_batch(algorithm, algorithm.credit(rollouts)), algorithm.loss, per_token=algorithm.per_token)
    assert not learner._forward._obstacle, "rows were padded"
    return caught


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3", "gpt2"])
def test_the_gradient_is_that_of_trl(
    tmp_path: Path, architecture: str, loss_type: str, lora: bool, again: bool
) -> None:
    folder = tiny_folder(tmp_path, architecture, **DROPOUT.get(architecture, {}))
    theirs, adapter, old = of_trl(folder, architecture, loss_type, lora, again)
    ours = of_ours(folder, architecture, loss_type, adapter, again, old)
    assert all(".lora_" in name for name in ours) == lora
    distance = relative_distance(ours, theirs)
    assert 0 < distance < 1e-5
