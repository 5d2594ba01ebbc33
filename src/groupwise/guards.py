"""What keeps numbers that are not finite out of the weights, who brought them, and what else a run warns of.

The optimizer refuses a step whose loss or gradient is not finite (`NumericalError`).  Only then are the rollouts of its
batch looked at one by one; a step that is fine pays nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from groupwise.errors import NumericalError, RewardError
from groupwise.records import Batch, Rollout
from groupwise.slots import Slot

HISTORY = 20
"""Steps whose gradient norms say what is usual; half of them have to be known."""


class Guards(Slot):
    """What a run stops at, and what it warns of."""

    max_skipped_updates: int = Field(default=0, ge=0)
    """Updates with a loss or gradient that is not finite are left out, up to this many in a run; then it stops."""
    grad_norm_spike: float = Field(default=20.0, gt=1.0)
    """Warn of a gradient norm that is this many times the median of the last 20 steps."""
    sampler_mismatch: float = Field(default=0.01, gt=0.0)
    """Warn when sampler and learner disagree on log-probs by more than this (mean, nats a token)."""
    entropy: float = Field(default=0.01, ge=0.0)
    """Warn when the mean entropy of the sampled tokens falls below this (nats): little is left to explore."""
    kl: float = Field(default=1.0, gt=0.0)
    """Warn when `kl` or `approx_kl` rises above this (nats a token)."""

    def warnings(self, metrics: Mapping[str, float], grad_norms: Sequence[float]) -> Iterator[tuple[str, str]]:
        """(kind, text) of what is unusual in the metrics of a step, after steps with these gradient norms."""
        mismatch, entropy = metrics.get("sampler_mismatch", 0.0), metrics.get("entropy", math.nan)
        if mismatch > self.sampler_mismatch:
            yield (
                "sampler_mismatch",
                f"sampler and learner disagree on log-probs by {mismatch:.3g} nats a token; use the same dtype for "
                "both, or algorithm.correction: importance",
            )
        if entropy < self.entropy:
            yield (
                "entropy",
                f"the entropy has collapsed to {entropy:.3g} nats; raise sampling.temperature or "
                "algorithm.surrogate.high, or set algorithm.entropy",
            )
        for name in ("kl", "approx_kl"):
            if metrics.get(name, 0.0) > self.kl:
                yield name, f"{name} is {metrics[name]:.3g} nats a token; lower optimizer.learning_rate"
        usual = statistics.median(grad_norms) if len(grad_norms) >= HISTORY // 2 else math.inf
        if metrics.get("grad_norm", 0.0) > self.grad_norm_spike * usual:
            yield (
                "grad_norm",
                f"the gradient norm is {metrics['grad_norm']:.3g}, usually {usual:.3g}; the step was clipped to "
                "optimizer.max_grad_norm",
            )


def check_finite(step: int, rollouts: Sequence[Rollout]) -> None:
    """
    Raises:
        RewardError: a rollout that counts has a reward that is not finite: its whole group would learn from nothing.
    """
    for index, rollout in enumerate(rollouts):
        wrong = [value for value in (rollout.reward, *(r for _, r in rollout.step_rewards)) if not math.isfinite(value)]
        if rollout.valid and wrong:
            raise RewardError(
                f"step {step + 1}: {_named(index, rollouts)}: its reward is {wrong[0]}; nothing was changed. A reward "
                "has to be a finite number; lower the weight that makes it overflow"
            )


@dataclass(frozen=True)
class Finding:
    """What of a rollout is not finite."""

    row: int
    """Of the batch."""
    what: str


@contextlib.contextmanager
def blaming(
    batch: Batch, values: str, score: Callable[[Batch], Tensor], probe: Callable[[Batch], object]
) -> Generator[None]:
    """Give a `NumericalError` raised inside the `findings` that explain it.

    Args:
        values: what `score` computes, in words.
        score: what the model says of a batch, float[B, T].
        probe: an update that cannot be applied, because its loss is nan beside its own gradient.

    Raises:
        NumericalError: the same one.
    """
    try:
        yield
    except NumericalError as error:
        error.findings = culprits(batch, values, score, probe)
        raise


def culprits(
    batch: Batch, values: str, score: Callable[[Batch], Tensor], probe: Callable[[Batch], object]
) -> list[Finding]:
    """What is not finite in the batch; if nothing, in what the model says of it; if nothing, in its rows' gradients."""
    rows = [batch.rows(torch.tensor([row])) for row in range(len(batch))]
    held = [Finding(row, what) for row, one in enumerate(rows) for what in _not_finite_in(one)]
    if held:
        return held
    said = [
        Finding(row, f"{values} {place}")
        for row, one in enumerate(rows)
        if (place := _place(score(one)[0].where(one.loss_mask[0].cpu(), 0.0)))
    ]
    return said or [Finding(row, "its gradient is not finite") for row, one in enumerate(rows) if not _safe(probe, one)]


