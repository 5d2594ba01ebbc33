"""How fast machines are: GPUs by their datasheets, and this one as it was measured.

A plan asks a machine how long a kernel takes (`Machine.seconds`) and what a call costs that launches it
(`Machine.overhead`); it does not care which kind of machine answers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

from groupwise.errors import ConfigError, did_you_mean
from groupwise.plan.kernels import Kernel, Work

NEGLIGIBLE_BYTES, NEGLIGIBLE_FLOPS = 1e4, 1e6
"""A kernel below both takes no longer than the call that launches it."""


class Machine(Protocol):
    """What a plan asks of a device."""

    def seconds(self, kernel: Kernel) -> float:
        """How long one launch takes, the call not counted."""
        ...

    def duration(self, work: Work) -> float:
        """How long all of it takes."""
        ...


# GPUs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU by its datasheet, and which share of that our kernels reach."""

    name: str
    flops: float
    """Dense products in bfloat16, FLOP/s."""
    bandwidth: float
    """Of its memory, bytes/s."""
    memory: float
    """Bytes."""
    link: float
    """To the others of its node, bytes/s in one direction."""
    network: float
    """To other nodes, bytes/s for each GPU: an assumption about the cluster, as no datasheet says it."""
    per_node: int = 8
    source: str = ""
    product_share: float = 0.5
    """Of `flops` in training: large products reach 60-75 % on Hopper, a whole decoder layer less."""
    stream_share: float = 0.8
    """Of `bandwidth`: what STREAM-like kernels reach on all of these."""
    launch_seconds: float = 4e-6
    """The least that a kernel takes."""
    call_seconds: float = 8e-6
    """Python, autograd and dispatch of an operation; hidden wherever kernels take longer."""

    def seconds(self, kernel: Kernel) -> float:
        peak = self.flops if kernel.dtype in ("bfloat16", "medium") else self.flops / 2  # float32 through TF32
        return max(
            kernel.flops / (peak * self.product_share),
            kernel.bytes / (self.bandwidth * self.stream_share),
            self.launch_seconds,
        )

    def duration(self, work: Work) -> float:
        """Kernels and the calls that launch them overlap: the slower of the two."""
        kernels = sum(self.seconds(kernel) * count for kernel, count in work.kernels.items())
        return max(kernels, work.calls * self.call_seconds)


_T, _G = 1e12, 1e9
_NVIDIA = "NVIDIA's datasheet (dense, SXM)"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100-80G", 989 * _T, 3350 * _G, 80 * _G, 450 * _G, 50 * _G, source=_NVIDIA),
        Gpu("H200-141G", 989 * _T, 4800 * _G, 141 * _G, 450 * _G, 50 * _G, source=_NVIDIA),
        Gpu("A100-80G", 312 * _T, 2039 * _G, 80 * _G, 300 * _G, 25 * _G, source=_NVIDIA),
        Gpu("A100-40G", 312 * _T, 1555 * _G, 40 * _G, 300 * _G, 25 * _G, source=_NVIDIA),
        Gpu("L40S-48G", 362 * _T, 864 * _G, 48 * _G, 32 * _G, 12.5 * _G, source="NVIDIA's datasheet (dense); PCIe 4"),
        Gpu("RTX4090-24G", 165 * _T, 1008 * _G, 24 * _G, 32 * _G, 3 * _G, source="NVIDIA's Ada paper (dense); PCIe 4"),
        Gpu("MI300X-192G", 1307 * _T, 5300 * _G, 192 * _G, 448 * _G, 50 * _G, source="AMD's datasheet (dense)"),
    )
}
ALIASES = {
    **{"H100": "H100-80G", "H200": "H200-141G", "A100": "A100-80G", "L40S": "L40S-48G", "MI300X": "MI300X-192G"},
    **{"RTX-4090": "RTX4090-24G", "RTX4090": "RTX4090-24G", "4090": "RTX4090-24G"},
}
BY_NUMBERS = "8xMINE:memory=80,tflops=400,bandwidth=2000,link=300,network=25"


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind."""

    count: int
    gpu: Gpu

    def bandwidth(self, members: int) -> float:
        """Bytes/s of each of so many GPUs to the next, by the slowest link between them."""
        return self.gpu.link if members <= self.gpu.per_node else self.gpu.network

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"


def read_gpus(text: str) -> Cluster:
    """`8xH100-80G`, `H200`, or a GPU by its numbers in GB, TFLOP/s and GB/s: `8xMINE:memory=80,tflops=400,...`.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[x*])?([^:]+)(?::(.*))?", text.strip())
    count = int(match[1] or 1) if match else 0
    if not match or count < 1:
        raise ConfigError(f"--gpus: {text!r}; write a count and a GPU, such as 8xH100-80G, or {BY_NUMBERS}")
    name = match[2].strip()
    if match[3] is not None:
        return Cluster(count, _by_numbers(name, match[3]))
    known = {alias.lower(): GPUS[full] for alias, full in ALIASES.items()} | {n.lower(): g for n, g in GPUS.items()}
    if name.lower() not in known:
        hint = did_you_mean(name.upper(), [*GPUS, *ALIASES])
        raise ConfigError(
            f"--gpus: {name}: no such GPU{hint}; accepted: {', '.join(GPUS)}, or any other by its numbers in GB, "
            f"TFLOP/s and GB/s: {BY_NUMBERS}"
        )
    return Cluster(count, known[name.lower()])


