"""The engine inside this process: one transformers model that samples and learns, weights shared.

Shapes: B rows (completions or rollouts), T tokens of the longest row, R `max_tokens`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.adapters import Lora, adapted, attach, merged, save_adapter, switched_off, trained
from groupwise.decoding import Decoding, attention_windows
from groupwise.drawing import Drawn
from groupwise.engines import (
    Completion,
    Critic,
    Learner,
    LossFn,
    Optimizer,
    Processes,
    Request,
    Sampler,
    Sampling,
    Snapshot,
)
from groupwise.engines.critic import LocalCritic
from groupwise.engines.ranks import started
from groupwise.engines.steps import Steps, all_of, copied, distinct, restore_weights, weights_file
from groupwise.errors import ConfigError, GroupwiseError, ModelError
from groupwise.folding import Folded, is_lean
from groupwise.head import at_tokens, learn, products, score
from groupwise.lean import LeanDecoding
from groupwise.model import (
    check_head,
    check_tokenizer,
    context_length,
    hidden_states,
    load_model,
    stop_token_ids,
)
from groupwise.model_files import load_tokenizer
from groupwise.packing import Forward
from groupwise.records import Batch, Floats, Ints
from groupwise.slots import Slot

LOG = logging.getLogger(__name__)
REFERENCE = "reference.safetensors"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far log-probs may be from those of transformers' own forward pass, in nats and in the mean over a completion, by
the dtype of the products: rounding is far below, a mistake far above."""
TRIED = 4
"""Completions that are compared."""


class Local(Slot):
    """This process, with one copy of the weights to sample and to learn."""

    type: Literal["local"] = "local"

    def to_start(self) -> int:
        """How many processes a command has to start."""
        return 1

    def split(self) -> int:
        """Over how many processes the weights are split; 0: sampler and learner share them."""
        return 0

    def join(self, device: str) -> contextlib.AbstractContextManager[None]:
        """There is nobody to meet.

        Raises:
            ConfigError: there is, and all would train the same.
        """
        if (size := started()) > 1:
            raise ConfigError(
                f"engine.learner: local; this program was started as {size} processes, each of which would train the "
                "same: set engine.learner: fsdp, or start it once"
            )
        return contextlib.nullcontext()

    def engine(self, ranks: object, model: str | Path, **settings: Any) -> LocalEngine:
        """See `local_engine`."""
        return local_engine(model, **settings)


class LocalEngine(NamedTuple):
    """A sampler and a learner around one model, and what else the model knows."""

    sampler: Sampler
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    context: int | None
    """Most tokens of prompt and completion together, or None when the model does not say."""
    critic: Critic | None = None
    save_adapter: Callable[[Path], None] | None = None
    """With LoRA: writes the adapter alone."""
    processes: Processes | None = None
    """What runs it, where that is not this process."""


@dataclass(frozen=True)
class Recipe:
    """How to make an engine: what is sent to another process in the place of one."""

    engine: Callable[[], LocalEngine]
    """Sampler and learner around one model."""
    sampler: Callable[[], Sampler]
    """A sampler around a model of its own."""
    threads: int
    """CPU threads of each."""
    gpu: bool
    """Whether each needs a GPU."""


