"""The weights of a Llama-like model on the CPU, arranged for decoding: few rows at a time, one token each.

A small model spends most of a decoding step in dispatch: transformers makes some 40 calls a layer.  Here norm weights
are folded into the projections after them; queries, keys and values are one matrix, gate and up another; the halves
that a rotary embedding mixes stand side by side, so that rotating is one complex product; and each matrix is laid out
the way in which a product with few rows is fastest.

Shapes: D hidden size, F width of the MLP, H query heads, K key heads, E head size, C slots, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.adapters import weight_of

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOST_PARAMETERS = 200_000_000
"""In the layers.  Beyond, dispatch is no longer what a step spends its time on, and a second copy is dear."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position alone, not on how long the sequence is by now."""


class Matrix:
    """A weight [out, in] that is multiplied with few rows, over and over."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._packed = dtype == torch.bfloat16
        if self._packed:
            # What torch.compile does with the weights of a linear layer on the CPU.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous())
        else:
            self._weight = weight.T.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """float32[B, in] -> float32[B, out]"""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self._weight, None, "none", [], "").float()
        return x @ self._weight

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, added to float32[B, out]."""
        return self(x).add_(other) if self._packed else torch.addmm(other, x, self._weight)


@dataclass(frozen=True)
class Layer:
    """One layer; `qkv` and `gate_up` take a state divided by its length, not by its root mean square."""

    qkv: Matrix
    """D -> (H + 2 K) E"""
    qkv_bias: Tensor | None
    out: Matrix
    """H E -> D"""
    gate_up: Matrix
    """D -> 2 F"""
    down: Matrix
    """F -> D"""
    qk_norm: Tensor | None
    """[H + K, E]: what queries and keys are scaled by once they are divided by their length (Qwen3)."""


def is_lean(model: PreTrainedModel) -> bool:
    """Whether the model is one that `Folded` can serve: a float32 CPU model of the known families, nothing replaced.

    Adapted layers are served, too: their weights are taken with the adapter added.
    """
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
        type(getattr(linear, "base_layer", linear)) is nn.Linear
        for layer in flexible.model.layers
        for linear in (
            *(getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"),
            *(getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")),
        )
    )
    rotary = flexible.model.rotary_emb
    rotates_all = rotary.rope_type in ROPES and 2 * len(rotary.inv_freq) == head_size(config)
    return plain and _has_no_bias(flexible) and config.hidden_act == "silu" and rotates_all


def head_size(config: Any) -> int:
    """E."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _has_no_bias(model: Any) -> bool:
    """Queries, keys and values may have one (Qwen2); the other projections may not."""
    return model.lm_head.bias is None and all(
        linear.bias is None
        for layer in model.model.layers
        for linear in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    )


class Folded:
    """The weights of a model as they are now; take a new one when they have changed."""

    def __init__(self, model: PreTrainedModel, slots: int, dtype: torch.dtype = torch.float32) -> None:
        """
        Args:
            model: one for which `is_lean` holds.
            slots: C, most tokens of a sequence.
            dtype: of the matrices, float32 or bfloat16; everything else is float32.
        """
        self.dtype = dtype
        decoder: Any = cast(Any, model).model
        config = model.config
        self.heads, self.key_heads, self.head_size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size(config),
        )
        sizes = (self.head_size, config.hidden_size)
        self.least = {size: torch.tensor(math.sqrt(size * config.rms_norm_eps)) for size in sizes}
        """By size: what a norm's eps comes to for the length of a vector, as the other side of a right angle."""
        half = self.head_size // 2
        self.pairs = torch.arange(self.head_size).view(2, half).T.flatten()
        """int64[E]: where each place of a head of ours is in one of transformers'."""
        self.embed, self.norm = decoder.embed_tokens, decoder.norm.weight * math.sqrt(config.hidden_size)
        self.layers = [self._fold(layer, dtype) for layer in decoder.layers]
        self.head = Matrix(cast(Any, model).lm_head.weight, dtype)
        cos, sin = decoder.rotary_emb(self.norm, torch.arange(slots)[None])
        self.rotations = torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]
        """complex64[C, 1, E / 2]"""

    def _fold(self, layer: Any, dtype: torch.dtype) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        # Attention logits are divided by sqrt(E); dividing the queries does the same.
        scale = self.head_size**-0.5
        query, key = self._paired(weight_of(attention.q_proj)), self._paired(weight_of(attention.k_proj))
        bias = qk_norm = None
        if attention.q_proj.bias is not None:
            own = self._paired(attention.q_proj.bias) * scale, self._paired(attention.k_proj.bias)
            bias = torch.cat([*own, attention.v_proj.bias])
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight.expand(self.heads, -1), attention.k_norm.weight.expand(self.key_heads, -1)
            # sqrt(E) turns a division by the length into one by the root mean square; for queries it meets the scale.
            qk_norm = torch.cat([norms[0], norms[1] / scale])[:, self.pairs]
        else:
            query = query * scale
        return Layer(
            qkv=Matrix(_times_norm(layer.input_layernorm.weight, query, key, weight_of(attention.v_proj)), dtype),
            qkv_bias=bias,
            out=Matrix(weight_of(attention.o_proj), dtype),
            gate_up=Matrix(
                _times_norm(layer.post_attention_layernorm.weight, weight_of(mlp.gate_proj), weight_of(mlp.up_proj)),
                dtype,
            ),
            down=Matrix(weight_of(mlp.down_proj), dtype),
            qk_norm=qk_norm,
        )

    def _paired(self, weight: Tensor) -> Tensor:
        """Rows (or biases) of all heads, the two halves of each head interleaved."""
        return weight.unflatten(0, (-1, self.head_size))[:, self.pairs].flatten(0, 1)


def _times_norm(norm: Tensor, *weights: Tensor) -> Tensor:
    """[sum of outputs, D]: projections of a normalised state, one below the other, the norm's weight inside."""
    return torch.cat(weights) * (norm * math.sqrt(len(norm)))
