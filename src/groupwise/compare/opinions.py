"""What an algorithm says about stored rollouts, without a model: its push on every token, and whom that favours.

The push is `-dL/d log pi` at the policy that the updates start from, where every ratio is 1, in float64.  All that an
algorithm knows of a completion is in it; a model only turns it into a gradient of weights.

Shapes: N loss tokens of the valid completions, one behind the other; n algorithms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.advantages import Array
from groupwise.algorithms import Algorithm
from groupwise.records import Batch, Bools, Floats, Ints, Rollout
from groupwise.rewards import PASSED
from groupwise.slots import replace

Json = dict[str, Any]
CLIPPED = ("clip_ratio/low", "clip_ratio/high")


class Tokens(NamedTuple):
    """The loss tokens of the valid completions."""

    owner: Ints
    """int[N]: the index of the completion."""
    lengths: Array
    """Of each completion, valid or not."""
    classes: dict[str, Bools]
    """bool[N]: which tokens belong to the short completions, to the right ones, ..."""

    def shares(self, amounts: Array) -> dict[str, float | None]:
        """The part of the amounts [N] that goes to each class."""
        whole = float(amounts.sum())
        return {name: number(amounts[inside].sum() / whole) if whole else None for name, inside in self.classes.items()}

    def means(self, amounts: Array) -> Array:
        """The mean amount of a token of each completion; nan for one without tokens."""
        counts = np.bincount(self.owner, minlength=len(self.lengths))
        sums = np.bincount(self.owner, amounts, minlength=len(self.lengths))
        return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def tokens_of(rollouts: Sequence[Rollout], headline: str) -> Tokens:
    """The tokens of some rollouts, and the classes they are in; `headline` is the reward that says what is right.

    Completions are short, middling or long by the thirds of all lengths; a prompt is hard when less than half of its
    completions are right; a token is early, midway or late by the third of its completion that it stands in.
    """
    lengths = np.array([rollout.num_completion_tokens for rollout in rollouts], dtype=np.float64)
    valid = np.array([rollout.valid for rollout in rollouts], dtype=np.bool_)
    right = np.array([rollout.rewards.get(headline, 0.0) > PASSED for rollout in rollouts])
    groups = np.array([rollout.group for rollout in rollouts])
    solved = {group: right[valid & (groups == group)].mean() for group in set(groups[valid].tolist())}
    hard = np.array([solved.get(group, 0.0) < 0.5 for group in groups.tolist()])
    first, second = np.quantile(lengths[valid], [1 / 3, 2 / 3]) if valid.any() else (0.0, 0.0)
    beyond = np.less_equal if first < second else np.less  # where most are equally long, those are middling
    counts = np.where(valid, lengths, 0).astype(np.int64)
    owner = np.repeat(np.arange(len(rollouts)), counts).astype(np.int32)
    place = np.concatenate([np.zeros(0), *(np.arange(count) / count for count in counts if count)])
    long = lengths[owner]
    classes = {
        "short": beyond(long, first),
        "middling": ~beyond(long, first) & ~beyond(second, long),
        "long": beyond(second, long),
        "right": right[owner],
        "wrong": ~right[owner],
        "hard": hard[owner],
        "early": place < 1 / 3,
        "midway": (place >= 1 / 3) & (place < 2 / 3),
        "late": place >= 2 / 3,
    }
    return Tokens(owner, lengths, classes)


class Opinion(NamedTuple):
    """What an algorithm makes of a step's rollouts."""

    credited: list[Rollout]
    advantages: Array
    """[N]"""
    push: Array
    """[N]: `-dL/d log pi`, 0 for tokens that it leaves out."""

    def push_of_each(self) -> list[Floats]:
        """float[T] of each rollout: the push where the policy sampled."""
        spread: list[Floats] = [np.zeros(len(rollout.tokens)) for rollout in self.credited]
        begin = 0
        for values, rollout in zip(spread, self.credited, strict=True):
            if rollout.valid:
                values[rollout.loss_mask] = self.push[begin : begin + rollout.num_completion_tokens]
                begin += rollout.num_completion_tokens
        return spread


def opinion(algorithm: Algorithm, rollouts: Sequence[Rollout]) -> Opinion:
    """The advantages and the push of an algorithm; the rollouts have `old_logprobs`, and whatever else it needs."""
    credited = algorithm.credit(rollouts)
    push = [np.zeros(rollout.num_completion_tokens) for rollout in rollouts]
    batch = batch_of(algorithm, credited)
    if batch is not None:
        pushed = pushed_at(algorithm, batch, batch.old_logprobs)
        for row, index in enumerate(batch.tokens[:, 0].tolist()):
            push[index] = pushed[row][batch.loss_mask[row]].numpy()
    advantages = [np.asarray(rollout.advantages)[rollout.loss_mask] for rollout in credited]
    return Opinion(credited, of_valid(rollouts, advantages), of_valid(rollouts, push))


def of_valid(rollouts: Sequence[Rollout], values: Sequence[Floats]) -> Array:
    """[N]: the values of the loss tokens of each rollout, of the valid ones, one behind the other."""
    said = (value.astype(np.float64) for r, value in zip(rollouts, values, strict=True) if r.valid)
    return np.concatenate([np.zeros(0), *said])


