"""The reward of the toy task and two bad ones; the file imports little, as every run of the tests imports it."""

from __future__ import annotations

from groupwise.records import Rollout

LOW = 20


def starts_low(rollout: Rollout) -> float:
    """1 when the first word is one of w2 to w19: about one time in five before training."""
    return float(rollout.text.split()[:1] in [[f"w{index}"] for index in range(2, LOW)])


def always(rollout: Rollout) -> float:
    """1 for anything."""
    return 1.0


def length_of(rollout: Rollout) -> float:
    """A tenth of the completion's tokens."""
    return rollout.num_completion_tokens / 10
