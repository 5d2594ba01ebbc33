"""The training loop on one screen (`loop`), its stages, and `train`, which builds what it needs from a `Config`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from groupwise import checkpoint
from groupwise.algorithms import zero_variance
from groupwise.chat import Chat
from groupwise.config import Config, Data, Engine
from groupwise.engines import Learner, Sampler, Sampling
from groupwise.engines.local import LocalSampler, local_engine
from groupwise.errors import ConfigError
from groupwise.evaluate import Scores, evaluate
from groupwise.log import RunLog, new_folder
from groupwise.model import load_model, load_tokenizer, save_model, stop_token_ids
from groupwise.records import Rollout, collate
from groupwise.rollout import play
from groupwise.seeding import generator
from groupwise.tasks import Task, check_task, read_rows, rows_for_step


def loop(config: Config, parts: Parts, log: RunLog, start: int = 0) -> None:
    """Steps `start` to `config.steps`: sample groups, credit them, update the policy, publish it."""
    algorithm, sampler, learner = config.algorithm, parts.sampler, parts.learner
    for step, rollouts in experience(config, parts, start):  # whole groups, scored
        log.lap("sample")
        log.check(rollouts)
        rollouts = annotate(rollouts, learner, algorithm.needs(config.updates_per_step))  # old / reference log-probs
        rollouts = algorithm.credit(rollouts)  # rewards -> advantages
        log.lap("credit")
        batches = algorithm.batches(rollouts, config.updates_per_step)  # tensors and token weights
        updates = [learner.update(batch, algorithm.loss) for batch in batches]
        sampler.load(learner.weights(), version=step + 1)
        log.lap("update")
        log.step(step, rollouts, updates)
        if _due(config.evaluation.every, step + 1, config.steps):
            parts.evaluate(config, log, step + 1)
        if _due(config.checkpoint.every, step + 1, config.steps):
            checkpoint.save(log.folder, step + 1, learner, config.checkpoint.keep_last)


def experience(config: Config, parts: Parts, start: int = 0) -> Iterator[tuple[int, list[Rollout]]]:
    """(step, its scored groups), from the policy as it is when the step is asked for."""
    for step in range(start, config.steps):
        rows = rows_for_step(len(parts.task.rows), step, config.prompts_per_step, config.seed)
        rollouts = _play(config, parts, rows, step, 0)
        if config.algorithm.filter == "dynamic_sampling":
            rollouts = _fill_with_informative_groups(config, parts, step, rollouts)
        yield step, rollouts


def _play(config: Config, parts: Parts, rows: Sequence[int], step: int, draw: int) -> list[Rollout]:
    return play(
        parts.task,
        parts.sampler,
        parts.chat,
        rows,
        group_size=config.group_size,
        sampling=config.sampling,
        seed=config.seed,
        step=step,
        stream=f"train.{draw}",
    )


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


def annotate(rollouts: Sequence[Rollout], learner: Learner, needs: Container[str]) -> list[Rollout]:
    """Fill `old_logprobs` and `ref_logprobs`, where needed, before any update: later the old policy is gone."""
    annotated = list(rollouts)
    batch = collate(annotated) if needs else None
    for need, name in (("old", "old_logprobs"), ("ref", "ref_logprobs")):
        if batch is None or need not in needs:
            continue
        rows = learner.logprobs(batch, reference=need == "ref").numpy()
        annotated = [
            dataclasses.replace(rollout, **{name: row[: len(rollout.tokens)]})
            for rollout, row in zip(annotated, rows, strict=True)
        ]
    return annotated


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
    """config.yaml, metrics.jsonl, rollouts/, checkpoints/, and the trained model in model/."""
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
    parts = build(config, task, held_out)
    folder = resume if resume is not None else new_folder(Path(config.output) if config.output else _fresh_name(config))
    log = RunLog(
        folder,
        steps=config.steps,
        headline=parts.task.rewards[0].title,
        prompt_text=parts.chat.prompt_text,
        console=console,
        max_invalid_fraction=config.max_invalid_fraction,
    )
    for caution in config.cautions():
        log.warn(caution)
    start, before = 0, None
    if resume is not None:
        start = checkpoint.restore(folder, parts.learner)
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
    checkpoint.save(folder, config.steps, parts.learner, config.checkpoint.keep_last)
    save_model(config.model, parts.learner.weights(), folder / "model")
    return Run(folder, before, parts.evaluate(config, log, config.steps))


def _fresh_name(config: Config) -> Path:
    model = Path(config.model).name or "model"
    stem = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{model}"
    return next(path for i in range(1000) if not (path := Path(f"{stem}-{i}") if i else stem).exists())


def build(config: Config, task: Task | None = None, held_out: Task | None = None) -> Parts:
    """The task, engine and tokenizer of a configuration, checked against each other.

    Raises:
        GroupwiseError: see `train`.
    """
    task = task or load_task(config, config.data)
    if held_out is None and config.evaluation.data is not None:
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
        reference=config.model if "ref" in config.algorithm.needs(config.updates_per_step) else None,
        entropy=config.algorithm.entropy_coef != 0,
        gradient_checkpointing=config.engine.gradient_checkpointing,
    )
    chat = Chat(engine.tokenizer, engine.stop_ids)
    check = partial(
        check_task,
        chat=chat,
        max_tokens=config.sampling.max_tokens,
        context=engine.context,
        long_prompts=config.data.long_prompts,
    )
    return Parts(
        task=check(task),
        sampler=engine.sampler,
        learner=engine.learner,
        chat=chat,
        held_out=None if held_out is None else check(held_out),
    )


def load_sampler(model: str, engine: Engine) -> tuple[Sampler, Chat]:
    """A sampler for a model that is not to be trained, and its tokenizer.

    Raises:
        GroupwiseError: the model cannot be loaded, or the engine's device is not there.
    """
    policy = load_model(model, dtype=getattr(torch, engine.dtype), device=device_of(engine))
    tokenizer = load_tokenizer(model)
    stop_ids = stop_token_ids(policy, tokenizer)
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
