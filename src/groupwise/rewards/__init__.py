"""What a completion is worth: built-in rewards, rewards as settings, and scoring that never invents a 0."""

from __future__ import annotations

from groupwise.rewards.answers import ExactMatch, MathAnswer, RegexMatch
from groupwise.rewards.calls import RewardFunction
from groupwise.rewards.format import Format
from groupwise.rewards.judge import Judge, ScoreField, ScorePattern
from groupwise.rewards.process import NextToken, ProcessRewardModel, TokenClassifier
from groupwise.rewards.reward import Reward, RewardLike, Rewards, as_rewards
from groupwise.rewards.reward_model import RewardModel
from groupwise.rewards.scoring import check_rewards, score
from groupwise.rewards.steps import StepRewards

__all__ = [
    "ExactMatch",
    "Format",
    "Judge",
    "MathAnswer",
    "NextToken",
    "ProcessRewardModel",
    "RegexMatch",
    "Reward",
    "RewardFunction",
    "RewardLike",
    "RewardModel",
    "Rewards",
    "ScoreField",
    "ScorePattern",
    "StepRewards",
    "TokenClassifier",
    "as_rewards",
    "check_rewards",
    "score",
]
