"""A run on 8 to 4,096 GPUs, step by step with drawn lengths: where does another GPU stop paying?

The batch of a step stays the same (strong scaling).  In each step lengths are drawn from a long-tailed distribution,
whole groups wait for slots of the samplers, the slowest sampler holds up the step, the learner follows or keeps pace,
weights are broadcast, and GPUs fail.  Numbers are numpy's from a seed, the same lengths for every size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.plan.cluster import Job

SIZES = tuple(2**power for power in range(3, 13))
TAIL = 0.8
"""Spread of the logarithm of a completion's length: the longest 1 % are about 6 times the median."""
STEPS = 12
"""Drawn for each size."""
GPU_HOURS_PER_FAILURE = 50_000.0
"""Llama 3: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, 3.3.4)."""
RESTART_SECONDS = 600.0
"""From a failure to the first new step: detection, rescheduling, loading."""
PAYS = 1.5
"""Twice the GPUs pay while they make a step at least so many times as fast."""
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Scale:
    """What the simulation saw at one size."""

    gpus: int
    samplers: int
    learners: int
    """As many as samplers and as there are, when the two take turns on the same GPUs."""
    sample: float
    """Seconds of a step."""
    train: float
    publish: float
    waiting: float
    """Share of the completions that waited for a slot."""
    straggling: float
    """How long the last sampler takes, relative to their mean."""
    failing: float
    """Share of the time that failures cost."""
    step: float
    """Seconds of a step, failures included."""

    @property
    def shared(self) -> bool:
        """Whether sampling and training take turns on the same GPUs."""
        return self.samplers == self.learners == self.gpus

    @property
    def idle(self) -> tuple[float, float]:
        """Share of the time in which samplers, and learners, have nothing to do."""
        if self.shared:
            return 1 - 1 / self.straggling, 0.0
        longest = max(self.sample, self.train) + self.publish
        return 1 - self.sample / self.straggling / longest, 1 - self.train / longest


def drawn_lengths(job: Job, seed: int, step: int, tail: float = TAIL) -> Lengths:
    """int64[N, G]: lognormal lengths, cut at the longest, whose mean is the expected one."""
    rng = np.random.default_rng([seed, step])
    shape = (job.config.prompts_per_step, job.config.group_size)
    noise, mean, most = np.exp(tail * rng.standard_normal(shape)), job.lengths.completion, job.lengths.longest
    low, high = 0.0, float(most) * 1e3
    for _ in range(60):  # the scale at which the mean is right once the tail is cut
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(noise * middle, 1, most).mean() < mean else (low, middle)
    return np.clip(np.rint(noise * high), 1, most).astype(np.int64)


def sampled(job: Job, lengths: Lengths, samplers: int) -> tuple[float, float, float]:
    """(seconds until the last completion, share of completions that waited, last over mean) on so many GPUs."""
    replicas = max(1, samplers // job.parallel)
    step, row = job.decoding()
    taken: list[float] = []
    waited = 0
    for replica in range(min(replicas, len(lengths))):
        own = lengths[replica::replicas].ravel()  # whole groups, dealt out in turn
        waited += max(len(own) - job.slots, 0)
        taken.append(step * makespan(own, job.slots) + row * float(own.sum()))
    mean = sum(taken) / replicas
    prefill = job.prefill_seconds(min(samplers, job.config.prompts_per_step * job.parallel))
    return prefill + max(taken), waited / lengths.size, max(taken) / mean if mean else 1.0


def makespan(lengths: Sequence[int] | Lengths, slots: int) -> int:
    """Steps until the last of these completions is written, each beginning as soon as one of the slots is free."""
    if len(lengths) <= slots:
        return int(max(lengths, default=0))
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + int(length))
    return max(free)


def scale_at(job: Job, gpus: int, samplers: int | None, seed: int, tail: float = TAIL, steps: int = STEPS) -> Scale:
    """Some steps on so many GPUs: in turns on all of them (`samplers` None), or on GPUs of their own, a step apart."""
    sampling, learning = (gpus, gpus) if samplers is None else (samplers, gpus - samplers)
    seen: list[tuple[float, float, float, float]] = []
    for number in range(steps):
        lengths = drawn_lengths(job, seed, number, tail)
        tokens = job.config.prompts_per_step * job.lengths.prompt + int(lengths.sum())
        seen.append((*sampled(job, lengths, sampling), job.train_seconds(learning, tokens)))
    rows: Any = np.array(seen)
    publish = job.publish_seconds(max(1, sampling // job.parallel), gpus) if gpus > 1 else 0.0
    sample, waiting, straggling, train = (float(value) for value in rows.mean(0))
    if samplers is None:
        step = sample + train + publish + job.turn_seconds
    else:
        step = float(np.maximum(rows[:, 0], rows[:, 3]).mean()) + publish
    every = job.config.checkpoint.every or job.config.steps
    lost = RESTART_SECONDS + every * step / 2
    failures = gpus * lost / (GPU_HOURS_PER_FAILURE * 3600)
    return Scale(
        gpus, sampling, learning, sample, train, publish, waiting, straggling, failures / (1 + failures),
        step * (1 + failures),
    )  # fmt: skip


def splits(job: Job, gpus: int) -> list[int | None]:
    """The ways to divide GPUs that fit: all in turns, or so many that only sample."""
    found: list[int | None] = [None] if job.fits(gpus) else []
    parts = sorted({max(1, round(gpus * eighth / 8)) for eighth in range(1, 8)})
    ways = [part // job.parallel * job.parallel for part in parts if part < gpus]
    return found + [part for part in dict.fromkeys(ways) if part and job.fits(gpus - part)]


def best_split(job: Job, gpus: int, seed: int = 0, tail: float = TAIL) -> list[Scale]:
    """Every way to divide the GPUs that fits, the fastest first."""
    ways = (scale_at(job, gpus, way, seed, tail, steps=4) for way in splits(job, gpus))
    return sorted(ways, key=lambda scale: scale.step)


def scaling(job: Job, sizes: Sequence[int] = SIZES, seed: int = 0, tail: float = TAIL) -> list[Scale]:
    """The fastest way at each size; sizes at which it does not fit are left out."""
    found: list[Scale] = []
    for gpus in sizes:
        for best in best_split(job, gpus, seed, tail)[:1]:
            way = None if best.shared else best.samplers
            found.append(scale_at(job, gpus, way, seed, tail))
    return found


def pays_until(scales: Sequence[Scale]) -> int | None:
    """The last size that paid: up to it, twice the GPUs made a step at least `PAYS` times as fast; None: none fits."""
    last = None
    for before, scale in zip([None, *scales], scales, strict=False):
        if before is not None and before.step / scale.step < PAYS ** np.log2(scale.gpus / before.gpus):
            break
        last = scale.gpus
    return last
