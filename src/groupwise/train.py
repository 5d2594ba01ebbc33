"""The training loop on one screen (`loop`), its stages, and `train`, which builds what it needs from a `Config`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from groupwise import checkpoint
from groupwise.algorithms import Algorithm, zero_variance
from groupwise.chat import Chat
from groupwise.config import Config, Data, Engine
from groupwise.engines import Critic, Learner, Sampler, Sampling
from groupwise.engines.local import LocalSampler, load_policy, local_engine
from groupwise.errors import ConfigError, DataError, RewardError
from groupwise.evaluate import Scores, evaluate
from groupwise.log import RunLog, new_folder
from groupwise.model import save_model
from groupwise.records import Batch, Rollout, collate
from groupwise.rollout import play
from groupwise.seeding import generator
from groupwise.slots import replace
from groupwise.tasks import Task, check_task, read_rows, rows_for_step


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
        rollouts = look_back(rollouts, learner) if updates else rollouts  # what that did to one group's log-probs
        sampler.load(learner.weights(), version=step + 1)
        log.lap("update")
        log.step(step, rollouts, updates)
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
        rows = rows_for_step(len(parts.task.rows), step, config.prompts_per_step, config.seed)
        rollouts = _play(config, parts, rows, step, 0)
        if config.algorithm.filter == "dynamic_sampling":
            rollouts = _fill_with_informative_groups(config, parts, step, rollouts)
        yield step, rollouts


def _play(config: Config, parts: Parts, rows: Sequence[int], step: int, draw: int) -> list[Rollout]:
    """The scored groups of some rows; with a greedy baseline, every rollout knows what the greedy answer earned."""
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


def look_back(rollouts: Sequence[Rollout], learner: Learner) -> list[Rollout]:
    """Fill in `new_logprobs`, after the updates, of the group whose rewards differ most: a single one costs little."""
    rewards: dict[int, list[float]] = {}
    for rollout in rollouts:
        if rollout.valid:
            rewards.setdefault(rollout.group, []).append(rollout.reward)
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


# Building a run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What a run works with."""

    task: Task
    sampler: Sampler
    learner: Learner
    chat: Chat
    held_out: Task | None = None
    """Prompts for evaluation."""
    critic: Critic | None = None
    """Of an algorithm that has one (PPO)."""

    def saved(self) -> dict[str, checkpoint.Saved]:
        """What a checkpoint holds, by the name of its folder."""
        return {"learner": self.learner} if self.critic is None else {"learner": self.learner, "critic": self.critic}

    def evaluate(self, config: Config, log: RunLog, steps_done: int) -> Scores | None:
        """Evaluate the policy on the held-out prompts, if there are any, and log it."""
        if self.held_out is None:
            return None
        scores = evaluate(
            self.held_out,
            self.sampler,
            self.chat,
            sampling=Sampling(max_tokens=config.sampling.max_tokens, temperature=config.evaluation.temperature),
            samples=config.evaluation.samples,
            seed=config.seed,
        )
        log.evaluation(steps_done, scores)
        return scores


@dataclass(frozen=True)
class Run:
    """What a training run leaves."""

    folder: Path
    """config.yaml, metrics.jsonl, rollouts/, evaluations/, checkpoints/, and the trained model in model/."""
    before: Scores | None
    """Held-out scores before the first step (None without `evaluation.data`, or when resumed)."""
    after: Scores | None


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
    name = Path(config.model).name or "model"
    folder = resume or new_folder(Path(config.output) if config.output else fresh_folder(Path("runs"), name))
    log = RunLog(
        folder,
        steps=config.steps,
        headline=parts.task.rewards[0].title,
        chat=parts.chat,
        console=console,
        max_invalid_fraction=config.max_invalid_fraction,
    )
    for caution in config.cautions():
        log.warn(caution)
    start, before = 0, None
    if resume is not None:
        start, algorithm = checkpoint.restore(folder, parts.saved())
        config = replace(config, algorithm=algorithm)
        parts.sampler.load(parts.learner.weights(), version=start)
        log.rewind(start)
        log.say(f"continuing {folder} after step {start}")
    else:
        (folder / "config.yaml").write_text(config.to_yaml())
        log.say(f"run folder: {folder}")
        before = parts.evaluate(config, log, 0)
    try:
        loop(config, parts, log, start)
    finally:
        log.close()
    save_model(config.model, parts.learner.weights(), folder / "model")
    return Run(folder, before, parts.evaluate(config, log, config.steps))


