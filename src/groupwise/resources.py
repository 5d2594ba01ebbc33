"""What a run needs of memory and disk, estimated before it begins, and what there is."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux says what a container may have."""
FEWEST_TOKENS = 256
"""A micro-batch below this is no way out: it trains slower than anybody waits for."""


@dataclass(frozen=True)
class Memory:
    """The memory of an update, in bytes."""

    parameters: int
    """Of the policy, weights that are tied counted once."""
    width: int
    """Bytes of one value."""
    layers: int
    token_values: int
    """Activations of one token that one layer keeps for the backward pass."""
    token_values_checkpointed: int
    """The same with gradient checkpointing."""
    tokens: int
    """Of one micro-batch."""
    reference: bool = False
    critic: bool = False
    checkpointing: bool = False
    trained: int | None = None
    """Parameters that are trained, where those are not all: with an adapter, its own."""
    adapted: int = 0
    """Parameters of an adapter, beside those of the model."""
    sampling: int = 0
    """Bytes that sampling holds at its highest beside weights and averages: keys and values, logits, weights arranged
    for decoding."""
    working: int | None = None
    """Bytes of gradients, activations and logits of an update at their highest, where that was rehearsed."""
    saves_meanwhile: bool = False
    """Whether a checkpoint may still be on its way to the disk while the run goes on."""
    samplers: int = 0
    """Processes beside the learner's that sample, each with weights of its own."""
    cached: int = 0
    """Bytes of the keys and values that each of those holds."""
    ranks: int = 0
    """Processes over which everything is split but a whole copy of the policy, which samples; 0: nothing is split."""
    together: int = 1
    """How many of those have their memory from the same pool."""

    @property
    def others(self) -> bool:
        """Whether other models than the policy are held."""
        return self.reference or self.critic or self.samplers > 0

    def _share(self, values: int) -> int:
        """Bytes of so many values that are split over the ranks."""
        return values * self.width // max(self.ranks, 1)

    @property
    def learning(self) -> int:
        """Parameters of the policy that are trained."""
        return self.parameters if self.trained is None else self.trained

    @property
    def fixed(self) -> int:
        """Weights, gradients and AdamW's two averages of policy and critic, and the reference's weights, of the ranks
        that are together; and what samples beside them."""
        values = self.parameters * (1 + self.reference + 4 * self.critic) + self.adapted + 3 * self.learning
        whole = (self.parameters + self.adapted) * self.width if self.ranks else 0
        each = self._share(values) + whole
        return self.together * each + self.samplers * (self.parameters * self.width + self.cached)

    @property
    def resting(self) -> int:
        """What is held all the time: weights and averages, no gradients."""
        return self.fixed - self._share(self.learning + self.critic * self.parameters)

    @property
    def copies(self) -> int:
        """Of what a checkpoint writes, which the run need not wait for."""
        return 3 * self._share(self.learning + self.critic * self.parameters)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes held in each part of a run."""
        update = self.needed - self.resting if self.working is None else self.working
        meanwhile = self.copies * self.saves_meanwhile
        return {
            "sampling": self.resting + self.sampling + meanwhile,
            "update": self.resting + update + meanwhile,
            "checkpoint": self.resting + self.copies,
        }

    @property
    def each_token(self) -> int:
        """Activations of one token of a micro-batch, of which each of the ranks that are together has one."""
        kept = self.token_values_checkpointed if self.checkpointing else self.token_values
        return self.together * self.layers * kept * self.width

    @property
    def needed(self) -> int:
        """Everything, while a full micro-batch is on its way back."""
        return self.fixed + self.tokens * self.each_token

    def remedies(self, available: int) -> list[str]:
        """Settings each of which makes the run fit by itself; if none does, all at once; if not even those, none."""
        fits = (available - self.fixed) // self.each_token
        ways = {
            f"engine.train_tokens: {fits}": {"tokens": max(fits, FEWEST_TOKENS)},
            "engine.gradient_checkpointing: true": {"checkpointing": True},
            "algorithm.kl: none": {"reference": False},
            "an algorithm without a critic": {"critic": False},
            "engine.placement.samplers: 1": {"samplers": min(self.samplers, 1)},
            "engine.dtype: bfloat16": {"width": min(self.width, torch.bfloat16.itemsize)},
        }
        alone = [name for name, change in ways.items() if dataclasses.replace(self, **change).needed <= available]
        if alone:
            return alone
        helping = {
            name: change for name, change in list(ways.items())[1:] if dataclasses.replace(self, **change) != self
        }
        everything = {name: value for change in helping.values() for name, value in change.items()}
        smallest = dataclasses.replace(self, **{**everything, "tokens": FEWEST_TOKENS})
        names = [f"engine.train_tokens: {FEWEST_TOKENS}", *helping]
        return [" with ".join(names)] if smallest.needed <= available else []


def memory_of(
    model: PreTrainedModel,
    dtype: torch.dtype,
    *,
    tokens: int,
    reference: bool,
    critic: bool,
    checkpointing: bool,
    **known: Any,
) -> Memory:
    """The memory of training this model, of which only the shapes are looked at; `known` are more fields of it."""
    config = model.config.get_text_config()
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    return Memory(
        parameters=parameter_count(model),
        width=dtype.itemsize,
        layers=int(config.num_hidden_layers),
        # Two norms, queries, keys, values, what attention makes of them, two residuals; gate, up and their product.
        token_values=8 * hidden + 3 * inner,
        token_values_checkpointed=hidden,
        tokens=tokens,
        reference=reference,
        critic=critic,
        checkpointing=checkpointing,
        **known,
    )


def key_value_count(model: PreTrainedModel) -> int:
    """Values that a token leaves behind for those after it to attend to: its keys and values in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size


def parameter_count(model: PreTrainedModel) -> int:
    """How many weights the model has, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def available_memory(device: torch.device) -> int | None:
    """Free bytes of the device, or None where nobody says; of a machine, the share of one of the ranks on it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [*_meminfo("MemAvailable"), *_left_in_container()] if device.type == "cpu" else []
    return min((limit // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) for limit in limits), default=None)


def _meminfo(name: str) -> list[int]:
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]


def _left_in_container() -> list[int]:
    """What a container's limit leaves; its caches are given up when memory is wanted, so they count as free."""
    limit, used, details = (CONTAINER / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.is_file() and used.is_file() and details.is_file()) or limit.read_text().strip() == "max":
        return []
    caches = [int(line.split()[1]) for line in details.read_text().splitlines() if line.startswith("inactive_file ")]
    return [int(limit.read_text()) - int(used.read_text()) + sum(caches)]


def checkpoint_bytes(
    model: PreTrainedModel, dtype: torch.dtype, *, critic: bool, reference: bool, adapter: int | None = None
) -> int:
    """Size of one checkpoint: weights and AdamW's two averages of what is trained, which is the policy or its adapter,
    and of the critic; a reference that has moved."""
    whole = parameter_count(model)
    return dtype.itemsize * (3 * (whole if adapter is None else adapter) + whole * (3 * critic + reference))


def checkpoints_at_once(steps: int, every: int, keep_last: int, keep_every: int = 0, keep_best: int = 0) -> int:
    """The most checkpoints that a run has on disk: one is written before the oldest that is not kept is deleted."""
    if not 0 < every < steps:
        return 1
    spaced = (steps - 1) // math.lcm(every, keep_every) if keep_every else 0
    return min(keep_last + 1 + spaced + keep_best, math.ceil(steps / every))


def free_disk(folder: Path) -> int:
    """Free bytes where the folder is, or will be."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    absolute = folder.expanduser().absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def in_words(size: float) -> str:
    """`3.4 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
