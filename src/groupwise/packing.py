"""The group as the unit of compute: completions that share a prompt are scored in one row, the prompt once.

    row = prompt A | response 1 | response 2 | ... | prompt B | response 1 | ...

Every token runs through the linear layers once, without padding.  Attention alone knows the layout: a response sees its
prompt and itself, nothing else.  As no token of a prompt depends on what follows it, log-probs are those of separate
rows, and so is the gradient: that of a prompt is the sum over its responses.

Shapes: T tokens of the packed row, H heads, E head size; a bucket has N prompts of equal length P, with M responses of
at most L tokens each.  Nothing here knows an algorithm, and no algorithm knows that this exists.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.attention import NAME, Bucket, Layout, WindowUnknownError, window_of
from groupwise.model import hidden_states, states_before
from groupwise.records import Batch, Rollout, collate

LOG = logging.getLogger(__name__)
Index = NDArray[np.int64]


class Forward:
    """How a model runs over a batch: packed where that is possible, else padded."""

    def __init__(self, model: PreTrainedModel, mixed: bool = False) -> None:
        """`mixed` takes the products of the decoder in bfloat16 (autocast), from weights that stay what they are."""
        self.model, self.mixed = model, mixed
        self._config: Any = model.config.get_text_config()
        self._usual: str = self._config._attn_implementation
        self._obstacle, self._checked = "", False
        if reason := cannot_pack(model):
            self._give_up(reason)

    @contextlib.contextmanager
    def microbatches(self, batch: Batch, budget: int) -> Generator[Iterator[tuple[Tensor, Batch]]]:
        """The rows that have loss tokens, in parts of at most `budget` tokens: (indices, rows on the device).

        To be left after the backward pass, which may recompute parts of the forward pass.
        """
        rows = batch.loss_mask.any(-1).nonzero().squeeze(-1) if len(batch) else torch.arange(0)
        scored = batch if len(rows) == len(batch) else batch.rows(rows)
        self.check()
        parts = padded_parts(scored.lengths, budget) if self._obstacle else packed_parts(scored, budget)
        with self._attention(self._usual if self._obstacle else NAME):
            yield ((rows[index], scored.rows(index).to(self.model.device)) for index in parts)

    def states(self, batch: Batch) -> Tensor:
        """float[n, D]: the state from which each of the n loss tokens is predicted, row by row."""
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.mixed):
            states = self._padded(batch) if self._obstacle else self._packed(batch)
        return states.to(self.model.dtype)

    def _padded(self, batch: Batch) -> Tensor:
        return states_before(self.model, batch.tokens, batch.lengths, batch.loss_mask)

    def _packed(self, batch: Batch) -> Tensor:
        layout = lay_out(batch)
        return hidden_states(self.model, layout.tokens, position_ids=layout.positions, layout=layout)[0, layout.before]

    @torch.no_grad()
    def for_each_token(self, batch: Batch, budget: int, of_part: Callable[[Batch], Tensor]) -> Tensor:
        """float[B, T] on the CPU: what `of_part` says, float[b, t], of each part of the batch; 0 for other rows."""
        found = torch.zeros(batch.tokens.shape, dtype=torch.promote_types(self.model.dtype, torch.float32))
        with self.microbatches(batch, budget) as parts:
            for index, part in parts:
                values = of_part(part)
                found[index, : values.shape[1]] = values.cpu()
        return found

    @contextlib.contextmanager
    def _attention(self, name: str) -> Generator[None]:
        before, self._config._attn_implementation = self._config._attn_implementation, name
        try:
            yield
        finally:
            self._config._attn_implementation = before

    @torch.no_grad()
    def check(self) -> None:
        """Compare with the padded way on made-up rows, once; give packing up, loudly, where they differ."""
        if self._obstacle or self._checked:
            return
        self._checked = True
        part = _made_up_rows(cast(Any, self.model.get_input_embeddings()).weight.shape[0], window_of(self._config))
        part = part.to(self.model.device)
        with self._attention(self._usual):
            padded = self._padded(part)
        try:
            with self._attention(NAME):
                packed = self._packed(part)
        except WindowUnknownError:
            self._give_up("does not tell its attention the sliding window")
            return
        difference = float((packed - padded).abs().max() / padded.abs().max())
        if not difference < torch.finfo(padded.dtype).eps ** 0.5:  # rounding is far below, a wrong mask far above
            self._give_up(f"differs by {difference:.2g} when its rows are packed")

    def _give_up(self, reason: str) -> None:
        self._obstacle = f"{type(self.model).__name__} {reason}"
        LOG.warning("%s, so prompts are not shared and rows are padded in training", self._obstacle)


def _made_up_rows(vocabulary: int, window: int | None) -> Batch:
    """Two prompts with two completions each; past a short sliding window, too."""
    longest = window + 5 if window is not None and window <= 256 else 6
    rng = np.random.default_rng(0)
    rows: list[Rollout] = []
    for length in (3, 5):
        prompt = rng.integers(0, vocabulary, length)
        for said in (4, longest):
            tokens = np.concatenate([prompt, rng.integers(0, vocabulary, said)]).astype(np.int32)
            rows.append(
                Rollout(tokens=tokens, loss_mask=np.arange(length + said) >= length, logprobs=tokens * 0.0, group=0)
            )
    return collate(rows)


# The layout ----------------------------------------------------------------------------------------------------------


def split(batch: Batch) -> tuple[Index, list[bytes]]:
    """For each row, the length of its prompt (what stands before its first loss token), and the prompt itself."""
    tokens, mask = batch.tokens.cpu().numpy(), batch.loss_mask.cpu().numpy()
    starts = mask.argmax(1).astype(np.int64) if len(batch) else np.zeros(0, dtype=np.int64)
    return starts, [tokens[row, :start].tobytes() for row, start in enumerate(starts)]


def lay_out(batch: Batch) -> Layout:
    """Pack the rows of a batch; rows without loss tokens are left out."""
    tokens, mask = batch.tokens.cpu().numpy(), batch.loss_mask.cpu().numpy()
    starts, prompts = split(batch)
    # The last loss token predicts nothing that is scored, so it and what follows it need no forward pass.
    ends = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    row_tokens: list[Index] = []
    positions: list[Index] = []
    first = np.zeros(len(tokens), dtype=np.int64)  # place of a row's prompt, then of its response
    rest = np.zeros(len(tokens), dtype=np.int64)
    families: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(mask.any(1)):
        families.setdefault(prompts[row], []).append(int(row))
    place = 0
    for rows in families.values():
        length = int(starts[rows[0]])
        pieces = [(0, length, rows[0])] + [(length, int(ends[row]), row) for row in rows]
        for begin, end, row in pieces:
            row_tokens.append(tokens[row, begin:end])
            positions.append(np.arange(begin, end))
        first[rows] = place
        rest[rows] = place + length + np.cumsum([0, *(ends[row] - length for row in rows[:-1])])
        place += length + int(sum(ends[row] - length for row in rows))
    buckets, order = _bucket(list(families.values()), starts, ends, first, rest, place)
    rows, columns = np.nonzero(mask)
    inside_prompt = columns <= starts[rows]
    before = np.where(inside_prompt, first[rows], rest[rows] - starts[rows]) + columns - 1
    put = torch.as_tensor
    device = batch.tokens.device
    return Layout(
        tokens=put(np.concatenate(row_tokens), device=device)[None],
        positions=put(np.concatenate(positions), device=device)[None],
        buckets=tuple(
            Bucket(*(put(array, device=device) for array in bucket), ragged=not bucket[-1].all()) for bucket in buckets
        ),
        order=put(order, device=device),
        before=put(before, device=device),
    )


def _bucket(
    families: list[list[int]], starts: Index, ends: Index, first: Index, rest: Index, total: int
) -> tuple[list[tuple[Any, ...]], Index]:
    """The arrays of each bucket, and `Layout.order`."""
    alike: dict[tuple[int, int], list[list[int]]] = {}
    for rows in families:
        alike.setdefault((int(starts[rows[0]]), len(rows)), []).append(rows)
    buckets: list[tuple[Any, ...]] = []
    joined: list[Index] = []
    for (length, _), members in alike.items():
        rows = np.array(members)
        prompts = first[rows[:, 0]][:, None] + np.arange(length)
        lengths = (ends[rows] - length)[..., None]
        steps = np.arange(max(int(lengths.max()), 0))
        responses = rest[rows][..., None] + np.minimum(steps, np.maximum(lengths - 1, 0))
        inside = steps < lengths
        buckets.append((prompts, np.minimum(responses, total - 1), inside))
        joined += [prompts.ravel(), responses[inside]]
    order = np.empty(total, dtype=np.int64)
    order[np.concatenate(joined)] = np.arange(total)
    return buckets, order


def packed_parts(batch: Batch, budget: int) -> Iterator[Tensor]:
    """Row indices int64[n]: rows with one prompt together, at most `budget` tokens a part, the prompt counted once.

    A prompt whose responses do not fit is forwarded once in each of its parts; a single row always fits.
    """
    starts, prompts = split(batch)
    lengths = batch.lengths.cpu().numpy()
    part: list[int] = []
    used, current = 0, b""
    for row in sorted(range(len(batch)), key=lambda row: (starts[row], prompts[row])):
        cost = int(lengths[row] - starts[row])
        shared = bool(part) and prompts[row] == current
        if part and used + cost + (0 if shared else int(starts[row])) > budget:
            yield torch.tensor(part)
            part, used, shared = [], 0, False
        part.append(row)
        used += cost + (0 if shared else int(starts[row]))
        current = prompts[row]
    if part:
        yield torch.tensor(part)


def padded_parts(lengths: Tensor, budget: int) -> Iterator[Tensor]:
    """Row indices int64[n], rows of similar length together: rows times the longest stays within `budget` tokens."""
    lengths, order = lengths.cpu().sort(descending=True, stable=True)
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, int(lengths[start])))
        yield order[start : start + rows]
        start += rows


# What can be packed --------------------------------------------------------------------------------------------------


def cannot_pack(model: PreTrainedModel) -> str:
    """Why this model's rows have to be padded, as the end of a sentence about it; empty when they can be packed."""
    flexible: Any = model
    if "position_ids" not in inspect.signature(flexible.get_decoder().forward).parameters:
        return "takes no position_ids"
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if strange := sorted(types - {"full_attention", "sliding_attention"}):
        return f"has layers of type {', '.join(strange)}"
    if not flexible._supports_attention_backend:
        return "does not let its attention be replaced"
    return ""
