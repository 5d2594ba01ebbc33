"""One decoding step of a Llama-like model on the CPU, without what a module call for every norm and projection costs.

A small model spends most of a step in dispatch: transformers makes some 40 calls a layer.  Here the weights are
gathered once for a whole wave of completions (norm weights folded into the projections after them; queries, keys and
values in one matrix, gate and up in another; transposed, which is how a product with few rows is fastest), and a layer
is some 20 calls.  The numbers are the same up to rounding; `Decoding` compares them with transformers' own in its first
step and gives this up where they differ.

Shapes: B rows, D hidden size, H query heads, K key heads, E head size, C slots of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOST_PARAMETERS = 200_000_000
"""In the layers.  Beyond, dispatch is no longer what a step spends its time on, and a second copy is dear."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position alone, not on how long the sequence is by now."""


@dataclass(frozen=True)
class _Layer:
    qkv: Tensor
    """[D, (H + 2 K) E]"""
    qkv_bias: Tensor | None
    out: Tensor
    """[H E, D]"""
    gate_up: Tensor
    """[D, 2 F]"""
    down: Tensor
    """[F, D]"""
    qk_norm: Tensor | None
    """[H + K, E]: what queries and keys are scaled by after they are normalised (Qwen3)."""


def is_lean(model: PreTrainedModel) -> bool:
    """Whether the model is one that `Lean` can serve: a float32 CPU model of the known families, nothing replaced."""
    flexible: Any = model
    config = model.config
    if type(model).__name__ not in FAMILIES or model.dtype != torch.float32 or model.device.type != "cpu":
        return False
    if sum(parameter.numel() for parameter in flexible.model.layers.parameters()) > MOST_PARAMETERS:
        return False
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    if getattr(config, "sliding_window", None) is not None and not hasattr(config, "layer_types"):
        return False
    plain = all(
        type(linear) is nn.Linear
        for layer in flexible.model.layers
        for linear in (
            *(getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"),
            *(getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")),
        )
    )
    rotary = flexible.model.rotary_emb
    rotates_all = rotary.rope_type in ROPES and 2 * len(rotary.inv_freq) == _head_size(config)
    return plain and _has_no_bias(flexible) and config.hidden_act == "silu" and rotates_all


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _has_no_bias(model: Any) -> bool:
    """Queries, keys and values may have one (Qwen2); the other projections may not."""
    return all(
        linear.bias is None
        for layer in model.model.layers
        for linear in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    )


class Lean:
    """The weights of a model as they are now, arranged for decoding; take a new one when they have changed."""

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        """
        Args:
            model: one for which `is_lean` holds.
            slots: C, most tokens of a sequence.
        """
        self._decoder: Any = cast(Any, model).model
        config = model.config
        self._eps = config.rms_norm_eps
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._size = _head_size(config)
        self._layers = [self._gather(layer) for layer in self._decoder.layers]
        cos, sin = self._decoder.rotary_emb(self._layers[0].qkv, torch.arange(slots)[None])
        half = self._size // 2
        # rotate_half(x) * sin is a swap of the halves of x, times sin with its first half negated.
        self._cos, self._sin = cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]
        self._swap = torch.arange(self._size).roll(half)

    def step(
        self, tokens: Tensor, positions: Tensor, caches: Sequence[tuple[Tensor, Tensor]], slot: int, mask: Tensor | None
    ) -> Tensor:
        """float[B, D], what the head turns into logits, after appending one token to each row.

        Args:
            tokens: int64[B].
            positions: int64[B], of those tokens.
            caches: keys and values of each layer, float[>= B, K, C, E]; the token's are written into `slot`.
            slot: where in the caches the token goes; those before it are seen.
            mask: added to the attention logits, float[B, 1, 1, slot + 1]; None when every slot is seen.
        """
        rows, heads, keys, size = len(tokens), self._heads, self._key_heads, self._size
        cos, sin = self._cos[positions], self._sin[positions]
        x = self._decoder.embed_tokens(tokens)
        for layer, (key_cache, value_cache) in zip(self._layers, caches, strict=True):
            normed = self._normalise(x)
            qkv = normed @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
            qkv = qkv.view(rows, heads + 2 * keys, size)
            qk = qkv[:, : heads + keys]
            if layer.qk_norm is not None:
                qk = self._normalise(qk) * layer.qk_norm
            qk = torch.addcmul(qk * cos, qk[..., self._swap], sin)
            key_cache[:rows, :, slot] = qk[:, heads:]
            value_cache[:rows, :, slot] = qkv[:, heads + keys :]
            attended = scaled_dot_product_attention(
                qk[:, :heads, None],
                key_cache[:rows, :, : slot + 1],
                value_cache[:rows, :, : slot + 1],
                attn_mask=mask,
                enable_gqa=heads != keys,
            )
            x = torch.addmm(x, attended.reshape(rows, heads * size), layer.out)
            gate, up = (self._normalise(x) @ layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, silu(gate) * up, layer.down)
        return self._decoder.norm(x)

    def _normalise(self, x: Tensor) -> Tensor:
        return x * (torch.linalg.vecdot(x, x) / x.shape[-1] + self._eps).rsqrt()[..., None]

    def _gather(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [projection.bias for projection in projections]
        qk_norm = None
        if hasattr(attention, "q_norm"):
            scales = (
                attention.q_norm.weight.expand(self._heads, -1),
                attention.k_norm.weight.expand(self._key_heads, -1),
            )
            qk_norm = torch.cat(scales)
        return _Layer(
            qkv=_folded(layer.input_layernorm.weight, *(projection.weight for projection in projections)),
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            out=attention.o_proj.weight.T.contiguous(),
            gate_up=_folded(layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight),
            down=mlp.down_proj.weight.T.contiguous(),
            qk_norm=qk_norm,
        )


def _folded(norm: Tensor, *weights: Tensor) -> Tensor:
    """[D, sum of outputs]: the projections of a normalised state side by side, the norm's weight inside."""
    return (torch.cat(weights) * norm).T.contiguous()


def differs(one: Tensor, other: Tensor) -> bool:
    """Whether two states of the same step are more than rounding apart."""
    return not math.isfinite(gap := float((one - other).abs().max() / other.abs().max())) or gap > 3e-4
