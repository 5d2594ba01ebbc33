"""Write completions a token at a time: the memory of the rows still being written, and how a token is chosen.

Shapes: N groups, B rows (completions), P tokens of the longest prompt, R most tokens of a completion, V vocabulary,
D hidden size.

Each prompt runs once, and every completion of its group gets a copy of its keys and values.  Prompts are aligned at
their ends, so that every row writes its next token into the same slot; the slots before a shorter prompt are masked.
A row that has finished leaves at once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from groupwise.errors import ModelError
from groupwise.head import entropy_of
from groupwise.lean import Lean, differs
from groupwise.records import Floats, Ints


class Decoding:
    """The rows still being written: their keys and values, which slots they see, and where they stand.

    To be used under `torch.no_grad`, or the cache would keep every step for a backward pass.
    """

    hidden: Tensor
    """float[B, D]: what the head turns into the logits of the next token."""
    positions: Tensor
    """int64[B]: the position of the next token, which is how many stand before it."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Ints],
        counts: Sequence[int],
        most: int,
        lean: Lean | None = None,
    ) -> None:
        """Run every prompt once and spread what it leaves behind over its completions.

        Args:
            model: from `load_model`.
            prompts: N prompts, int32[<= P] each.
            counts: how many completions of each.
            most: R, most tokens of a completion.
            lean: the model's weights as they are now, to take steps the short way of `lean.py`; None: the long way.

        Raises:
            ModelError: the model cannot be decoded this way; see `attention_windows`.
        """
        windows = attention_windows(model)
        device = model.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        group = torch.repeat_interleave(torch.tensor(counts, device=device))
        cache = DynamicCache()
        self._decoder = cast(Any, model).get_decoder()
        output = self._decoder(input_ids=_pad(prompts).to(device), past_key_values=cache, use_cache=True)

        self.hidden = output.last_hidden_state[torch.arange(len(prompts), device=device), lengths - 1][group]
        self.positions = lengths[group]
        self._end = int(lengths.max())
        padding = self._end - lengths
        self._layers = [
            _Layer(*_spread(layer, padding, group, most), self._end, window)
            for layer, (_, window) in zip(cache.layers, windows, strict=True)
        ]
        self._cache = Cache(layers=cast(Any, self._layers))
        # transformers wants a mask for each type of layer where the config names types, else one mask.
        self._types = dict(windows) if hasattr(model.config.get_text_config(), "layer_types") else None
        self._window = windows[0][1]
        unseen = torch.arange(self._end + most, device=device) < padding[group][:, None]
        # Additive, because eager attention (Gemma 2) cannot take a boolean mask.
        self._mask = torch.zeros(unseen.shape, dtype=model.dtype, device=device)
        self._mask = self._mask.masked_fill_(unseen, -math.inf)[:, None, None]
        self._padded = bool(padding.any())
        self._lean = lean
        self._checked = False

    @property
    def lean(self) -> bool:
        """Whether steps take the short way; False once it was found to differ from transformers' own."""
        return self._lean is not None

    def step(self, tokens: Tensor) -> None:
        """Append one token to each row, int64[B]."""
        if self._lean is None:
            self._step(tokens)
            return
        caches = [layer.buffers for layer in self._layers]
        mask = self._mask[..., : self._end + 1] if self._padded else None
        hidden = self._lean.step(tokens, self.positions, caches, self._end, mask)
        if self._checked:
            self.hidden, self.positions = hidden, self.positions + 1
            self._end += 1
            for layer in self._layers:
                layer.advance()
            return
        self._checked = True
        self._step(tokens)
        if differs(hidden, self.hidden):
            self._lean = None

    def _step(self, tokens: Tensor) -> None:
        """The step as transformers takes it."""
        self._end += 1
        mask: Any = self._visible(self._window)
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
        """Let the rows of bool[B] leave, not all of them; the old indices of the others in their new order.

        Rows from the end move into the gaps, so that as little as possible is copied.
        """
        left = len(finished) - int(finished.sum())
        gaps = finished[:left].nonzero().squeeze(1)
        movers = (~finished[left:]).nonzero().squeeze(1) + left
        for layer in self._layers:
            layer.move(movers, gaps, left)
        order = torch.arange(left, device=finished.device)
        order[gaps] = movers
        self._mask, self.positions = self._mask[order], self.positions[order]
        return order

    def _visible(self, window: int | None) -> Tensor:
        return self._mask[..., 0 if window is None else max(0, self._end - window) : self._end]


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

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        return self._buffers

    def advance(self) -> None:
        """A token was written into the buffers from outside."""
        self._length += 1

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


