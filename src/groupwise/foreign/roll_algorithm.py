"""The algorithm of a ROLL config: which slot each of its keys sets, in ROLL's order of operations."""

from __future__ import annotations

import re
from typing import Any

from groupwise.advantages import (
    BatchMean,
    BatchStd,
    Gae,
    GroupMean,
    GroupStd,
    ReturnToGo,
    Whiten,
)
from groupwise.errors import ConfigError
from groupwise.foreign import Reader
from groupwise.losses import (
    Cispo,
    Clip,
    Reinforce,
    Topr,
)
from groupwise.penalties import (
    KL,
    EntropyBonus,
    ValueLoss,
)
from groupwise.trees import Tree
from groupwise.weights import Importance, SequenceMean, SequenceSum, SequenceSumNorm, TokenMean


def roll_algorithm(r: Reader) -> Tree:
    """The slots of the algorithm, by name.

    Raises:
        ConfigError: ROLL does something there that cannot be meant, or that has no counterpart at all.
    """
    return _credit(r) | _policy_loss(r)


# Rewards to advantages ------------------------------------------------------------------------------------------------


def _credit(r: Reader) -> Tree:
    estimator = r.take("adv_estimator", "gae")
    gae = estimator == "gae"
    if estimator not in ("grpo", "reinforce", "gae"):
        raise ConfigError(f"adv_estimator: {estimator}; only grpo, reinforce and gae are imported: the others of ROLL "
                          "credit turns of an agent")  # fmt: skip
    baseline, scale = _statistics(r, estimator)
    gamma, lam = float(r.number("gamma", 1)), float(r.number("lambd", 0.95))
    slots: Tree = {"baseline": baseline, "scale": scale, "credit_over_time": ReturnToGo(gamma=gamma)}
    if gae:
        value_clip = r.number("value_clip")
        slots |= {"credit_over_time": Gae(gamma=gamma, lam=lam), "critic": ValueLoss(clip=value_clip or None)}
        r.became("lambd", f"credit_over_time.lam: {lam}")
        r.became("value_clip", f"critic.clip: {value_clip}")
    names = [getattr(slot, "type", "none") for slot in (baseline, scale, slots["credit_over_time"])]
    r.became("adv_estimator", "baseline: {}, scale: {}, credit_over_time: {}".format(*names))
    r.became("gamma", f"credit_over_time.gamma: {gamma}")
    clip = r.number("reward_clip") or None  # ROLL tests for truth, so 0 is off
    slots["reward_clip"] = clip and float(clip)
    r.became("reward_clip", f"reward_clip: {slots['reward_clip']}, on the normalised reward")
    if r.take("whiten_advantages", False):
        slots["whiten"] = Whiten(level="token", ddof=1, eps=1e-8)
    r.became("whiten_advantages", "whiten: token, ddof 1, eps 1e-8" if "whiten" in slots else "whiten: none")
    limit = r.number("advantage_clip")
    if limit == 0:
        raise ConfigError("advantage_clip: 0; ROLL sets every advantage to 0 with it; use null for no clip")
    slots["advantage_clip"] = limit and float(limit)
    r.became("advantage_clip", f"advantage_clip: {limit}")
    return slots | {"filter": _filter(r), "drop_truncated": _drop_truncated(r)}


def _statistics(r: Reader, estimator: str) -> tuple[Any, Any]:
    """Baseline and scale: what today's keys say, or else what the documentation says of the three dead ones."""
    mean, std = r.take("norm_mean_type"), r.take("norm_std_type")
    group, shift, divide = r.take("reward_norm"), r.take("reward_shift", False), r.take("reward_scale", False)
    grpo = estimator == "grpo"
    if not grpo and (mean or std):
        for key in ("norm_mean_type", "norm_std_type"):
            running = "the statistics of the step are taken, not running ones" if r.take(key) == "running" else ""
            r.became(key, f"{'baseline' if 'mean' in key else 'scale'}: {r.take(key)}", running)
        group = None
    elif grpo or group:
        kind = "group" if grpo else group
        mean, std = None if divide else kind, None if shift else kind
    today = "it takes the group's mean and std whatever this says" if grpo else "it trains on the rewards as they are"
    if not grpo and (r.take("norm_mean_type") or r.take("norm_std_type")):
        today = "norm_mean_type and norm_std_type decide"
    meant = f"baseline {mean or 'none'}, scale {std or 'none'}"
    for key in ("reward_norm", "reward_shift", "reward_scale"):
        r.dead(key, f"removed in August 2025, dropped in silence; {today}. Imported as documented: {meant}")
    if estimator == "gae" and mean:
        r.ask("algorithm.baseline", "the critic is the baseline; ROLL would subtract the mean of the rewards as well")
        mean = None
    baselines = {None: None, "group": GroupMean(), "batch": BatchMean(), "running": BatchMean()}
    scales = {None: None, "group": GroupStd(), "batch": BatchStd(), "running": BatchStd()}
    if mean not in baselines or std not in scales:
        raise ConfigError(f"reward normalisation: {mean!r}, {std!r}; ROLL knows batch, group, running and null")
    return baselines[mean], scales[std]


