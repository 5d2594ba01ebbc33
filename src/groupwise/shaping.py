"""What the length of a completion does to its reward, before any statistic.

N is the number of rollouts of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from groupwise.advantages import Array, Groups
from groupwise.slots import Slot

Bools = NDArray[np.bool_]
Shaping = Callable[[Array, Groups, Array, Bools], Array]
"""(rewards[N], groups[N], lengths[N] in tokens, truncated[N]) -> what is added to each reward."""


class SoftOverlong(Slot):
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to `limit - cache` tokens, then falling linearly
    to -1 at `limit` tokens."""

    type: Literal["soft_overlong"] = "soft_overlong"
    cache_fraction: float = Field(default=0.2, gt=0, le=1)
    """Length of the falling part as a fraction of the limit (the paper: 4,096 of 20,480 tokens)."""

    limit: int | None = Field(default=None, ge=1)
    """Tokens; null takes `sampling.max_tokens`."""

    @property
    def formula(self) -> str:
        limit, cache = self.limit or "max_tokens", self.cache_fraction
        return f"clip(({1 - cache:g} · {limit} − |o|) / ({cache:g} · {limit}), −1, 0)"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array, truncated: Bools) -> Array:
        assert self.limit is not None, "Algorithm.resolve fills the limit"
        cache = self.cache_fraction * self.limit
        return np.clip((self.limit - cache - lengths) / cache, -1.0, 0.0)


class KimiLength(Slot):
    """Kimi k1.5's length reward (arXiv:2501.12599): `0.5 - (length - shortest) / (longest - shortest)` within the
    group, for an answer that is not right never above 0."""

    type: Literal["kimi"] = "kimi"
    right_above: float = 0.5
    """An answer counts as right when its reward is greater than this."""

    @property
    def formula(self) -> str:
        return f"0.5 − (|o| − shortest) / (longest − shortest), at most 0 unless r > {self.right_above:g}"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array, truncated: Bools) -> Array:
        longest, shortest = np.zeros_like(lengths), np.zeros_like(lengths)
        for group in np.unique(groups):
            members = groups == group
            longest[members], shortest[members] = lengths[members].max(), lengths[members].min()
        spread = longest - shortest
        bonus = np.where(spread > 0, 0.5 - (lengths - shortest) / np.maximum(spread, 1), 0.0)
        return np.where(rewards > self.right_above, bonus, np.minimum(bonus, 0.0))


class LinearLength(Slot):
    """`-coef * length / limit`: every token costs the same."""

    type: Literal["linear"] = "linear"
    coef: float = Field(default=0.1, ge=0)
    """What a completion of the longest length loses."""
    limit: int | None = Field(default=None, ge=1)
    """Tokens; null takes `sampling.max_tokens`."""

    @property
    def formula(self) -> str:
        return f"−{self.coef:g} |o| / {self.limit or 'max_tokens'}"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array, truncated: Bools) -> Array:
        assert self.limit is not None, "Algorithm.resolve fills the limit"
        return -self.coef * lengths / self.limit


class CosineLength(Slot):
    """The cosine reward (arXiv:2502.03373), in place of the reward: half a cosine over the length, from the value of an
    answer without length to that of one as long as the limit, apart for right and wrong answers; one that does not end
    within the limit gets neither."""

    type: Literal["cosine"] = "cosine"
    right_short: float = 2.0
    """A right answer of no length."""
    right_long: float = 1.0
    """A right answer of the longest length."""
    wrong_short: float = -10.0
    """A wrong answer of no length: it did not even try."""
    wrong_long: float = 0.0
    """A wrong answer of the longest length."""
    exceeded: float = -10.0
    """An answer that hit the length limit, right or wrong."""
    right_above: float = 0.5
    """An answer counts as right when its reward is greater than this."""
    limit: int | None = Field(default=None, ge=1)
    """Tokens; null takes `sampling.max_tokens`."""

    @property
    def formula(self) -> str:
        right, wrong = (self.right_short, self.right_long), (self.wrong_short, self.wrong_long)
        ends = "{:g} if truncated, else if r > {:g} half a cosine from {:g} to {:g}, else from {:g} to {:g}"
        text = ends.format(self.exceeded, self.right_above, *right, *wrong)
        return f"−r + ({text}, over {self.limit or 'max_tokens'} tokens)"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array, truncated: Bools) -> Array:
        assert self.limit is not None, "Algorithm.resolve fills the limit"
        right = rewards > self.right_above
        short = np.where(right, self.right_short, self.wrong_short)
        long = np.where(right, self.right_long, self.wrong_long)
        share = (1 + np.cos(np.pi * np.minimum(lengths / self.limit, 1.0))) / 2
        return np.where(truncated, self.exceeded, long + (short - long) * share) - rewards


class StopProperly(Slot):
    """A truncated completion keeps only `coef` of its reward (ProRL v2)."""

    type: Literal["stop_properly"] = "stop_properly"
    coef: float = Field(default=0.0, ge=0, le=1)
    """Share of the reward that is kept."""

    @property
    def formula(self) -> str:
        return f"−{1 - self.coef:g} r if truncated, else 0"

    def __call__(self, rewards: Array, groups: Groups, lengths: Array, truncated: Bools) -> Array:
        return np.where(truncated, (self.coef - 1) * rewards, 0.0)