def _spread(layer: Any, padding: Tensor, group: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a prompt, float[N, heads, P, D], aligned at its end for each row of its group."""
    width = layer.keys.shape[2]
    # The slots before a shorter prompt repeat its first token: they are masked, but have to be finite.
    slots = (torch.arange(width, device=padding.device) - padding[:, None]).clamp_min(0)[:, None, :, None]

    def spread(prompts: Tensor) -> Tensor:
        buffer = prompts.new_empty((len(group), prompts.shape[1], width + most, prompts.shape[3]))
        buffer[:, :, :width] = prompts.take_along_dim(slots, dim=2)[group]
        return buffer

    return spread(layer.keys), spread(layer.values)


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


class Drawn:
    """What has been drawn so far, [B, R] on the device, in the order in which the rows began."""

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self._tokens = torch.zeros((rows, most), dtype=torch.int32, device=device)
        self._logprobs = torch.zeros((rows, most), dtype=torch.float32, device=device)
        self._entropies = torch.zeros((rows, most), dtype=torch.float32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def record(
        self, rows: Tensor, step: int, tokens: Tensor, logprobs: Tensor, entropies: Tensor, stopped: Tensor
    ) -> None:
        """Keep what was drawn at a step for some of the rows, [len(rows)] each."""
        self._tokens[rows, step] = tokens.int()
        self._logprobs[rows, step] = logprobs.float()
        self._entropies[rows, step] = entropies.float()
        self._lengths[rows] = step + 1
        self._stopped[rows] = stopped

    def rows(self) -> Iterator[tuple[Ints, Floats, Floats, bool]]:
        """Each row's tokens, log-probabilities and entropies, and whether it stopped by itself."""
        arrays = [array.cpu().numpy() for array in (self._tokens, self._logprobs, self._entropies)]
        for row, (length, stopped) in enumerate(zip(self._lengths.tolist(), self._stopped.tolist(), strict=True)):
            tokens, logprobs, entropies = (array[row, :length].copy() for array in arrays)
            yield tokens, logprobs, entropies, stopped


def draw(
    logits: Tensor, uniforms: Tensor, *, greedy: bool = False, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a token per row by inverting the cumulative distribution.

    One uniform per row makes a token depend on nothing but its own logits and its own key; it is also many times as
    fast as `torch.multinomial`, which draws noise for the whole vocabulary.

    Args:
        logits: float[B, V], after temperature.
        uniforms: float64[B] in [0, 1).
        greedy: take the most likely token instead.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: then keep the most likely tokens whose probabilities reach this sum.

    Returns:
        Tokens int64[B], their log-probabilities and the entropies, float[B], of the distribution drawn from.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if top_k or top_p < 1.0:
        logprobs = torch.log_softmax(_truncate(logprobs, top_k or logits.shape[1], top_p), dim=-1)
    probs = logprobs.exp()
    tokens = logprobs.argmax(-1) if greedy else _invert(probs, uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropy_of(logprobs, probs)


def _truncate(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """float[B, V], -inf where a token is not kept; the most likely one always is."""
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    ranked[:, top_k:] = -math.inf
    probs = torch.softmax(ranked.double(), dim=-1)
    ranked[probs.cumsum(-1) - probs >= top_p] = -math.inf
    return torch.empty_like(logprobs).scatter_(-1, order, ranked)


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """int64[B]: first a block of the vocabulary, then a token in it.

    A cumulative sum over a large vocabulary loses small probabilities in float32 and is slow in float64; two levels
    of about sqrt(V) sums are exact and cheap.
    """
    width = math.isqrt(probs.shape[1] - 1) + 1
    blocks = functional.pad(probs, (0, -probs.shape[1] % width)).unflatten(1, (-1, width))
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms * edges[:, -1]
    block = _first_above(edges, target)
    before = functional.pad(edges, (1, 0)).gather(1, block[:, None]).squeeze(1)
    chosen = blocks[torch.arange(len(block), device=block.device), block]
    return block * width + _first_above(chosen.double().cumsum(-1), target - before)


def _first_above(edges: Tensor, target: Tensor) -> Tensor:
    """int64[B]: the first index where float64[B, n] ascending edges pass float64[B] targets.

    The edge rises there, so its probability is not 0.  Rounding can lift a target to the last edge, past all of them.
    """
    below_last = torch.nextafter(edges[:, -1], torch.zeros_like(target))
    return torch.searchsorted(edges, torch.minimum(target, below_last)[:, None], right=True).squeeze(1)
