"""The training loop on one screen (`loop`), its stages, and `train`, which builds what it needs from a `Config`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from groupwise import checkpoint
from groupwise.algorithms import Algorithm, zero_variance
from groupwise.chat import Chat
from groupwise.checks import (
    Outline,
    cautions,
    check_disk,
    check_folder,
    check_it_learns,
    check_memory,
    data_cautions,
    outline,
)
from groupwise.config import Config, Engine
from groupwise.curriculum import History
from groupwise.data import Data, hold_out, load_task, without_held_out
from groupwise.devices import find_device
from groupwise.engines import Critic, Learner, Sampler
from groupwise.engines.local import LocalSampler, load_policy, local_engine
from groupwise.environment import write_environment
from groupwise.errors import Findings, GroupwiseError
from groupwise.evaluate import Scores, evaluate
from groupwise.log import RunLog, new_folder
from groupwise.model import save_model
from groupwise.records import Batch, Rollout, collate
from groupwise.rewards import workers_end
from groupwise.rollout import play
from groupwise.seeding import generator
from groupwise.settling import MOST_SAMPLE_TOKENS, settle
from groupwise.slots import replace
from groupwise.tasks import Task, check_prompts, check_task
from groupwise.trackers import open_trackers

RUNS = "runs"
"""The folder in which runs are made that name none."""


def loop(config: Config, parts: Parts, log: RunLog, start: int = 0) -> None:
    """Steps `start` to `config.steps`: sample groups, credit them, update the policy, publish it."""
    algorithm, sampler, learner = config.algorithm, parts.sampler, parts.learner
    for step, rollouts in experience(config, parts, start):  # whole groups, scored
        log.lap("sample")
        log.check(rollouts)
        algorithm = algorithm.adapt(rollouts)  # coefficients that follow a target
        rollouts = annotate(rollouts, parts, algorithm.needs(config.updates_per_step))  # old / reference log-probs
        rollouts = algorithm.credit(rollouts)  # rewards -> advantages
        log.lap("credit")
        batches = algorithm.batches(rollouts, config.updates_per_step)  # tensors and token weights
        updates = [update(batch, algorithm, parts) for batch in batches]
        sampler.load(learner.weights(), version=step + 1)
        log.lap("update")
        log.step(step, rollouts, updates)
        log.diagnose(step + 1)
        if algorithm.kl is not None and _due(algorithm.kl.refresh_every, step + 1, config.steps):
            learner.refresh_reference()
        if _due(config.evaluation.every, step + 1, config.steps):
            parts.evaluate(config, log, step + 1)
        if step + 1 == config.steps or _due(config.checkpoint.every, step + 1, config.steps):
            checkpoint.save(log.folder, step + 1, parts.saved(), algorithm, config.checkpoint.keep_last)
            log.lap("checkpoint")


def update(batch: Batch, algorithm: Algorithm, parts: Parts) -> dict[str, float]:
    """One optimizer step of the policy, and of the critic if there is one; their metrics."""
    metrics = parts.learner.update(batch, algorithm.loss, per_token=algorithm.per_token)
    return metrics if parts.critic is None else metrics | parts.critic.update(batch, algorithm.value_loss)


def experience(config: Config, parts: Parts, start: int = 0) -> Iterator[tuple[int, list[Rollout]]]:
    """(step, its scored groups), from the policy as it is when the step is asked for."""
    for step in range(start, config.steps):
        usual = parts.task.rows_for_step(step, config.prompts_per_step, config.seed)
        rollouts = _play(config, parts, usual, step, 0)
        if config.algorithm.filter == "dynamic_sampling":
            rollouts = _fill_with_informative_groups(config, parts, step, rollouts)
        if parts.history is not None:
            parts.history.record(step, rollouts)
        yield step, rollouts


def _play(config: Config, parts: Parts, rows: Sequence[int], step: int, draw: int) -> list[Rollout]:
    """The scored groups of some rows; with a greedy baseline, every rollout knows what the greedy answer earned.

    With a curriculum, other rows take the place of those that it skips.
    """
    if parts.history is not None:
        rows = parts.history.instead_of(rows, step, draw, config.seed)
    play_rows = partial(play, parts.task, parts.sampler, parts.chat, rows, seed=config.seed, step=step)
    rollouts = play_rows(group_size=config.group_size, sampling=config.sampling, stream=f"train.{draw}")
    if not config.algorithm.greedy_baseline:
        return rollouts
    greedy = play_rows(group_size=1, sampling=replace(config.sampling, temperature=0.0), stream=f"greedy.{draw}")
    earned = {rollout.group: rollout for rollout in greedy}
    return [_against_greedy(rollout, earned[rollout.group]) for rollout in rollouts]


def _against_greedy(rollout: Rollout, greedy: Rollout) -> Rollout:
    if greedy.valid:
        return dataclasses.replace(rollout, greedy_reward=greedy.reward)
    problem = rollout.problem or f"the greedy completion of its prompt has no reward: {greedy.problem}"
    return dataclasses.replace(rollout, valid=False, problem=problem)


def _fill_with_informative_groups(config: Config, parts: Parts, step: int, rollouts: list[Rollout]) -> list[Rollout]:
    """DAPO's dynamic sampling (arXiv:2503.14476): draw more prompts until `prompts_per_step` groups can teach.

    Groups that cannot are kept for the metrics; `Algorithm.batches` leaves them out.  Informative groups beyond the
    number wanted are dropped.
    """
    for draw in range(1, config.sampling_rounds):
        informative = _informative_groups(rollouts)
        drawn = max(rollout.group for rollout in rollouts) + 1
        missing = config.prompts_per_step - len(informative)
        if missing <= 0:
            break
        wanted = math.ceil(missing * drawn / max(len(informative), 1))
        order = generator(config.seed, "more prompts", step, draw).permutation(len(parts.task.rows))
        more = _play(config, parts, order[: min(wanted, config.prompts_per_step)].tolist(), step, draw)
        rollouts = rollouts + [dataclasses.replace(rollout, group=rollout.group + drawn) for rollout in more]
    surplus = set(_informative_groups(rollouts)[config.prompts_per_step :])
    return [rollout for rollout in rollouts if rollout.group not in surplus]


def _informative_groups(rollouts: Sequence[Rollout]) -> list[int]:
    valid = [rollout for rollout in rollouts if rollout.valid]
    dull = zero_variance(valid)
    return list(dict.fromkeys(rollout.group for rollout, flat in zip(valid, dull, strict=True) if not flat))


def annotate(rollouts: Sequence[Rollout], parts: Parts, needs: Collection[str]) -> list[Rollout]:
    """Fill in what is needed of `old_logprobs`, `ref_logprobs` and `values`, before any update moves the policy."""
    if not needs:
        return list(rollouts)
    batch = collate(rollouts)
    known: dict[str, Tensor] = {}
    if "old_logprobs" in needs:
        known["old_logprobs"] = parts.learner.logprobs(batch)
    if "ref_logprobs" in needs:
        known["ref_logprobs"] = parts.learner.logprobs(batch, reference=True)
    if "values" in needs:
        assert parts.critic is not None, "build makes a critic when the algorithm has one"
        known["values"] = parts.critic.values(batch)
    return [
        dataclasses.replace(rollout, **{name: rows[i, : len(rollout.tokens)].numpy() for name, rows in known.items()})
        for i, rollout in enumerate(rollouts)
    ]


def _due(every: int, done: int, total: int) -> bool:
    """Whether something that happens every so many steps (0: only at the end) is due; the end is `train`'s."""
    return every > 0 and done % every == 0 and done < total