def fresh_folder(home: Path, name: str) -> Path:
    """A path below `home`, of the time and the name, at which there is nothing yet."""
    stem = home / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    return next(path for i in range(1000) if not (path := Path(f"{stem}-{i}") if i else stem).exists())


def build(config: Config, task: Task | None = None, held_out: Task | None = None) -> Parts:
    """The task, engine and tokenizer of a configuration, checked against each other.

    Raises:
        GroupwiseError: see `train`.
    """
    task = task or load_task(config, config.data)
    if held_out is None and config.evaluation.data is not None:
        with _of_evaluation():
            held_out = load_task(config, config.evaluation.data)
    rows_for_step(len(task.rows), 0, config.prompts_per_step, config.seed)  # are there enough?
    engine = local_engine(
        config.model,
        dtype=getattr(torch, config.engine.dtype),
        device=device_of(config.engine),
        max_batch_tokens=config.engine.sample_tokens,
        microbatch_tokens=config.engine.train_tokens,
        optimizer=config.optimizer,
        temperature=config.sampling.temperature,
        total_updates=config.steps * config.updates_per_step,
        reference=config.model if "ref_logprobs" in config.algorithm.needs(config.updates_per_step) else None,
        critic=config.critic_optimizer if config.algorithm.critic is not None else None,
        entropy=config.algorithm.entropy is not None,
        gradient_checkpointing=config.engine.gradient_checkpointing,
    )
    chat = Chat(engine.tokenizer, engine.stop_ids)
    check = partial(check_task, chat=chat, max_tokens=config.sampling.max_tokens, context=engine.context)
    task = check(task, long_prompts=config.data.long_prompts)
    rows_for_step(len(task.rows), 0, config.prompts_per_step, config.seed)  # still enough without the long ones?
    if held_out is not None:
        with _of_evaluation():
            held_out = check(held_out, long_prompts=(config.evaluation.data or config.data).long_prompts)
    return Parts(
        task=task, sampler=engine.sampler, learner=engine.learner, critic=engine.critic, chat=chat, held_out=held_out
    )


@contextlib.contextmanager
def _of_evaluation() -> Generator[None]:
    """What is wrong with held-out data is said of `evaluation.data`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"evaluation.{error}") from error
    except RewardError as error:
        raise RewardError(f"evaluation.data: {error}") from error


def load_sampler(model: str, engine: Engine) -> tuple[Sampler, Chat]:
    """A sampler for a model that is not to be trained, and its tokenizer.

    Raises:
        GroupwiseError: the model cannot be loaded, or the engine's device is not there.
    """
    policy, tokenizer, stop_ids = load_policy(model, getattr(torch, engine.dtype), device_of(engine))
    return LocalSampler(policy, stop_ids, max_batch_tokens=engine.sample_tokens), Chat(tokenizer, stop_ids)


def load_task(config: Config, data: Data) -> Task:
    """The rows of a dataset with the configuration's rewards.

    Raises:
        DataError: the dataset cannot be read.
    """
    rows = read_rows(data.path, split=data.split, limit=data.limit)
    return Task(rows, config.rewards, prompt=data.prompt_column, system=data.system_prompt)


def device_of(engine: Engine) -> torch.device:
    """The device that `engine.device` names; also sets the number of CPU threads.

    Raises:
        ConfigError: there is no such device here.
    """
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    name = engine.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device: {name}; no such device; accepted: auto, cpu, cuda, cuda:0, ...") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device: {name}; torch sees {torch.cuda.device_count()} CUDA devices here; use auto or cpu"
        )
    return device
