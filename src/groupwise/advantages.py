"""Rewards to advantages: shaping, baselines, scales, whitening and credit over time, in float64 numpy.

N is the number of rollouts of a step (for process supervision, of scored reasoning steps).  All statistics are
taken over complete groups, before any split into optimizer steps.  A statistic is one thing whether it is
subtracted (`baseline`) or divided by (`scale`): `scale=GroupMean()` is MaxRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from groupwise.slots import Slot, replace

Array = NDArray[np.float64]
Groups = NDArray[np.integer[Any]]
Statistic = Callable[[Array, Groups, Array], Array]
"""(rewards[N], groups[N], completion lengths in tokens[N]) -> one number for each of the N.

As a scale, 0 says that there is no spread to measure by: the advantage is 0 there, not a division by almost nothing.
"""
Credit = Callable[[Array, Array], tuple[Array, Array]]
"""(rewards of the tokens[n], critic values[n]) -> (advantages[n], returns[n]) of one completion of n tokens."""


def group_sum(values: Array, groups: Groups) -> Array:
    """The sum over each item's group, N -> N."""
    _, member = np.unique(groups, return_inverse=True)
    return np.bincount(member, values).astype(np.float64)[member]


def group_size(groups: Groups) -> Array:
    """The number of items in each item's group, N -> N."""
    return group_sum(np.ones(len(groups)), groups)


def group_is_flat(rewards: Array, groups: Groups) -> NDArray[np.bool_]:
    """Whether all rewards of an item's group are equal: by max == min, because a floating-point std of equal numbers
    need not be 0 and would be blown up by the division."""
    _, member = np.unique(groups, return_inverse=True)
    high = np.full(member.max(initial=-1) + 1, -np.inf)
    low = -high
    np.maximum.at(high, member, rewards)
    np.minimum.at(low, member, rewards)
    return (high == low)[member]


def of_group(baseline: Statistic | None) -> bool:
    """Whether a baseline equals the rewards of a group in which all are equal; assumed of a function of the user's."""
    return baseline is not None and not isinstance(baseline, BatchMean | MovingMean)


# Statistics ----------------------------------------------------------------------------------------------------------


class GroupMean(Slot):
    """The mean reward of the group: GRPO's baseline (arXiv:2402.03300); as a scale, MaxRL (arXiv:2602.02710)."""

    type: Literal["group_mean"] = "group_mean"
    formula: ClassVar[str] = "mean_group"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        return group_sum(rewards, groups) / group_size(groups)


class BatchMean(Slot):
    """The mean of all rewards of the step (REINFORCE with a batch baseline)."""

    type: Literal["batch_mean"] = "batch_mean"
    formula: ClassVar[str] = "mean_batch"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        return np.full_like(rewards, rewards.mean() if len(rewards) else 0.0)


class MovingMean(Slot):
    """A moving average of the mean reward, for groups of one: self-play's baseline (SPIRAL, arXiv:2506.24119)."""

    type: Literal["ema"] = "ema"
    formula: ClassVar[str] = "ema"
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Share of the old average that is kept in a step."""
    mean: float = 0.0
    """Where it stands now; moves in every step."""

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        return np.full_like(rewards, self.mean)

    def after_seeing(self, reward: float) -> MovingMean:
        """The baseline for a step with this mean reward."""
        return replace(self, mean=self.decay * self.mean + (1 - self.decay) * reward)


class LeaveOneOut(Slot):
    """The mean reward of the others of the group: RLOO (arXiv:2402.14740)."""

    type: Literal["leave_one_out"] = "leave_one_out"
    formula: ClassVar[str] = "mean_others"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        return (group_sum(rewards, groups) - rewards) / np.maximum(group_size(groups) - 1, 1)


class LengthWeightedMean(Slot):
    """`sum(l r) / sum(l)` over the group: OPO's minimum-variance baseline (arXiv:2505.23585)."""

    type: Literal["length_weighted_mean"] = "length_weighted_mean"
    formula: ClassVar[str] = "Σ |o| r / Σ |o|"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        return group_sum(lengths * rewards, groups) / np.maximum(group_sum(lengths, groups), 1)


class GroupStd(Slot):
    """The standard deviation of the group's rewards, plus `eps`: GRPO's scale (arXiv:2402.03300).

    The paper does not say which: `ddof: 1` is the sample std of most implementations, `ddof: 0` the population std.
    """

    type: Literal["group_std"] = "group_std"
    ddof: Literal[0, 1] = 1
    """1: the sample std; 0: the population std."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the std."""

    @property
    def formula(self) -> str:
        return f"std_group + {self.eps:g}"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        size = group_size(groups)
        centred = rewards - group_sum(rewards, groups) / size
        spread = np.sqrt(group_sum(centred**2, groups) / np.maximum(size - self.ddof, 1)) + self.eps
        return np.where(group_is_flat(rewards, groups), 0.0, spread)


