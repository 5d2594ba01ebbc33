"""The engine inside this process: one transformers model that samples and learns, weights shared.

Shapes: B rows (completions or rollouts), T tokens of the longest row, R `max_tokens`.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise import seeding
from groupwise.decoding import Decoding, Drawn, attention_windows, draw
from groupwise.engines import Completion, LossFn, Optimizer, Request, Sampling
from groupwise.errors import CheckpointError, GroupwiseError, ModelError
from groupwise.model import (
    check_head,
    check_tokenizer,
    context_length,
    load_model,
    load_tokenizer,
    logits,
    stop_token_ids,
    token_logprobs,
)
from groupwise.records import Batch

# What json, safetensors and torch raise about a file that is missing, cut short or not theirs.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError)


class LocalEngine(NamedTuple):
    """A sampler and a learner around one model, and what else the model knows."""

    sampler: LocalSampler
    learner: LocalLearner
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    context: int | None
    """Most tokens of prompt and completion together, or None when the model does not say."""


def local_engine(
    model: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    max_batch_tokens: int,
    microbatch_tokens: int,
    optimizer: Optimizer,
    temperature: float,
    total_updates: int,
    reference: str | Path | None = None,
    entropy: bool = False,
    gradient_checkpointing: bool = False,
) -> LocalEngine:
    """Load a model once, to sample and to learn; the arguments are those of `load_model` and of the two classes.

    `reference` is a folder or hub id; that model is loaded when it is first asked for.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded or served.
    """
    policy = load_model(model, dtype=dtype, device=device, gradient_checkpointing=gradient_checkpointing)
    tokenizer = load_tokenizer(model)
    check_tokenizer(policy, tokenizer)
    check_head(policy)
    stop_ids = stop_token_ids(policy, tokenizer)
    learner = LocalLearner(
        policy,
        optimizer,
        temperature=temperature,
        microbatch_tokens=microbatch_tokens,
        total_updates=total_updates,
        reference=None if reference is None else lambda: load_model(reference, dtype=dtype, device=device),
        entropy=entropy,
    )
    sampler = LocalSampler(policy, stop_ids, max_batch_tokens=max_batch_tokens)
    return LocalEngine(sampler, learner, tokenizer, stop_ids, context_length(policy))


class LocalSampler:
    """Draws completions with a transformers model.  See `groupwise.engines.Sampler`."""

    def __init__(self, model: PreTrainedModel, stop_ids: Iterable[int], *, max_batch_tokens: int) -> None:
        """
        Args:
            model: the policy; only read, except by `load`.
            stop_ids: tokens that end a completion.
            max_batch_tokens: most tokens of keys and values held at one time; a group larger than that still runs,
                alone.

        Raises:
            ModelError: the model cannot be decoded here; see `groupwise.decoding.attention_windows`.
        """
        attention_windows(model)  # so that it is refused now and not at the first prompt
        self._model = model
        self._stop_ids = torch.tensor(sorted(stop_ids), device=model.device)
        self._max_batch_tokens = max_batch_tokens
        self._context = context_length(model) or 2**62
        self._version = 0

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights in place; a tensor that is already the model's own is not copied, one not named stays.

        Raises:
            ModelError: the model has no tensor of that name and shape.
        """
        own = self._model.state_dict()
        for name, tensor in weights:
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
        completions: list[list[Completion]] = [[] for _ in requests]
        for wave in self._waves(requests, sampling.max_tokens):
            for index, group in zip(wave, self._sample_wave([requests[i] for i in wave], sampling), strict=True):
                completions[index] = group
        return completions

    def _waves(self, requests: Sequence[Request], max_tokens: int) -> Iterator[list[int]]:
        """Indices of the groups that are decoded together; prompts of similar length share a wave."""
        wave: list[int] = []
        rows = 0
        for index in sorted(range(len(requests)), key=lambda i: len(requests[i].prompt)):
            prompt, n = len(requests[index].prompt), len(requests[index].keys)
            if prompt >= self._context:
                raise ModelError(f"a prompt of {prompt} tokens leaves no room in the context of {self._context} tokens")
            if wave and (rows + n) * (prompt + max_tokens) > self._max_batch_tokens:
                yield wave
                wave, rows = [], 0
            wave.append(index)
            rows += n
        if wave:
            yield wave

    def _sample_wave(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        device, most = self._model.device, sampling.max_tokens
        keys = [key for request in requests for key in request.keys]
        uniforms = torch.from_numpy(np.stack([seeding.uniforms(key, most) for key in keys])).to(device)
        prompts, counts = [request.prompt for request in requests], [len(request.keys) for request in requests]
        decoding = Decoding(self._model, prompts, counts, most)
        limits = (self._context - decoding.positions).clamp(max=most)
        drawn = Drawn(len(keys), most, device)
        rows = torch.arange(len(keys), device=device)
        greedy = sampling.temperature == 0.0
        for step in range(most):
            values = logits(self._model, decoding.hidden, 1.0 if greedy else sampling.temperature)
            tokens, logprobs, entropies = draw(
                values, uniforms[rows, step], greedy=greedy, top_k=sampling.top_k, top_p=sampling.top_p
            )
            stopped = torch.isin(tokens, self._stop_ids)
            drawn.record(rows, step, tokens, logprobs, entropies, stopped)
            finished = stopped | (limits[rows] == step + 1)
            if finished.all():
                break
            if finished.any():
                left = decoding.drop(finished)
                rows, tokens = rows[left], tokens[left]
            decoding.step(tokens)
        completions = (
            Completion(tokens, logprobs, entropies, "stop" if stopped else "length", self._version)
            for tokens, logprobs, entropies, stopped in drawn.rows()
        )
        return [list(islice(completions, count)) for count in counts]


class LocalLearner:
    """Scores tokens and takes AdamW steps with a transformers model.  See `groupwise.engines.Learner`."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        temperature: float,
        microbatch_tokens: int,
        total_updates: int,
        reference: PreTrainedModel | Callable[[], PreTrainedModel] | None = None,
        entropy: bool = False,
    ) -> None:
        """
        Args:
            model: the policy; parameters that do not require a gradient are left alone.
            optimizer: AdamW and its schedule.
            temperature: logits are divided by it; that of sampling.
            microbatch_tokens: most tokens, padding included, in one forward pass; a longer row still runs, alone.
            total_updates: optimizer steps over which the schedule falls to 0.
            reference: the reference policy, or what loads it when it is first asked for.
            entropy: hand the loss the entropies of the policy; otherwise they are 0.
        """
        self._model, self._settings = model, optimizer
        self._temperature, self._microbatch_tokens = temperature, microbatch_tokens
        self._total_updates, self._updates = total_updates, 0
        self._reference, self._entropy = reference, entropy
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=model.device.type in ("cpu", "cuda"),
        )

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """See `Learner.logprobs`.

        Raises:
            GroupwiseError: `reference` is asked for and there is none.
        """
        model = self._reference_model() if reference else self._model
        found = torch.zeros(batch.tokens.shape, dtype=torch.promote_types(model.dtype, torch.float32))
        for index in microbatches(batch.lengths, self._microbatch_tokens):
            part = batch.rows(index).to(model.device)
            scored, _ = self._score(model, part, entropy=False)
            found[index, : scored.shape[1]] = scored.cpu()
        return found

    def update(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """See `Learner.update`.  `loss`, `grad_norm` (before clipping) and `learning_rate` are among the metrics.

        A batch without rows is a step with zero gradient: AdamW's averages, and with them the weights, move on.

        Raises:
            GroupwiseError: loss or gradient is not finite; weights and optimizer are as they were.
        """
        self._adamw.zero_grad(set_to_none=True)
        total, sums = self._backward(batch, loss)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm))
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._adamw.zero_grad(set_to_none=True)
            raise GroupwiseError(
                f"update {self._updates}: the loss is {total} and the norm of its gradient {norm}; nothing was "
                "changed. Lower optimizer.learning_rate, or train in float32 if the model is in float16"
            )
        rate = self._settings.learning_rate * schedule(self._settings, self._updates, self._total_updates)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._updates += 1
        means = {name: value / count for name, (value, count) in sums.items() if count}
        return {**means, "loss": total, "grad_norm": norm, "learning_rate": rate}

    def _backward(self, batch: Batch, loss: LossFn) -> tuple[float, dict[str, list[float]]]:
        """Add the gradient of every micro-batch to that of the parameters; the loss, and (sum, count) of metrics."""
        total = torch.zeros((), dtype=torch.float64, device=self._model.device)
        sums: dict[str, Tensor] = {}
        for index in microbatches(batch.lengths, self._microbatch_tokens):
            part = batch.rows(index).to(self._model.device)
            logprobs, entropies = self._score(self._model, part, self._entropy)
            value, metrics = loss(logprobs, entropies, part)
            if value.requires_grad:
                value.backward()
            total += value.detach()
            for name, metric in metrics.items():
                sums[name] = sums.get(name, 0) + metric.detach().double()
        return total.item(), {name: metric.tolist() for name, metric in sums.items()}

    def _score(self, model: PreTrainedModel, part: Batch, entropy: bool) -> tuple[Tensor, Tensor]:
        inputs = (part.tokens, part.lengths, part.loss_mask)
        return token_logprobs(model, *inputs, self._temperature, entropy)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the policy, on its device, not copied; of tied weights, the first name."""
        seen: set[int] = set()
        for name, tensor in self._model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def save(self, path: Path) -> None:
        """Write `model.safetensors`, `optimizer.pt` and `learner.json` into the folder `path`."""
        path.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.contiguous() for name, tensor in self.weights()}
        safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        torch.save(self._adamw.state_dict()["state"], path / "optimizer.pt")
        (path / "learner.json").write_text(json.dumps({"updates": self._updates}))

    def restore(self, path: Path) -> None:
        """Continue from what `save` wrote; the optimizer's settings stay those given here.

        Raises:
            CheckpointError: a file is missing, or is not that of this model.
        """
        own = dict(self.weights())
        try:
            updates = int(json.loads((path / "learner.json").read_text())["updates"])
            weights = safetensors.torch.load_file(path / "model.safetensors")
            state = torch.load(path / "optimizer.pt", map_location=self._model.device, weights_only=True)
        except UNREADABLE as error:
            raise CheckpointError(f"{path}: not a complete checkpoint of the learner: {error!r}") from error
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.items()}:
            raise CheckpointError(f"{path}: the weights are those of another model; start a new run folder")
        for name, tensor in weights.items():
            own[name].copy_(tensor)  # in place: the sampler holds the same tensors
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": state})
        self._updates = updates

    def _reference_model(self) -> PreTrainedModel:
        if self._reference is None:
            raise GroupwiseError("log-probabilities of the reference policy are needed, but no reference was given")
        if not isinstance(self._reference, PreTrainedModel):
            self._reference = self._reference()
        return self._reference


def microbatches(lengths: Tensor, budget: int) -> Iterator[Tensor]:
    """Row indices int64[n], rows of similar length together: rows times the longest stays within `budget` tokens."""
    lengths, order = lengths.cpu().sort(descending=True, stable=True)
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, int(lengths[start])))
        yield order[start : start + rows]
        start += rows


def schedule(settings: Optimizer, update: int, total: int) -> float:
    """The share of the peak learning rate at the update with this index (from 0).

    Warmup ends, at its last update, on the peak; the fall would reach 0 at the update after the last.
    """
    if update < settings.warmup_updates:
        return (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (update - settings.warmup_updates) / max(1, total - settings.warmup_updates))
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
