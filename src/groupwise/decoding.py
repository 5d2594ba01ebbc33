"""Write completions a token at a time with any transformers decoder: the memory of the rows still being written.

Shapes: N groups, B rows (completions), P tokens of the longest prompt, R most tokens of a completion, V vocabulary,
D hidden size.

Each prompt runs once, and every completion of its group gets a copy of its keys and values.  Prompts are aligned at
their ends, so that every row writes its next token into the same slot; the slots before a shorter prompt are masked.
A row that has finished leaves at once; others enter when all have left.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from groupwise.errors import ModelError
from groupwise.model import logits
from groupwise.records import Ints


class Decoding:
    """The rows being written: their keys and values, which slots they see, and where they stand.

    To be used under `torch.no_grad`, or the cache would keep every step for a backward pass.
    """

    hidden: Tensor
    """float[B, D]: what the head turns into the logits of the next token."""
    positions: Tensor
    """int64[B]: the position of the next token, which is how many stand before it."""

    def __init__(self, model: PreTrainedModel, most: int, budget: int) -> None:
        """
        Args:
            model: from `load_model`.
            most: R, most tokens of a completion.
            budget: tokens whose keys and values may be held at one time.

        Raises:
            ModelError: the model cannot be decoded this way; see `attention_windows`.
        """
        self._windows = attention_windows(model)
        self._model, self._most, self._budget = model, most, budget
        self._decoder = cast(Any, model).get_decoder()
        # transformers wants a mask for each type of layer where the config names types, else one mask.
        self._types = dict(self._windows) if hasattr(model.config.get_text_config(), "layer_types") else None
        self.hidden = torch.zeros(0)

    def __len__(self) -> int:
        """B."""
        return len(self.hidden)

    def has_room(self, lengths: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether groups with prompts of these lengths, and so many rows each, may enter together now.

        A single group always may when there are no rows.
        """
        held = sum(counts) * (max(lengths) + self._most)
        return not len(self) and (held <= self._budget or len(counts) == 1)

    def enter(self, prompts: Sequence[Ints], counts: Sequence[int]) -> None:
        """Run prompts, int32[<= P] each, and begin so many completions of each, behind the rows that are there."""
        model = self._model
        hidden, cache = prefill(model, prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
        group = torch.repeat_interleave(torch.tensor(counts, device=model.device))
        self.hidden, self.positions = hidden[group], lengths[group]
        self._end = int(lengths.max())
        padding = self._end - lengths
        self._layers = [
            _Layer(*_spread(*layer, padding, group, self._most), self._end, window)
            for layer, (_, window) in zip(cache, self._windows, strict=True)
        ]
        self._cache = Cache(layers=cast(Any, self._layers))
        unseen = torch.arange(self._end + self._most, device=model.device) < padding[group][:, None]
        # Additive, because eager attention (Gemma 2) cannot take a boolean mask.
        self._mask = torch.zeros(unseen.shape, dtype=model.dtype, device=model.device)
        self._mask = self._mask.masked_fill_(unseen, -math.inf)[:, None, None]

    def logits(self, temperature: float) -> Tensor:
        """float[B, V]: of the next tokens, divided by the temperature."""
        return logits(self._model, self.hidden, temperature)

    def step(self, tokens: Tensor) -> None:
        """Append one token to each row, int64[B]."""
        self._end += 1
        mask: Any = self._visible(self._windows[0][1])
        if self._types is not None:
            mask = {name: self._visible(window) for name, window in self._types.items()}
        output = self._decoder(
            input_ids=tokens[:, None],
            position_ids=self.positions[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        self.hidden = output.last_hidden_state[:, 0]
        self.positions = self.positions + 1

    def drop(self, finished: Tensor) -> Tensor:
        """Let the rows of bool[B] leave; the old indices of the others in their new order.

        Rows from the end move into the gaps, so that as little as possible is copied.
        """
        left = len(finished) - int(finished.sum())
        gaps = finished[:left].nonzero().squeeze(1)
        movers = (~finished[left:]).nonzero().squeeze(1) + left
        for layer in self._layers:
            layer.move(movers, gaps, left)
        order = torch.arange(left, device=finished.device)
        order[gaps] = movers
        self._mask, self.positions, self.hidden = self._mask[order], self.positions[order], self.hidden[order]
        return order

    def _visible(self, window: int | None) -> Tensor:
        return self._mask[..., 0 if window is None else max(0, self._end - window) : self._end]


def prefill(model: PreTrainedModel, prompts: Sequence[Ints]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Run N prompts: the states of their last tokens, float[N, D], and the keys and values of each layer.

    Those are float[N, heads, P, size] each, in the order of the tokens; what stands behind a shorter prompt is garbage.
    """
    cache = DynamicCache()
    output = cast(Any, model).get_decoder()(
        input_ids=_pad(prompts).to(model.device), past_key_values=cache, use_cache=True
    )
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=model.device)
    hidden = output.last_hidden_state[torch.arange(len(prompts), device=model.device), last]
    return hidden, [(layer.keys, layer.values) for layer in cast(Any, cache.layers)]


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, float[B, heads, P + R, D], in buffers that never grow: appending is one copy."""

    def __init__(self, keys: Tensor, values: Tensor, length: int, window: int | None) -> None:
        super().__init__()
        self._buffers = (keys, values)
        self._rows, self._length, self._window = len(keys), length, window

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[: self._rows] for buffer in self._buffers)
        end = self._length + 1
        keys[:, :, self._length : end] = key_states
        values[:, :, self._length : end] = value_states
        self._length = end
        start = 0 if self._window is None else max(0, end - self._window)
        return keys[:, :, start:end], values[:, :, start:end]

    def move(self, source: Tensor, target: Tensor, rows: int) -> None:
        for buffer in self._buffers:
            buffer[target, :, : self._length] = buffer[source, :, : self._length]
        self._rows = rows

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return self._buffers[0].shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the buffers are there from the start")


def _pad(prompts: Sequence[Ints]) -> Tensor:
    """int64[N, P], padded on the right."""
    padded = torch.zeros((len(prompts), max(map(len, prompts))), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.from_numpy(prompt)
    return padded


def _spread(keys: Tensor, values: Tensor, padding: Tensor, group: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a prompt, float[N, heads, P, D], aligned at its end for each row of its group."""
    width = keys.shape[2]
    # The slots before a shorter prompt repeat its first token: they are masked, but have to be finite.
    slots = (torch.arange(width, device=padding.device) - padding[:, None]).clamp_min(0)[:, None, :, None]

    def spread(prompts: Tensor) -> Tensor:
        buffer = prompts.new_empty((len(group), prompts.shape[1], width + most, prompts.shape[3]))
        buffer[:, :, :width] = prompts.take_along_dim(slots, dim=2)[group]
        return buffer

    return spread(keys), spread(values)


def attention_windows(model: PreTrainedModel) -> list[tuple[str, int | None]]:
    """For each layer, its type and how many tokens it sees, the last one included; None when it sees all.

    Raises:
        ModelError: the model has layers whose memory of the past is not keys and values, or finds the positions of
            tokens by itself, which goes wrong where a prompt is padded.
    """
    if "position_ids" not in inspect.signature(cast(Any, model).get_decoder().forward).parameters:
        raise ModelError(
            f"{type(model).__name__} takes no position_ids; the local engine samples only from models that do, "
            "such as Llama, Qwen, Gemma or GPT-2: take another model"
        )
    types, settings = get_layer_types_and_kwargs(model.config.get_text_config())
    if strange := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ModelError(
            f"{type(model).__name__} has layers of type {', '.join(strange)}; the local engine samples only from "
            "models with full and sliding attention: take another model"
        )
    return [(kind, setting.get("sliding_window")) for kind, setting in zip(types, settings, strict=True)]