class Here(Slot):
    """Everything in this process, around one model."""

    type: Literal["local"] = "local"

    def __call__(self, recipe: Recipe) -> LocalEngine:
        return recipe.engine()


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
    critic: Optimizer | None = None,
    mixed: bool = False,
    lora: Lora | None = None,
    seed: int = 0,
) -> LocalEngine:
    """Load a model once, to sample and to learn; the arguments are those of `load_model` and of the two classes.

    `reference` is a folder or hub id; that model is loaded when it is first asked for.  With `critic`, the optimizer of
    one, a value network of the same architecture and first weights is made as well.  With `lora`, an adapter is
    trained, whose first values `seed` decides; the reference is then the model without it, whatever `reference` says,
    and the critic is trained whole.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded or served.
    """
    policy, tokenizer, stop_ids = load_policy(model, dtype, device, gradient_checkpointing)
    if lora is not None:
        attach(policy, lora, seed)
    learner = LocalLearner(
        policy,
        optimizer,
        temperature=temperature,
        microbatch_tokens=microbatch_tokens,
        total_updates=total_updates,
        reference=None if reference is None else lambda: load_model(reference, dtype=dtype, device=device),
        entropy=entropy,
        mixed=mixed,
    )
    sampler = LocalSampler(policy, stop_ids, max_batch_tokens=max_batch_tokens, mixed=mixed)
    judge = None
    if critic is not None:
        judge = LocalCritic(
            load_model(model, dtype=dtype, device=device, gradient_checkpointing=gradient_checkpointing),
            critic,
            microbatch_tokens=microbatch_tokens,
            total_updates=total_updates,
            mixed=mixed,
        )
    save = None if lora is None else partial(save_adapter, policy)
    return LocalEngine(sampler, learner, tokenizer, stop_ids, context_length(policy), judge, save)


def load_policy(
    model: str | Path, dtype: torch.dtype, device: str | torch.device, gradient_checkpointing: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[int, ...]]:
    """A model that can be served, its tokenizer, and the ids that end a completion.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded, or the model would be served wrongly.
    """
    policy = load_model(model, dtype=dtype, device=device, gradient_checkpointing=gradient_checkpointing)
    tokenizer = load_tokenizer(model)
    check_tokenizer(policy, tokenizer)
    check_head(policy)
    return policy, tokenizer, stop_token_ids(policy, tokenizer)


