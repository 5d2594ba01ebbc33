"""Everything about a run that can be known before the first token is sampled, looked at before any weight is read.

Each check stands for itself: what it objects to goes into `Findings`, and a check whose subject could not be read is
left out.  What runs, but is rarely meant, is a caution.
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

from groupwise import algorithms
from groupwise.chat import Chat
from groupwise.config import Config, Evaluation
from groupwise.engines.vllm import Vllm
from groupwise.errors import CheckpointError, ConfigError, Findings
from groupwise.losses import Reinforce
from groupwise.model import check_tokenizer, context_length, sketch, stop_token_ids
from groupwise.model_files import check_weights, load_tokenizer
from groupwise.resources import (
    available_memory,
    checkpoint_bytes,
    checkpoints_at_once,
    existing,
    free_disk,
    in_words,
    memory_of,
    parameter_count,
)
from groupwise.rewards import Reward
from groupwise.shaping import SoftOverlong
from groupwise.slots import Slot
from groupwise.tasks import Task

FAR_TOO_LARGE = 2
"""Completions may be shorter than they could be: only a run that needs this many times the free memory is refused."""
LOWEST_TEMPERATURE = 0.1
"""Below this a model rarely says two different things."""
STARTS_A_SERVER = {"python", "dtype", "max_sequences", "arguments", "environment"}
"""Settings of vLLM that its command line is made of."""
BYTES_PER_TOKEN = 12
"""Of a rollout on disk: the token, its log-prob, its mask and its text."""


@dataclass(frozen=True)
class Outline:
    """A model as far as it is known without its weights."""

    model: PreTrainedModel | None = None
    """On the meta device; None when its config cannot be read."""
    chat: Chat | None = None
    """None when config or tokenizer cannot be read."""

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion together, or None when the model does not say."""
        return None if self.model is None else context_length(self.model)


