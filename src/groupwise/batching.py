"""Advantages to optimizer steps: which rollouts take part in each, and how much each of their tokens counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from groupwise.formula import Formula
from groupwise.groups import zero_variance
from groupwise.records import Batch, Rollout, collate


def batches(
    a: Formula, rollouts: Sequence[Rollout], count: int = 1, dtype: torch.dtype = torch.float32
) -> Iterator[Batch]:
    """The optimizer steps of one set of credited rollouts: whole groups, weights fixed, dead rows left out.

    A row is dead when it cannot carry a gradient: its advantages are 0 and neither KL, entropy nor critic acts on
    it.  It still counts in every denominator.  A batch may be all dead: the optimizer moves on by its momentum.
    """
    kept = structurally_kept(a, rollouts)
    for groups in np.array_split(list(dict.fromkeys(rollout.group for rollout in kept)), count):
        members = set(groups.tolist())
        part = [rollout for rollout in kept if rollout.group in members]
        if part:
            yield _without_dead_rows(a, weigh(a, part, collate(part, dtype)))


def structurally_kept(a: Formula, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts that the denominators count: valid ones, without those that the algorithm leaves out."""
    kept = [rollout for rollout in rollouts if rollout.valid]
    if a.filter != "none":
        flat = zero_variance(kept)
        kept = [rollout for rollout, dull in zip(kept, flat, strict=True) if not dull]
    return [rollout for rollout in kept if not (a.drop_truncated and rollout.truncated)]


def weigh(a: Formula, rollouts: Sequence[Rollout], batch: Batch) -> Batch:
    """The batch of these rollouts, a whole optimizer step, with the weight of each token and whether it is selected."""
    mask = batch.loss_mask.to(batch.advantages.dtype)
    selection = batch.selection
    if a.selection is not None:
        entropies = torch.zeros_like(mask)
        for row, rollout in enumerate(rollouts):
            assert rollout.entropies is not None, "Config refuses a selection with a sampler that does not say"
            entropies[row, : len(rollout.tokens)] = torch.from_numpy(rollout.entropies).to(mask.dtype)
        selection = a.selection(entropies, mask)
    return dataclasses.replace(batch, weights=a.aggregate(mask, batch.groups), selection=selection)


def _without_dead_rows(a: Formula, batch: Batch) -> Batch:
    if a.entropy or a.critic or a.loss_kl:
        return batch
    alive = (batch.advantages != 0).any(-1)
    return batch if bool(alive.all()) else batch.rows(alive.nonzero().squeeze(-1))