def batch_of(algorithm: Algorithm, credited: Sequence[Rollout]) -> Batch | None:
    """The whole step as one update, in float64, each row's tokens being the index of its rollout; None if empty."""
    marked = [
        dataclasses.replace(rollout, tokens=np.full(len(rollout.tokens), i, dtype=np.int32))
        for i, rollout in enumerate(credited)
    ]
    batch = next(algorithm.batches(marked, dtype=torch.float64), None)
    return batch if batch is not None and len(batch) else None


def pushed_at(algorithm: Algorithm, batch: Batch, logprobs: Tensor | None) -> Tensor:
    """`-dL/d log pi`, float64[B, T], where the policy has these log-probs."""
    assert logprobs is not None, "the caller fills old_logprobs"
    at = logprobs.clone().requires_grad_()
    loss, _ = algorithm.loss(at, torch.zeros_like(at), batch)
    (gradient,) = torch.autograd.grad(loss, at, materialize_grads=True)
    return -gradient


def favours(found: Opinion, tokens: Tokens, of_the_run: Array | None) -> Json:
    """An opinion in numbers; `of_the_run` are the advantages [N] that the run itself had."""
    each = tokens.means(found.advantages)
    own = None if of_the_run is None else tokens.means(of_the_run)
    there = np.isfinite(each)
    return {
        "advantage": {
            "mean": number(each[there].mean()) if there.any() else None,
            "spread": number(each[there].std()) if there.any() else None,
            "zero": number((tokens.means(np.abs(found.advantages))[there] == 0).mean()) if there.any() else None,
            "correlation": None if own is None else correlation(each[there], own[there]),
        },
        "length_slope": length_slope(found, tokens),
        "shares": tokens.shares(np.abs(found.push)),
    }


def length_slope(found: Opinion, tokens: Tokens) -> float | None:
    """How the weight of a token, |push| for each unit of |advantage|, changes with the length of its completion.

    It is the slope of log weight over log length: -1 for `1 / |o|`, 0 where every token weighs the same.  None where
    fewer than two lengths are updated.
    """
    push, advantage = (tokens.means(np.abs(values)) for values in (found.push, found.advantages))
    used = (np.nan_to_num(push) > 0) & (np.nan_to_num(advantage) > 0)
    lengths = np.log(tokens.lengths[used])
    if len(set(lengths.tolist())) < 2:
        return None
    return number(np.polyfit(lengths, np.log(push[used] / advantage[used]), 1)[0])


def held_back(algorithm: Algorithm, credited: Sequence[Rollout], moved: Sequence[Floats | None]) -> Json:
    """What the policy term holds back once the policy has moved to other log-probs (None: not known of that rollout).

    `clipped` is the share of tokens that the surrogate itself calls so, as in metrics.jsonl; `silenced` that of the
    tokens which were pushed and are not any more, for whatever reason.
    """
    algorithm = replace(algorithm, kl=None, reward_kl_coef=0.0, entropy=None)
    batch = batch_of(algorithm, credited)
    if batch is None:
        return {"clipped": None, "silenced": None}
    new = torch.zeros_like(batch.rollout_logprobs)
    known = torch.zeros(len(batch), dtype=torch.bool)
    for row, index in enumerate(batch.tokens[:, 0].tolist()):
        logprobs = moved[index]
        if logprobs is not None:
            new[row, : len(logprobs)] = torch.from_numpy(np.asarray(logprobs, dtype=np.float64))
            known[row] = True
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & known[:, None])
    _, metrics = algorithm.loss(new, torch.zeros_like(new), batch)
    clips = [metrics[name] for name in CLIPPED if name in metrics]
    before, after = pushed_at(algorithm, batch, batch.old_logprobs), pushed_at(algorithm, batch, new)
    pushed = before[batch.loss_mask] != 0
    count = int(pushed.sum())
    return {
        "clipped": number(sum(float(total / tokens) for total, tokens in clips)) if clips and known.any() else None,
        "silenced": number(float((after[batch.loss_mask][pushed] == 0).sum()) / count) if count else None,
    }


# Vectors -------------------------------------------------------------------------------------------------------------


def norms(products: Array) -> list[float]:
    """The lengths of n vectors, from their inner products [n, n]."""
    return np.sqrt(np.diag(products)).tolist()


def cosines(products: Array) -> list[list[float | None]]:
    """[n][n] cosines, from the inner products [n, n] of n vectors; None beside a vector of length 0."""
    lengths = norms(products)
    return [
        [number(product / (a * b)) if a and b else None for product, b in zip(row, lengths, strict=True)]
        for row, a in zip(products, lengths, strict=True)
    ]


def correlation(a: Array, b: Array) -> float | None:
    """Pearson's; None where one of the two never changes."""
    if len(a) < 2 or not np.ptp(a) or not np.ptp(b):
        return None
    return number(np.corrcoef(a, b)[0, 1])


def number(value: Any) -> float | None:
    """What JSON can spell."""
    return float(value) if np.isfinite(value) else None
