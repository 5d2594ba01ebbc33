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
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from groupwise.model import hidden_states, states_before
from groupwise.records import Batch, Rollout, collate

LOG = logging.getLogger(__name__)
NAME = "groupwise_packed"
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Bucket:
    """Prompts of one length with equally many responses, as places in the packed row."""

    prompts: Tensor
    """int64[N, P]"""
    responses: Tensor
    """int64[N, M, L]; past the end of a response, its last place again."""
    inside: Tensor
    """bool[N, M, L]: which of those are its own."""
    ragged: bool
    """Whether any are not."""


@dataclass(frozen=True)
class Layout:
    """Where everything is in a packed row."""

    tokens: Tensor
    """int64[1, T]"""
    positions: Tensor
    """int64[1, T]: of each token in its own sequence."""
    buckets: tuple[Bucket, ...]
    order: Tensor
    """int64[T]: where the attention output of each place stands when the buckets' outputs are joined."""
    before: Tensor
    """int64[n]: the place from which each of the n loss tokens of the batch is predicted."""


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
        if not self._obstacle and not self._checked:
            self._check()
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
    def _check(self) -> None:
        """Compare with the padded way on made-up rows, once; give packing up, loudly, where they differ."""
        self._checked = True
        part = _made_up_rows(cast(Any, self.model.get_input_embeddings()).weight.shape[0], _window(self._config))
        part = part.to(self.model.device)
        with self._attention(self._usual):
            padded = self._padded(part)
        try:
            with self._attention(NAME):
                packed = self._packed(part)
        except _WindowUnknownError:
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


# Attention -----------------------------------------------------------------------------------------------------------


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface, [1, H, T, E] -> [1, T, H, E], for a row laid out by `options["layout"]`."""
    layout = cast(Layout, options["layout"])
    window, cap = options.get("sliding_window"), options.get("softcap")
    if window is None and _window(module.config, getattr(module, "layer_idx", None)) is not None:
        raise _WindowUnknownError
    # Under autocast, norms and rotary embeddings leave queries and keys in float32.
    q, k, v = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    if window is None and cap is None and q.device.type == "cpu":
        return cast(Any, _SharedPrompt).apply(q, k, v, layout, options["scaling"])[None], None
    outputs: list[Tensor] = []
    for bucket in layout.buckets:
        pq, pk, pv = (states[bucket.prompts] for states in (q, k, v))
        outputs.append(_attend(pq, pk, pv, 0, options).flatten(0, 1))
        if bucket.responses.shape[2]:
            rq, rk, rv = (states[bucket.responses] for states in (q, k, v))
            shape = rk.shape[1]
            rk, rv = (torch.cat([p[:, None].expand(-1, shape, -1, -1, -1), r], 2) for p, r in ((pk, rk), (pv, rv)))
            rq, rk, rv = (states.flatten(0, 1) for states in (rq, rk, rv))
            outputs.append(_attend(rq, rk, rv, pk.shape[1], options)[bucket.inside.flatten(0, 1)])
    return torch.cat(outputs)[layout.order][None], None


class _SharedPrompt(torch.autograd.Function):
    """Full attention on the CPU in which the responses read the keys of their prompt where they are.

    A response attends to its prompt and to itself in two calls, merged by their log-sum-exps.  The kernel's own
    backward pass does each call's share: given the merged output and log-sum-exp, its probabilities are those of the
    whole row.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for bucket in layout.buckets:
            p, r = bucket.prompts, bucket.responses
            pk, pv = k[p], v[p]
            out[p], lse[p] = _flash([q[p], pk, pv], True, scale)
            if not r.numel():
                continue
            response = q[r], k[r], v[r]
            own, own_lse = (x.view(*r.shape, *x.shape[2:]) for x in _flash(_rows(*response), True, scale))
            theirs, theirs_lse = _flash([response[0].flatten(1, 2), pk, pv], False, scale)
            theirs, theirs_lse = theirs.view_as(own), theirs_lse.view_as(own_lse)
            total = torch.logaddexp(theirs_lse, own_lse)
            weight = (theirs_lse - total).exp_()[..., None]
            merged = torch.lerp(own.to(weight.dtype), theirs.to(weight.dtype), weight).to(own.dtype)
            places, merged, total = _inside(bucket, r, merged, total)
            out[places], lse[places] = merged, total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        (grad,) = gradients
        dq, dk, dv = (torch.empty_like(states, memory_format=torch.contiguous_format) for states in (q, k, v))
        for bucket in ctx.layout.buckets:
            p, r = bucket.prompts, bucket.responses
            pk, pv = k[p], v[p]
            dq[p], gk, gv = _flash_backward([grad[p], q[p], pk, pv, out[p], lse[p]], True, ctx.scale)
            if r.numel():
                go, rq, rk, rv, ro, rl = (x[r] for x in (grad, q, k, v, out, lse))
                if bucket.ragged:
                    go = go.masked_fill(~bucket.inside[..., None, None], 0.0)
                go_, rq_, ro_, rl_ = (x.flatten(1, 2) for x in (go, rq, ro, rl))
                theirs = _flash_backward([go_, rq_, pk, pv, ro_, rl_], False, ctx.scale)
                gk, gv = gk + theirs[1], gv + theirs[2]
                own = _flash_backward(_rows(go, rq, rk, rv, ro, rl), True, ctx.scale)
                own[0] = own[0] + theirs[0].view_as(own[0])
                places, *own = _inside(bucket, r, *(x.view(*r.shape, *x.shape[2:]) for x in own))
                dq[places], dk[places], dv[places] = own
            dk[p], dv[p] = gk, gv
        return dq, dk, dv, None, None


