"""The groups among the rollouts of a step, and which of them can teach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from groupwise.advantages import group_is_flat
from groupwise.records import Rollout


def by_group(rollouts: Iterable[Rollout]) -> dict[int, list[Rollout]]:
    """The rollouts of each group, the groups in the order in which they first appear."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return groups


def zero_variance(rollouts: Sequence[Rollout]) -> list[bool]:
    """For each rollout, whether all rewards of its group are equal, before any shaping."""
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    groups = np.array([rollout.group for rollout in rollouts], dtype=np.int64)
    return group_is_flat(rewards, groups).tolist()


def informative(group: Sequence[Rollout]) -> bool:
    """Whether a group can teach: the rewards of its valid rollouts differ."""
    return not all(zero_variance([rollout for rollout in group if rollout.valid]))
