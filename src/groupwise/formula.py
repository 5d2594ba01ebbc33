"""`Formula`: the slots that an algorithm chooses in, what may stand in each, and what a choice implies.

    L = - SUM w * m * c * PHI(u, A)  +  beta * SUM w * K  -  eta * SUM w * H

The stages of a step read it and never change it: `crediting` computes `A`, `batching` fixes `w` and `m`, `objective`
is the sum.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from groupwise import losses
from groupwise.advantages import (
    BatchMean,
    BatchStd,
    BetaDensity,
    Credit,
    Gae,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    LengthWeightedMean,
    MovingMean,
    ReturnToGo,
    Statistic,
    Whiten,
)
from groupwise.losses import (
    RatioLevel,
    Surrogate,
)
from groupwise.penalties import KL, EntropyBonus, ValueLoss
from groupwise.shaping import (
    CosineLength,
    KimiLength,
    LinearLength,
    Shaping,
    SoftOverlong,
    StopProperly,
)
from groupwise.slots import OneOf, Slot
from groupwise.weights import (
    Aggregate,
    Correction,
    Decoupled,
    Importance,
    MicrobatchTokenMean,
    OffPolicyMask,
    PromptMean,
    Selection,
    SequenceMean,
    SequenceSum,
    SequenceSumNorm,
    TokenMean,
    TopEntropy,
)

Shapings = OneOf(SoftOverlong, KimiLength, LinearLength, CosineLength, StopProperly)
Statistics = OneOf(GroupMean, BatchMean, MovingMean, LeaveOneOut, LengthWeightedMean, GroupStd, BatchStd, BetaDensity)
Surrogates = OneOf(
    losses.Clip,
    losses.Reinforce,
    losses.Unclipped,
    losses.Cispo,
    losses.Sapo,
    losses.Gmpo,
    losses.Topr,
    losses.Vespo,
    losses.Dppo,
)
PER_TOKEN = set(Surrogates.members.values()) - {losses.Gmpo}
"""Surrogates whose value at a token depends on nothing else in its row."""
Aggregates = OneOf(TokenMean, PromptMean, SequenceMean, SequenceSum, SequenceSumNorm, Decoupled, MicrobatchTokenMean)


class Formula(Slot):
    """A choice in each slot; `Algorithm` is one whose choices go together."""

    shaping: Annotated[Shaping | None, Shapings] = None
    """What a completion's length adds to its reward, before any statistic."""
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Where several reward functions meet: their weighted sum is normalised (GRPO), or each on its own (GDPO)."""
    supervision: Literal["outcome", "process"] = "outcome"
    """One reward for the completion, or one for each of its reasoning steps, where a reward gives those."""
    baseline: Annotated[Statistic | None, Statistics] = GroupMean()
    """Subtracted from the reward."""
    scale: Annotated[Statistic | None, Statistics] = GroupStd()
    """The centred reward is divided by it."""
    greedy_baseline: bool = False
    """Subtract, before anything else, the reward of the greedy completion of the same prompt (ReMax); it is sampled for
    this."""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Normalised rewards are clipped to +- this, and once more after a KL in the reward of the tokens (ROLL)."""
    credit_over_time: Annotated[Credit, OneOf(ReturnToGo, Gae)] = ReturnToGo()
    """Rewards along a completion to the advantage of each token."""
    whiten: Whiten | None = None
    """Normalise the advantages once more, over the whole step."""
    advantage_clip: Annotated[float, Field(gt=0)] | None = None
    """Advantages are clipped to +- this."""

    filter: Literal["none", "drop_zero_variance", "dynamic_sampling"] = "none"
    """Groups whose rewards (before shaping) are all equal: keep them, leave them out of every denominator, or sample
    others in their place (DAPO)."""
    drop_truncated: bool = False
    """Leave completions that hit the length limit out of the loss (not of the group's statistics): DAPO's overlong
    filtering."""

    ratio: RatioLevel = "token"
    """Whose probability ratio a token gets: its own, or its completion's geometric mean or product."""
    anchor: Literal["old", "rollout"] = "old"
    """The ratio's denominator: the policy at the start of the update phase, or the one that sampled."""
    surrogate: Annotated[Surrogate, Surrogates] = losses.Clip(low=0.2, high=0.28)
    """The objective of a token, from its ratio and its advantage."""
    selection: Annotated[Selection | None, OneOf(TopEntropy)] = None
    """Tokens whose policy term counts; all when null."""
    correction: Annotated[Correction | None, OneOf(Importance, OffPolicyMask)] = None
    """Weight of a token that the learner's policy would not have sampled with the same probability."""
    kl: KL | None = None
    """Penalty for leaving a reference policy."""
    reward_kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Beside a `kl` in the loss: this much of `log pi_old - log pi_ref` comes off the reward of each token (ROLL)."""
    entropy: EntropyBonus | None = None
    """Bonus for a policy that stays undecided."""
    aggregate: Annotated[Aggregate, Aggregates] = TokenMean()
    """How much each token counts."""
    critic: ValueLoss | None = None
    """Train a value head beside the policy (PPO)."""

    @property
    def per_token(self) -> bool:
        """Whether each term of the loss looks at one token alone; not assumed of pieces that are not ours."""
        correction, kl = self.correction, self.loss_kl
        return (
            self.ratio == "token"
            and type(self.surrogate) in PER_TOKEN
            and (correction is None or (isinstance(correction, Importance) and correction.level == "token"))
            and (kl is None or kl.level == "token")
        )

    @property
    def weighs_age(self) -> bool:
        """Whether the correction weighs what an older policy sampled: then the ratio begins at the learner's policy.

        Otherwise it begins at the one that sampled, whatever `anchor` says, as far as the surrogate has a ratio.
        """
        return self.correction is not None and not isinstance(self.correction, OffPolicyMask)

    @property
    def token_kl_coef(self) -> float:
        """How much of the sampled KL comes off the reward of each token."""
        own = self.kl.coef if self.kl is not None and self.kl.placement == "reward_token" else 0.0
        return own + self.reward_kl_coef

    @property
    def loss_kl(self) -> KL | None:
        """The KL that acts in the loss, if any."""
        return self.kl if self.kl is not None and self.kl.placement == "loss" and self.kl.coef > 0 else None

    @property
    def sequence_kl_coef(self) -> float:
        """How much of the sampled KL of the whole completion comes off its reward."""
        return self.kl.coef if self.kl is not None and self.kl.placement == "reward_sequence" else 0.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL acts in the reward, so that there are no advantages without both policies' log-probs."""
        return self.sequence_kl_coef > 0 or self.token_kl_coef > 0
