"""The algorithm of a GRPOConfig: which slot each of its fields sets."""

from __future__ import annotations

import math
from typing import Any

from groupwise.advantages import (
    BatchStd,
    GroupMean,
    GroupStd,
    Whiten,
)
from groupwise.errors import ConfigError
from groupwise.foreign import Reader
from groupwise.losses import (
    Cispo,
    Clip,
    Sapo,
    Vespo,
)
from groupwise.penalties import (
    KL,
    EntropyBonus,
)
from groupwise.trees import Tree
from groupwise.weights import (
    Importance,
    MicrobatchTokenMean,
    OffPolicyMask,
    SequenceMean,
    SequenceSum,
    SequenceSumNorm,
    TokenMean,
    TopEntropy,
)

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
EPS = 1e-4
"""Added to every standard deviation."""


def trl_algorithm(r: Reader, updates: int) -> Tree:
    """The slots of the algorithm, by name; `updates` of TRL's optimizer steps are one of our steps.

    Raises:
        ConfigError: TRL would refuse it.
    """
    kind = r.take("loss_type", "dapo")
    ratio = _ratio(r, kind)
    correction = _correction(r)
    return _credit(r) | {
        "drop_truncated": _drop_truncated(r, kind),
        "ratio": ratio,
        "anchor": "rollout" if kind == "vespo" and isinstance(correction, Importance) else "old",
        "surrogate": _surrogate(r, kind),
        "selection": _selection(r),
        "correction": None if kind == "vespo" and isinstance(correction, Importance) else correction,
        "kl": _kl(r, ratio, updates),
        "entropy": _entropy(r, kind),
        "aggregate": _aggregate(r, kind),
    }


def _credit(r: Reader) -> Tree:
    given = r.take("scale_rewards", "group")
    scale = {True: "group", "True": "group", False: "none", "False": "none"}.get(given, given)
    scales = {"group": GroupStd(eps=EPS), "batch": BatchStd(eps=EPS), "none": None}
    if scale not in scales:
        raise ConfigError(f"scale_rewards: {given!r}; TRL knows group, batch and none")
    together = r.take("multi_objective_aggregation", "sum_then_normalize")
    if together not in ("sum_then_normalize", "normalize_then_sum"):
        raise ConfigError(f"multi_objective_aggregation: {together!r}; sum_then_normalize or normalize_then_sum")
    if together == "sum_then_normalize":
        r.became("multi_objective_aggregation", "combine: sum_then_normalize")
        detail = "" if scale == "none" else f", ddof 1, eps {EPS}"
        r.became("scale_rewards", f"baseline: group_mean, scale: {scale}{detail}")
        return {"combine": together, "baseline": GroupMean(), "scale": scales[scale]}
    r.became("multi_objective_aggregation", "combine: normalize_then_sum, whiten: sample, ddof 1", "TRL adds 1e-4 to "
             "the std of the whitening, we add nothing")  # fmt: skip
    r.became("scale_rewards", "scale: group_std: TRL does not read it with normalize_then_sum")
    return {"combine": together, "scale": scales["group"], "whiten": Whiten(level="sample", ddof=1)}


def _drop_truncated(r: Reader, kind: str) -> bool:
    drop = bool(r.take("mask_truncated_completions", False))
    counted = "" if kind in ("dapo", "cispo", "vespo", "bnpo") else "in TRL it still counts in the denominator"
    r.became("mask_truncated_completions", f"drop_truncated: {str(drop).lower()}", counted if drop else "")
    return drop


def _ratio(r: Reader, kind: str) -> str:
    level = r.take("importance_sampling_level", "token")
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level: {level!r}; TRL knows token and sequence")
    ratio = "sequence_product" if kind == "vespo" else level
    r.became("importance_sampling_level", f"ratio: {ratio}")
    return ratio


