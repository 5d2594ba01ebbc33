"""`Algorithm`: how rewards become gradients, as one formula with a few orthogonal slots.

    L = - SUM w * m * c * PHI(u, A)  +  beta * SUM w * K  -  eta * SUM w * H

An algorithm is a value.  The named ones are in `presets.py`; a variant is `replace(DAPO, surrogate=Cispo(cap=5.0))`.
`credit` computes `A` from rewards over complete groups, `batches` fixes `w` and `m` for each optimizer step, and
`loss` is the sum above for any part of such a step.  Combinations that cannot be right are refused when the value is
made, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from groupwise import losses
from groupwise.advantages import (
    Array,
    BatchMean,
    BatchStd,
    BetaDensity,
    Credit,
    Gae,
    GroupMean,
    Groups,
    GroupStd,
    LeaveOneOut,
    LengthWeightedMean,
    MovingMean,
    ReturnToGo,
    Statistic,
    Whiten,
    group_is_flat,
    normalise,
)
from groupwise.losses import (
    LossInputs,
    RatioLevel,
    Surrogate,
    clamp_log_ratio,
)
from groupwise.penalties import KL, EntropyBonus, ValueLoss, k3
from groupwise.records import Batch, Floats, Rollout, collate
from groupwise.shaping import (
    CosineLength,
    KimiLength,
    LinearLength,
    Shaping,
    SoftOverlong,
    StopProperly,
)
from groupwise.slots import OneOf, Slot, replace
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


class Algorithm(Slot):
    """One point of the GRPO family; the defaults are group-normalised rewards, clip-higher, a token mean and no KL."""

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

    @model_validator(mode="after")
    def _refuse_what_cannot_be_right(self) -> Algorithm:
        reasons = [reason for refused, reason in refusals(self) if refused]
        if reasons:
            raise ValueError("\n".join(reasons))
        return self

    def needs(self, updates_per_step: int) -> set[str]:
        """Which fields of a rollout have to be computed before the updates of a step."""
        # With a single update per step the old policy is the current one, and costs no pass of its own.
        old = updates_per_step > 1 or self._kl_in_reward
        ref = self._kl_in_reward or (self._loss_kl is not None and self._loss_kl.to == "ref")
        wanted = {"old_logprobs": old, "ref_logprobs": ref, "values": self.critic is not None}
        return {name for name, needed in wanted.items() if needed}

    def resolve(self, max_tokens: int) -> Algorithm:
        """The same algorithm with every length that was left open set to `max_tokens`."""
        changes: dict[str, Slot] = {}
        if isinstance(self.aggregate, SequenceSumNorm) and self.aggregate.length is None:
            changes["aggregate"] = replace(self.aggregate, length=max_tokens)
        if isinstance(self.shaping, SoftOverlong | LinearLength | CosineLength) and self.shaping.limit is None:
            changes["shaping"] = replace(self.shaping, limit=max_tokens)
        return replace(self, **changes) if changes else self

    def adapt(self, rollouts: Sequence[Rollout]) -> Algorithm:
        """The algorithm for a step with these rollouts: coefficients that follow the run have moved."""
        changes: dict[str, Slot] = {}
        rewards = [rollout.reward for rollout in rollouts if rollout.valid]
        if isinstance(self.baseline, MovingMean) and rewards:
            changes["baseline"] = self.baseline.after_seeing(float(np.mean(rewards)))
        entropies = [_loss_tokens(r, r.entropies) for r in rollouts if r.entropies is not None]
        if self.entropy is not None and self.entropy.target is not None and entropies:
            changes["entropy"] = self.entropy.after_seeing(float(np.concatenate(entropies).mean()))
        return replace(self, **changes) if changes else self

    # Rewards to advantages -------------------------------------------------------------------------------------------

    def credit(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Fill `advantages` (and `returns`) of the complete groups of one step; 0 for rollouts that are not valid."""
        trusted = [rollout for rollout in rollouts if rollout.valid]
        tokens = self._token_advantages(trusted, self._token_rewards(trusted))
        filled = {id(rollout): pair for rollout, pair in zip(trusted, tokens, strict=True)}
        nothing = (np.zeros(0), np.zeros(0))
        return [_with_advantages(rollout, *filled.get(id(rollout), nothing)) for rollout in rollouts]

    def _token_rewards(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """Normalised rewards where they are earned, minus a KL penalty per token, for each loss token of a rollout."""
        earned = [np.zeros(rollout.num_completion_tokens) for rollout in rollouts]
        owners, places, values = self._items(rollouts)
        for owner, place, value in zip(owners, places, values, strict=True):
            if len(earned[owner]):
                earned[owner][place] += value
        if self._token_kl_coef:
            for reward, rollout in zip(earned, rollouts, strict=True):
                reward -= self._token_kl_coef * sampled_kl(rollout)
                if self.reward_clip is not None:
                    reward.clip(-self.reward_clip, self.reward_clip, out=reward)
        return earned

    def _items(self, rollouts: Sequence[Rollout]) -> tuple[list[int], list[int], Array]:
        """What is rewarded: (index of the rollout, place among its loss tokens, normalised reward) of each
        completion, or for process supervision of each reasoning step."""
        if self.supervision == "process":
            steps = [(i, _place(r, end), reward) for i, r in enumerate(rollouts) for end, reward in r.step_rewards]
        else:
            steps = [(i, -1, rollout.reward) for i, rollout in enumerate(rollouts)]
        owners, places = [owner for owner, _, _ in steps], [place for _, place, _ in steps]
        groups = np.array([rollouts[owner].group for owner in owners], dtype=np.int64)
        lengths = np.array([rollouts[owner].num_completion_tokens for owner in owners], dtype=np.float64)
        rewards = np.array([reward for _, _, reward in steps], dtype=np.float64)
        if self.shaping is not None:
            truncated = np.array([rollouts[owner].truncated for owner in owners], dtype=np.bool_)
            rewards = rewards + self.shaping(rewards, groups, lengths, truncated)
        rewards = rewards - np.array([rollouts[owner].greedy_reward for owner in owners])
        if self.kl is not None and self.kl.placement == "reward_sequence" and self.kl.coef > 0:
            rewards = rewards - self.kl.coef * np.array([sampled_kl(rollout).sum() for rollout in rollouts])
        if self.combine == "normalize_then_sum":
            values = self._sum_of_normalised(rollouts, groups, lengths)
        else:
            values = normalise(rewards, groups, lengths, self.baseline, self.scale)
        if self.reward_clip is not None:
            values = np.clip(values, -self.reward_clip, self.reward_clip)
        if self.whiten is not None and self.whiten.level == "sample":
            values = self.whiten(values)
        return owners, places, values

    def _sum_of_normalised(self, rollouts: Sequence[Rollout], groups: Groups, lengths: Array) -> Array:
        """GDPO (arXiv:2601.05242): each reward function is normalised on its own, then they are weighed and added."""
        total = np.zeros(len(rollouts))
        for name in {name: None for rollout in rollouts for name in rollout.rewards}:
            rewards = np.array([rollout.rewards.get(name, np.nan) for rollout in rollouts], dtype=np.float64)
            weights = np.array([rollout.reward_weights.get(name, 1.0) for rollout in rollouts])
            said = np.isfinite(rewards)  # a function may have no opinion on a completion
            total[said] += weights[said] * normalise(
                rewards[said], groups[said], lengths[said], self.baseline, self.scale
            )
        return total

    def _token_advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[Array]) -> list[tuple[Array, Array]]:
        """(advantages, returns) of the loss tokens of each rollout."""
        values = [
            np.zeros(r.num_completion_tokens) if r.values is None else _loss_tokens(r, r.values) for r in rollouts
        ]
        pairs = [self.credit_over_time(reward, value) for reward, value in zip(rewards, values, strict=True)]
        advantages = [advantage for advantage, _ in pairs]
        if self.whiten is not None and self.whiten.level == "token" and advantages:
            ends = np.cumsum([len(advantage) for advantage in advantages])[:-1]
            advantages = np.split(self.whiten(np.concatenate(advantages)), ends)
        if self.advantage_clip is not None:
            advantages = [np.clip(advantage, -self.advantage_clip, self.advantage_clip) for advantage in advantages]
        return [(advantage, returns) for advantage, (_, returns) in zip(advantages, pairs, strict=True)]

    # Advantages to optimizer steps -----------------------------------------------------------------------------------

    def batches(
        self, rollouts: Sequence[Rollout], count: int = 1, dtype: torch.dtype = torch.float32
    ) -> Iterator[Batch]:
        """The optimizer steps of one set of credited rollouts: whole groups, weights fixed, dead rows left out.

        A row is dead when it cannot carry a gradient: its advantages are 0 and neither KL, entropy nor critic acts on
        it.  It still counts in every denominator.  A batch may be all dead: the optimizer moves on by its momentum.
        """
        kept = self._structurally_kept(rollouts)
        for groups in np.array_split(list(dict.fromkeys(rollout.group for rollout in kept)), count):
            members = set(groups.tolist())
            part = [rollout for rollout in kept if rollout.group in members]
            if part:
                yield self._without_dead_rows(self._weigh(part, collate(part, dtype)))

    def _structurally_kept(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        kept = [rollout for rollout in rollouts if rollout.valid]
        if self.filter != "none":
            flat = zero_variance(kept)
            kept = [rollout for rollout, dull in zip(kept, flat, strict=True) if not dull]
        return [rollout for rollout in kept if not (self.drop_truncated and rollout.truncated)]

    def _weigh(self, rollouts: Sequence[Rollout], batch: Batch) -> Batch:
        mask = batch.loss_mask.to(batch.advantages.dtype)
        selection = batch.selection
        if self.selection is not None:
            entropies = torch.zeros_like(mask)
            for row, rollout in enumerate(rollouts):
                assert rollout.entropies is not None, "Config refuses a selection with a sampler that does not say"
                entropies[row, : len(rollout.tokens)] = torch.from_numpy(rollout.entropies).to(mask.dtype)
            selection = self.selection(entropies, mask)
        return dataclasses.replace(batch, weights=self.aggregate(mask, batch.groups), selection=selection)

    def _without_dead_rows(self, batch: Batch) -> Batch:
        if self.entropy or self.critic or self._loss_kl:
            return batch
        alive = (batch.advantages != 0).any(-1)
        return batch if bool(alive.all()) else batch.rows(alive.nonzero().squeeze(-1))

    # The loss --------------------------------------------------------------------------------------------------------

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The formula at the top, summed over the rows of `batch`, which may be any part of an optimizer step.

        `logprobs` and `entropies` are [B, T].  Metrics are (sum, count) over loss tokens and add up like the loss.
        """
        x = self.inputs(logprobs, entropies, batch)
        loss, diagnostics = self.surrogate(x)
        loss = loss * batch.selection
        if self.correction is not None:
            diagnostics["correction"] = self.correction(x).detach()
            loss = loss * diagnostics["correction"]
        if self._loss_kl is not None:
            diagnostics["kl"] = self._loss_kl(x)
            loss = loss + self._loss_kl.coef * diagnostics["kl"]
        if self.entropy is not None and self.entropy.acting:
            loss = loss - self.entropy.coef * x.entropy
        diagnostics["approx_kl"] = k3(clamp_log_ratio(x.old - x.logprobs))
        diagnostics["sampler_mismatch"] = (x.old - x.rollout).abs()
        tokens = x.mask.sum()
        metrics = {name: torch.stack([(d.detach() * x.mask).sum(), tokens]) for name, d in diagnostics.items()}
        return (loss * batch.weights).sum(), metrics

    def inputs(self, logprobs: Tensor, entropies: Tensor, batch: Batch) -> LossInputs:
        """Zero whatever is masked, so that no garbage reaches an exp(), and take the log-ratio at its level."""
        keep = batch.loss_mask
        new, rollout = logprobs.where(keep, 0.0), batch.rollout_logprobs.where(keep, 0.0)
        old = new.detach() if batch.old_logprobs is None else batch.old_logprobs.where(keep, 0.0)
        mask = keep.to(new.dtype)
        log_ratio = clamp_log_ratio(new - (old if self.anchor == "old" else rollout))
        return LossInputs(
            logprobs=new,
            old=old,
            rollout=rollout,
            ref=None if batch.ref_logprobs is None else batch.ref_logprobs.where(keep, 0.0),
            advantages=batch.advantages.where(keep, 0.0),
            entropy=entropies.where(keep, 0.0),
            mask=mask,
            log_ratio=clamp_log_ratio(losses.RATIO_LEVELS[self.ratio](log_ratio, mask)),
        )

    def value_loss(self, values: Tensor, batch: Batch) -> Tensor:
        """The critic's loss, with the same weights as the policy's; `values` is [B, T]."""
        assert self.critic is not None and batch.values is not None and batch.returns is not None
        per_token = self.critic(values.where(batch.loss_mask, 0.0), batch.values, batch.returns)
        return (per_token * batch.weights).sum()

    @property
    def per_token(self) -> bool:
        """Whether each term of the loss looks at one token alone; not assumed of pieces that are not ours."""
        correction, kl = self.correction, self._loss_kl
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
    def _token_kl_coef(self) -> float:
        """How much of the sampled KL comes off the reward of each token."""
        own = self.kl.coef if self.kl is not None and self.kl.placement == "reward_token" else 0.0
        return own + self.reward_kl_coef

    @property
    def _loss_kl(self) -> KL | None:
        """The KL that acts in the loss, if any."""
        return self.kl if self.kl is not None and self.kl.placement == "loss" and self.kl.coef > 0 else None

    @property
    def _kl_in_reward(self) -> bool:
        whole = self.kl is not None and self.kl.placement == "reward_sequence" and self.kl.coef > 0
        return whole or self._token_kl_coef > 0


def zero_variance(rollouts: Sequence[Rollout]) -> list[bool]:
    """For each rollout, whether all rewards of its group are equal, before any shaping."""
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    groups = np.array([rollout.group for rollout in rollouts], dtype=np.int64)
    return group_is_flat(rewards, groups).tolist()


def sampled_kl(rollout: Rollout) -> Array:
    """`log pi_old - log pi_ref` of each loss token: the only estimate whose use as a reward has the right gradient."""
    assert rollout.old_logprobs is not None and rollout.ref_logprobs is not None, "Algorithm.needs asked for them"
    return _loss_tokens(rollout, rollout.old_logprobs) - _loss_tokens(rollout, rollout.ref_logprobs)


def _loss_tokens(rollout: Rollout, values: Floats) -> Array:
    return values[rollout.loss_mask].astype(np.float64)


def _place(rollout: Rollout, token: int) -> int:
    """Where a token index stands among the loss tokens: itself, or the last one before it."""
    return max(int(rollout.loss_mask[: token + 1].sum()) - 1, 0)


def _with_advantages(rollout: Rollout, advantages: Array, returns: Array) -> Rollout:
    spread = {name: np.zeros(len(rollout.tokens)) for name in ("advantages", "returns")}
    if len(advantages):
        spread["advantages"][rollout.loss_mask] = advantages
        spread["returns"][rollout.loss_mask] = returns
    return dataclasses.replace(rollout, **spread)


def refusals(a: Algorithm) -> Iterator[tuple[bool, str]]:
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


def _kl_refusals(a: Algorithm) -> Iterator[tuple[bool, str]]:
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


def cautions(a: Algorithm) -> Iterator[tuple[bool, str]]:
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
