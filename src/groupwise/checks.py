"""Everything about a run that can be known before the first token is sampled, looked at before any weight is read.

Each check stands for itself: what it objects to goes into `Findings`, and a check whose subject could not be read is
left out.  What runs, but is rarely meant, is a caution; those of the settings alone are in `cautions.py`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from groupwise.adapters import Lora, adapter_count
from groupwise.chat import Chat
from groupwise.config import Config
from groupwise.errors import CheckpointError, ConfigError, Findings
from groupwise.footprint import beside, footprint
from groupwise.model import check_tokenizer, context_length, sketch, stop_token_ids
from groupwise.model_files import check_weights, load_tokenizer
from groupwise.resources import (
    available_memory,
    checkpoint_bytes,
    checkpoints_at_once,
    existing,
    free_disk,
    in_words,
    parameter_count,
)
from groupwise.rewards import Reward
from groupwise.tasks import Task

FAR_TOO_LARGE = 2
"""Completions may be shorter than they could be: only a run that needs this many times the free memory is refused."""
BYTES_PER_TOKEN = 12
"""Of a rollout on disk: the token, its log-prob, its mask and its text."""


@dataclass(frozen=True)
class Outline:
    """A model as far as it is known without its weights."""

    model: PreTrainedModel | None = None
    """On the meta device; None when its config cannot be read."""
    chat: Chat | None = None
    """None when config or tokenizer cannot be read."""
    adapter: int | None = None
    """How many weights the adapter has that is trained in the model's place; None: there is none."""

    def lacks(self, lora: Lora | None) -> bool:
        """Whether it is not known how much is trained: its adapter is wrong, which was said."""
        return lora is not None and self.adapter is None

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion together, or None when the model does not say."""
        return None if self.model is None else context_length(self.model)


def outline(path: str, findings: Findings, lora: Lora | None = None) -> Outline:
    """The model at `path`, its files looked through, and the adapter that it is to carry."""
    model, tokenizer, chat, adapter = None, None, None, None
    with findings:
        model = sketch(path)
    if model is not None:  # what is no model needs neither weights nor a tokenizer
        with findings:
            check_weights(path)
        with findings:
            tokenizer = load_tokenizer(path)
        with findings:
            adapter = None if lora is None else adapter_count(model, lora)
    if model is not None and tokenizer is not None:
        with findings:
            check_tokenizer(model, tokenizer)
        with findings:
            chat = Chat(tokenizer, stop_token_ids(model, tokenizer))
    return Outline(model, chat, adapter)


def check_it_learns(config: Config, rewards: Sequence[Reward]) -> None:
    """Refuse a run after which the weights would be what they were.

    Raises:
        ConfigError: the learning rate is 0, or every completion earns the same whatever it says.
    """
    findings, algorithm = Findings(), config.algorithm
    critic_learns = algorithm.critic is not None and config.critic_optimizer.learning_rate > 0
    with findings:
        if config.optimizer.learning_rate == 0 and not critic_learns:
            raise ConfigError(
                "optimizer.learning_rate: 0; the weights would end as they began: set it above 0 (the default is "
                "1e-6), or measure the model with `groupwise eval`"
            )
    with findings:
        undecided = algorithm.entropy is not None and algorithm.entropy.acting
        other = algorithm.shaping is not None or algorithm.supervision == "process" or undecided
        if not other and not any(reward.weight for reward in rewards):
            raise ConfigError(
                f"rewards: the weight of {', '.join(reward.title for reward in rewards)} is 0, so every completion "
                "earns the same and nothing would be learned; set the `weight` of one above or below 0"
            )
    findings.settle()


def check_folder(folder: Path) -> None:
    """Make sure that a run can write into the folder, which need not exist.

    Raises:
        CheckpointError: it, or the nearest folder above it that exists, is a file or is read-only.
    """
    place = existing(folder)
    problem = "is not a folder" if not place.is_dir() else "" if os.access(place, os.W_OK) else "cannot be written to"
    if problem:
        raise CheckpointError(f"output: {folder}; {place} {problem}; accepted: a folder, or one to be made: output=DIR")


def check_disk(config: Config, known: Outline, folder: Path) -> list[str]:
    """Make sure that the checkpoints asked for fit where the run is to be written; cautions.

    Raises:
        CheckpointError: they do not.
    """
    if known.model is None or known.lacks(config.lora):
        return []
    kept, dtype, kl = config.checkpoint, config.engine.weights, config.algorithm.kl
    moves = kl is not None and kl.refresh_every > 0
    critic = config.algorithm.critic is not None
    each = checkpoint_bytes(known.model, dtype, critic=critic, reference=moves, adapter=known.adapter)
    best = kept.keep_best if config.evaluation.every else 0
    count = checkpoints_at_once(config.steps, kept.every, kept.keep_last, kept.keep_every, best)
    needed, free = count * each + parameter_count(known.model) * dtype.itemsize, free_disk(folder)
    if needed > free:
        asked = {"keep_last": kept.keep_last, "keep_every": kept.keep_every, "keep_best": best}
        rules = ", ".join(f"{name}: {value}" for name, value in asked.items() if value)
        fewer = "keep fewer checkpoints, " if count > 2 else ""
        raise CheckpointError(
            f"output: {folder}; the trained model and {count} checkpoints at a time (checkpoint.every: {kept.every}, "
            f"{rules}) of {in_words(each)} each need {in_words(needed)}, and {in_words(free)} is "
            f"free there; {fewer}make room, or choose another disk with output=DIR"
        )
    tokens = config.steps * config.prompts_per_step * config.group_size * config.sampling.max_tokens
    rollouts = tokens * BYTES_PER_TOKEN
    if needed + rollouts <= free:
        return []
    return [
        f"output: {folder}; {in_words(free - needed)} is free beside the checkpoints, and completions as long as "
        f"sampling.max_tokens: {config.sampling.max_tokens} make {in_words(rollouts)} of rollouts in the whole run"
    ]


def check_memory(config: Config, known: Outline, device: torch.device) -> list[str]:
    """Compare what training needs with the memory that is free; cautions.

    Raises:
        ConfigError: it needs clearly more.
    """
    available = available_memory(device)
    if known.model is None or available is None or known.lacks(config.lora):
        return []
    rollouts = math.ceil(config.prompts_per_step / config.updates_per_step) * config.group_size
    memory = footprint(
        config,
        known.model,
        tokens=min(config.engine.train_tokens, rollouts * config.sampling.max_tokens),
        adapter=known.adapter,
        **beside(config, gpu=device.type == "cuda"),
    )
    if memory.needed <= available:
        return []
    remedies = memory.remedies(available)
    found = (
        f"engine: training {config.model} ({memory.parameters:,} parameters) in {config.engine.dtype} needs about "
        f"{in_words(memory.fixed)} for weights, gradients, AdamW{' and others' if memory.others else ''}, and up to "
        f"{in_words(memory.needed - memory.fixed)} for a micro-batch of {memory.tokens} tokens; {in_words(available)} "
        f"is free on {device}; what helps: {', or '.join([*remedies, 'a smaller model' if not remedies else ''])}"
    ).removesuffix(", or ")
    if memory.fixed > available or memory.needed > FAR_TOO_LARGE * available:
        raise ConfigError(found)
    return [found]


def data_cautions(config: Config, task: Task, held_out: Task | None) -> Iterator[str]:
    """What is unusual about the prompts, or about a setting of theirs that has no effect."""
    sides = {"data": (config.data, task), "evaluation.data": (config.evaluation.data, held_out)}
    for path, (data, side) in sides.items():
        if side is None:
            continue
        asked = [json.dumps(side.prompt_of(row), sort_keys=True, default=str) for row in side.rows]
        if repeated := len(asked) - len(set(asked)):
            yield f"{path}: {repeated} of {len(asked)} prompts are there more than once, and count as often"
        if data is not None and data.split != "train" and Path(data.path).is_file():
            yield f"{path}.split: {data.split} has no effect: {data.path} is a file, which has no splits"
