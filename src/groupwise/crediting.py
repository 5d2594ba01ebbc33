"""Rewards to advantages: the complete groups of a step, each token of them credited with what it led to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from groupwise.advantages import Array, Groups, normalise
from groupwise.formula import Formula
from groupwise.records import Floats, Rollout


def credit(a: Formula, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Fill `advantages` (and `returns`) of the complete groups of one step; 0 for rollouts that are not valid."""
    trusted = [rollout for rollout in rollouts if rollout.valid]
    tokens = _token_advantages(a, trusted, _token_rewards(a, trusted))
    filled = {id(rollout): pair for rollout, pair in zip(trusted, tokens, strict=True)}
    nothing = (np.zeros(0), np.zeros(0))
    return [_with_advantages(rollout, *filled.get(id(rollout), nothing)) for rollout in rollouts]


def _token_rewards(a: Formula, rollouts: Sequence[Rollout]) -> list[Array]:
    """Normalised rewards where they are earned, minus a KL penalty per token, for each loss token of a rollout."""
    earned = [np.zeros(rollout.num_completion_tokens) for rollout in rollouts]
    owners, places, values = _items(a, rollouts)
    for owner, place, value in zip(owners, places, values, strict=True):
        if len(earned[owner]):
            earned[owner][place] += value
    if a.token_kl_coef:
        for reward, rollout in zip(earned, rollouts, strict=True):
            reward -= a.token_kl_coef * sampled_kl(rollout)
            if a.reward_clip is not None:
                reward.clip(-a.reward_clip, a.reward_clip, out=reward)
    return earned


def _items(a: Formula, rollouts: Sequence[Rollout]) -> tuple[list[int], list[int], Array]:
    """What is rewarded: (index of the rollout, place among its loss tokens, normalised reward) of each
    completion, or for process supervision of each reasoning step."""
    if a.supervision == "process":
        steps = [(i, _place(r, end), reward) for i, r in enumerate(rollouts) for end, reward in r.step_rewards]
    else:
        steps = [(i, -1, rollout.reward) for i, rollout in enumerate(rollouts)]
    owners, places = [owner for owner, _, _ in steps], [place for _, place, _ in steps]
    groups = np.array([rollouts[owner].group for owner in owners], dtype=np.int64)
    lengths = np.array([rollouts[owner].num_completion_tokens for owner in owners], dtype=np.float64)
    rewards = np.array([reward for _, _, reward in steps], dtype=np.float64)
    if a.shaping is not None:
        truncated = np.array([rollouts[owner].truncated for owner in owners], dtype=np.bool_)
        rewards = rewards + a.shaping(rewards, groups, lengths, truncated)
    rewards = rewards - np.array([rollouts[owner].greedy_reward for owner in owners])
    if a.sequence_kl_coef:
        rewards = rewards - a.sequence_kl_coef * np.array([sampled_kl(rollout).sum() for rollout in rollouts])
    if a.combine == "normalize_then_sum":
        values = _sum_of_normalised(a, rollouts, groups, lengths)
    else:
        values = normalise(rewards, groups, lengths, a.baseline, a.scale)
    if a.reward_clip is not None:
        values = np.clip(values, -a.reward_clip, a.reward_clip)
    if a.whiten is not None and a.whiten.level == "sample":
        values = a.whiten(values)
    return owners, places, values


def _sum_of_normalised(a: Formula, rollouts: Sequence[Rollout], groups: Groups, lengths: Array) -> Array:
    """GDPO (arXiv:2601.05242): each reward function is normalised on its own, then they are weighed and added."""
    total = np.zeros(len(rollouts))
    for name in {name: None for rollout in rollouts for name in rollout.rewards}:
        rewards = np.array([rollout.rewards.get(name, np.nan) for rollout in rollouts], dtype=np.float64)
        weights = np.array([rollout.reward_weights.get(name, 1.0) for rollout in rollouts])
        said = np.isfinite(rewards)  # a function may have no opinion on a completion
        total[said] += weights[said] * normalise(rewards[said], groups[said], lengths[said], a.baseline, a.scale)
    return total


def _token_advantages(a: Formula, rollouts: Sequence[Rollout], rewards: Sequence[Array]) -> list[tuple[Array, Array]]:
    """(advantages, returns) of the loss tokens of each rollout."""
    values = [np.zeros(r.num_completion_tokens) if r.values is None else loss_tokens(r, r.values) for r in rollouts]
    pairs = [a.credit_over_time(reward, value) for reward, value in zip(rewards, values, strict=True)]
    advantages = [advantage for advantage, _ in pairs]
    if a.whiten is not None and a.whiten.level == "token" and advantages:
        ends = np.cumsum([len(advantage) for advantage in advantages])[:-1]
        advantages = np.split(a.whiten(np.concatenate(advantages)), ends)
    if a.advantage_clip is not None:
        advantages = [np.clip(advantage, -a.advantage_clip, a.advantage_clip) for advantage in advantages]
    return [(advantage, returns) for advantage, (_, returns) in zip(advantages, pairs, strict=True)]


def sampled_kl(rollout: Rollout) -> Array:
    """`log pi_old - log pi_ref` of each loss token: the only estimate whose use as a reward has the right gradient."""
    assert rollout.old_logprobs is not None and rollout.ref_logprobs is not None, "Algorithm.needs asked for them"
    return loss_tokens(rollout, rollout.old_logprobs) - loss_tokens(rollout, rollout.ref_logprobs)


def loss_tokens(rollout: Rollout, values: Floats) -> Array:
    """Of a value for each token, those that the policy sampled."""
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
