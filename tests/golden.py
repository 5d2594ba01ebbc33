"""From the axis names of `golden_algorithms.json` to our slots, and its fixtures to rollouts."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from groupwise.advantages import (
    BatchStd,
    BetaDensity,
    Gae,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    LengthWeightedMean,
    ReturnToGo,
    Whiten,
)
from groupwise.algorithms import Algorithm
from groupwise.batching import structurally_kept, weigh
from groupwise.losses import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    Reinforce,
    Sapo,
    Topr,
    Unclipped,
    Vespo,
)
from groupwise.penalties import (
    KL,
    ValueLoss,
)
from groupwise.records import Batch, Rollout, collate
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

DATA = Path(__file__).parent / "data" / "golden_algorithms.json"
PROMPT = 2  # tokens before every completion: the fixtures have none

Axes = Mapping[str, Any]


def golden_files() -> list[dict[str, Any]]:
    extra = os.environ.get("GROUPWISE_GOLDEN_EXTRA", "")
    paths = [DATA, *(Path(path) for path in extra.split(os.pathsep) if path)]
    return [json.loads(path.read_text()) for path in paths]


def golden_cases() -> list[Any]:
    """(case, its fixture with overrides applied, its axes with the defaults filled in), named by the case's id."""
    import pytest

    return [
        pytest.param(
            case["expected"],
            file["fixtures"][case["fixture"]] | case.get("inputs_override", {}),
            file["axis_defaults"] | case["axes"],
            id=f"{'extra.' if number else ''}{case['id']}",
        )
        for number, file in enumerate(golden_files())
        for case in file["cases"]
    ]


def algorithm(axes: Axes, fixture: Mapping[str, Any]) -> Algorithm:
    """The `Algorithm` that a case's axes describe."""
    eps, ddof = axes["std_eps"], axes["std_ddof"]
    statistics = {
        "none": None,
        "critic": None,
        "greedy": None,
        "group_mean": GroupMean(),
        "leave_one_out": LeaveOneOut(),
        "length_weighted_mean": LengthWeightedMean(),
        "group_std": GroupStd(ddof=ddof, eps=eps),
        "batch_std": BatchStd(ddof=ddof, eps=eps),
        "beta": BetaDensity(),
    }
    gae = axes["credit"] == "gae"
    gmpo = axes["surrogate"] == "gmpo"  # ours clips tokens and takes the sequence's mean itself
    level = "token" if gmpo or axes["ratio_level"] == "none" else axes["ratio_level"]
    return Algorithm(
        combine=axes.get("reward_aggregation", "sum_then_normalize"),
        supervision="process" if axes["credit"] == "process" else "outcome",
        baseline=statistics[axes["baseline"]],
        scale=statistics[axes["scale"]],
        credit_over_time=Gae(gamma=axes["gamma"], lam=axes["lam"]) if gae else ReturnToGo(gamma=axes.get("gamma", 1.0)),
        whiten=_whiten(axes),
        advantage_clip=axes.get("advantage_clip"),
        filter="none" if axes["sample_filter"] == "overlong" else axes["sample_filter"],
        drop_truncated=axes["sample_filter"] == "overlong",
        ratio=level,
        anchor=axes["ratio_anchor"],
        surrogate=_surrogate(axes),
        selection=_selection(axes),
        correction=_correction(axes),
        kl=_kl(axes),
        aggregate=_aggregate(axes, fixture),
        critic=ValueLoss(clip=axes.get("value_clip", 0.2)) if gae else None,
    )


def _whiten(axes: Axes) -> Whiten | None:
    if axes["whiten"] == "none":
        return None
    return Whiten(level=axes["whiten"], ddof=axes.get("whiten_ddof", 0), eps=axes.get("whiten_eps", 0.0))


def _surrogate(axes: Axes) -> Any:
    low, high = axes["clip_low"], axes["clip_high"]
    delta = {"low": axes.get("delta_low", 0.2), "high": axes.get("delta_high", 0.2)}
    return {
        "reinforce": lambda: Reinforce(),
        "unclipped": lambda: Unclipped(),
        "clip": lambda: Clip(low=low, high=high),
        "dual_clip": lambda: Clip(low=low, high=high, dual=axes["dual_clip_c"]),
        "cispo": lambda: Cispo(floor=axes["ratio_floor"], cap=axes["ratio_cap"]),
        "sapo": lambda: Sapo(tau_pos=axes["tau_pos"], tau_neg=axes["tau_neg"]),
        "gmpo": lambda: Gmpo(low=low, high=high),
        "topr": lambda: Topr(),
        "vespo": lambda: Vespo(**{name: axes[name] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}),
        "dppo_tv": lambda: Dppo(divergence="tv", **delta),
        "dppo_kl": lambda: Dppo(divergence="kl", **delta),
    }[axes["surrogate"]]()


def _selection(axes: Axes) -> TopEntropy | None:
    if axes["token_selection"] == "all":
        return None
    return TopEntropy(fraction=axes["top_fraction"], renormalise=axes.get("denominator") == "kept")