# Building a run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What a run works with."""

    config: Config
    """The settings, none of them left open."""
    task: Task
    sampler: Sampler
    learner: Learner
    chat: Chat
    held_out: Task | None = None
    """Prompts for evaluation."""
    critic: Critic | None = None
    """Of an algorithm that has one (PPO)."""
    cautions: tuple[str, ...] = ()
    """What was unusual about data, memory or disk."""
    history: History | None = None
    """How the policy did on each prompt, of a run with a curriculum."""
    save_adapter: Callable[[Path], None] | None = None
    """With LoRA: writes the adapter alone, beside the merged model."""

    def saved(self) -> dict[str, checkpoint.Saved]:
        """What a checkpoint holds, by the name of its folder."""
        found = {"learner": self.learner, "critic": self.critic, "curriculum": self.history}
        return {name: part for name, part in found.items() if part is not None}

    def evaluate(self, config: Config, log: RunLog, steps_done: int) -> Scores | None:
        """Evaluate the policy on the held-out prompts, if there are any, and log it."""
        if self.held_out is None:
            return None
        scores = evaluate(
            self.held_out,
            self.sampler,
            self.chat,
            sampling=config.evaluation.sampling(config.sampling.max_tokens),
            samples=config.evaluation.samples,
            seed=config.seed,
        )
        log.evaluation(steps_done, scores)
        return scores


