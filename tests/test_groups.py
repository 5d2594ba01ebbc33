"""Which rollouts make a group, and which groups can teach."""

from __future__ import annotations

import numpy as np

from groupwise.groups import by_group, informative, zero_variance
from groupwise.records import Rollout


def rollout(group: int, reward: float, *, valid: bool = True) -> Rollout:
    return Rollout(
        tokens=np.zeros(1, dtype=np.int32),
        loss_mask=np.ones(1, dtype=np.bool_),
        logprobs=np.zeros(1),
        group=group,
        reward=reward,
        valid=valid,
    )


def test_groups_come_in_the_order_in_which_they_first_appear() -> None:
    rollouts = [rollout(group, reward) for group, reward in [(7, 0.0), (2, 1.0), (7, 2.0), (2, 3.0)]]
    groups = by_group(rollouts)
    assert [(group, [one.reward for one in members]) for group, members in groups.items()] == [
        (7, [0.0, 2.0]),
        (2, [1.0, 3.0]),
    ]


def test_a_group_teaches_only_when_the_rewards_of_its_valid_rollouts_differ() -> None:
    assert informative([rollout(0, 0.0), rollout(0, 1.0)])
    assert not informative([rollout(0, 1.0), rollout(0, 1.0)])
    assert not informative([rollout(0, 1.0), rollout(0, 0.0, valid=False)])
    assert not informative([rollout(0, 1.0, valid=False), rollout(0, 0.0, valid=False)])


def test_zero_variance_is_by_equality_and_not_by_size() -> None:
    rollouts = [rollout(0, 0.1), rollout(1, 1e-300), rollout(0, 0.1), rollout(1, 2e-300)]
    assert zero_variance(rollouts) == [True, False, True, False]