def outline(path: str, findings: Findings) -> Outline:
    """The model at `path`, its files looked through."""
    model, tokenizer, chat = None, None, None
    with findings:
        model = sketch(path)
    if model is not None:  # what is no model needs neither weights nor a tokenizer
        with findings:
            check_weights(path)
        with findings:
            tokenizer = load_tokenizer(path)
    if model is not None and tokenizer is not None:
        with findings:
            check_tokenizer(model, tokenizer)
        with findings:
            chat = Chat(tokenizer, stop_token_ids(model, tokenizer))
    return Outline(model, chat)


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
    if known.model is None:
        return []
    kept, dtype, kl = config.checkpoint, config.engine.weights, config.algorithm.kl
    moves = kl is not None and kl.refresh_every > 0
    each = checkpoint_bytes(known.model, dtype, critic=config.algorithm.critic is not None, reference=moves)
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
    if known.model is None or available is None:
        return []
    rollouts = math.ceil(config.prompts_per_step / config.updates_per_step) * config.group_size
    memory = memory_of(
        known.model,
        config.engine.weights,
        tokens=min(config.engine.train_tokens, rollouts * config.sampling.max_tokens),
        reference="ref_logprobs" in config.algorithm.needs(config.updates_per_step),
        critic=config.algorithm.critic is not None,
        checkpointing=config.engine.gradient_checkpointing,
        ranks=config.engine.learner.split(),
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


def cautions(config: Config) -> list[str]:
    """What will run, but is rarely meant or has no effect."""
    found = (
        *algorithms.cautions(config.algorithm),
        *_without_effect(config),
        *_evaluation_without_effect(config.evaluation),
    )
    return [text for applies, text in found if applies]


def _without_effect(config: Config) -> Iterator[tuple[bool, str]]:
    # What a run wrote down has every setting, so that one was set does not yet mean that it was meant.
    meant = _changed(config)
    algorithm, updates = config.algorithm, config.steps * config.updates_per_step
    yield (
        algorithm.filter != "dynamic_sampling" and "sampling_rounds" in meant,
        "sampling_rounds has no effect without algorithm.filter: dynamic_sampling",
    )
    yield (
        algorithm.critic is None and "critic_optimizer" in meant,
        "critic_optimizer has no effect without algorithm.critic",
    )
    yield (
        algorithm.supervision == "process"
        and not any(getattr(reward.use, "gives_steps", False) for reward in config.rewards),
        "algorithm.supervision: process learns from the rewards of steps, and none of these rewards is known to give "
        "them: add a process_reward_model, or return StepRewards from a function that says gives_steps",
    )
    kl = algorithm.kl
    yield (
        kl is not None and kl.to == "old" and config.updates_per_step == 1,
        "algorithm.kl.to: old is the current policy when updates_per_step is 1: the KL has no effect",
    )
    yield (
        kl is not None and kl.coef == 0,
        "algorithm.kl has no effect with coef: 0, and is not measured; set kl: none, or a coef above 0",
    )
    yield (
        config.ahead > 0 and isinstance(algorithm.surrogate, Reinforce) and not algorithm.weighs_age,
        f"ahead: {config.ahead}; what an older policy sampled is trained on as if the current one had: this surrogate "
        "has neither a ratio nor a correction beside it; set algorithm.correction: importance",
    )
    yield (
        config.ahead > 0 and algorithm.filter == "dynamic_sampling",
        f"ahead: {config.ahead}; what dynamic sampling draws beyond a step is thrown away: it would be too old for "
        "the next one",
    )
    shaping = algorithm.shaping
    yield (
        isinstance(shaping, SoftOverlong)
        and shaping.limit is not None
        and config.sampling.max_tokens <= shaping.limit * (1 - shaping.cache_fraction),
        f"algorithm.shaping has no effect: completions end at sampling.max_tokens: {config.sampling.max_tokens}, "
        "before the penalty begins; lower shaping.limit, or leave it out",
    )
    yield (
        config.sampling.temperature < LOWEST_TEMPERATURE,
        f"sampling.temperature: {config.sampling.temperature} makes the completions of a group nearly all the same, "
        "and such a group teaches nothing",
    )
    yield (
        config.engine.dtype == "bfloat16",
        "engine.dtype: bfloat16 holds the weights themselves in bfloat16: small optimizer steps round away "
        "(1e-6 nearly always); use float32 unless memory forbids",
    )
    yield (
        config.curriculum is not None and config.group_size == 1,
        "curriculum takes every prompt for always or never solved when group_size is 1",
    )
    server = config.engine.sampler
    for name in sorted(STARTS_A_SERVER & _changed(server)) if isinstance(server, Vllm) and server.url else ():
        yield True, f"engine.sampler.{name} has no effect with url: whoever starts that server decides"
    for path, slot in (("evaluation.every", config.evaluation), ("checkpoint.every", config.checkpoint)):
        yield (
            slot.every > config.steps and "every" in _changed(slot),
            f"{path}: {slot.every} is never reached in steps: {config.steps}; only the end counts",
        )
    common = math.lcm(config.evaluation.every, config.checkpoint.every)  # 0 where one of them is
    for name in sorted({"keep_last", "keep_every", "keep_best"} & _changed(config.checkpoint)):
        yield (
            config.checkpoint.every == 0,
            f"checkpoint.{name} has no effect with checkpoint.every: 0: there is one checkpoint, at the end",
        )
    yield (
        config.checkpoint.keep_best > 0 and not 0 < common < config.steps,
        "checkpoint.keep_best has no effect: no checkpoint has a score, for none before the last is saved at a step "
        f"that is evaluated; set evaluation.every (now {config.evaluation.every}) to checkpoint.every, or to a part "
        "of it",
    )
    yield (
        config.optimizer.warmup_updates > updates,
        f"optimizer.warmup_updates: {config.optimizer.warmup_updates} is more than the run's {updates} updates: "
        "the learning rate never reaches its peak",
    )


def _evaluation_without_effect(evaluation: Evaluation) -> Iterator[tuple[bool, str]]:
    yield (
        evaluation.samples > 1 and evaluation.temperature == 0,
        "evaluation.samples has no effect at evaluation.temperature: 0: all answers are the same",
    )
    yield (
        evaluation.temperature == 0 and bool({"top_p", "top_k"} & _changed(evaluation)),
        "evaluation.top_p and evaluation.top_k have no effect at evaluation.temperature: 0",
    )
    for name in sorted(_changed(evaluation) - {"data"}) if evaluation.data is None and not evaluation.fraction else ():
        yield True, f"evaluation.{name} has no effect without evaluation.data or evaluation.fraction"


def _changed(slot: Slot) -> set[str]:
    """The settings of a slot that differ from their defaults."""
    return {name for name, field in type(slot).model_fields.items() if getattr(slot, name) != field.default}
