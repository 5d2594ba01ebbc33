"""What a run of this configuration will take here, from a look at its files and a rehearsal of a step.

No weights are read: the model is its config.json, the prompts are tokenised, and nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from groupwise.chat import Chat
from groupwise.checks import outline
from groupwise.config import Config
from groupwise.data import load_task
from groupwise.devices import find_device
from groupwise.errors import ConfigError, Findings
from groupwise.plan.calibrate import calibrate
from groupwise.plan.local import LocalStep, local_step
from groupwise.plan.machine import Measured, recall, remember
from groupwise.plan.sampling import Lengths
from groupwise.resources import FEWEST_TOKENS, available_memory
from groupwise.settling import settle

MOST_PROMPTS = 256
"""So many prompts tell how long prompts are."""
STEP_SECONDS = 0.02
"""A step's own bookkeeping: credit, metrics, rollouts on disk.  What rewards take is not counted."""
Changes = dict[str, Any]
"""Settings by their paths."""


@dataclass(frozen=True)
class Subject:
    """What is planned: the settings, none left open, the model's shape and the lengths."""

    config: Config
    model: PreTrainedModel
    """On the meta device."""
    lengths: Lengths


@dataclass(frozen=True)
class Outlook:
    """What a step takes on this machine."""

    subject: Subject
    step: LocalStep
    seconds: dict[str, float]
    """By phase."""
    available: int | None
    """Free bytes, or None where nobody says."""
    calibrated: bool

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak(self) -> int:
        """The most bytes that the run holds, beside the process with its libraries."""
        return max(self.peaks.values())

    @property
    def peaks(self) -> dict[str, int]:
        """The same of each part of a run."""
        on_cpu = find_device(self.subject.config.engine.device, "engine.device").type == "cpu"
        return self.step.resident if on_cpu else self.step.memory.peaks

    @property
    def fits(self) -> bool:
        return self.available is None or self.peak <= self.available


def subject_of(config: Config, prompt_tokens: int | None = None, completion_tokens: int | None = None) -> Subject:
    """Look at a run's files.

    Args:
        config: the run.
        prompt_tokens: length of a prompt; None reads the data and measures.
        completion_tokens: mean length of a completion; None takes all to be as long as they may be.

    Raises:
        GroupwiseError: the model or the data cannot be read, or a completion is to be longer than it may be.
    """
    findings, config = Findings(), config.resolve()
    known, most = outline(config.model, findings, config.lora), config.sampling.max_tokens
    lengths = None
    with findings:
        if completion_tokens is not None and not 1 <= completion_tokens <= most:
            raise ConfigError(
                f"--completion-tokens: {completion_tokens}; completions have 1 to sampling.max_tokens: {most} tokens; "
                "give their mean, or raise that"
            )
    with findings:
        if prompt_tokens is not None:
            lengths = (prompt_tokens, prompt_tokens)
        elif known.chat is not None:
            lengths = _prompt_lengths(config, known.chat)
    findings.settle()
    assert known.model is not None and lengths is not None, "settled"
    config, _ = settle(config, known, find_device(config.engine.device, "engine.device"))
    return Subject(config, known.model, Lengths(*lengths, completion_tokens or most, most))


def _prompt_lengths(config: Config, chat: Chat) -> tuple[int, int]:
    """(mean, longest) of some prompts."""
    task = load_task(config.data, config.rewards)
    apart = max(1, len(task.rows) // MOST_PROMPTS)
    counted = [len(chat.prompt(task.prompt_of(row))) for row in task.rows[::apart]]
    if not counted:
        raise ConfigError("data: has no rows, so nobody knows how long prompts are; give --prompt-tokens")
    return round(sum(counted) / len(counted)), max(counted)


def look_ahead(subject: Subject, *, measure: bool = False, say: Callable[[str], None] = lambda text: None) -> Outlook:
    """A step of the run on this machine; `measure` times its kernels first, and remembers them."""
    step, threads = local_step(subject.config, subject.model, subject.lengths), torch.get_num_threads()
    machine = recall(threads)
    if measure:
        machine = calibrate([phase.work for phase in step.phases], machine, say)
        say(f"measured in {remember(machine, threads)}")
    available = available_memory(find_device(subject.config.engine.device, "engine.device"))
    return Outlook(subject, step, seconds_of(step, machine), available, machine.calibrated)


def seconds_of(step: LocalStep, machine: Measured) -> dict[str, float]:
    """By phase."""
    found = {
        phase.name: machine.duration(phase.work)
        + phase.decoding_steps * (machine.step_seconds + step.layers * machine.layer_seconds)
        for phase in step.phases
    }
    return {**found, "other": STEP_SECONDS}


def smallest_change(subject: Subject, available: int) -> tuple[Changes, Outlook] | None:
    """The first setting, or settings, with which the run fits, by planning it again; None when none do.

    What changes no result comes first, what changes the run last.
    """
    less_trained: Changes = {}
    for size in _halves(look_ahead(subject).step.microbatch):
        less_trained = {"engine.train_tokens": size}
        if (found := _fitting(subject, less_trained, available)) is not None:
            return less_trained, found
    less_sampled: Changes = {"engine.sample_tokens": FEWEST_TOKENS, **less_trained}
    checkpointing: Changes = {"engine.gradient_checkpointing": True}
    late: Changes = {"checkpoint.every": 0}
    ways = [
        late,
        {**late, **less_trained},
        checkpointing,
        {**less_sampled},
        {**less_sampled, **checkpointing},
        {**less_sampled, **checkpointing, **late},
        {"lora.rank": 16},
        {**less_sampled, **checkpointing, **late, "lora.rank": 16},
        {**less_sampled, **checkpointing, **late, "engine.dtype": "bfloat16"},
    ]
    for way in ways:
        if (found := _fitting(subject, way, available)) is not None:
            return way, found
    return None


def _halves(tokens: int) -> list[int]:
    found: list[int] = []
    while tokens // 2 >= FEWEST_TOKENS:
        tokens //= 2
        found.append(tokens)
    return found


def _fitting(subject: Subject, changes: Changes, available: int) -> Outlook | None:
    """The outlook with these settings, where it fits."""
    other = altered(subject, changes)
    found = None if other is None else look_ahead(other)
    return found if found is not None and found.peak <= available else None


def altered(subject: Subject, changes: Changes) -> Subject | None:
    """The same run with some settings set anew; None where they do not go with its others."""
    try:
        config = changed(subject.config, changes)
    except ConfigError:
        return None
    return Subject(config, subject.model, subject.lengths)


def changed(config: Config, changes: Changes) -> Config:
    """The configuration with some settings, by their paths, set anew."""
    tree = config.model_dump(mode="json")
    for path, value in changes.items():
        place, (*parents, last) = tree, path.split(".")
        for name in parents:
            place[name] = place[name] or {}
            place = place[name]
        place[last] = value
    return Config.parse(tree)
