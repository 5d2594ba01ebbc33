"""A plan for the reader: tables for the terminal, the same as plain values, and what to do where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from groupwise.config import Config
from groupwise.plan.cluster import Job, job_of
from groupwise.plan.machine import Cluster
from groupwise.plan.outlook import Outlook, Subject, altered, look_ahead, smallest_change
from groupwise.plan.simulate import SIZES, TAIL, Scale, best_split, pays_until, scaling
from groupwise.resources import in_words

ROUGH = "times are rough, by a usual CPU's rates: measure this machine with --calibrate"


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it."""

    here: Outlook
    other: Outlook | None
    """The same run with PPO's critic, or without, if it has one; None where its settings allow none."""
    remedy: str
    """The smallest change with which it fits here; empty where it fits."""
    clusters: Sequence[OnCluster] = field(default_factory=list["OnCluster"])


@dataclass(frozen=True)
class OnCluster:
    """The same on GPUs."""

    job: Job
    splits: Sequence[Scale]
    """The fastest first; none where it does not fit."""
    remedy: str
    scales: Sequence[Scale] = ()
    """By number of GPUs, where they were simulated."""


def plan(
    subject: Subject,
    clusters: Sequence[Cluster] = (),
    *,
    measure: bool = False,
    simulate: bool = False,
    seed: int = 0,
    tail: float = TAIL,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a run here and on clusters; `measure` times this machine, `simulate` looks at 8 to 4,096 GPUs."""
    here = look_ahead(subject, measure=measure, say=say)
    otherwise = altered(subject, {"algorithm": "grpo" if subject.config.algorithm.critic else "ppo"})
    other = None if otherwise is None else look_ahead(otherwise)
    found: list[OnCluster] = []
    for cluster in clusters:
        job = job_of(subject.config, subject.model, subject.lengths, cluster)
        ways = best_split(job, cluster.count, seed, tail)
        scales = scaling(job, SIZES, seed, tail) if simulate else []
        found.append(OnCluster(job, ways, "" if ways else _cluster_remedy(subject, job), scales))
    return Plan(here, other, "" if here.fits else _remedy(here), found)


def _remedy(here: Outlook) -> str:
    assert here.available is not None, "it does not fit"
    way = smallest_change(here.subject, here.available)
    if way is None:
        return "nothing that was tried makes it fit: take a smaller model, or a larger machine"
    settings, fitting = way
    return f"{_spelt(settings)} needs {in_words(fitting.peak)}"


def _spelt(settings: dict[str, Any]) -> str:
    return " with ".join(f"{path}={str(value).lower()}" for path, value in settings.items())


def _cluster_remedy(subject: Subject, job: Job) -> str:
    """The fewest GPUs on which it fits, or the setting with which it fits on these."""
    cluster = job.cluster
    if job.slots == 0:
        return f"a sampler has no room for keys and values on {cluster.gpu.name}: take GPUs with more memory"
    for changes in ({"engine.gradient_checkpointing": True}, {"engine.gradient_checkpointing": True, "lora.rank": 16}):
        other = altered(subject, changes)
        if other is not None and job_of(other.config, other.model, other.lengths, cluster).fits(cluster.count):
            enough = f", or {job.fewest}x{cluster.gpu.name}" if job.fewest else ""
            return f"{_spelt(changes)}{enough}"
    return f"{job.fewest}x{cluster.gpu.name}" if job.fewest else "a smaller model, or GPUs with more memory"


# As text -------------------------------------------------------------------------------------------------------------


def lines(found: Plan) -> Iterator[str | Table]:
    """The plan for the terminal."""
    here, config = found.here, found.here.subject.config
    lengths, memory = here.subject.lengths, here.step.memory
    yield (
        f"{config.model}: {memory.parameters:,} parameters, {memory.learning:,} trained; {config.prompts_per_step} "
        f"prompts of {lengths.prompt} tokens (at most {lengths.longest_prompt}), {config.group_size} completions each "
        f"of {lengths.completion} (at most {lengths.longest})"
    )
    yield from _here(here, found.other)
    if found.remedy:
        assert here.available is not None
        free = f"{in_words(here.available)} is free"
        yield f"warning: does not fit: {free}, {in_words(here.peak)} needed; the smallest change: {found.remedy}"
    for part in found.clusters:
        yield from _cluster(part, config)


def _here(here: Outlook, other: Outlook | None) -> Iterator[str | Table]:
    config, memory = here.subject.config, here.step.memory
    table = Table("memory on this machine", "at most", title_justify="left")
    for name, size in held(here).items():
        table.add_row(name, in_words(size))
    table.add_section()
    for name, size in here.peaks.items():
        table.add_row(f"peak of {name}", in_words(size))
    if here.available is not None:
        table.add_row("free now", in_words(here.available))
    yield table
    table = Table("time on this machine", "seconds", "share")
    for name, seconds in here.seconds.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / here.step_seconds:.0%}")
    table.add_section()
    table.add_row("a step, without rewards", f"{here.step_seconds:.3f}", "")
    table.add_row(f"{config.steps} steps", f"{here.step_seconds * config.steps:.0f}", "")
    yield table
    if not here.calibrated:
        yield ROUGH
    yield f"micro-batch: {here.step.microbatch} tokens of engine.train_tokens: {config.engine.train_tokens}"
    engine = config.engine
    if engine.split() or engine.sampler is not None or not engine.shares_weights:
        yield "this is the run in one process; engine.learner, sampler and placement are not counted"
    if other is None:
        return
    step, peak = other.step_seconds / here.step_seconds, in_words(abs(other.peak - here.peak))
    word = "more" if other.peak > here.peak else "less"
    name = "without the critic (grpo)" if memory.critic else "with PPO's critic (ppo)"
    yield f"{name}: {peak} {word} memory, a step takes {step:.2f} times as long"


def held(here: Outlook) -> dict[str, int]:
    """Bytes by what they are."""
    memory, step = here.step.memory, here.step
    width, parameters = memory.width, memory.parameters + memory.adapted
    found = {
        "parameters": parameters * width,
        "gradients": memory.learning * width,
        "optimizer": 2 * memory.learning * width,
        "reference": memory.parameters * memory.reference * width,
        "critic, its gradients and optimizer": 4 * memory.parameters * memory.critic * width,
        **step.held,
        "copies for a checkpoint": memory.copies,
    }
    return {name: size for name, size in found.items() if size}


def _cluster(part: OnCluster, config: Config) -> Iterator[str | Table]:
    job, count = part.job, part.job.cluster.count
    gpu = job.cluster.gpu
    best = part.splits[0] if part.splits else None
    learners = best.learners if best else count
    table = Table(
        f"memory of each {gpu.name}", f"learner (FSDP, {learners})", f"sampler (vLLM, {job.parallel} a model)"
    )
    learner, sampler = job.learner_bytes(learners), job.sampler_bytes()
    for name in (name for name in dict.fromkeys([*learner, *sampler]) if learner.get(name) or sampler.get(name)):
        sizes = (side.get(name, 0.0) for side in (learner, sampler))
        table.add_row(name, *(in_words(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("peak", in_words(sum(learner.values())), in_words(sum(sampler.values())))
    yield table
    if best is None:
        yield f"warning: does not fit {job.cluster}; the smallest change: {part.remedy}"
    else:
        budget, slots = job.microbatch(learners), job.slots
        yield f"micro-batch: {budget} tokens on each learner; {slots} completions at a time on each sampler"
        yield _ways(f"ways to divide {job.cluster}", part.splits)
        hours = best.step * config.steps / 3600
        yield f"{config.steps} steps: {hours:.2f} hours, {hours * count:.1f} GPU-hours"
    if part.scales:
        yield _ways(f"{gpu.name}, simulated", part.scales)
        yield verdict(part.scales)


def _ways(title: str, scales: Sequence[Scale]) -> Table:
    names = ["GPUs", "sample on", "train on", "sample s", "train s", "publish s", "waiting", "last sampler", "failures"]
    table = Table(*names, "step s", "relative", title=title)
    for scale in scales:
        on = ["all", "in turn"] if scale.shared else [str(scale.samplers), str(scale.learners)]
        times = (f"{value:.2f}" for value in (scale.sample, scale.train, scale.publish))
        shares = [f"{scale.waiting:.0%}", f"{scale.straggling:.2f}x", f"{scale.failing:.1%}"]
        table.add_row(str(scale.gpus), *on, *times, *shares, f"{scale.step:.2f}", f"{scales[0].step / scale.step:.1f}x")
    return table


def verdict(scales: Sequence[Scale]) -> str:
    """Where scaling stops paying, and what stops it."""
    last = pays_until(scales)
    after = next((scale for scale in scales if last is not None and scale.gpus > last), None)
    if last is None or after is None:
        return f"scaling pays up to {last} GPUs, the most that were simulated"
    reasons = {"sampling": after.sample, "training": after.train, "publishing": after.publish}
    slowest = max(reasons, key=lambda name: reasons[name])
    return (
        f"scaling stops paying at {last} GPUs: on {after.gpus} a step is only "
        f"{next(s.step for s in scales if s.gpus == last) / after.step:.2f} times as fast, held up by {slowest} "
        f"(the last sampler takes {after.straggling:.1f} times the mean)"
    )


# As values -----------------------------------------------------------------------------------------------------------


def as_json(found: Plan) -> dict[str, Any]:
    """The plan as plain values: bytes, seconds and counts."""
    here = found.here
    return {
        "parameters": here.step.memory.parameters,
        "trained": here.step.memory.learning,
        "lengths": asdict(here.subject.lengths),
        "here": {**_values(here), "remedy": found.remedy or None},
        "with_critic" if not here.step.memory.critic else "without_critic": found.other and _values(found.other),
        "clusters": [_cluster_values(part) for part in found.clusters],
    }


def _values(here: Outlook) -> dict[str, Any]:
    return {
        "held_bytes": held(here),
        "peak_bytes": here.peaks,
        "available_bytes": here.available,
        "fits": here.fits,
        "calibrated": here.calibrated,
        "seconds": here.seconds,
        "step_seconds": here.step_seconds,
        "run_seconds": here.step_seconds * here.subject.config.steps,
        "microbatch_tokens": here.step.microbatch,
    }


def _cluster_values(part: OnCluster) -> dict[str, Any]:
    job = part.job
    learners = part.splits[0].learners if part.splits else job.cluster.count
    return {
        "gpus": str(job.cluster),
        "fits": bool(part.splits),
        "remedy": part.remedy or None,
        "learner_bytes": job.learner_bytes(learners),
        "sampler_bytes": job.sampler_bytes(),
        "microbatch_tokens": job.microbatch(learners),
        "splits": [asdict(scale) for scale in part.splits],
        "scales": [asdict(scale) for scale in part.scales],
        "pays_until": pays_until(part.scales) if part.scales else None,
    }
