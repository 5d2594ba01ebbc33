"""The named algorithms: each published one as a value of `Algorithm`, under the name and numbers of its paper.

Where a paper leaves a number open, the comment says so.  `about.py` says what each is for.
"""

from __future__ import annotations

from groupwise.advantages import (
    BatchStd,
    BetaDensity,
    Gae,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    LengthWeightedMean,
    Whiten,
)
from groupwise.algorithms import Algorithm
from groupwise.losses import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    Reinforce,
    Sapo,
    Topr,
    Vespo,
)
from groupwise.penalties import (
    KL,
    ValueLoss,
)
from groupwise.shaping import (
    KimiLength,
    SoftOverlong,
)
from groupwise.slots import replace
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

# GRPO and its corrections --------------------------------------------------------------------------------------------

# The paper does not state the clip width; 0.2 is every port's.
GRPO = Algorithm(surrogate=Clip(), aggregate=SequenceMean(), kl=KL(coef=0.04))
GRPO_PROCESS = replace(GRPO, supervision="process")
GRPO_R1 = replace(GRPO, surrogate=Clip(low=10.0, high=10.0), kl=KL(coef=0.001))
# kl.coef and delta are not published: R1's coefficient, TRL's delta.
GRPO_V32 = replace(GRPO, scale=None, kl=KL(coef=0.001, estimator="k3_is"), correction=OffPolicyMask(delta=0.5))
GRPO_TRL_DEFAULT = Algorithm(
    scale=GroupStd(eps=1e-4), surrogate=Clip(), correction=Importance(mode="mask", level="sequence", high=3.0)
)
GRPO_ROLL = replace(
    GRPO, surrogate=Clip(dual=1.4), kl=KL(coef=0.001), whiten=Whiten(level="token", ddof=1), advantage_clip=2.0
)
DR_GRPO = Algorithm(scale=None, surrogate=Clip(), aggregate=SequenceSumNorm())
DAPO = Algorithm(shaping=SoftOverlong(), filter="dynamic_sampling", surrogate=Clip(low=0.2, high=0.28))
DAPO_AS_WRITTEN = replace(DAPO, aggregate=PromptMean())
LITE_PPO = Algorithm(scale=BatchStd(), surrogate=Clip())
BNPO = Algorithm(scale=BetaDensity(), surrogate=Clip(low=0.2, high=0.28, dual=10.0), aggregate=SequenceSum())
BNPO_TRL = Algorithm(surrogate=Clip(), aggregate=MicrobatchTokenMean())
GDPO = Algorithm(
    combine="normalize_then_sum",
    scale=GroupStd(eps=1e-4),
    whiten=Whiten(level="sample", ddof=1),
    surrogate=Clip(),
    aggregate=SequenceMean(),
)
DEGRPO = Algorithm(scale=None, surrogate=Clip(), aggregate=Decoupled(alpha=0.001), kl=KL(coef=0.001))
EIGHTY_TWENTY = replace(DAPO, selection=TopEntropy(fraction=0.2))

# Another ratio or surrogate ------------------------------------------------------------------------------------------

GSPO = Algorithm(ratio="sequence", surrogate=Clip(low=3e-4, high=4e-4), aggregate=SequenceMean())
GSPO_TOKEN = replace(GSPO, ratio="sequence_token")
LUSPO = replace(GSPO, surrogate=Clip(low=2e-3, high=2.5e-3), aggregate=SequenceSum())
GMPO = Algorithm(surrogate=Gmpo(), aggregate=SequenceMean())
# The cap is not published; 5 is within the range that ScaleRL found equivalent.
CISPO = Algorithm(shaping=SoftOverlong(), filter="dynamic_sampling", surrogate=Cispo(cap=5.0))
SCALERL = Algorithm(scale=BatchStd(), surrogate=Cispo(cap=5.0), aggregate=PromptMean(), filter="drop_zero_variance")
SAPO = Algorithm(surrogate=Sapo(), aggregate=SequenceMean())
DPPO = Algorithm(anchor="rollout", surrogate=Dppo())
PRIME_RL_DEFAULT = Algorithm(
    scale=None, anchor="rollout", surrogate=Dppo(), kl=KL(coef=0.002, estimator="k2", to="rollout")
)
TOPR = Algorithm(ratio="sequence_product", surrogate=Topr(), aggregate=SequenceSum())
VESPO = Algorithm(ratio="sequence_product", anchor="rollout", surrogate=Vespo())
INTELLECT2 = Algorithm(surrogate=Clip(dual=4.0))

# REINFORCE with a better baseline ------------------------------------------------------------------------------------

REINFORCE = Algorithm(baseline=None, scale=None, surrogate=Reinforce(), aggregate=SequenceSum())
# kl.coef is not stated in the paper's table; 0.05 is PPO's.
REMAX = replace(REINFORCE, greedy_baseline=True, kl=KL(coef=0.05, estimator="k1", placement="reward_token"))
RLOO = replace(REINFORCE, baseline=LeaveOneOut(), kl=KL(coef=0.05, estimator="k1", placement="reward_sequence"))
RLOO_TRL = replace(RLOO, ratio="sequence_product", surrogate=Clip(), aggregate=SequenceMean())
# kl.coef is not stated in the paper; 0.01 is OpenRLHF's.
REINFORCE_PP = Algorithm(
    baseline=None,
    scale=None,
    whiten=Whiten(level="token"),
    surrogate=Clip(),
    aggregate=TokenMean(),
    kl=KL(coef=0.01, estimator="k1", placement="reward_token"),
)
REINFORCE_PP_BASELINE = Algorithm(
    scale=None, whiten=Whiten(level="token"), surrogate=Clip(), kl=KL(coef=0.01, estimator="k2")
)
PPO = Algorithm(
    baseline=None,
    scale=None,
    credit_over_time=Gae(gamma=1.0, lam=0.95),
    whiten=Whiten(level="token", ddof=1, eps=1e-8),
    surrogate=Clip(),
    kl=KL(coef=0.05, estimator="k1", placement="reward_token"),
    critic=ValueLoss(clip=0.2),
)
MAXRL = replace(REINFORCE, baseline=GroupMean(), scale=GroupMean())
OPO = replace(REINFORCE, baseline=LengthWeightedMean())
# Leaving dull groups out of the mean is the paper's factor B / (B - M), with tokens as the unit.
GPG = Algorithm(scale=None, surrogate=Reinforce(), filter="drop_zero_variance")
# tau is not published.
KIMI_K15 = replace(
    REINFORCE,
    baseline=GroupMean(),
    shaping=KimiLength(),
    kl=KL(coef=0.1, estimator="k2", to="old", level="sequence"),
)

# For rollouts of another policy --------------------------------------------------------------------------------------

TIS = Algorithm(surrogate=Clip(), correction=Importance(mode="truncate", high=2.0))
ICEPOP = Algorithm(surrogate=Clip(), correction=Importance(mode="mask", low=0.5, high=5.0))
DECOUPLED_PPO = Algorithm(surrogate=Clip(), correction=Importance(mode="truncate", high=None))

PRESETS: dict[str, Algorithm] = {
    name.lower(): value for name, value in list(globals().items()) if isinstance(value, Algorithm)
}
"""Every algorithm above by its name in lower case, as run files and the command line spell it."""
