"""The training loop on one screen (`loop`), its stages, and `train`, which runs it in a run folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console
from torch import Tensor

from groupwise import checkpoint
from groupwise.algorithms import Algorithm
from groupwise.build import RUNS, Parts, build, engine_of, fresh_folder
from groupwise.cautions import cautions
from groupwise.checkpoint import Checkpoints
from groupwise.config import Config
from groupwise.engines import Learner
from groupwise.environment import write_environment
from groupwise.errors import CheckpointError, EngineError, LearnerLostError, NumericalError
from groupwise.evaluate import Scores
from groupwise.experience import experience
from groupwise.files import alone, damage, whole_folder, write_whole
from groupwise.groups import by_group
from groupwise.guards import blaming, cause, poisoned
from groupwise.interrupt import Stop, Stopped
from groupwise.log import RunLog, new_folder
from groupwise.model import save_model
from groupwise.pending import Pending
from groupwise.records import Batch, Rollout, collate
from groupwise.rewards import workers_end
from groupwise.slots import replace
from groupwise.tasks import Task
from groupwise.trackers import open_trackers

LOOK_BACK_EVERY = 10
"""Steps between two at which a group is read again after the update, for the report to show what the update did."""


def loop(config: Config, parts: Parts, log: RunLog, start: int = 0, stop: Stop | None = None) -> None:
    """Steps `start` to `config.steps`: sample groups, credit them, update the policy, publish it.

    Raises:
        Stopped: `stop` was asked to; a checkpoint of the steps done is on disk.
    """
    algorithm, sampler, learner = config.algorithm, parts.sampler, parts.learner
    done, stop = start, stop or Stop()
    with (
        Checkpoints(log.folder, config.checkpoint, parts.covered) as checkpoints,
        contextlib.closing(experience(config, parts, start, log.note)) as steps,
    ):
        try:
            for step, rollouts in steps:  # whole groups, scored
                log.lap("sample")
                parts.check(log, step, rollouts)
                adapted = algorithm.adapt(rollouts)  # coefficients that follow a target
                # Old and reference log-probs and the critic's values, where they are needed.
                rollouts = annotate(rollouts, parts, adapted, config.updates_per_step, step)
                rollouts = adapted.credit(rollouts)  # rewards -> advantages
                log.lap("credit")
                with stop.held():  # from the first update until it is written down, a step is not interrupted
                    batches = adapted.batches(rollouts, config.updates_per_step)  # tensors and weights of each update
                    updates = [
                        guarded(step, i, batch, rollouts, adapted, parts, log) for i, batch in enumerate(batches)
                    ]
                    if updates and step % LOOK_BACK_EVERY == 0:
                        rollouts = look_back(rollouts, learner)  # one group's new log-probs
                    sampler.load(learner.weights(), version=step + 1)
                    log.lap("update")
                    log.note(parts.idle())
                    log.step(step, rollouts, updates)
                    if adapted.kl is not None and _due(adapted.kl.refresh_every, step + 1, config.steps):
                        learner.refresh_reference()
                    parts.remember(step, rollouts)
                    done, algorithm = step + 1, adapted
                log.diagnose(done)
                score = parts.evaluate(config, log, done) if _due(config.evaluation.every, done, config.steps) else None
                if done == config.steps or _due(config.checkpoint.every, done, config.steps):
                    with stop.held():
                        checkpoints.save(done, parts.saved(), algorithm, None if score is None else score.headline)
                    log.lap("checkpoint")
        except Stopped:
            if done not in (start, checkpoints.newest):
                checkpoints.save(done, parts.saved(), algorithm, None)
            checkpoints.wait()
            raise


def guarded(
    step: int,
    number: int,
    batch: Batch,
    rollouts: Sequence[Rollout],
    algorithm: Algorithm,
    parts: Parts,
    log: RunLog,
) -> dict[str, float]:
    """The metrics of an update; none when its loss or gradient was not finite and it may be left out.

    Raises:
        NumericalError: it was not finite, and may not; the batch is in the run folder.
    """
    try:
        return update(batch, algorithm, parts)
    except NumericalError as error:
        found = cause(error.findings, batch, rollouts, parts.learner.weights())
        log.refuse(step, number, batch, f"{error}; {found}")
        return {}


def update(batch: Batch, algorithm: Algorithm, parts: Parts) -> dict[str, float]:
    """One optimizer step of the policy, and of the critic if there is one; their metrics.

    Raises:
        NumericalError: loss or gradient is not finite, with what of which row is to blame; that model is as it was.
    """
    learner, critic = parts.learner, parts.critic
    probe = partial(learner.update, loss=poisoned(algorithm.loss), per_token=algorithm.per_token)
    with blaming(batch, "the policy's log-prob", learner.logprobs, probe):
        metrics = learner.update(batch, algorithm.loss, per_token=algorithm.per_token)
    if critic is None:
        return metrics
    probe = partial(critic.update, loss=poisoned(algorithm.value_loss))
    with blaming(batch, "the critic's value", critic.values, probe):
        return metrics | critic.update(batch, algorithm.value_loss)


def annotate(
    rollouts: Sequence[Rollout], parts: Parts, algorithm: Algorithm, updates_per_step: int, step: int
) -> list[Rollout]:
    """Fill in what is needed of `old_logprobs`, `ref_logprobs` and `values`, before any update moves the policy.

    For groups that an older policy sampled (not the one after `step` steps), the old policy is that one: its log-probs
    are those of the sampler.  Where the algorithm's correction weighs them, it is the learner's (decoupled PPO).
    """
    needs, stale = algorithm.needs(updates_per_step), [r.policy_version < step for r in rollouts]
    if algorithm.weighs_age:
        stale = [False] * len(stale)
    if any(stale):
        needs.add("old_logprobs")
    if all(stale):
        needs.discard("old_logprobs")
    if not needs and not any(stale):
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
    filled = (
        dataclasses.replace(rollout, **{name: rows[i, : len(rollout.tokens)].numpy() for name, rows in known.items()})
        for i, rollout in enumerate(rollouts)
    )
    return [
        dataclasses.replace(rollout, old_logprobs=rollout.logprobs) if old else rollout
        for rollout, old in zip(filled, stale, strict=True)
    ]


def look_back(rollouts: Sequence[Rollout], learner: Learner) -> list[Rollout]:
    """Fill in `new_logprobs`, after the updates, of the group whose rewards differ most: a single one costs little."""
    groups = by_group(rollout for rollout in rollouts if rollout.valid)
    rewards = {group: [rollout.reward for rollout in members] for group, members in groups.items()}
    group = max(rewards, key=lambda group: max(rewards[group]) - min(rewards[group]))
    batch = collate([rollout for rollout in rollouts if rollout.group == group])
    rows = iter(learner.logprobs(batch).numpy())
    return [
        dataclasses.replace(rollout, new_logprobs=next(rows)[: len(rollout.tokens)])
        if rollout.group == group
        else rollout
        for rollout in rollouts
    ]


def _due(every: int, done: int, total: int) -> bool:
    """Whether something that happens every so many steps (0: only at the end) is due; the end is `train`'s."""
    return every > 0 and done % every == 0 and done < total