def poisoned(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss with the same gradient and the value nan, so that no optimizer applies it."""

    return partial(_with_nan, loss)  # no function of its own, so that it can be sent to other processes


def _with_nan(loss: Callable[..., Any], *arguments: Any) -> Any:
    value = loss(*arguments)
    return (value[0] + math.nan, *value[1:]) if isinstance(value, tuple) else value + math.nan


def _safe(probe: Callable[[Batch], object], one: Batch) -> bool:
    try:
        probe(one)
    except NumericalError as error:
        return math.isfinite(error.grad_norm)
    raise AssertionError("an update whose loss is nan was applied")


def _not_finite_in(one: Batch) -> Iterator[str]:
    everywhere = ("weights", "selection")  # multiply every position; the others are read under the mask
    for field in dataclasses.fields(one):
        tensor = getattr(one, field.name)
        if tensor is None or not tensor.is_floating_point():
            continue
        place = _place(tensor[0] if field.name in everywhere else tensor[0].where(one.loss_mask[0], 0.0))
        if place:
            yield f"{field.name} {place}"


def _place(values: Tensor) -> str:
    """`is nan at token 7`, or nothing."""
    wrong = (~values.isfinite()).nonzero()
    return f"is {float(values[wrong[0, 0]])} at token {int(wrong[0, 0])}" if len(wrong) else ""


def cause(
    findings: Sequence[Finding], batch: Batch, rollouts: Sequence[Rollout], weights: Iterable[tuple[str, Tensor]]
) -> str:
    """In words: which weights and which of the step's rollouts brought what is not finite."""
    broken = [name for name, tensor in weights if not bool(tensor.isfinite().all())]
    parts = [f"the weight {broken[0]} is not finite (of {len(broken)} such)"] if broken else []
    if findings:
        first = findings[0]
        others = len({finding.row for finding in findings} - {first.row})
        parts.append(
            f"{_named(_index_of(first.row, batch, rollouts), rollouts)}: {first.what}"
            + (f"; so in {others} more of its {len(batch)} rollouts" if others else "")
        )
    return "; ".join(parts) or "no rollout alone has a gradient that is not finite: their sum overflows"


def _named(index: int, rollouts: Sequence[Rollout]) -> str:
    return f"rollout {index} of the step (group {rollouts[index].group}, {rollouts[index].text[:40]!r})"


def _index_of(row: int, batch: Batch, rollouts: Sequence[Rollout]) -> int:
    tokens = batch.tokens[row, : int(batch.lengths[row])].cpu().numpy()
    group, advantages = int(batch.groups[row]), batch.advantages[row, : len(tokens)].cpu().numpy()

    def same(rollout: Rollout) -> bool:
        if rollout.group != group or not np.array_equal(rollout.tokens, tokens) or rollout.advantages is None:
            return False
        return np.array_equal(rollout.advantages.astype(advantages.dtype), advantages, equal_nan=True)

    return next(index for index, rollout in enumerate(rollouts) if same(rollout))