def _surrogate(r: Reader, kind: str) -> Any:
    low, given, delta = float(r.number("epsilon", 0.2)), r.number("epsilon_high"), r.number("delta")
    high = float(low if given is None else given)
    if kind == "cispo":
        trap = "TRL reads it as an absolute cap: this one scales down even a token of ratio 1" if high < 1 else ""
        r.became("epsilon_high", f"surrogate: cispo, cap {high}")
        if given is None:
            r.became("epsilon", f"surrogate: cispo, cap {high}")
        r.no_counterpart("epsilon", "cispo reads epsilon_high")
        if trap:
            r.ask("algorithm.surrogate.cap", f"is {high}, as in TRL; {trap}; the paper's cap is above 1, such as 5")
        return Cispo(cap=high)
    if kind == "sapo":
        positive, negative = float(r.number("sapo_temperature_pos", 1.0)), float(r.number("sapo_temperature_neg", 1.05))
        r.became("sapo_temperature_pos", f"surrogate.tau_pos: {positive}")
        r.became("sapo_temperature_neg", f"surrogate.tau_neg: {negative}")
        return Sapo(tau_pos=positive, tau_neg=negative)
    if kind == "vespo":
        defaults = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
        powers: dict[str, Any] = {k: float(r.number(f"vespo_{k}", default)) for k, default in defaults.items()}
        for name, value in powers.items():
            r.became(f"vespo_{name}", f"surrogate.{name}: {value}")
        return Vespo(**powers)
    r.became("epsilon", f"surrogate.low: {low}" + ("" if given is not None else f", surrogate.high: {high}"))
    r.became("epsilon_high", f"surrogate.high: {high}")
    if delta is not None and delta <= 1:
        raise ConfigError(f"delta: {delta}; the largest ratio that counts has to be above 1 + epsilon_high")
    narrow = "below 1 + epsilon_high TRL's cap acts on the unclipped term alone" if delta and delta <= 1 + high else ""
    r.became("delta", f"surrogate.dual: {delta}", narrow)
    return Clip(low=low, high=high, dual=delta and float(delta))


def _selection(r: Reader) -> TopEntropy | None:
    fraction = float(r.number("top_entropy_quantile", 1.0))
    if fraction >= 1:
        r.became("top_entropy_quantile", "selection: none")
        return None
    r.became("top_entropy_quantile", f"selection: top_entropy, fraction {fraction}", "TRL ranks the tokens of a "
             "micro-batch, we those of an update")  # fmt: skip
    return TopEntropy(fraction=fraction)


def _correction(r: Reader) -> Importance | OffPolicyMask | None:
    """Of vLLM's log-probs, which TRL corrects by default, or the mask of DeepSeek-V3.2; a run has one of them."""
    threshold = r.number("off_policy_mask_threshold")
    mode = str(r.take("vllm_importance_sampling_mode", "sequence_mask"))
    low, high = r.number("vllm_importance_sampling_clip_min"), r.number("vllm_importance_sampling_clip_max", 3.0)
    high = r.number("vllm_importance_sampling_cap") or high
    level, _, what = mode.partition("_")
    if level not in ("token", "sequence") or what not in ("truncate", "mask"):
        raise ConfigError(f"vllm_importance_sampling_mode: {mode}; TRL knows token_ and sequence_ truncate and mask")
    if threshold is not None:
        mask = f"correction: opsm, delta {threshold}"
        used = r.take("use_vllm", False) and r.take("vllm_importance_sampling_correction", True)
        r.became("off_policy_mask_threshold", mask, "TRL would use vLLM's correction as well" if used else "")
        r.no_counterpart("use_vllm", "the engine samples by itself; there is one correction, and it is opsm")
        return OffPolicyMask(delta=float(threshold))
    if not (r.take("use_vllm", False) and r.take("vllm_importance_sampling_correction", True)):
        return None
    text = f"correction: {what}, level {level}, {low or 0.0} to {high}"
    for name in ("correction", "mode", "clip_max", "clip_min", "cap"):
        r.became(f"vllm_importance_sampling_{name}", text)
    r.became("use_vllm", "correction, as TRL makes by default", "the engine decides what samples")
    return Importance(mode="mask" if what == "mask" else "truncate", level="token" if level == "token" else "sequence",
                      low=float(low or 0), high=None if high is None else float(high))  # fmt: skip


