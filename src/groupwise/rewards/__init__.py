"""What a completion is worth: built-in rewards, rewards as settings, and scoring that never invents a 0."""

from __future__ import annotations

from groupwise.rewards.answers import ExactMatch, MathAnswer, RegexMatch
from groupwise.rewards.calls import RewardFunction
from groupwise.rewards.format import Format
from groupwise.rewards.reward import Reward, RewardLike, Rewards, as_rewards
from groupwise.rewards.scoring import PASSED, check_rewards, grades, score
from groupwise.rewards.workers import workers_end

__all__ = [
    "PASSED",
    "ExactMatch",
    "Format",
    "MathAnswer",
    "RegexMatch",
    "Reward",
    "RewardFunction",
    "RewardLike",
    "Rewards",
    "as_rewards",
    "check_rewards",
    "grades",
    "score",
    "workers_end",
]
