"""Attention over a packed row: a response sees its prompt and itself, and nothing else that shares the row.

transformers' models call it by the name under which it is registered, with the layout of the row among their arguments.

Shapes: T tokens of the packed row, H heads, E head size; a bucket has N prompts of equal length P, with M responses of
at most L tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "groupwise_packed"


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


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface, [1, H, T, E] -> [1, T, H, E], for a row laid out by `options["layout"]`."""
    layout = cast(Layout, options["layout"])
    window, cap = options.get("sliding_window"), options.get("softcap")
    if window is None and window_of(module.config, getattr(module, "layer_idx", None)) is not None:
        raise WindowUnknownError
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
            found = _attend(rq, rk, rv, pk.shape[1], options)
            outputs.append(found[bucket.inside.flatten(0, 1)] if bucket.ragged else found.flatten(0, 1))
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


class WindowUnknownError(Exception):
    """A layer has a sliding window that its attention is not told: only the mask knew, and a packed row has none."""


def window_of(config: Any, layer: int | None = None) -> int | None:
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
