"""Packed rows with shared prompts give the log-probs and gradients of padded rows, and compute each token once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import ARCHITECTURES, tiny_folder, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from groupwise import attention
from groupwise.engines import Optimizer
from groupwise.engines.local_learner import LocalLearner
from groupwise.head import token_logprobs
from groupwise.model import load_model
from groupwise.packing import Forward, lay_out, packed_parts
from groupwise.records import Batch, Rollout, collate


def ragged_groups(prompts: tuple[int, ...] = (5, 9, 5, 1, 12), group: int = 4) -> Batch:
    """Groups of ragged completions; prompts of equal and different lengths, longer than the sliding window or not."""
    rng = np.random.default_rng(0)
    made: list[Rollout] = []
    for number, length in enumerate(prompts):
        prompt = rng.integers(5, 60, length)
        for sample in range(group):
            said = int(rng.integers(1, 14))
            mask = np.arange(length + said) >= length
            if said > 5 and sample == 2:
                mask[length + 2 : length + 4] = False  # what a tool said in between
            made.append(
                Rollout(
                    tokens=np.concatenate([prompt, rng.integers(5, 60, said)]).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.zeros(length + said),
                    group=number,
                )
            )
    return collate(made, torch.float64)


def weighted_sum(logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return ((logprobs + 0.3 * entropies) * torch.sin(batch.tokens.double())).sum(), {}


def gradient(model: PreTrainedModel, batch: Batch, padded: bool, budget: int = 10**6) -> dict[str, Tensor]:
    """The gradient of `weighted_sum`, caught where the optimizer would use it."""
    learner = LocalLearner(
        model, Optimizer(max_grad_norm=1e9), temperature=0.7, microbatch_tokens=budget, total_updates=1, entropy=True
    )
    if padded:
        learner._forward._obstacle = "on purpose"
    caught: dict[str, Tensor] = {}
    learner._steps._adamw.step = lambda: caught.update(  # type: ignore[method-assign]
        {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    )
    learner.update(batch, weighted_sum)
    return caught


def relative_distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = sum(float(((one[name] - other[name]) ** 2).sum()) for name in one)
    return (difference / sum(float((tensor**2).sum()) for tensor in other.values())) ** 0.5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget", [10**6, 30, 1])
def test_the_gradient_is_that_of_padded_rows(architecture: str, budget: int) -> None:
    batch = ragged_groups()
    packed = gradient(tiny_model(architecture, torch.float64), batch, padded=False, budget=budget)
    padded = gradient(tiny_model(architecture, torch.float64), batch, padded=True)
    # transformers takes Gemma 2's eager softmax in float32, whatever the dtype.
    assert relative_distance(packed, padded) < (1e-6 if architecture == "gemma2" else 1e-10)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recomputing_activations_in_the_backward_pass_changes_nothing(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, architecture)
    plain, recomputed = (
        load_model(folder, dtype=torch.float64, device="cpu", gradient_checkpointing=again) for again in (False, True)
    )
    expected = gradient(plain, ragged_groups(), padded=False)
    assert relative_distance(gradient(recomputed, ragged_groups(), padded=False), expected) < 1e-12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_are_those_of_padded_rows_in_float32(architecture: str) -> None:
    model, batch = tiny_model(architecture), ragged_groups()
    learner = LocalLearner(model, Optimizer(), temperature=0.7, microbatch_tokens=50, total_updates=1)
    padded, _ = token_logprobs(model, batch.tokens, batch.lengths, batch.loss_mask, 0.7, entropy=False)
    torch.testing.assert_close(learner.logprobs(batch), padded.detach(), atol=1e-5, rtol=0)
    assert not learner._forward._obstacle


def test_every_token_runs_once() -> None:
    batch = ragged_groups(prompts=(7, 7, 3), group=5)
    layout = lay_out(batch)
    said = int((batch.lengths - batch.loss_mask.int().argmax(1)).sum())
    # Each prompt once, each response without its last token, from which nothing is predicted.
    assert layout.tokens.numel() == 7 + 7 + 3 + said - len(batch)


def test_groups_with_one_prompt_share_it() -> None:
    one, two = ragged_groups(prompts=(6,), group=4), ragged_groups(prompts=(6,), group=4)
    twice = Batch(
        **{name: torch.cat([getattr(b, name) for b in (one, two)]) for name in ("tokens", "lengths", "loss_mask")},
        **{name: torch.cat([getattr(b, name) for b in (one, two)]) for name in ("rollout_logprobs", "advantages")},
        **{name: torch.cat([getattr(b, name) for b in (one, two)]) for name in ("weights", "selection", "groups")},
    )
    assert lay_out(twice).tokens.numel() == 2 * lay_out(one).tokens.numel() - 6


@pytest.mark.parametrize("budget", [1, 17, 40, 1000])
def test_parts_hold_every_row_once_within_the_budget(budget: int) -> None:
    batch = ragged_groups()
    parts = list(packed_parts(batch, budget))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    for part in parts:
        assert len(part) == 1 or lay_out(batch.rows(part)).tokens.numel() <= budget
    if budget == 1000:
        assert len(parts) == 1


def test_a_model_whose_packed_rows_differ_is_padded_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def blind(states: Any, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(states[0]), torch.zeros(states[0].shape[:3])

    model, batch = tiny_model("qwen3"), ragged_groups()
    expected, _ = token_logprobs(model, batch.tokens, batch.lengths, batch.loss_mask, 1.0, entropy=False)
    monkeypatch.setattr(attention, "_flash", blind)
    learner = LocalLearner(model, Optimizer(), temperature=1.0, microbatch_tokens=10**6, total_updates=1)
    with caplog.at_level(logging.WARNING):
        found = learner.logprobs(batch)
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=0)
    assert "differs by" in caplog.text
    assert "rows are padded" in caplog.text


def test_the_model_is_left_as_it_was_even_by_an_error() -> None:
    model = tiny_model("llama")
    usual = model.config._attn_implementation
    forward = Forward(model)

    def fail() -> None:
        with forward.microbatches(ragged_groups(), 100) as parts:
            next(parts)
            assert model.config._attn_implementation == attention.NAME
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.config._attn_implementation == usual
