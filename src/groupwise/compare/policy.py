"""A policy that the run has kept, for what needs its weights: log-probs of the stored tokens, gradients of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from groupwise.advantages import Array
from groupwise.compare.stored import Weights
from groupwise.config import Config
from groupwise.devices import find_device
from groupwise.engines.local import local_engine
from groupwise.engines.local_learner import LocalLearner
from groupwise.errors import ConfigError
from groupwise.records import Batch, Floats, Rollout, collate
from groupwise.resources import available_memory, in_words
from groupwise.settling import MOST_SAMPLE_TOKENS, MOST_TRAIN_TOKENS

AT_ONCE = 2**22
"""Entries of a gradient that are multiplied in float64 at one time."""


def load(config: Config, weights: Weights) -> LocalLearner:
    """The run's learner with some of its weights; its reference is the model that the run began with.

    The device is chosen anew, as the run may have been on another machine.

    Raises:
        GroupwiseError: the model cannot be loaded, or the checkpoint is not its own.
    """
    merged = _is_merged(weights)
    engine = local_engine(
        weights.path if merged else config.model,
        dtype=config.engine.weights,
        device=find_device("auto", "engine.device"),
        max_batch_tokens=config.engine.sample_tokens or MOST_SAMPLE_TOKENS,
        microbatch_tokens=config.engine.train_tokens or MOST_TRAIN_TOKENS,
        optimizer=config.optimizer,
        temperature=config.sampling.temperature,
        total_updates=config.steps * config.updates_per_step,
        reference=config.model,
        gradient_checkpointing=config.engine.gradient_checkpointing,
        lora=None if merged else config.lora,
        seed=config.seed,
        mixed=config.engine.dtype == "mixed",
    )
    assert isinstance(engine.learner, LocalLearner), "it is in this process"
    if weights.is_checkpoint:
        engine.learner.restore(Path(weights.path) / "learner")
    return engine.learner


def moved(config: Config, learner: LocalLearner, weights: Weights, target: Weights) -> LocalLearner:
    """A learner with other weights of the run than it has: the same one, where these are in a checkpoint.

    Raises:
        GroupwiseError: see `load`.
    """
    if target == weights:
        return learner
    if not target.is_checkpoint or _is_merged(weights):
        return load(config, target)
    learner.restore(Path(target.path) / "learner")
    return learner


def _is_merged(weights: Weights) -> bool:
    """Whether these are in a model folder of their own, an adapter added."""
    return not weights.is_checkpoint and weights.steps_done > 0


def logprobs_of(learner: LocalLearner, rollouts: Sequence[Rollout], *, reference: bool = False) -> list[Floats]:
    """float32[T] of each rollout, under the policy or its reference."""
    rows = learner.logprobs(collate(rollouts), reference=reference).numpy()
    return [row[: len(rollout.tokens)] for row, rollout in zip(rows, rollouts, strict=True)]


def gradients(learner: LocalLearner, rollouts: Sequence[Rollout], pushes: Sequence[Sequence[Floats]]) -> Array:
    """The inner products [n, n] of the gradients of the trained weights that n pushes make.

    By the chain rule a gradient is the sum of push times d log pi over the tokens.  So at the weights that sampled it
    is the very gradient of the first update, and at others it says what the same pushes would do there.

    Args:
        learner: any weights of the run.
        rollouts: of one step.
        pushes: for each of the n, float[T] for each rollout.

    Raises:
        ConfigError: the memory that is free does not hold so many gradients.
    """
    needed, free = len(pushes) * learner.gradient_bytes, available_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise ConfigError(
            f"--algorithms: the gradients of {len(pushes)} algorithms need {in_words(needed)}, and {in_words(free)} is "
            "free; compare fewer at a time, or pass --no-gradients"
        )

    def linear(logprobs: Tensor, entropies: Tensor, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return -(part.advantages * logprobs).sum(), {}

    found: list[list[Tensor]] = []
    for push in pushes:
        rows = [dataclasses.replace(r, advantages=each) for r, each in zip(rollouts, push, strict=True) if each.any()]
        found.append(learner.gradient(collate(rows), linear, per_token=True))
    return products(found)


def products(vectors: Sequence[Sequence[Tensor]]) -> Array:
    """float64[n, n]: the inner products of n vectors, each of them given in the same pieces."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for pieces in zip(*vectors, strict=True):
        for parts in zip(*(piece.flatten().split(AT_ONCE) for piece in pieces), strict=True):
            rows = torch.stack(parts).double()
            total += rows @ rows.T
    return np.asarray(total.numpy())
