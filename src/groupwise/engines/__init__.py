"""The boundary between the training loop and whatever computes: two small protocols, and a third for PPO.

A `Sampler` turns prompts into completions; a `Learner` scores tokens and takes optimizer steps; a `Critic` estimates
what is still to be earned.  The loop does
not know which it has.  Engines never see an algorithm: they are handed a loss function that returns a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor

from groupwise.busy import Busy
from groupwise.records import Batch, FinishReason, Floats, Ints
from groupwise.slots import Slot

LossFn = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [B, T], entropies [B, T], batch) -> (the loss as a sum, sums of metrics).

Each metric is a float[2] tensor, (sum, count).  Loss and metrics add up over micro-batches and ranks: whoever calls
this divides by nothing, and the mean of a metric is its sum over its count once everything is added.
"""

Snapshot = Callable[[Path], None]
"""A copy of a state, as what writes it into an empty folder; may be called from another thread."""

ValueLossFn = Callable[[Tensor, Batch], Tensor]
"""(critic values [B, T], batch) -> the critic's loss as a sum."""


_ONE_DISTRIBUTION = (
    "completions would be drawn from another distribution than the one that training scores, so that the ratio of the "
    "policy to itself is not 1; accepted: temperature. Leave it out"
)
_OWN_END = (
    "a completion has to end with a token that the policy drew, or it never learns to stop; name the tokens that end "
    "one as eos_token_id in the model's generation_config.json, and bound the length with sampling.max_tokens"
)


class Sampling(Slot):
    """How completions are drawn.  Log-probabilities are those of the distribution drawn from."""

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("min_p", "typical_p", "epsilon_cutoff", "logit_bias", "bad_words_ids"), _ONE_DISTRIBUTION),
        **dict.fromkeys(
            ("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size"),
            f"{_ONE_DISTRIBUTION}, and discourage repetition with a reward",
        ),
        **dict.fromkeys(("stop", "stop_strings", "stop_sequences", "stop_token_ids"), _OWN_END),
    }

    max_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens, the stop token included."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Logits are divided by this; 0 means greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the most likely tokens whose probabilities reach this sum; 1 keeps all (required in training)."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many most likely tokens; 0 keeps all (required in training)."""


Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Optimizer(Slot):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(default=1e-6, ge=0.0)
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of AdamW's running averages of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay of all parameters."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """The gradient is scaled down to this global L2 norm."""
    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from its peak to 0 at the last update."""


@dataclass(frozen=True, slots=True)
class Request:
    """A whole group: one prompt and a random key for each completion wanted."""

    prompt: Ints
    """int32[P], P >= 1."""
    keys: tuple[int, ...]
    """One 64-bit key (`seeding.key`) per completion; a completion depends on its prompt, its key and the weights,
    not on what else is sampled beside it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler says: R tokens, the stop token included when there was one."""

    tokens: Ints
    """int32[R]"""
    logprobs: Floats
    """float32[R]: natural logarithm, of the tempered distribution the token was drawn from."""
    entropies: Floats | None
    """float32[R]: entropy of that distribution, in nats; None of a sampler that does not say."""
    finish_reason: FinishReason
    policy_version: int
    """The `version` last passed to `Sampler.load` when the first token was drawn."""


class Sampler(Protocol):
    """Draws completions from the current policy."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """For each request, its completions in the order of its keys."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the learner's weights; `version` is the number of training steps they have seen."""
        ...


@runtime_checkable
class Running(Protocol):
    """What some samplers need: a server beside this process, for as long as the run lasts.

    It may be asked for completions while the learner trains, from other threads and several at a time.  Weights that
    are loaded meanwhile may draw the later tokens of completions under way, which say what drew their first."""

    busy: Busy
    """With what it was asked for."""

    def running(self, folder: Path, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Everything that it needs, inside; `folder` is the run's, and `say` is told what is waited for."""
        ...


@dataclass(frozen=True)
class Serving:
    """What a sampler with a model of its own has to know of the run."""

    model: str
    """Folder or hub id of the policy's first weights."""
    dtype: torch.dtype
    """Of the learner's weights."""
    mixed: bool
    """Whether the learner takes matrix products in bfloat16."""
    device: torch.device
    """The learner's."""
    threads: int
    """CPU threads of this process."""
    stop_ids: Sequence[int]
    """Tokens that end a completion."""
    temperature: float
    """That the learner scores at."""
    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    """`Learner.weights`."""
    logprobs: Callable[[Batch], Tensor]
    """`Learner.logprobs`."""
    loaded: Callable[[int], None] = lambda version: None
    """Told the version of weights that were taken over."""


MakeSampler = Callable[[Serving], Sampler]
"""What `engine.sampler` holds."""


class Learner(Protocol):
    """Scores tokens and takes optimizer steps."""

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """float[B, T] on the CPU: log-probability of each token under the policy (or the reference policy), after
        temperature; 0 where `batch.loss_mask` is False.  No gradient."""
        ...

    def update(self, batch: Batch, loss: LossFn, *, per_token: bool = False) -> dict[str, float]:
        """One optimizer step on the sum of `loss` over the batch; the metrics, as means.

        `per_token` says that no term of the loss looks at more than one token, so that rows may be cut as well."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Names, as `save_pretrained` writes them, and tensors of the policy."""
        ...

    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference."""
        ...

    def snapshot(self) -> Snapshot:
        """A copy of everything needed to continue exactly: weights, optimizer, schedule.  Later updates leave it."""
        ...

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote."""
        ...


class Processes(Protocol):
    """What runs an engine outside this process, and can be lost."""

    restarts: int
    """How often a learner that is lost may be started anew in a run."""

    def restart(self) -> None:
        """Start the learner anew, with the weights that the run began with; a checkpoint is restored afterwards.

        Raises:
            EngineError: it cannot be started.
        """
        ...

    def idle(self) -> dict[str, float]:
        """The share of the time since this was last asked in which each side waited: `idle/sampler`, `idle/learner`."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class Critic(Protocol):
    """Estimates what is still to be earned at each token (PPO)."""

    def values(self, batch: Batch) -> Tensor:
        """float[B, T] on the CPU: the estimate before each token is chosen; 0 where `batch.loss_mask` is False."""
        ...

    def update(self, batch: Batch, loss: ValueLossFn) -> dict[str, float]:
        """One optimizer step on the sum of `loss` over the batch; its metrics begin with `critic/`."""
        ...

    def snapshot(self) -> Snapshot:
        """A copy of everything needed to continue exactly."""
        ...

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote."""
        ...