def _kl(r: Reader, ratio: str, updates: int) -> KL | None:
    beta = float(r.number("beta", 0.0))
    r.became("beta", f"kl.coef: {beta}" if beta else "kl: none")
    if beta == 0:
        if r.take("sync_ref_model", False):
            r.no_counterpart("sync_ref_model", "beta is 0, so there is no reference")
        r.no_counterpart("sync_ref_model", "the reference stays what training starts from")
        return None
    unbiased = bool(r.take("use_bias_correction_kl", True))
    other = "TRL multiplies by the sequence's ratio, we by the token's" if unbiased and ratio != "token" else ""
    r.became("use_bias_correction_kl", f"kl.estimator: {'k3_is' if unbiased else 'k3'}", other)
    every = 0
    if r.take("sync_ref_model", False):
        every = math.ceil(r.number("ref_model_sync_steps", 512) / updates)
        share = r.number("ref_model_mixup_alpha", 0.6)
        for key in ("sync_ref_model", "ref_model_sync_steps"):
            r.became(key, f"kl.refresh_every: {every}")
        mixes = "" if share == 1 else "the reference becomes the policy, not a mixture of both"
        r.became("ref_model_mixup_alpha", "kl.refresh_every", mixes)
    r.became("sync_ref_model", "kl.refresh_every: 0")
    return KL(coef=beta, estimator="k3_is" if unbiased else "k3", refresh_every=every)


def _entropy(r: Reader, kind: str) -> EntropyBonus | None:
    coef, adaptive = float(r.number("entropy_coef", 0.0)), bool(r.take("use_adaptive_entropy", False))
    if not (coef or adaptive):
        r.became("entropy_coef", "entropy: none")
        return None
    weighed = "" if kind in ("dapo", "cispo", "vespo") else "TRL takes the mean over tokens, we weigh as the loss does"
    r.became("entropy_coef", f"entropy.coef: {coef}", weighed)
    if not adaptive:
        return EntropyBonus(coef=coef)
    target, delta = float(r.number("entropy_target", 0.2)), float(r.number("entropy_coef_delta", 0.005))
    r.became("entropy_target", f"entropy.target: {target}")
    r.became("entropy_coef_delta", f"entropy.delta: {delta}")
    r.became("use_adaptive_entropy", "entropy.target", "TRL adapts to the entropy of the last update, we to that of "
             "this step's rollouts")  # fmt: skip
    for name in ("entropy_coef_min", "entropy_coef_max"):
        r.no_counterpart(name, "the coefficient has no bound but 0")
    return EntropyBonus(coef=coef, target=target, delta=delta)


def _aggregate(r: Reader, kind: str) -> Any:
    rows = r.number("per_device_train_batch_size", 8)
    aggregates = {
        "grpo": SequenceMean(),
        "sapo": SequenceMean(),
        "bnpo": MicrobatchTokenMean(rows=rows),
        "dr_grpo": SequenceSumNorm(length=r.number("max_completion_length", 512)),
        "dapo": TokenMean(),
        "cispo": TokenMean(),
        "vespo": TokenMean(),
        "luspo": SequenceSum(),
    }
    if kind not in aggregates:
        raise ConfigError(f"loss_type: {kind!r}; TRL knows {', '.join(aggregates)}")
    accumulation, generation = r.number("gradient_accumulation_steps", 1), r.number("steps_per_generation")
    shared = "TRL divides by an update's average share of the tokens, we by its own tokens"
    uneven = kind in ("dapo", "cispo", "vespo") and generation is not None and generation != accumulation
    surrogate = kind if kind in ("cispo", "sapo", "vespo") else "clip"
    r.became("loss_type", f"surrogate: {surrogate}, aggregate: {aggregates[kind].type}", shared if uneven else "")
    return aggregates[kind]
