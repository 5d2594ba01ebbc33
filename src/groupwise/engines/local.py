"""The engine inside this process: one transformers model that samples and learns, weights shared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.adapters import Lora, attach, save_adapter
from groupwise.demands import Demands, Remarks
from groupwise.engines import Critic, Learner, Optimizer, Processes, Sampler
from groupwise.engines.critic import LocalCritic
from groupwise.engines.local_learner import LocalLearner
from groupwise.engines.local_sampler import LocalSampler
from groupwise.engines.ranks import Ranks
from groupwise.meeting import check_alone
from groupwise.model import check_head, check_tokenizer, context_length, load_model, stop_token_ids
from groupwise.model_files import load_tokenizer
from groupwise.slots import Slot


class Local(Slot):
    """This process, with one copy of the weights to sample and to learn."""

    type: Literal["local"] = "local"

    def to_start(self) -> int:
        """How many processes a command has to start."""
        return 1

    def split(self, already: int) -> int:
        """Over how many processes the weights are split; 0: sampler and learner share them."""
        return 0

    def join(self, device: str, dumps: object = None) -> contextlib.AbstractContextManager[None]:
        """There is nobody to meet.

        Raises:
            ConfigError: there is, and all would train the same.
        """
        check_alone("engine.learner: local", "set engine.learner: fsdp, or start it once")
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

    engine: Callable[..., LocalEngine]
    """Sampler and learner around one model; where a rank of several is made in another process, with what `join` found
    there as `ranks`."""
    sampler: Callable[[], Sampler]
    """A sampler around a model of its own."""
    threads: int
    """CPU threads of each."""
    gpu: bool
    """Whether each needs a GPU."""
    ranks: int
    """Over how many processes the learner is split."""
    join: Callable[..., contextlib.AbstractContextManager[Ranks | None]]
    """In a process made for the learner, or for a rank of it: meet the others, told with `dumps` (see `ranks.join`)."""


class Here(Slot):
    """Everything in this process, around one model."""

    type: Literal["local"] = "local"

    def refusals(self, demands: Demands) -> Remarks:
        """Sampling ahead: there is one model; see `Refuses.refusals`."""
        yield (
            demands.ahead > 0 and demands.own_sampler,
            f"ahead: {demands.ahead}; with engine.placement: local sampler and learner share one model, which cannot "
            "be sampled from while it is trained: set engine.sampler: vllm or engine.placement: ray, or ahead: 0",
        )

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
    make: Callable[..., Learner] = LocalLearner,
    make_critic: Callable[..., Critic] = LocalCritic,
) -> LocalEngine:
    """Load a model once, to sample and to learn; the arguments are those of `load_model` and of the two classes.

    `reference` is a folder or hub id; that model is loaded when it is first asked for.  With `critic`, the optimizer of
    one, a value network of the same architecture and first weights is made as well.  With `lora`, an adapter is
    trained, whose first values `seed` decides; the reference is then the model without it, whatever `reference` says,
    and the critic is trained whole.  `make` takes what `LocalLearner` takes, and `make_critic` what `LocalCritic` does.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded or served.
    """
    policy, tokenizer, stop_ids = load_policy(model, dtype, device, gradient_checkpointing)
    if lora is not None:
        attach(policy, lora, seed)
    learner = make(
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
        judge = make_critic(
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
