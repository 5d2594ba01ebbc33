"""Decoding by groups for Llama-like models on the CPU: a prompt's keys and values are there once for all its rows.

    what a row attends to = the keys of its prompt (shared by its group), and of its own tokens (a ring of R slots)

No row has more than R tokens of its own, so a ring into which all rows write at the same slot is enough however long
the others have been at work: rows that have finished leave, and waiting groups enter, at any step.  The numbers are
those of transformers up to rounding, which the sampler checks once.

Shapes: N groups, B rows, M rows of the largest group, P tokens of the longest prompt, R most tokens of a completion,
D hidden size, V vocabulary; H query heads and K key heads of size E, each key head serving r = H / K query heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, silu
from transformers import PreTrainedModel

from groupwise.decoding import prefill
from groupwise.folding import Folded, Layer
from groupwise.records import Ints

KeysValues = tuple[Tensor, Tensor]


class LeanDecoding:
    """The rows being written.  What its methods do is said at `Decoding`."""

    hidden: Tensor
    """float[B, D]"""
    positions: Tensor
    """int64[B]"""

    def __init__(self, model: PreTrainedModel, weights: Folded, most: int, budget: int, group: int) -> None:
        """
        Args:
            model: runs the prompts.
            weights: those of `model`, as they are now.
            most: R, most tokens of a completion.
            budget: tokens whose keys and values may be held at one time.
            group: rows of the largest group that will enter.
        """
        self._model, self._weights, self._most, self._budget = model, weights, most, budget
        self._capacity = max(group, budget // (most + 1))
        # [layers, 2, rows K, R, E].  A slot that a row does not see still has to be finite; and unlike torch.zeros,
        # numpy.zeros takes no memory from the machine for what no row ever writes.
        slots = (len(weights.layers), 2, self._capacity * weights.key_heads, most, weights.head_size)
        self._own = torch.from_numpy(np.zeros(slots, dtype=np.float32))
        self._reset()

    def __len__(self) -> int:
        return len(self._owners)

    def has_room(self, lengths: Sequence[int], counts: Sequence[int]) -> bool:
        rows, groups = len(self) + sum(counts), len(self._lengths) + len(lengths)
        held = groups * max([*lengths, *self._lengths.tolist()]) + rows * self._most
        return rows <= self._capacity and (held <= self._budget or groups == 1)

    def enter(self, prompts: Sequence[Ints], counts: Sequence[int]) -> None:
        if not len(self):
            self._reset()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._weights.dtype == torch.bfloat16):
            hidden, cache = prefill(self._model, prompts)
        group = torch.repeat_interleave(torch.tensor(counts))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self._owners = torch.cat([self._owners, group + len(self._lengths)])
        self._began = torch.cat([self._began, torch.full_like(group, self._steps)])
        self._lengths = torch.cat([self._lengths, lengths])
        self.positions = torch.cat([self.positions, lengths[group]])
        self.hidden = torch.cat([self.hidden, hidden[group].float()])
        entered = [(keys[..., self._weights.pairs].float(), values.float()) for keys, values in cache]
        if self._prompts:
            pairs = zip(self._prompts, entered, strict=True)
            entered = [(_stack(old[0], new[0]), _stack(old[1], new[1])) for old, new in pairs]
        self._prompts = entered
        self._arrange()

    def logits(self, temperature: float) -> Tensor:
        values = self._weights.head(self.hidden)
        return values if temperature == 1.0 else values / temperature

    def step(self, tokens: Tensor) -> None:
        weights, slot = self._weights, self._steps % self._most
        rotation = weights.rotations[self.positions]
        mask, seen = self._visible(slot)
        own = self._own[:, :, : len(self) * weights.key_heads]
        written, own = own.select(3, slot), own[:, :, :, :seen]
        caches = zip(written.unbind(0), own[:, 0].transpose(2, 3).unbind(0), own[:, 1].unbind(0), strict=True)
        x = weights.embed(tokens)
        for layer, prompt, (here, keys, values) in zip(weights.layers, self._prompts, caches, strict=True):
            query, key, value = self._project(layer, x, rotation)
            here[0].view_as(key).copy_(key)
            here[1].view_as(value).copy_(value)
            x = layer.out.plus(self._attend(query, prompt, keys, values, mask), x)
            gate, up = layer.gate_up(self._normalise(x)).chunk(2, -1)
            x = layer.down.plus(silu(gate).mul_(up), x)
        self.hidden = self._normalise(x) * weights.norm
        self.positions = self.positions + 1
        self._steps += 1

    def drop(self, finished: Tensor) -> Tensor:
        left = len(finished) - int(finished.sum())
        gaps = finished[:left].nonzero().squeeze(1)
        movers = (~finished[left:]).nonzero().squeeze(1) + left
        order = torch.arange(left)
        order[gaps] = movers
        own = self._own.unflatten(2, (self._capacity, -1))[:, :, :, :, : min(self._steps, self._most)]
        own[:, :, gaps] = own[:, :, movers]
        self._began, self.positions, self.hidden = self._began[order], self.positions[order], self.hidden[order]
        kept, self._owners = self._owners[order].unique(return_inverse=True)
        if len(kept) < len(self._lengths):
            self._lengths = self._lengths[kept]
            self._prompts = [(keys[kept], values[kept]) for keys, values in self._prompts]
        self._arrange()
        return order

    def _reset(self) -> None:
        nothing = torch.zeros(0, dtype=torch.int64)
        self._owners = self._began = self._lengths = self.positions = nothing
        self.hidden = torch.zeros(0, len(self._weights.norm))
        self._prompts: list[KeysValues] = []
        self._steps = 0

    def _arrange(self) -> None:
        """Where the rows of each group are, for going from rows to groups and back."""
        counts = self._owners.bincount(minlength=len(self._lengths))
        members, order = int(counts.max()) if len(self) else 0, self._owners.argsort(stable=True)
        within = torch.arange(len(self)) - (counts.cumsum(0) - counts)[self._owners[order]]
        self._places = torch.empty_like(order)
        self._places[order] = self._owners[order] * members + within
        self._table = torch.zeros(len(counts), members, dtype=torch.int64)
        self._table.view(-1)[self._places] = torch.arange(len(self))
        self._aligned = torch.equal(self._places, torch.arange(len(counts) * members))
        longest = self._prompts[0][0].shape[2] if self._prompts else 0
        padding = torch.arange(longest) >= self._lengths[:, None]
        self._padding = _unseen(padding, self._weights.key_heads) if padding.any() else None

    def _visible(self, slot: int) -> tuple[Tensor | None, int]:
        """What to add to the logits of each row's own slots, [B K, 1, slots], and how many slots there are to see."""
        if self._steps < self._most and not self._began.any():
            return None, slot + 1
        slots = torch.arange(min(self._steps + 1, self._most))
        written = self._steps - (self._steps - slots) % self._most
        return _unseen(written < self._began[:, None], self._weights.key_heads), len(slots)

    def _project(self, layer: Layer, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B K, r, E], keys and values [B, K, E]."""
        heads, keys, size = self._weights.heads, self._weights.key_heads, self._weights.head_size
        qkv = layer.qkv(self._normalise(x))
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        qk, value = qkv.view(-1, heads + 2 * keys, size).split((heads + keys, keys), 1)
        if layer.qk_norm is not None:
            qk = self._normalise(qk) * layer.qk_norm
        rotated = torch.view_as_complex(qk.unflatten(2, (-1, 2))) * rotation
        query, key = torch.view_as_real(rotated).flatten(2).split((heads, keys), 1)
        return query.reshape(-1, heads // keys, size), key, value

    def _attend(self, query: Tensor, prompt: KeysValues, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """float[B, H E], from queries [B K, r, E] and the rows' own keys [B K, E, seen] and values [B K, seen, E]."""
        theirs = torch.bmm(self._by_group(query), prompt[0].flatten(0, 1).transpose(1, 2))
        if self._padding is not None:
            theirs += self._padding
        mine = torch.bmm(query, keys)
        if mask is not None:
            mine += mask
        theirs = self._by_row(theirs)
        weights = torch.cat([theirs, mine], 2).softmax(2)
        theirs, mine = weights.split((theirs.shape[2], mine.shape[2]), 2)
        found = self._by_row(torch.bmm(self._by_group(theirs), prompt[1].flatten(0, 1)))
        return torch.baddbmm(found, mine, values).view(len(self), -1)

    def _by_group(self, rows: Tensor) -> Tensor:
        """[B K, r, X] -> [N K, M r, X]; what stands in the places of rows that are not there does not matter."""
        (groups, members), keys = self._table.shape, self._weights.key_heads
        if self._aligned and members == 1:
            return rows
        grouped = (
            rows.view(groups, members, keys, *rows.shape[1:])
            if self._aligned
            else rows.unflatten(0, (-1, keys))[self._table]
        )
        return grouped.transpose(1, 2).reshape(groups * keys, -1, rows.shape[2])

    def _by_row(self, grouped: Tensor) -> Tensor:
        """[N K, M r, X] -> [B K, r, X]"""
        (groups, members), keys = self._table.shape, self._weights.key_heads
        if self._aligned and members == 1:
            return grouped
        rows = grouped.view(groups, keys, members, -1, grouped.shape[2]).transpose(1, 2)
        if not self._aligned:
            rows = rows.flatten(0, 1)[self._places]
        return rows.reshape(len(self) * keys, -1, grouped.shape[2])

    def _normalise(self, x: Tensor) -> Tensor:
        """Divided by its length; the root of its size is in the weights that follow."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(length, self._weights.least[x.shape[-1]])


def _unseen(places: Tensor, keys: int) -> Tensor:
    """bool[n, X] -> float[n K, 1, X]: -inf where it is true, to be added to attention logits."""
    return torch.zeros(places.shape).masked_fill_(places, -math.inf).repeat_interleave(keys, 0)[:, None]


def _stack(one: Tensor, other: Tensor) -> Tensor:
    """[n, K, p, E] and [m, K, q, E] -> [n + m, K, max(p, q), E]"""
    longest = max(one.shape[2], other.shape[2])
    return torch.cat([pad(x, (0, 0, 0, longest - x.shape[2])) for x in (one, other)])