class BatchStd(Slot):
    """The standard deviation of all raw rewards of the step, plus `eps`: LitePPO (arXiv:2508.08221)."""

    type: Literal["batch_std"] = "batch_std"
    ddof: Literal[0, 1] = 1
    """1: the sample std; 0: the population std."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the std."""

    @property
    def formula(self) -> str:
        return f"std_batch + {self.eps:g}"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        if len(rewards) == 0 or rewards.max() == rewards.min():
            return np.zeros_like(rewards)
        spread = math.sqrt(float(((rewards - rewards.mean()) ** 2).sum()) / max(len(rewards) - self.ddof, 1))
        return np.full_like(rewards, spread + self.eps)


class BetaDensity(Slot):
    """The density, at the group's mean reward, of a Beta distribution fitted to all groups: BNPO (arXiv:2506.02864).

    Rewards must lie in [0, 1].
    """

    type: Literal["beta"] = "beta"
    formula: ClassVar[str] = "f_Beta(mean_group)"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array) -> Array:
        mean = group_sum(rewards, groups) / group_size(groups)
        per_group = mean[np.unique(groups, return_index=True)[1]]
        m, v = float(per_group.mean()), float(per_group.var(ddof=1)) if len(per_group) > 1 else 0.0
        concentration = m * (1 - m) / v - 1 if v > 0 else 0.0
        alpha = max(1.0, 1 + concentration * m / 3)
        beta = max(1.0, 1 + concentration * (1 - m) / 3)
        log_norm = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
        density = math.exp(log_norm) * mean ** (alpha - 1) * (1 - mean) ** (beta - 1)
        return np.maximum(density, 1e-6)


# Normalisation -------------------------------------------------------------------------------------------------------


def normalise(
    rewards: Array, groups: Groups, lengths: Array, baseline: Statistic | None, scale: Statistic | None
) -> Array:
    """`(reward - baseline) / scale`, N -> N; exactly 0 in a flat group when the baseline is one of the group, and
    where the scale is not positive."""
    centred = rewards - baseline(rewards, groups, lengths) if baseline is not None else rewards
    if of_group(baseline):
        centred = np.where(group_is_flat(rewards, groups), 0.0, centred)
    if scale is None:
        return centred
    divisor = scale(rewards, groups, lengths)
    return np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor > 0)


class Whiten(Slot):
    """`(A - mean) / sqrt(var + eps)` over the whole step: REINFORCE++ (arXiv:2501.03262)."""

    type: Literal["whiten"] = "whiten"
    level: Literal["sample", "token"] = "token"
    """Statistics over completions, or over loss tokens (long completions weigh more)."""
    ddof: Literal[0, 1] = 0
    """1: the sample variance; 0: the population variance."""
    eps: float = Field(default=0.0, ge=0)
    """Added to the variance."""

    @property
    def formula(self) -> str:
        std = f"√(var + {self.eps:g})" if self.eps else "std"
        return f"(A − mean) / {std}, over all {self.level}s"

    def __call__(self, values: Array) -> Array:
        if len(values) == 0 or values.max() == values.min():
            return np.zeros_like(values)
        variance = float(((values - values.mean()) ** 2).sum()) / (len(values) - self.ddof)
        return (values - values.mean()) / math.sqrt(variance + self.eps)


# Credit over time ----------------------------------------------------------------------------------------------------


class ReturnToGo(Slot):
    """`A_t = sum over t' >= t of gamma^(t'-t) r_t'`.

    With gamma 1 and one reward at the end, every token gets the outcome (GRPO); with a reward at the end of every
    reasoning step, the sum of the steps not yet finished (GRPO's process supervision, arXiv:2402.03300, 4.1.3).
    """

    type: Literal["return_to_go"] = "return_to_go"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of each token."""

    @property
    def formula(self) -> str:
        discount = "" if self.gamma == 1 else f"{self.gamma:g}^(t'−t) "
        return f"Σ_t'≥t {discount}r_t'"

    def __call__(self, rewards: Array, values: Array) -> tuple[Array, Array]:
        returns = _discounted_sum(rewards, self.gamma)
        return returns, returns


class Gae(Slot):
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16); the value after the last token is 0."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of each token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """0 trusts the critic, 1 the rewards."""

    @property
    def formula(self) -> str:
        discount = "" if self.gamma == 1 else f"{self.gamma:g} "
        return f"Σ_k {self.gamma * self.lam:g}^k δ_t+k,  δ_t = r_t + {discount}V_t+1 − V_t"

    def __call__(self, rewards: Array, values: Array) -> tuple[Array, Array]:
        surprise = rewards + self.gamma * np.append(values[1:], 0.0) - values
        advantages = _discounted_sum(surprise, self.gamma * self.lam)
        return advantages, advantages + values


def _discounted_sum(values: Array, decay: float) -> Array:
    total, sums = 0.0, np.empty_like(values)
    for t in range(len(values) - 1, -1, -1):
        total = float(values[t]) + decay * total
        sums[t] = total
    return sums