def _by_numbers(name: str, text: str) -> Gpu:
    usual = {"link": 32.0, "network": 12.5}
    units = {"memory": _G, "tflops": _T, "bandwidth": _G, "link": _G, "network": _G}
    try:
        given = {key: float(value) for key, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise ConfigError(f"--gpus: {text!r}: not numbers; write NAME=NUMBER, such as {BY_NUMBERS}") from None
    unknown, missing = sorted(given.keys() - units.keys()), sorted(units.keys() - usual.keys() - given.keys())
    if unknown or missing or min(given.values()) <= 0:
        wrong = f"no such number: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        wrong = wrong if unknown or missing else "every number has to be above 0"
        raise ConfigError(f"--gpus: {text}: {wrong}; accepted: {', '.join(sorted(units))}, as in {BY_NUMBERS}")
    of = {key: value * units[key] for key, value in {**usual, **given}.items()}
    return Gpu(name, of["tflops"], of["bandwidth"], of["memory"], of["link"], of["network"], source="as given")


# This machine --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """This machine: how long kernels took on it, and the calls around them."""

    kernels: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by `Kernel.key`."""
    call_seconds: float = 4e-6
    """Python, autograd and dispatch of an operation in training."""
    layer_seconds: float = 2e-4
    """The same of one layer in a decoding step."""
    step_seconds: float = 4e-4
    """What a decoding step takes beside its layers."""

    def seconds(self, kernel: Kernel) -> float:
        """As measured; else as for the most similar kernel that was, in proportion; else by the usual rates."""
        if kernel.bytes < NEGLIGIBLE_BYTES and kernel.flops < NEGLIGIBLE_FLOPS:
            return 0.0
        if (exact := self.kernels.get(kernel.key)) is not None:
            return exact
        for family in (f"{kernel.name} {kernel.dtype} ", f"{kernel.name} ", "add "):
            alike = [(key, taken) for key, taken in self.kernels.items() if key.startswith(family)]
            near = min(alike, key=lambda pair: _distance(sizes_of(pair[0]), kernel.sizes), default=None)
            if near is not None and len(sizes_of(near[0])) == len(kernel.sizes):
                return near[1] * math.prod(kernel.sizes) / math.prod(sizes_of(near[0]))
        rate = USUAL_FLOPS * (8 if kernel.dtype in ("bfloat16", "medium") else 1)
        return max(kernel.flops / rate, kernel.bytes / USUAL_BANDWIDTH)

    def duration(self, work: Work) -> float:
        """On a CPU nothing overlaps."""
        kernels = sum(self.seconds(kernel) * count for kernel, count in work.kernels.items())
        return kernels + work.calls * self.call_seconds

    @property
    def calibrated(self) -> bool:
        return bool(self.kernels)

    def rate(self, name: str, dtype: str = "float32") -> float | None:
        """Median FLOP/s of the products that were measured, or bytes/s of another kernel; None if none was."""
        found = [(sizes_of(key), taken) for key, taken in self.kernels.items() if key.startswith(f"{name} {dtype} ")]
        work = [math.prod(sizes) * (2 if name == "product" else 1) / taken for sizes, taken in found]
        return median(work) if work else None


USUAL_FLOPS, USUAL_BANDWIDTH = 1e11, 8e9
"""A core of a server CPU in float32, where nothing was measured."""


def sizes_of(key: str) -> tuple[int, ...]:
    """`Kernel.sizes` of a key."""
    return tuple(map(int, key.rsplit(" ", 1)[1].split("x")))


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    if len(one) != len(other):
        return math.inf
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(one, other, strict=True))


def cache_file() -> Path:
    """Where measurements of this machine are kept: `groupwise/machine.json` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "groupwise" / "machine.json"


def this_machine(threads: int) -> str:
    """What measurements are valid for."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{cpu}, {threads} threads, torch {torch.__version__}"


def recall(threads: int) -> Measured:
    """What was measured here with so many threads; nothing where nothing was, or where the file cannot be read."""
    try:
        known: Mapping[str, Mapping[str, object]] = json.loads(cache_file().read_text())
        return Measured(**known[this_machine(threads)])  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError, KeyError, TypeError):
        return Measured()


def remember(measured: Measured, threads: int) -> Path:
    """Keep measurements for later plans; the file."""
    file = cache_file()
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    known[this_machine(threads)] = vars(measured)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1))
    return file
