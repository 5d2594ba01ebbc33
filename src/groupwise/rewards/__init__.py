"""What a completion is worth: built-in rewards, rewards as settings, and scoring that never invents a 0."""

from __future__ import annotations

from groupwise.rewards.answers import ExactMatch, MultipleChoice, RegexMatch
from groupwise.rewards.calls import RewardFunction
from groupwise.rewards.code import Code
from groupwise.rewards.countdown import Countdown
from groupwise.rewards.format import Format
from groupwise.rewards.gym import Gym
from groupwise.rewards.json_schema import JsonSchema
from groupwise.rewards.judge import Judge, ScoreField, ScorePattern
from groupwise.rewards.math import MathAnswer
from groupwise.rewards.process import NextToken, ProcessRewardModel, TokenClassifier
from groupwise.rewards.prose import Repetition, Script
from groupwise.rewards.reward import Reward, RewardLike, Rewards, as_rewards
from groupwise.rewards.reward_model import RewardModel
from groupwise.rewards.scoring import PASSED, check_rewards, grades, made_up, reference_answer, score
from groupwise.rewards.steps import StepRewards
from groupwise.rewards.votes import votes
from groupwise.rewards.workers import workers_end

__all__ = [
    "PASSED",
    "Code",
    "Countdown",
    "ExactMatch",
    "Format",
    "Gym",
    "JsonSchema",
    "Judge",
    "MathAnswer",
    "MultipleChoice",
    "NextToken",
    "ProcessRewardModel",
    "RegexMatch",
    "Repetition",
    "Reward",
    "RewardFunction",
    "RewardLike",
    "RewardModel",
    "Rewards",
    "ScoreField",
    "ScorePattern",
    "Script",
    "StepRewards",
    "TokenClassifier",
    "as_rewards",
    "check_rewards",
    "grades",
    "made_up",
    "reference_answer",
    "score",
    "votes",
    "workers_end",
]
