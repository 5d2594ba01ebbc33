"""Groupwise: post-training of language models with group-relative reinforcement learning.

    import groupwise as gw

    gw.train(gw.Config(model="my-model", data=gw.Data(path="prompts.jsonl"), rewards=("math_answer",)))

An algorithm is a value (`gw.GRPO`, `gw.DAPO`, ...), a reward is a function, the loop is `groupwise.train.loop`.
"""

from __future__ import annotations

from groupwise.advantages import (
    BatchMean,
    BatchStd,
    BetaDensity,
    Gae,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    LengthWeightedMean,
    MovingMean,
    ReturnToGo,
    Whiten,
)
from groupwise.algorithms import Algorithm
from groupwise.chat import Chat
from groupwise.config import Checkpoint, Config, Engine, Evaluation
from groupwise.curriculum import Curriculum
from groupwise.data import Data, Portion
from groupwise.engines import Completion, Learner, Optimizer, Request, Sampler, Sampling
from groupwise.errors import CheckpointError, ConfigError, DataError, GroupwiseError, ModelError, RewardError
from groupwise.evaluate import Scores, evaluate
from groupwise.losses import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    LossInputs,
    Reinforce,
    Sapo,
    Topr,
    Unclipped,
    Vespo,
)
from groupwise.penalties import (
    KL,
    EntropyBonus,
    ValueLoss,
)
from groupwise.presets import CISPO, DAPO, DR_GRPO, GMPO, GRPO, GSPO, PRESETS, REINFORCE_PP, RLOO, SAPO
from groupwise.records import Batch, Rollout, collate
from groupwise.rewards import Reward, StepRewards
from groupwise.rows import read_rows
from groupwise.shaping import (
    CosineLength,
    KimiLength,
    LinearLength,
    SoftOverlong,
    StopProperly,
)
from groupwise.slots import replace
from groupwise.tasks import Task
from groupwise.train import Run, train
from groupwise.weights import (
    Decoupled,
    Importance,
    MicrobatchTokenMean,
    OffPolicyMask,
    PromptMean,
    SequenceMean,
    SequenceSum,
    SequenceSumNorm,
    TokenMean,
    TopEntropy,
)

__version__ = "0.1.0"

__all__ = [
    "CISPO",
    "DAPO",
    "DR_GRPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "KL",
    "PRESETS",
    "REINFORCE_PP",
    "RLOO",
    "SAPO",
    "Algorithm",
    "Batch",
    "BatchMean",
    "BatchStd",
    "BetaDensity",
    "Chat",
    "Checkpoint",
    "CheckpointError",
    "Cispo",
    "Clip",
    "Completion",
    "Config",
    "ConfigError",
    "CosineLength",
    "Curriculum",
    "Data",
    "DataError",
    "Decoupled",
    "Dppo",
    "Engine",
    "EntropyBonus",
    "Evaluation",
    "Gae",
    "Gmpo",
    "GroupMean",
    "GroupStd",
    "GroupwiseError",
    "Importance",
    "KimiLength",
    "Learner",
    "LeaveOneOut",
    "LengthWeightedMean",
    "LinearLength",
    "LossInputs",
    "MicrobatchTokenMean",
    "ModelError",
    "MovingMean",
    "OffPolicyMask",
    "Optimizer",
    "Portion",
    "PromptMean",
    "Reinforce",
    "Request",
    "ReturnToGo",
    "Reward",
    "RewardError",
    "Rollout",
    "Run",
    "Sampler",
    "Sampling",
    "Sapo",
    "Scores",
    "SequenceMean",
    "SequenceSum",
    "SequenceSumNorm",
    "SoftOverlong",
    "StepRewards",
    "StopProperly",
    "Task",
    "TokenMean",
    "TopEntropy",
    "Topr",
    "Unclipped",
    "ValueLoss",
    "Vespo",
    "Whiten",
    "__version__",
    "collate",
    "evaluate",
    "read_rows",
    "replace",
    "train",
]
