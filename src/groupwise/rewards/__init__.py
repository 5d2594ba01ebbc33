"""What a completion is worth: built-in rewards, rewards as settings, and scoring that never invents a 0."""

from __future__ import annotations

from groupwise.rewards.answers import ExactMatch, MathAnswer, RegexMatch
from groupwise.rewards.calls import RewardFunction
from groupwise.rewards.countdown import Countdown
from groupwise.rewards.format import Format
from groupwise.rewards.gym import Gym
from groupwise.rewards.reward import Reward, RewardLike, Rewards, as_rewards
from groupwise.rewards.scoring import check_rewards, made_up, reference_answer, score

__all__ = [
    "Countdown",
    "ExactMatch",
    "Format",
    "Gym",
    "MathAnswer",
    "RegexMatch",
    "Reward",
    "RewardFunction",
    "RewardLike",
    "Rewards",
    "as_rewards",
    "check_rewards",
    "made_up",
    "reference_answer",
    "score",
]