def _rows(*states: Tensor) -> list[Tensor]:
    """[N, M, L, ...] -> [N M, L, ...]"""
    return [x.flatten(0, 1) for x in states]


def _inside(bucket: Bucket, *padded: Tensor) -> list[Tensor]:
    """What stands inside the responses, of each [N, M, L, ...]."""
    return [x[bucket.inside] if bucket.ragged else x.flatten(0, 2) for x in padded]


def _flash(states: Sequence[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The kernel behind scaled_dot_product_attention: its output [n, t, H, E] and the log-sum-exps [n, t, H].

    `states` are queries, keys and values, [n, t, H, E] each.
    """
    turned = (x.transpose(1, 2) for x in states)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*turned, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _flash_backward(states: Sequence[Tensor], causal: bool, scale: float) -> list[Tensor]:
    """The gradients of queries, keys and values, from that of the output, those three, the output and log-sum-exps."""
    turned = (x.transpose(1, 2) for x in states)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [x.transpose(1, 2) for x in kernel(*turned, 0.0, causal, scale=scale)]


class _WindowUnknownError(Exception):
    """A layer has a sliding window that its attention is not told: only the mask knew, and a packed row has none."""


def _window(config: Any, layer: int | None = None) -> int | None:
    """How many tokens a layer (any layer, for None) sees; None when it sees all."""
    types = getattr(config, "layer_types", None)
    slides = types is None or "sliding_attention" in (types if layer is None else types[layer : layer + 1])
    return getattr(config, "sliding_window", None) if slides else None


def _attend(q: Tensor, k: Tensor, v: Tensor, before: int, options: dict[str, Any]) -> Tensor:
    """Causal attention of [n, t, H, E] queries to [n, before + t, H, E] keys, whose first `before` come first.

    Padding at the end of a response needs no mask: causality hides it from every real query.
    """
    q, k, v = (states.transpose(1, 2) for states in (q, k, v))
    window, cap, scale = options.get("sliding_window"), options.get("softcap"), options["scaling"]
    gqa = q.shape[1] != k.shape[1]
    plain = before == 0 and (window is None or q.shape[2] <= window)
    if plain and cap is None:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa).transpose(1, 2)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
    if window is not None:
        seen = seen.triu(before - window + 1)
    if cap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    logits = torch.tanh((q @ k.transpose(2, 3)) * scale / cap) * cap  # Gemma 2; no fused kernel has it
    # transformers takes this softmax in float32, whatever the model's dtype.
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2)


AttentionInterface.register(NAME, cast(Any, attention))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout says who sees whom; a mask of T x T would be all that packing saves, and more."""


AttentionMaskInterface.register(NAME, cast(Any, _no_mask))


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