def local_sampler(
    model: str | Path, *, dtype: torch.dtype, device: str | torch.device, max_batch_tokens: int, mixed: bool = False
) -> LocalSampler:
    """A sampler around a model of its own; the arguments are those of `local_engine`.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded or served.
    """
    policy, _, stop_ids = load_policy(model, dtype, device)
    return LocalSampler(policy, stop_ids, max_batch_tokens=max_batch_tokens, mixed=mixed)


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
        mixed: bool = False,
    ) -> None:
        """
        Args:
            model: the policy; parameters that do not require a gradient are left alone.  Adapted, it is its own
                reference, with the adapter off.
            optimizer: AdamW and its schedule.
            temperature: logits are divided by it; that of sampling.
            microbatch_tokens: most tokens, padding included, in one forward pass; a longer row still runs, alone.
            total_updates: optimizer steps over which the schedule falls to 0.
            reference: the reference policy, or what loads it when it is first asked for.
            entropy: hand the loss the entropies of the policy; otherwise they are 0.
            mixed: take matrix products in bfloat16; weights, gradients and all else stay float32.
        """
        self._model, self._adapted = model, adapted(model)
        self._temperature, self._microbatch_tokens = temperature, microbatch_tokens
        self._forward = Forward(model, mixed)
        self._reference: Forward | PreTrainedModel | Callable[[], PreTrainedModel] | None = reference
        self._entropy = entropy
        self._refreshed = False
        self._steps = Steps(model.parameters(), optimizer, total_updates)

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """See `Learner.logprobs`.

        Raises:
            GroupwiseError: `reference` is asked for and there is none.
        """
        with self._reference_policy() if reference else contextlib.nullcontext(self._forward) as forward:

            def scored(part: Batch) -> Tensor:
                targets = part.tokens[part.loss_mask]
                states = forward.states(part)
                with products(self._forward.mixed):
                    return at_tokens(part.loss_mask, score(forward.model, states, targets, self._temperature, False)[0])

            return forward.for_each_token(batch, self._microbatch_tokens, scored)

    def update(self, batch: Batch, loss: LossFn, *, per_token: bool = False) -> dict[str, float]:
        """See `Learner.update`.  `loss`, `grad_norm` (before clipping) and `learning_rate` are among the metrics.

        A batch without rows is a step with zero gradient: AdamW's averages, and with them the weights, move on.

        Raises:
            NumericalError: loss or gradient is not finite; weights and optimizer are as they were.
        """
        sums: dict[str, Tensor] = {}
        taken = self._steps.take(lambda: self._accumulate(batch, loss, per_token, sums))
        totals = {name: metric.tolist() for name, metric in sums.items()}
        return {name: value / count for name, (value, count) in totals.items() if count} | taken

    def gradient(self, batch: Batch, loss: LossFn, *, per_token: bool = False) -> list[Tensor]:
        """The gradient of what `update` would minimise, for each trained parameter, on the CPU; nothing is changed."""
        parameters = self._trainable()
        self._accumulate(batch, loss, per_token, {})
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [gradient.cpu() for gradient in found]

    @property
    def gradient_bytes(self) -> int:
        """What one gradient takes."""
        return sum(parameter.nbytes for parameter in self._trainable())

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _accumulate(self, batch: Batch, loss: LossFn, per_token: bool, sums: dict[str, Tensor]) -> float:
        """Add the gradient to that of the parameters, and the metrics to `sums`; the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self._model.device)
        with self._forward.microbatches(batch, self._microbatch_tokens) as parts:
            for _, part in parts:
                value, metrics = learn(
                    self._model,
                    self._forward.states(part),
                    part,
                    loss,
                    self._temperature,
                    entropy=self._entropy,
                    per_token=per_token,
                    mixed=self._forward.mixed,
                )
                total += value
                for name, metric in metrics.items():
                    sums[name] = sums.get(name, 0) + metric
        return total.item()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the policy, on its device, not copied; of tied weights, the first name.

        Weights with an adapter are copied, with the adapter added, as they are asked for.
        """
        own = distinct(self._model.state_dict())
        return merged(self._model, own) if self._adapted else own

    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference.

        Raises:
            GroupwiseError: the policy is adapted, so that its base is the reference.
        """
        if self._adapted:
            raise GroupwiseError("with LoRA the reference is the base model, which cannot move; train without lora")
        reference = self._reference_model()
        with torch.no_grad():
            policy = self._model.state_dict()
            for name, tensor in reference.state_dict().items():
                tensor.copy_(policy[name])
        self._refreshed = True

    def snapshot(self) -> Snapshot:
        """What is trained, the optimizer's state and, if it has moved, the reference; as they are now."""
        name, weights = self._trained()
        files = {name: copied(weights)}
        if self._refreshed:
            files[REFERENCE] = copied(distinct(self._reference_model().state_dict()))
        return all_of(*starmap(weights_file, files.items()), self._steps.snapshot())

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote; the optimizer's settings stay those given here.

        Raises:
            CheckpointError: a file is missing, or is not that of this model.
        """
        name, weights = self._trained()
        restore_weights(weights, path / name)
        self._refreshed = (path / REFERENCE).is_file()
        if self._refreshed:
            restore_weights(distinct(self._reference_model().state_dict()), path / REFERENCE)
        self._steps.restore(path)

    def _trained(self) -> tuple[str, Iterator[tuple[str, Tensor]]]:
        """The file of the tensors that training changes, and those."""
        if self._adapted:
            return "adapter.safetensors", trained(self._model)
        return "model.safetensors", self.weights()

    @contextlib.contextmanager
    def _reference_policy(self) -> Generator[Forward]:
        if self._adapted:
            with switched_off(self._model):
                yield self._forward
        else:
            yield self._reference_forward()

    def _reference_model(self) -> PreTrainedModel:
        return self._reference_forward().model

    def _reference_forward(self) -> Forward:
        if self._reference is None:
            raise GroupwiseError("log-probabilities of the reference policy are needed, but no reference was given")
        if not isinstance(self._reference, Forward):
            model = self._reference if isinstance(self._reference, PreTrainedModel) else self._reference()
            self._reference = Forward(model, self._forward.mixed)
        return self._reference