# A run in its folder ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a training run leaves."""

    folder: Path
    """config.yaml, environment.json, metrics.jsonl, rollouts/, evaluations/, checkpoints/, and the trained model in
    model/ (with LoRA the adapter alone, too, in adapter/)."""
    before: Scores | None
    """Held-out scores before the first step (None without `evaluation.data`, or when resumed after it)."""
    after: Scores | None
    stopped: str | None = None
    """By what it was stopped before its end, to be resumed: SIGTERM, SIGINT or the time limit."""


@workers_end()
def train(
    config: Config,
    task: Task | None = None,
    *,
    held_out: Task | None = None,
    resume: Path | None = None,
    max_seconds: float | None = None,
    console: Console | None = None,
) -> Run:
    """Train `config.model` on the task, by default the one that `config.data` and `config.rewards` describe.

    SIGINT and SIGTERM stop it where it can be resumed.

    Args:
        task: other prompts and rewards than the configuration's.
        held_out: other held-out prompts than those of `config.evaluation`.
        resume: a run folder to continue from its newest undamaged checkpoint, or from the start if it has none.
        max_seconds: stop after this time, as a signal would.
        console: where progress is shown; standard error when None.

    Raises:
        GroupwiseError: whatever is wrong with the configuration, the data, the rewards or the model, before the first
            token is sampled where it can be known then.
    """
    config = config.resolve()
    if resume is not None:
        checkpoint.check_run(resume)  # before a model is loaded: is there anything to continue?
    with config.engine.join() as ranks:
        if ranks is not None:
            ranks.follow(lambda settings: engine_of(Config.parse(yaml.safe_load(settings)), ranks)())
        with contextlib.closing(build(config, task, held_out, ranks)) as parts:
            name = Path(config.model).name or "model"
            folder = resume or new_folder(Path(config.output) if config.output else fresh_folder(Path(RUNS), name))
            with alone(folder):
                return _train(parts, folder, resume is not None, max_seconds, console)


