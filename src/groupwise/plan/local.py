"""What a step of the local engine takes: its phases, and the memory of each, from a rehearsal of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.config import Config
from groupwise.footprint import footprint
from groupwise.plan.kernels import MAPPED_BYTES, Heap, Kernel, Work
from groupwise.plan.rehearsal import Rehearsed, Stage
from groupwise.plan.sampling import Lengths, Phase, sampling_phases
from groupwise.resources import Memory

WEIGHTS_AT_ONCE = 2**24
"""More are stepped in the same time each."""
OPTIMIZER_BYTES = 48
"""Read and written for each trained float32 weight: its norm and clipping, AdamW's averages, zeroing."""


SPLIT, SPLIT_WITH_ADAPTER = 1.25, 1.6
"""Small memory that the C library holds for what is used of it, more where an adapter's many tensors lie between; these
and the next as `benchmarks/plan.py` found."""
LIBRARIES = 95 * 2**20
"""What torch and pyarrow take once products are multiplied and rollouts are written."""


@dataclass(frozen=True)
class LocalStep:
    """A step of a run on the local engine."""

    memory: Memory
    phases: tuple[Phase, ...]
    layers: int
    microbatch: int
    """Tokens of the largest micro-batch."""
    rows: int
    """B, completions written at a time."""
    held: dict[str, int]
    """Bytes by what they are, for the reader."""
    heaps: dict[str, Heap]
    """Memory that comes and goes, by part of a run."""
    copied: list[int]
    """Bytes of each tensor of a checkpoint."""

    @property
    def resident(self) -> dict[str, int]:
        """The most bytes that the system counts for each part of a run on a CPU.

        What is small and free stays with the C library, split up: it serves the other parts, but not all of it.
        """
        memory, small = self.memory, max(heap.most_small for heap in self.heaps.values())
        large = sum(size for size in self.copied if size >= MAPPED_BYTES)
        there = memory.resting + LIBRARIES
        split = SPLIT_WITH_ADAPTER if memory.adapted else SPLIT
        # Copies of small weights lie where activations were; the largest weight is once more in the file's buffer.
        saving = there + round(split * max(small, memory.copies - large)) + large + max(self.copied)
        there += memory.copies * memory.saves_meanwhile + round(split * small)
        return {**{name: there + heap.most_large for name, heap in self.heaps.items()}, "checkpoint": saving}


def local_step(config: Config, sketched: PreTrainedModel, lengths: Lengths) -> LocalStep:
    """Rehearse a step of a settled configuration.

    Args:
        config: with `engine.train_tokens`, `sample_tokens` and `dtype` chosen.
        sketched: the model on the meta device; it is left as it is.
    """
    engine, needs = config.engine, config.algorithm.needs(config.updates_per_step)
    critic = config.algorithm.critic is not None
    stage = partial(Stage, dtype=engine.weights, checkpointing=engine.gradient_checkpointing,
                    mixed=engine.dtype == "mixed")  # fmt: skip
    policy = stage(copy.deepcopy(sketched), lora=config.lora)
    scored = [name for name in ("old_logprobs", "ref_logprobs") if name in needs]
    mean, most = _updates(policy, config, lengths, scoring=bool(scored))
    judge = _updates(stage(copy.deepcopy(sketched)), config, lengths, scoring=True, head=False) if critic else None
    sampling, heap, rows, held = sampling_phases(policy, sketched, config, lengths)
    heaps = {"sampling": heap, "update": most.rehearsed.heap}
    phases = [*sampling, *(Phase(name, mean.rehearsed.forward.times(mean.count)) for name in scored)]
    phases.append(Phase("update", mean.rehearsed.update.times(mean.count)))
    phases.append(Phase("optimizer", optimizer(mean.rehearsed.trained, engine.weights).times(config.updates_per_step)))
    if judge is not None:
        value, heaps["critic"] = judge[0], judge[1].rehearsed.heap
        phases.append(Phase("values", value.rehearsed.forward.times(value.count)))
        phases.append(Phase("critic", value.rehearsed.update.times(value.count)))
        steps = optimizer(value.rehearsed.trained, engine.weights).times(config.updates_per_step)
        phases.append(Phase("critic optimizer", steps))
    working = max(most.rehearsed.peak, 0 if judge is None else judge[1].rehearsed.peak)
    memory = footprint(
        config,
        sketched,
        tokens=most.tokens,
        adapter=None if config.lora is None else most.rehearsed.trained,
        ranks=0,
        sampling=heap.most,
        working=working,
        saves_meanwhile=0 < config.checkpoint.every < config.steps,
    )
    held |= {"activations": most.rehearsed.kept, "logits": most.rehearsed.head}
    layers = sketched.config.get_text_config().num_hidden_layers
    trained = [p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad]
    judging = [p.numel() * p.element_size() for p in sketched.parameters()] * critic
    return LocalStep(memory, tuple(phases), layers, most.tokens, rows, held, heaps, 3 * (trained + judging))


@dataclass(frozen=True)
class _Updates:
    rehearsed: Rehearsed
    count: float
    """Micro-batches of such a size in a step."""
    tokens: int


def _updates(
    stage: Stage, config: Config, lengths: Lengths, *, scoring: bool, head: bool = True
) -> tuple[_Updates, _Updates]:
    """The largest micro-batch, and how often its work is done in a step: of usual completions, and of the longest."""

    def of(response: int) -> _Updates:
        groups, rows = microbatch(config, lengths.prompt, response)
        found = stage.update(groups, lengths.prompt, rows, response, head=head, scoring=scoring)
        count = config.prompts_per_step * config.group_size / (groups * rows)
        return _Updates(found, count, groups * (lengths.prompt + rows * response))

    usual = of(lengths.completion)
    return usual, usual if lengths.longest == lengths.completion else of(lengths.longest)


def microbatch(config: Config, prompt: int, response: int) -> tuple[int, int]:
    """(groups, completions of each) of a full micro-batch, as `packing.packed_parts` fills it."""
    budget, group = config.engine.train_tokens, config.group_size
    whole = budget // (prompt + group * response)
    if whole:
        return min(whole, math.ceil(config.prompts_per_step / config.updates_per_step)), group
    return 1, max(1, min(group, (budget - prompt) // response))


def optimizer(trained: int, dtype: torch.dtype) -> Work:
    """Clipping and AdamW's step of so many weights."""
    size, work = min(trained, WEIGHTS_AT_ONCE), Work()
    kernel = Kernel("adamw", str(dtype).removeprefix("torch."), (size,), 0.0, size * OPTIMIZER_BYTES)
    work.kernels[kernel], work.examples[kernel] = 1, partial(_adamw, size, dtype)
    return work.times(trained / size)


def _adamw(size: int, dtype: torch.dtype) -> Callable[[], Any]:
    parameter = nn.Parameter(torch.zeros(size, dtype=dtype))
    adamw = torch.optim.AdamW([parameter], fused=True)

    def launch() -> None:
        parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_([parameter], 1.0)
        adamw.step()

    return launch
