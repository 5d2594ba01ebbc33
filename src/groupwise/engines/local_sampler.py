"""Sampling with a transformers model in this process, by groups.

Shapes: B rows (completions), T tokens of the longest row, R `max_tokens`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.adapters import adapted
from groupwise.decoding import Decoding, attention_windows
from groupwise.drawing import Drawn
from groupwise.engines import Completion, Request, Sampling
from groupwise.errors import GroupwiseError, ModelError
from groupwise.folding import Folded, is_lean
from groupwise.head import score
from groupwise.lean import LeanDecoding
from groupwise.model import context_length, hidden_states
from groupwise.records import Floats, Ints

LOG = logging.getLogger(__name__)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far log-probs may be from those of transformers' own forward pass, in nats and in the mean over a completion, by
the dtype of the products: rounding is far below, a mistake far above."""
TRIED = 4
"""Completions that are compared."""


class LocalSampler:
    """Draws completions with a transformers model.  See `groupwise.engines.Sampler`."""

    def __init__(
        self, model: PreTrainedModel, stop_ids: Iterable[int], *, max_batch_tokens: int, mixed: bool = False
    ) -> None:
        """
        Args:
            model: the policy; only read, except by `load`.
            stop_ids: tokens that end a completion.
            max_batch_tokens: most tokens of keys and values held at one time; a group larger than that still runs.
            mixed: decode with a copy of the weights in bfloat16, where the model allows it (`is_lean`).

        Raises:
            ModelError: the model cannot be decoded here; see `groupwise.decoding.attention_windows`.
        """
        attention_windows(model)  # so that it is refused now and not at the first prompt
        self._model = model
        self._stop_ids = torch.tensor(sorted(stop_ids), device=model.device)
        self._max_batch_tokens = max_batch_tokens
        self._context = context_length(model) or 2**62
        self._lean = is_lean(model)
        self._checked = not self._lean
        self._matrices = torch.bfloat16 if mixed else torch.float32
        self._version = 0

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights in place; a tensor that is already the model's own is not copied, one not named stays.

        An adapted model is the learner's own and already as it should be: its weights are not even asked for.

        Raises:
            ModelError: the model has no tensor of that name and shape.
        """
        own = self._model.state_dict()
        for name, tensor in () if adapted(self._model) else weights:
            if name not in own or own[name].shape != tensor.shape:
                raise ModelError(f"{name} {tuple(tensor.shape)}: the sampler's model has no such weight")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self._version = version

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """For each request, its completions in the order of its keys.

        At temperature 0 the log-probabilities and entropies are those at temperature 1.  A completion ends with
        `length` also where the model's context does.

        Raises:
            ModelError: a prompt leaves no room in the model's context.
        """
        completions = self._sample(requests, sampling) if requests else []
        uncut = sampling.top_p == 1.0 and not sampling.top_k
        if completions and not self._checked and uncut and not self._agrees(requests, completions, sampling):
            completions = self._sample(requests, sampling)
        return completions

    def _sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        counts = [len(request.keys) for request in requests]
        firsts = np.cumsum([0, *counts])
        drawn = Drawn(
            [key for request in requests for key in request.keys],
            [self._limit(request, sampling) for request in requests for _ in request.keys],
            self._stop_ids,
        )
        greedy = sampling.temperature == 0.0
        decoding = self._decoding(requests, sampling)
        # Prompts of similar length keep each other company.
        waiting = deque(sorted(range(len(requests)), key=lambda i: len(requests[i].prompt)))
        rows = drawn.begin([])
        while waiting or len(rows):
            if entering := _entering(waiting, requests, decoding):
                decoding.enter([requests[i].prompt for i in entering], [counts[i] for i in entering])
                rows = torch.cat([rows, drawn.begin([row for i in entering for row in range(*firsts[i : i + 2])])])
            values = decoding.logits(1.0 if greedy else sampling.temperature)
            tokens, finished = drawn.draw(rows, values, greedy=greedy, top_k=sampling.top_k, top_p=sampling.top_p)
            if finished.any():
                left = decoding.drop(finished)
                rows, tokens = rows[left], tokens[left]
            if len(rows):
                decoding.step(tokens)
        completions = (
            Completion(tokens, _finite(logprobs), entropies, "stop" if stopped else "length", self._version)
            for tokens, logprobs, entropies, stopped in drawn.completions()
        )
        return [list(islice(completions, count)) for count in counts]

    def _limit(self, request: Request, sampling: Sampling) -> int:
        prompt = len(request.prompt)
        if prompt >= self._context:
            raise ModelError(
                f"a prompt of {prompt} tokens leaves no room in the context of {self._context}; shorten it"
            )
        return min(sampling.max_tokens, self._context - prompt)

    def _decoding(self, requests: Sequence[Request], sampling: Sampling) -> Decoding | LeanDecoding:
        most, budget = sampling.max_tokens, self._max_batch_tokens
        if not self._lean:
            return Decoding(self._model, most, budget)
        weights = Folded(self._model, max(len(request.prompt) for request in requests) + most, self._matrices)
        return LeanDecoding(self._model, weights, most, budget, max(len(request.keys) for request in requests))

    def _agrees(
        self, requests: Sequence[Request], completions: Sequence[Sequence[Completion]], sampling: Sampling
    ) -> bool:
        """Whether the lean way gave the longest completions, whose rows have seen most others leave and enter, the
        log-probs of transformers' own forward pass; asked once."""
        self._checked = True
        drawn = [(request.prompt, one) for request, ones in zip(requests, completions, strict=True) for one in ones]
        longest = sorted(drawn, key=lambda pair: len(pair[1].tokens), reverse=True)[:TRIED]
        furthest = max(self._difference(prompt, one, sampling.temperature or 1.0) for prompt, one in longest)
        if furthest < TOLERANCE[self._matrices]:
            return True
        self._lean = False
        LOG.warning(
            "%s decodes differently the short way (by %.2g nats); the long way is taken",
            type(self._model).__name__,
            furthest,
        )
        return False

    def _difference(self, prompt: Ints, completion: Completion, temperature: float) -> float:
        """Mean distance of a completion's log-probs from those of a forward pass over prompt and completion."""
        tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
        states = hidden_states(self._model, tokens[None])[0, len(prompt) - 1 : -1]
        logprobs, _ = score(self._model, states, tokens[len(prompt) :], temperature, False)
        return float((logprobs - torch.from_numpy(completion.logprobs)).abs().mean())


def _entering(waiting: deque[int], requests: Sequence[Request], decoding: Decoding | LeanDecoding) -> list[int]:
    """As many of the waiting groups as there is room for, taken off the queue."""
    entering: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    while waiting:
        request = requests[waiting[0]]
        lengths, counts = [*lengths, len(request.prompt)], [*counts, len(request.keys)]
        if not decoding.has_room(lengths, counts):
            break
        entering.append(waiting.popleft())
    return entering


def _finite(logprobs: Floats) -> Floats:
    if not np.isfinite(logprobs).all():
        raise GroupwiseError(
            "the policy's probabilities are not finite: its weights have become too large, or nan; lower "
            "optimizer.learning_rate and start from the last checkpoint that was good, or the model itself"
        )
    return logprobs
