"""From hidden states to log-probs, and back: the head on the loss tokens alone, a chunk of them at a time.

The logits of a batch are its largest tensor by far, tokens x vocabulary; no more than `LOGITS_PER_CHUNK` of them exist
at one time.  `learn` takes the gradient of a chunk while its logits are there, which is possible because the loss is a
sum: over rows always, over tokens where no term looks at a whole row.  `score` alone has to compute the logits of a
batch of several chunks a second time in the backward pass.

Shapes: B rows, T tokens of the longest row, V vocabulary, D hidden size, n loss tokens, row by row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from groupwise.model import logits, states_before, vocabulary
from groupwise.records import Batch

LOGITS_PER_CHUNK = 2**24
"""Most logits that exist at one time while scoring (64 MiB in float32)."""

Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


def learn(
    model: PreTrainedModel,
    states: Tensor,
    part: Batch,
    loss: Loss,
    temperature: float,
    *,
    entropy: bool = False,
    per_token: bool = False,
    mixed: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a part of a batch and its metrics; its gradient is added to that of the model's parameters.

    Args:
        states: float[n, D], the state before each loss token of the part.
        loss: (log-probs [B, T], entropies [B, T], batch) -> (a sum, sums of metrics).
        temperature: the logits are divided by it.
        entropy: hand the loss entropies; otherwise they are 0.
        per_token: the loss is a sum of terms that each look at one token, so that rows may be cut.
        mixed: see `products`.
    """
    total, sums = states.new_zeros((), dtype=torch.float64), dict[str, Tensor]()
    gradients: list[Tensor] = []
    for (begin, end), piece in pieces(part, _tokens_per_chunk(model), per_token):
        hidden = states[begin:end].detach().requires_grad_(states.requires_grad)
        mask = piece.loss_mask
        with products(mixed):
            logprobs, entropies = score(model, hidden, piece.tokens[mask], temperature, entropy)
            value, metrics = loss(at_tokens(mask, logprobs), at_tokens(mask, entropies), piece)
            if value.requires_grad:
                value.backward()
        gradients.append(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
        total += value.detach()
        for name, metric in metrics.items():
            sums[name] = sums.get(name, 0) + metric.detach().double()
    if states.requires_grad:
        states.backward(torch.cat(gradients))
    return total, sums


@contextlib.contextmanager
def products(mixed: bool) -> Generator[None]:
    """With `mixed`, products of float32 matrices round their factors to bfloat16 where the machine is faster at that.

    They add up in float32, and so do the logits; autocast would round those, too.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if mixed else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def pieces(part: Batch, tokens: int, per_token: bool) -> Iterator[tuple[tuple[int, int], Batch]]:
    """The part in pieces of at most so many loss tokens, each with where its tokens stand among all of them.

    A row is whole in one piece, however long it is, unless `per_token`.
    """
    counts = part.loss_mask.sum(-1)
    ends = counts.cumsum(0).tolist()
    if ends and ends[-1] <= tokens:
        yield (0, ends[-1]), part
        return
    rank = at_tokens(part.loss_mask, torch.arange(ends[-1] if ends else 0, device=part.tokens.device))
    for begin, end in _ranges(ends, tokens, per_token):
        inside = part.loss_mask & (rank >= begin) & (rank < end)
        rows = inside.any(-1).nonzero().squeeze(-1)
        yield (begin, end), dataclasses.replace(part, loss_mask=inside).rows(rows)


def _ranges(ends: list[int], tokens: int, per_token: bool) -> Iterator[tuple[int, int]]:
    if per_token:
        yield from ((begin, min(begin + tokens, ends[-1])) for begin in range(0, ends[-1], tokens))
        return
    begin = done = 0
    for end in ends:
        if end - begin > tokens and done > begin:
            yield begin, done
            begin = done
        done = end
    if done > begin:
        yield begin, done


def score(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of int64[n] tokens and entropies, in nats, float[n] each, from the states float[n, D] before.

    At least float32.  Without `entropy` the entropies are 0.
    """
    rows = _tokens_per_chunk(model)
    once = len(targets) <= rows or not torch.is_grad_enabled()
    chunk = _score_chunk if once else _score_chunk_again_in_backward
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    scored = [chunk(model, states, chosen, temperature, entropy) for states, chosen in parts]
    logprobs, entropies = (torch.cat(part) for part in zip(*scored, strict=True))
    return logprobs, entropies


def token_logprobs(
    model: PreTrainedModel, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each masked token given those before it, and the entropy of its distribution; padded rows.

    Args:
        tokens: int64[B, T], right-padded.
        lengths: int64[B]; columns beyond the longest row are not computed.
        mask: bool[B, T]: which tokens to score; False in column 0, before which there is nothing.
        temperature: the logits are divided by it; above 0.
        entropy: compute entropies; otherwise they are 0.

    Returns:
        Log-probabilities and entropies in nats, float[B, T] each, aligned with `tokens`, 0 where `mask` is False;
        float64 for a float64 model, otherwise float32.
    """
    if not mask.any():
        nothing = torch.zeros(tokens.shape, dtype=torch.promote_types(model.dtype, torch.float32), device=tokens.device)
        return nothing, nothing.clone()
    states = states_before(model, tokens, lengths, mask)
    logprobs, entropies = score(model, states, tokens[mask], temperature, entropy)
    return at_tokens(mask, logprobs), at_tokens(mask, entropies)


def at_tokens(mask: Tensor, values: Tensor) -> Tensor:
    """[B, T]: the values [n] of the n masked tokens, row by row, in their places; 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def entropy_of(logprobs: Tensor, probs: Tensor) -> Tensor:
    """float[...]: entropy in nats, from float[..., V] log-probabilities (-inf is allowed) and probabilities."""
    return -(probs * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)


def _tokens_per_chunk(model: PreTrainedModel) -> int:
    return max(1, LOGITS_PER_CHUNK // vocabulary(model))


def _score_chunk(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    return cast(Any, _Score).apply(logits(model, hidden, temperature), targets, entropy)


def _score_chunk_again_in_backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    # There is no dropout, so the random state need not be restored for the second computation.
    return cast(Any, checkpoint)(_score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)


class _Score(torch.autograd.Function):
    """(logits [n, V], targets [n]) -> (log-probs [n], entropies [n]), with one buffer of the size of the logits.

    With p the probabilities: d logprob / d logits = onehot - p, and d entropy / d logits = -p (log p + entropy).
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(values, dim=-1)
        chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
        entropies = entropy_of(logprobs, logprobs.exp()) if entropy else torch.zeros_like(chosen)
        ctx.save_for_backward(logprobs, targets, entropies)
        ctx.entropy = entropy
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logprobs, targets, entropies = ctx.saved_tensors
        of_logprob, of_entropy = gradients
        scale = -of_logprob[:, None]
        if ctx.entropy:
            scale = scale - of_entropy[:, None] * (logprobs + entropies[:, None])
        # The log-probs are needed no more, so their buffer becomes the gradient.
        gradient = logprobs.exp_().mul_(scale)
        gradient[torch.arange(len(targets), device=targets.device), targets] += of_logprob
        return gradient, None, None