@dataclass(frozen=True)
class Run:
    """What a training run leaves."""

    folder: Path
    """config.yaml, environment.json, metrics.jsonl, rollouts/, checkpoints/, and the trained model in model/."""
    before: Scores | None
    """Held-out scores before the first step (None without `evaluation.data`, or when resumed)."""
    after: Scores | None


@workers_end()
def train(
    config: Config,
    task: Task | None = None,
    *,
    held_out: Task | None = None,
    resume: Path | None = None,
    console: Console | None = None,
) -> Run:
    """Train `config.model` on the task, by default the one that `config.data` and `config.rewards` describe.

    Args:
        task: other prompts and rewards than the configuration's.
        held_out: other held-out prompts than those of `config.evaluation`.
        resume: a run folder to continue from its newest checkpoint.
        console: where progress is shown; standard error when None.

    Raises:
        GroupwiseError: whatever is wrong with the configuration, the data, the rewards or the model, before the first
            token is sampled where it can be known then.
    """
    config = config.resolve()
    if resume is not None:
        checkpoint.newest(resume)  # before a model is loaded: is there anything to continue from?
    parts = build(config, task, held_out)
    config = parts.config
    name = Path(config.model).name or "model"
    folder = resume or new_folder(Path(config.output) if config.output else fresh_folder(Path(RUNS), name))
    log = RunLog(
        folder,
        steps=config.steps,
        headline=parts.task.rewards[0].title,
        prompt_text=parts.chat.prompt_text,
        console=console,
        max_invalid_fraction=config.max_invalid_fraction,
        trackers=open_trackers(config.trackers, folder, config.model_dump(mode="json")),
    )
    for caution in (*cautions(config), *parts.cautions):
        log.warn(caution)
    start = 0
    if resume is not None:
        start, algorithm = checkpoint.restore(folder, parts.saved())
        config = replace(config, algorithm=algorithm)
        parts.sampler.load(parts.learner.weights(), version=start)
        log.rewind(start)
        log.say(f"continuing {folder} after step {start}")
        if start >= config.steps:
            another = f"--model {folder / 'model'} starts another run from here"
            log.warn(f"all {config.steps} steps are done already, so nothing is trained; {another}")
    else:
        (folder / "config.yaml").write_text(config.to_yaml())
        write_environment(folder)
        log.say(f"run folder: {folder}")
    try:
        before = parts.evaluate(config, log, 0) if resume is None else None
        loop(config, parts, log, start)
        save_model(config.model, parts.learner.weights(), folder / "model")
        if parts.save_adapter is not None:
            parts.save_adapter(folder / "adapter")
        return Run(folder, before, parts.evaluate(config, log, config.steps))
    finally:
        log.close()


def fresh_folder(home: Path, name: str) -> Path:
    """A path below `home`, of the time and the name, at which there is nothing yet."""
    stem = home / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    return next(path for i in range(1000) if not (path := Path(f"{stem}-{i}") if i else stem).exists())