def _correction(axes: Axes) -> Any:
    if axes["correction"] == "none":
        return None
    mode, _, level = axes["correction"].partition(":")
    if mode == "opsm":
        return OffPolicyMask(delta=axes["opsm_delta"])
    return Importance(mode=mode, level=level, low=axes.get("correction_low", 0.0), high=axes.get("correction_high"))


def _kl(axes: Axes) -> KL | None:
    if axes["kl_placement"] == "none":
        return None
    return KL(
        coef=axes["kl_coef"],
        estimator=axes["kl_estimator"],
        placement=axes["kl_placement"],
        to=axes["kl_anchor"],
        level=axes.get("kl_level", "token"),
    )


def _aggregate(axes: Axes, fixture: Mapping[str, Any]) -> Any:
    alpha = axes.get("control_alpha", 0.001)
    return {
        "token-mean": lambda: TokenMean(),
        "prompt-mean-token-mean": lambda: PromptMean(),
        "seq-mean-token-mean": lambda: SequenceMean(),
        "seq-mean-token-sum": lambda: SequenceSum(),
        "seq-mean-token-sum-norm": lambda: SequenceSumNorm(length=axes.get("L_max", fixture.get("L_max"))),
        "decoupled-seq-mean": lambda: Decoupled(alpha=alpha, response="sequence"),
        "decoupled-token-mean": lambda: Decoupled(alpha=alpha, response="token"),
        "microbatch-token-mean": lambda: _by_microbatch(axes["micro_batches"]),
    }[axes["aggregation"]]()


def _by_microbatch(parts: list[list[int]]) -> Any:
    """Ours takes micro-batches of one size in the order of the rows; any others are a function of the user's."""
    sizes, order = {len(part) for part in parts}, [row for part in parts for row in part]
    if len(sizes) == 1 and order == sorted(order):
        return MicrobatchTokenMean(rows=len(parts[0]))

    def weights(mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        shares = torch.zeros_like(mask)
        for part in parts:
            shares[part] = TokenMean()(mask[part], groups[part]) / len(parts)
        return shares

    return weights


def rollouts(fixture: Mapping[str, Any], axes: Axes) -> list[Rollout]:
    """The completions of a fixture, each after a prompt of `PROMPT` tokens."""
    matrix = axes.get("reward_aggregation") is not None and "rewards" in fixture
    weights = axes.get("reward_weights", [])
    made: list[Rollout] = []
    for i, length in enumerate(fixture["length"]):

        def spread(name: str, i: int = i) -> Any:
            values = fixture.get(name)
            return None if values is None else np.concatenate([np.zeros(PROMPT), np.array(values[i], dtype=np.float64)])

        parts = {str(k): float(r) for k, r in enumerate(fixture["rewards"][i])} if matrix else {}
        shares = {str(k): float(w) for k, w in enumerate(weights)}
        total = sum(shares.get(k, 1.0) * r for k, r in parts.items()) if matrix else fixture.get("reward", [0] * 99)[i]
        old = spread("logp_old")
        made.append(
            Rollout(
                tokens=np.arange(PROMPT + length, dtype=np.int32),
                loss_mask=np.arange(PROMPT + length) >= PROMPT,
                logprobs=old if "logp_rollout" not in fixture else spread("logp_rollout"),
                group=fixture["group"][i],
                finish_reason="length" if fixture.get("truncated", [False] * 99)[i] else "stop",
                rewards=parts,
                reward_weights=shares,
                reward=float(total),
                step_rewards=_steps(fixture, i),
                old_logprobs=old,
                ref_logprobs=spread("logp_ref"),
                values=spread("values_old"),
                entropies=spread("entropy"),
            )
        )
    return made


def _steps(fixture: Mapping[str, Any], i: int) -> tuple[tuple[int, float], ...]:
    if "step_end_index" not in fixture:
        return ()
    pairs = zip(fixture["step_end_index"][i], fixture["step_reward"][i], strict=True)
    return tuple((PROMPT + end, float(reward)) for end, reward in pairs)


def credited(fixture: Mapping[str, Any], axes: Axes) -> tuple[Algorithm, list[Rollout]]:
    """The algorithm and its credited rollouts; `use_token_scale` multiplies the advantages by a fixture's column."""
    chosen = algorithm(axes, fixture)
    result = chosen.credit(rollouts(fixture, axes))
    if axes.get("use_token_scale"):
        scales = [np.concatenate([np.zeros(PROMPT), scale]) for scale in fixture["advantage_token_scale"]]
        result = [
            dataclasses.replace(r, advantages=r.advantages * s)  # type: ignore[operator]
            for r, s in zip(result, scales, strict=True)
        ]
    return chosen, result


def padded(rows: list[list[float]], width: int) -> torch.Tensor:
    """Ragged completion values as [B, width] after `PROMPT` columns of zeros."""
    out = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, row in enumerate(rows):
        out[i, PROMPT : PROMPT + len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def whole_batch(chosen: Algorithm, result: list[Rollout]) -> Batch:
    """All completions as one optimizer step in float64, dead rows kept so that every gradient can be compared."""
    kept = structurally_kept(chosen, result)
    return weigh(chosen, kept, collate(kept, torch.float64))