def _filter(r: Reader) -> str:
    """Which groups are sampled again or left out."""
    chosen = "none"
    for key, kind in r.given.items():
        if not re.fullmatch(r"rewards\.\w+\.query_filter_config\.type", key) or kind == "no_filter":
            continue
        chosen = "dynamic_sampling"
        bounds = "groups are kept when their rewards differ; ROLL's bounds on their mean are not taken over"
        r.became(key, "filter: dynamic_sampling", bounds if kind == "mean_filter" else "")
    if r.take("difficulty_mask", False):
        low, high = r.take("difficulty_low_threshold", 0), r.take("difficulty_high_threshold", 1)
        chosen = "drop_zero_variance" if chosen == "none" else chosen
        narrow = "" if (low, high) == (0, 1) else f"ROLL keeps groups with a mean score between {low} and {high}"
        r.became("difficulty_mask", f"filter: {chosen}", narrow)
    r.became("difficulty_mask", f"filter: {chosen}")
    return chosen


def _drop_truncated(r: Reader) -> bool:
    drop = bool(r.take("max_len_mask", False))
    whitened = "ROLL leaves them out of the whitening as well" if drop and r.take("whiten_advantages") else ""
    r.became("max_len_mask", f"drop_truncated: {str(drop).lower()}", whitened)
    return drop


# Advantages to a loss -------------------------------------------------------------------------------------------------


def _policy_loss(r: Reader) -> Tree:
    sequence = r.take("importance_sampling", "token") == "seq"
    r.became("importance_sampling", "ratio: sequence" if sequence else "ratio: token")
    kl, reward_kl = _kls(r)
    surrogate, own_kl = _surrogate(r)
    if own_kl is not None and kl is not None:
        r.ask("algorithm.kl", "one KL in the loss: that of kimi15 to the old policy is left out for the reference's")
    rate = r.number("entropy_loss_coef", 0)
    share = r.number("rl_loss_coef", 1.0)
    if share == 0:
        raise ConfigError("rl_loss_coef: 0; the loss is then 0 whatever the policy does; remove it, or set 1.0")
    entropy = EntropyBonus(coef=rate / share) if rate else None
    r.became("entropy_loss_coef", f"entropy.coef: {rate / share}" if rate else "entropy: none")
    r.became("rl_loss_coef", f"optimizer.max_grad_norm and entropy.coef divided by {share}")
    return {
        "ratio": "sequence" if sequence else "token",
        "surrogate": surrogate,
        "kl": kl or own_kl,
        "reward_kl_coef": reward_kl,
        "entropy": entropy,
        "correction": _correction(r),
        "aggregate": _aggregate(r),
    }


def _kls(r: Reader) -> tuple[KL | None, float]:
    """The KL that is a slot of its own, and the coefficient of one in the reward beside it."""
    in_loss, in_reward = r.take("use_kl_loss", False), r.take("add_token_level_kl", False)
    coef, beta = float(r.number("kl_loss_coef", 0)), float(r.number("init_kl_coef", 0.2))
    kl = KL(coef=coef) if in_loss else None
    cut = "ROLL cuts its value off at 10, where it has no gradient any more; we clamp the log-ratio"
    r.became("use_kl_loss", f"kl: k3 in the loss, coef {coef}" if kl else "no KL in the loss", cut if kl else "")
    r.became("kl_loss_coef", f"kl.coef: {coef}" if kl else "nothing, as use_kl_loss is off")
    if not in_reward:
        r.became("add_token_level_kl", "no KL in the reward")
        return kl, 0.0
    kind = r.take("kl_penalty", "kl")
    other = "" if kind in ("kl", "k1") else "in the reward only k1 has the right gradient"
    r.became("kl_penalty", "k1 in the reward", other)
    if kl is None:
        kl, beta = KL(coef=beta, estimator="k1", placement="reward_token"), 0.0
    r.became("add_token_level_kl", f"reward_kl_coef: {beta}" if beta else f"kl: k1 in the reward, coef {kl.coef}")
    r.became("init_kl_coef", "its coefficient", "ROLL adapts it towards target_kl" if r.take("target_kl") else "")
    return kl, beta