def _train(parts: Parts, folder: Path, resumed: bool, max_seconds: float | None, console: Console | None) -> Run:
    """The run of these parts, in its folder."""
    config = parts.config
    log = RunLog(
        folder,
        steps=config.steps,
        headline=parts.task.rewards[0].title,
        chat=parts.chat,
        console=console,
        max_invalid_fraction=config.max_invalid_fraction,
        trackers=open_trackers(config.trackers, folder, config.model_dump(mode="json")),
        guards=config.guards,
    )
    pending = Pending(folder, config.to_yaml(), log.warn)
    parts = dataclasses.replace(parts, pending=pending)
    for caution in (*cautions(config), *parts.cautions):
        log.warn(caution)
    before: Scores | None = None
    try:
        with Stop(max_seconds) as stop, contextlib.closing(log), contextlib.closing(pending):
            if not resumed:
                _begin(config, log)
            with parts.running(log):
                start, current = _continue(config, parts, log) if resumed else (0, config)
                with _way_out(folder):
                    before = parts.evaluate(config, log, 0) if start == 0 else None
                    _to_the_end(config, current, parts, log, start, stop)
                    return Run(folder, before, parts.evaluate(config, log, config.steps))
    except Stopped as stopped:
        log.say(f"stopped by {stopped}; continue with: groupwise train --resume {folder}")
        return Run(folder, before, None, stopped=str(stopped))


def _to_the_end(config: Config, current: Config, parts: Parts, log: RunLog, start: int, stop: Stop) -> None:
    """Train, and write the model; a learner that is lost is started anew, and goes on from the newest checkpoint.

    Args:
        config: the settings as the run began with them.
        current: those with coefficients as they stand after `start` steps.

    Raises:
        LearnerLostError: it is lost more often than `learner_restarts`.
    """
    lost = 0
    while True:
        try:
            if lost:
                assert parts.processes is not None, "it was lost"
                parts.processes.restart()
                start, current = _continue(config, parts, log)
            loop(current, parts, log, start, stop)
            with stop.held(), whole_folder(log.folder / "model") as model:
                save_model(config.model, parts.learner.weights(), model)
            if parts.save_adapter is not None:
                with stop.held(), whole_folder(log.folder / "adapter") as adapter:
                    parts.save_adapter(adapter)
            return
        except LearnerLostError as error:
            if parts.processes is None or lost == parts.processes.restarts:
                raise
            lost += 1
            again = f"it is started anew, {lost} of at most {parts.processes.restarts} times in this run"
            log.warn(f"{error}; the last step written down is {log.done}; {again}")


def _begin(config: Config, log: RunLog) -> None:
    write_whole(log.folder / "config.yaml", config.to_yaml().encode())
    write_environment(log.folder)
    log.say(f"run folder: {log.folder}")


def _continue(config: Config, parts: Parts, log: RunLog) -> tuple[int, Config]:
    """Bring everything to where the newest checkpoint has it; the steps done then, and the configuration."""
    start, found = 0, checkpoint.newest(log.folder, log.warn)
    if found is not None:
        start, algorithm = checkpoint.restore(found, parts.saved())
        config = replace(config, algorithm=algorithm)
    else:
        parts.start_over()
    parts.sampler.load(parts.learner.weights(), version=start)
    evaluated = {record["step"] for record in log.rewind(start) if any(name.startswith("eval/") for name in record)}
    log.say(f"continuing {log.folder} after step {start}")
    if start >= config.steps:
        another = f"--model {log.folder / 'model'} starts another run from here"
        log.warn(f"all {config.steps} steps are done already, so nothing is trained; {another}")
    if _due(config.evaluation.every, start, config.steps) and start and start not in evaluated:
        parts.evaluate(config, log, start)  # the run was stopped while it was evaluating
    return start, config


@contextlib.contextmanager
def _way_out(folder: Path) -> Generator[None]:
    """What goes wrong with the run folder or a process says what is left and how to go on."""
    try:
        yield
    except (CheckpointError, EngineError) as error:
        good = next((path for path in reversed(checkpoint.complete(folder)) if damage(path) is None), None)
        state = "there is no checkpoint yet" if good is None else f"the last good state is {good}"
        raise type(error)(f"{error}; {state}; mend this, then `groupwise train --resume {folder}`") from error
