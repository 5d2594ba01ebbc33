"""How a token is chosen from logits, and what has been chosen so far.

Shapes: B rows being written, C completions in all, R most tokens of a completion, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from groupwise import seeding
from groupwise.head import entropy_of
from groupwise.records import Floats, Ints

SUMMED_AT_ONCE = 4096
"""The largest vocabulary whose probabilities are added up in one go; what two levels cost is mostly dispatch."""


class Drawn:
    """The tokens of C completions, drawn a step at a time for some of them."""

    def __init__(self, keys: Sequence[int], limits: Sequence[int], stop_ids: Tensor) -> None:
        """
        Args:
            keys: one for each completion: all that its random numbers depend on.
            limits: most tokens of each.
            stop_ids: int64[n], tokens that end a completion; its device is that of all tensors.
        """
        self._keys, self._device, self._stop_ids = keys, stop_ids.device, stop_ids
        self._limits = torch.tensor(limits, device=self._device)
        self._uniforms = torch.empty((len(keys), max(limits, default=0)), dtype=torch.float64, device=self._device)
        self._lengths = torch.zeros(len(keys), dtype=torch.int64, device=self._device)
        self._stopped = torch.zeros(len(keys), dtype=torch.bool, device=self._device)
        # One place for everything drawn: small tensors kept from each step would lie between the large ones of the
        # next, whose memory could then never be used again.
        shape = self._uniforms.shape
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._logprobs, self._entropies = torch.zeros((2, *shape), device=self._device)

    def begin(self, completions: Sequence[int]) -> Tensor:
        """Fetch the random numbers of some completions; their indices, int64."""
        most = self._uniforms.shape[1]
        for completion in completions:
            self._uniforms[completion] = torch.from_numpy(seeding.uniforms(self._keys[completion], most))
        return torch.tensor(completions, dtype=torch.int64, device=self._device)

    def draw(self, rows: Tensor, logits: Tensor, *, greedy: bool, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
        """Choose the next token of the completions int64[B] from float[B, V]: the tokens, and which have now ended."""
        at = self._lengths[rows]
        chosen = draw(logits, self._uniforms[rows, at], greedy=greedy, top_k=top_k, top_p=top_p)
        stopped = (chosen[0][:, None] == self._stop_ids).any(-1)
        tokens, logprobs, entropies = chosen
        self._tokens[rows, at] = tokens.int()
        self._logprobs[rows, at], self._entropies[rows, at] = logprobs.float(), entropies.float()
        self._stopped[rows] = stopped
        self._lengths[rows] = at + 1
        return tokens, stopped | (at + 1 == self._limits[rows])

    def completions(self) -> Iterator[tuple[Ints, Floats, Floats, bool]]:
        """Each completion's tokens, log-probabilities and entropies, and whether it stopped by itself."""
        lengths, stopped = self._lengths.tolist(), self._stopped.tolist()
        tokens, logprobs, entropies = (drawn.cpu().numpy() for drawn in (self._tokens, self._logprobs, self._entropies))
        for row, length in enumerate(lengths):
            said = slice(0, length)
            # Copies, so that a completion does not keep all others alive.
            yield tokens[row, said].copy(), logprobs[row, said].copy(), entropies[row, said].copy(), stopped[row]


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
    """int64[B]: the token at which the cumulative distribution passes the uniform.

    A cumulative sum over a large vocabulary loses small probabilities in float32 and is slow in float64; there two
    levels of about sqrt(V) sums, first a block of the vocabulary and then a token in it, are exact and cheap.
    """
    if probs.shape[1] <= SUMMED_AT_ONCE:
        edges = probs.cumsum(-1, dtype=torch.float64)
        return _first_above(edges, uniforms * edges[:, -1])
    width = math.isqrt(probs.shape[1] - 1) + 1
    blocks = functional.pad(probs, (0, -probs.shape[1] % width)).unflatten(1, (-1, width))
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms * edges[:, -1]
    block = _first_above(edges, target)
    before = functional.pad(edges, (1, 0)).gather(1, block[:, None]).squeeze(1)
    chosen = blocks[torch.arange(len(block), device=block.device), block]
    token = block * width + _first_above(chosen.double().cumsum(-1), target - before)
    return token.clamp(max=probs.shape[1] - 1)  # of probabilities that are nan, any token: its log-prob says so


def _first_above(edges: Tensor, target: Tensor) -> Tensor:
    """int64[B]: the first index where float64[B, n] ascending edges pass float64[B] targets.

    The edge rises there, so its probability is not 0.  Rounding can lift a target to the last edge, past all of them.
    """
    below_last = torch.nextafter(edges[:, -1], torch.zeros_like(target))
    found = torch.searchsorted(edges, torch.minimum(target, below_last)[:, None], right=True).squeeze(1)
    return found.clamp(max=edges.shape[1] - 1)