def _surrogate(r: Reader) -> tuple[Any, KL | None]:
    """The surrogate, and the KL that belongs to it."""
    clip = float(r.number("pg_clip", 0.2))
    low, high = float(r.number("pg_clip_low", 0.2)), float(r.number("pg_clip_high", 0.2))
    wide = bool(r.take("use_pg_clip_range", False))
    if not wide:
        low = high = clip
    dual = 1 + 2 * clip if r.take("dual_clip_loss", False) else None
    variant = r.take("actor_train.pg_variant")
    surrogates: dict[Any, Any] = {
        "vanilla": Reinforce(),
        "tis": Cispo(floor=0.0, cap=1.0),
        "cispo": Cispo(floor=0.9, cap=1.1),
        "topr": Topr(),
        "kimi15": Reinforce(),
    }
    surrogate = surrogates.get(variant, Clip(low=low, high=high, dual=dual))
    differs = {"topr": "ROLL asks for a positive score, we for a positive advantage, and its two weights are 1"}
    r.became("actor_train.pg_variant", f"surrogate: {surrogate.type}", differs.get(variant, ""))
    clips = isinstance(surrogate, Clip)
    for key, live, what in (
        ("pg_clip", clips and (not wide or dual), f"surrogate.low and .high: {clip}" if not wide else "the dual clip"),
        ("use_pg_clip_range", clips, f"surrogate.low: {low}, .high: {high}"),
        ("pg_clip_low", clips and wide, f"surrogate.low: {low}"),
        ("pg_clip_high", clips and wide, f"surrogate.high: {high}"),
        ("dual_clip_loss", clips, f"surrogate.dual: {dual} (1 + 2 pg_clip)" if dual else "surrogate.dual: none"),
    ):
        r.became(key, what if live else "nothing: nothing here reads it")
    return surrogate, KL(coef=0.1, estimator="k2", to="old") if variant == "kimi15" else None


def _correction(r: Reader) -> Importance | None:
    prefix = "train_infer_correction"
    levels: dict[str, Any] = {name: name for name in ("token", "sequence", "geometric")} | {"segment": "geometric"}
    if r.take(f"{prefix}.is_weight.enabled", False):
        kind = r.take(f"{prefix}.is_weight.weight_type", "token")
        high = r.number(f"{prefix}.is_weight.upper_bound", 1.2)
        for name in ("enabled", "weight_type", "upper_bound", "detach"):
            r.became(f"{prefix}.is_weight.{name}", f"correction: truncate, level {levels[kind]}, high {high}")
        r.no_counterpart(f"{prefix}.filters", "there is one correction; the weight is taken, the filters are not")
        return Importance(mode="truncate", level=levels[kind], high=float(high))
    filters: list[Any] = [f for f in r.take(f"{prefix}.filters") or [] if f.get("enabled", False)]
    if not filters:
        r.became(f"{prefix}.filters", "correction: none")
        r.became(f"{prefix}.is_weight.enabled", "correction: none")
        return None
    first = filters[0]
    level, low, high = first.get("agg_type", "token"), first.get("ratio_low", 0.8), first.get("ratio_high", 1.2)
    level = levels[level]
    counted = "only the first filter, by its ratio; rejected tokens stay in the denominators here"
    r.became(f"{prefix}.filters", f"correction: reject, level {level}, {low} to {high}", counted)
    return Importance(mode="reject", level=level, low=float(low), high=float(high))


def _aggregate(r: Reader) -> Any:
    name = r.take("loss_agg_mode", "seq-mean-token-mean")
    length = r.number("response_length")
    modes = {
        "token-mean": TokenMean(),
        "seq-mean-token-mean": SequenceMean(),
        "seq-mean-token-sum": SequenceSum(),
        "seq-mean-token-sum-norm": SequenceSumNorm(length=length),
    }
    if name not in modes:
        raise ConfigError(f"loss_agg_mode: {name}; ROLL knows {', '.join(modes)}")
    constant = "ROLL divides by the width of the batch, prompt included, and not by the number of completions: its "
    constant += "loss is ours times completions * response_length / (prompt_length + response_length - 1)"
    r.became("loss_agg_mode", f"aggregate: {name}", constant if name.endswith("norm") else "")
    return modes[name]
