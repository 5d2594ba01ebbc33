"""Which slots do not go together: those refused when an algorithm is made, and those that run but are rarely meant."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise import losses
from groupwise.advantages import BatchStd, Gae, GroupStd, ReturnToGo
from groupwise.formula import Formula
from groupwise.shaping import SoftOverlong
from groupwise.weights import Importance, SequenceMean, TokenMean


def refusals(a: Formula) -> Iterator[tuple[bool, str]]:
    """Each combination that cannot be right: (whether this is one, why and what to do instead)."""
    yield from _kl_refusals(a)
    importance = a.correction if isinstance(a.correction, Importance) else None
    sequence = a.ratio in ("sequence", "sequence_product") and not isinstance(a.surrogate, losses.Reinforce)
    process = a.supervision == "process"
    varies = process or not isinstance(a.credit_over_time, ReturnToGo)
    kl_per_sequence = a.kl is not None and a.kl.placement == "reward_sequence"
    kl_per_token = a.reward_kl_coef > 0 or (a.kl is not None and a.kl.placement == "reward_token")
    yield (
        a.anchor == "rollout" and importance is not None and importance.mode != "reject",
        "anchor: rollout already divides by the sampler's probability; correction truncate or mask would do it twice: "
        "use anchor: old, or mode: reject",
    )
    yield (
        isinstance(a.surrogate, losses.Gmpo)
        and (a.ratio != "token" or not isinstance(a.aggregate, SequenceMean) or varies or kl_per_token),
        "surrogate gmpo clips each token and then takes the sequence's geometric mean: it needs ratio: token, "
        "aggregate: seq-mean-token-mean and one advantage for the whole completion",
    )
    yield (
        sequence and (varies or kl_per_token),
        "a sequence-level ratio cannot carry advantages that differ inside a completion; use ratio: sequence_token",
    )
    yield (
        isinstance(a.credit_over_time, Gae) != (a.critic is not None),
        "credit_over_time gae needs the values of a critic, and a critic is of no use without gae; set both or neither",
    )
    yield (
        a.critic is not None and (a.baseline is not None or a.greedy_baseline),
        "a critic is the baseline; set baseline: none and greedy_baseline: false",
    )
    yield (
        a.greedy_baseline and (process or a.combine == "normalize_then_sum"),
        "greedy_baseline is the reward of a whole completion; use supervision: outcome and combine: sum_then_normalize",
    )
    yield (
        a.combine == "normalize_then_sum" and (process or a.shaping is not None or kl_per_sequence),
        "combine: normalize_then_sum works on each reward function alone; it goes with supervision: outcome, without "
        "shaping (use a length reward function) and without a KL in the sequence's reward",
    )
    yield (
        process and (a.shaping is not None or kl_per_sequence),
        "supervision: process rewards steps, so nothing can be added to the reward of the completion; remove shaping "
        "or the KL in the sequence's reward",
    )


def _kl_refusals(a: Formula) -> Iterator[tuple[bool, str]]:
    kl = a.kl
    yield (
        kl is not None and kl.placement == "loss" and kl.estimator == "k1",
        "kl.estimator k1 in the loss has an expected gradient of zero and regularises nothing; use k2, k3 or k3_is",
    )
    yield (
        kl is not None and kl.placement != "loss" and kl.estimator != "k1",
        "kl.estimator other than k1 in the reward pushes the wrong way; use k1, or placement: loss",
    )
    yield (
        a.reward_kl_coef > 0 and (kl is None or kl.placement != "loss"),
        "reward_kl_coef is a KL in the reward beside one in the loss; alone, it is kl: {placement: reward_token}",
    )
    yield (
        kl is not None and kl.placement != "loss" and kl.to != "ref",
        "kl.placement in the reward measures the distance to the reference policy; set kl.to: ref",
    )
    yield (
        kl is not None and kl.refresh_every > 0 and (kl.to != "ref" or kl.coef == 0),
        "kl.refresh_every moves the reference policy, which this KL does not use; set kl.to: ref and kl.coef above 0, "
        "or refresh_every: 0",
    )
    yield (
        kl is not None and kl.level == "sequence" and (kl.estimator != "k2" or kl.placement != "loss"),
        "kl.level: sequence is Kimi's squared log-ratio of the completion; use estimator: k2 and placement: loss",
    )


def cautions(a: Formula) -> Iterator[tuple[bool, str]]:
    """Combinations that run but are rarely meant: (whether this is one, what happens)."""
    clip = a.surrogate if isinstance(a.surrogate, losses.Clip) else None
    yield (
        a.ratio == "sequence" and isinstance(a.aggregate, TokenMean),
        "ratio: sequence with aggregate: token-mean weighs completions by their length; GSPO is seq-mean-token-mean",
    )
    yield (
        clip is not None and a.ratio.startswith("sequence") and a.ratio != "sequence_product" and clip.high > 0.05,
        "a sequence-level ratio moves about 1000 times less than a token's: with this clip nothing is ever clipped "
        "(GSPO: low 3e-4, high 4e-4)",
    )
    yield (
        clip is not None and a.ratio == "token" and 0 < clip.high < 0.01,
        "a clip this narrow is meant for ratio: sequence; nearly every token will be clipped",
    )
    yield (
        a.drop_truncated and isinstance(a.shaping, SoftOverlong),
        "drop_truncated leaves truncated completions out, so soft_overlong acts only through the group's statistics",
    )
    yield (
        a.kl is not None and a.kl.placement != "loss" and isinstance(a.scale, GroupStd | BatchStd),
        "a KL in the reward enters the scale: the effective kl.coef changes from group to group",
    )