def build(config: Config, task: Task | None = None, held_out: Task | None = None) -> Parts:
    """The task, engine and tokenizer of a configuration, checked against each other.

    Raises:
        GroupwiseError: see `train`.
    """
    ready = prepare(config, task, held_out)
    config = ready.config
    engine = local_engine(
        config.model,
        dtype=config.engine.weights,
        device=ready.device,
        max_batch_tokens=config.engine.sample_tokens,
        microbatch_tokens=config.engine.train_tokens,
        optimizer=config.optimizer,
        temperature=config.sampling.temperature,
        total_updates=config.steps * config.updates_per_step,
        reference=config.model if "ref_logprobs" in config.algorithm.needs(config.updates_per_step) else None,
        critic=config.critic_optimizer if config.algorithm.critic is not None else None,
        entropy=config.algorithm.entropy is not None,
        gradient_checkpointing=config.engine.gradient_checkpointing,
        lora=config.lora,
        seed=config.seed,
        mixed=config.engine.dtype == "mixed",
    )
    return Parts(
        config=config,
        task=ready.task,
        sampler=engine.sampler,
        learner=engine.learner,
        critic=engine.critic,
        chat=Chat(engine.tokenizer, engine.stop_ids),
        held_out=ready.held_out,
        cautions=ready.cautions,
        save_adapter=engine.save_adapter,
        history=None if config.curriculum is None else History(config.curriculum, ready.task),
    )


class Prepared(NamedTuple):
    """What `prepare` has read, and found nothing wrong with."""

    config: Config
    """With every setting that chooses itself chosen."""
    task: Task
    held_out: Task | None
    device: torch.device
    cautions: tuple[str, ...]


def prepare(
    config: Config, task: Task | None = None, held_out: Task | None = None, *, training: bool = True
) -> Prepared:
    """Look at everything that can be known before the model's weights are read.

    Raises:
        GroupwiseError: every problem, in one message.
    """
    findings, device, unusual = Findings(), None, list[str]()
    known = outline(config.model, findings)
    with findings:
        device = device_of(config.engine)
        config, chosen = settle(config, known, device)
        if training:
            unusual += [*chosen, *check_memory(config, known, device)]
    with findings:
        task = task or load_task(config.data, config.rewards)
        if held_out is None and config.evaluation.fraction:
            check_prompts(task)
            task, held_out = hold_out(task, config.evaluation.fraction)
        if training:
            with findings:
                task.rows_for_step(0, config.prompts_per_step, config.seed)  # are there enough?
        task = _checked(config, task, config.data, known)
    with findings, _of_evaluation():
        data = config.evaluation.data
        held_out = load_task(data, config.rewards) if held_out is None and data is not None else held_out
        if held_out is not None:
            held_out = _checked(config, held_out, data or config.data, known)
    if training:
        folder = Path(config.output or RUNS)
        with findings:
            check_it_learns(config, config.rewards if task is None else task.rewards)
        with findings:
            check_folder(folder)
            unusual += check_disk(config, known, folder)
    findings.settle()
    assert task is not None and device is not None, "settled"
    if training:
        task = task if held_out is None else without_held_out(task, held_out)
        task.rows_for_step(0, config.prompts_per_step, config.seed)  # still enough without those and the long ones?
    return Prepared(config, task, held_out, device, (*unusual, *data_cautions(config, task, held_out)))


def _checked(config: Config, task: Task, data: Data, known: Outline) -> Task:
    return check_task(
        task,
        known.chat,
        max_tokens=config.sampling.max_tokens,
        context=known.context,
        long_prompts=data.long_prompts,
    )


@contextlib.contextmanager
def _of_evaluation() -> Generator[None]:
    """What is wrong with held-out data is said of `evaluation.data`."""
    try:
        yield
    except GroupwiseError as error:
        raise type(error)(*map(_held_out_problem, error.args)) from error


def _held_out_problem(problem: str) -> str:
    if problem.startswith("data"):
        return f"evaluation.{problem}"
    return f"evaluation.data: {problem}" if problem.startswith("rewards.") else problem


def load_sampler(model: str, engine: Engine) -> tuple[Sampler, Chat]:
    """A sampler for a model that is not to be trained, and its tokenizer.

    Raises:
        GroupwiseError: the model cannot be loaded, or the engine's device is not there.
    """
    policy, tokenizer, stop_ids = load_policy(model, engine.weights, device_of(engine))
    return LocalSampler(policy, stop_ids, max_batch_tokens=engine.sample_tokens or MOST_SAMPLE_TOKENS), Chat(
        tokenizer, stop_ids
    )


def device_of(engine: Engine) -> torch.device:
    """The device that `engine.device` names; also sets the number of CPU threads.

    Raises:
        ConfigError: there is no such device here.
    """
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    return find_device(engine.device, "engine.device")
