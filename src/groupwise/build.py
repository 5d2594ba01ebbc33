"""What a run works with (`Parts`), built from a `Config` after everything knowable was checked (`prepare`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from groupwise.busy import Busy
from groupwise.chat import Chat
from groupwise.checkpoint import Saved
from groupwise.checks import Outline, check_disk, check_folder, check_it_learns, check_memory, data_cautions, outline
from groupwise.config import Config, Engine, Evaluation
from groupwise.curriculum import History
from groupwise.data import Data, hold_out, load_task, without_held_out
from groupwise.devices import find_device
from groupwise.engines import Critic, Learner, Processes, Running, Sampler, Serving
from groupwise.engines.local import LocalEngine, Recipe, load_policy, local_sampler
from groupwise.engines.local_sampler import LocalSampler
from groupwise.engines.ranks import Ranks
from groupwise.engines.vllm import Vllm
from groupwise.errors import ConfigError, Findings, GroupwiseError, RewardError
from groupwise.evaluate import Scores, evaluate
from groupwise.guards import check_finite
from groupwise.log import RunLog
from groupwise.pending import Pending
from groupwise.records import Rollout
from groupwise.settling import MOST_SAMPLE_TOKENS, settle
from groupwise.surplus import Surplus
from groupwise.tasks import Task, check_prompts, check_task

RUNS = "runs"
"""The folder in which runs are made that name none."""


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
    surplus: Surplus | None = None
    """What dynamic sampling drew too much, where the algorithm samples so."""
    save_adapter: Callable[[Path], None] | None = None
    """With LoRA: writes the adapter alone, beside the merged model."""
    pending: Pending | None = None
    """Where sampled groups are kept until a checkpoint covers them."""
    processes: Processes | None = None
    """What runs sampler and learner, where that is not this process."""
    busy: Mapping[str, Busy] = field(default_factory=dict[str, Busy])
    """Both sides, where the sampler alone runs beside this process."""

    def check(self, log: RunLog, step: int, rollouts: Sequence[Rollout]) -> None:
        """Refuse rewards that cannot be trusted; their groups are not kept, for the rewards have to be asked again.

        Raises:
            RewardError: see `RunLog.check` and `check_finite`.
        """
        try:
            log.check(rollouts)
            check_finite(step, rollouts)
        except RewardError:
            if self.pending is not None:
                self.pending.forget_step(step)
            raise

    def remember(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A step is done: what it showed of its prompts, and what it left over."""
        if self.history is not None:
            self.history.record(step, rollouts)
        if self.surplus is not None:
            self.surplus.advance()

    def start_over(self) -> None:
        """The run begins again with its first step: nothing has been seen of any prompt, and nothing is left over."""
        for part in (self.history, self.surplus):
            if part is not None:
                part.forget()

    def idle(self) -> dict[str, float]:
        """The share of the step in which each side waited, where they are not one process."""
        waited = {f"idle/{side}": busy.idle() for side, busy in self.busy.items()}
        return waited if self.processes is None else self.processes.idle()

    def close(self) -> None:
        """End what runs in other processes."""
        if self.processes is not None:
            self.processes.close()

    def covered(self, steps_done: int) -> None:
        """A checkpoint of these steps is on disk."""
        if self.pending is not None:
            self.pending.forget(steps_done)

    @contextlib.contextmanager
    def running(self, log: RunLog) -> Generator[None]:
        """What the sampler needs beside this process runs inside."""
        with contextlib.ExitStack() as stack:
            if isinstance(self.sampler, Running):
                stack.enter_context(self.sampler.running(log.folder, log.say))
            log.begin_lap()
            yield

    def saved(self) -> dict[str, Saved]:
        """What a checkpoint holds, by the name of its folder."""
        found = {"learner": self.learner, "critic": self.critic, "curriculum": self.history, "surplus": self.surplus}
        return {name: part for name, part in found.items() if part is not None}

    def evaluate(self, config: Config, log: RunLog, steps_done: int) -> Scores | None:
        """Evaluate the policy on the held-out prompts, if there are any, and log it."""
        if self.held_out is None:
            return None
        scores = evaluate(
            self.held_out,
            self.sampler,
            self.chat,
            sampling=config.evaluation.sampling(config.sampling),
            samples=config.evaluation.samples,
            seed=config.seed,
        )
        log.evaluation(steps_done, scores)
        return scores


def fresh_folder(home: Path, name: str) -> Path:
    """A path below `home`, of the time and the name, at which there is nothing yet."""
    stem = home / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    return next(path for i in range(1000) if not (path := Path(f"{stem}-{i}") if i else stem).exists())


def build(config: Config, task: Task | None = None, held_out: Task | None = None, ranks: Ranks | None = None) -> Parts:
    """The task, engine and tokenizer of a configuration, checked against each other.

    Raises:
        GroupwiseError: see `train`.
    """
    ready = prepare(config, task, held_out)
    config = ready.config
    if ranks is not None:
        ranks.lead(config.to_yaml())
    recipe = Recipe(
        engine=engine_of(config, ranks),
        sampler=partial(local_sampler, config.model, **_where(config)),
        threads=config.engine.threads or torch.get_num_threads(),
        gpu=ready.device.type == "cuda",
        ranks=config.engine.split() or 1,
        join=partial(config.engine.learner.join, ready.device.type),
    )
    engine, busy = _beside(ready, config.engine.placement(recipe))
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
        # Left to the step after next at the earliest, what is left over would be older than `ahead` allows.
        surplus=Surplus() if config.algorithm.filter == "dynamic_sampling" and not config.ahead else None,
        processes=engine.processes,
        busy=busy,
    )


def engine_of(config: Config, ranks: Ranks | None = None) -> Callable[..., LocalEngine]:
    """What makes the engine of a configuration that `prepare` has settled; that of this rank, where there are several.

    It can be sent to another process, and raises a `GroupwiseError` when the model cannot be loaded or served, or the
    engine cannot do what the algorithm needs.
    """
    return partial(
        config.engine.learner.engine,
        model=config.model,
        ranks=ranks,
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
        **_where(config),
    )


def _where(config: Config) -> dict[str, Any]:
    """What learner and sampler have to know alike."""
    return {
        "dtype": config.engine.weights,
        "device": device_of(config.engine),
        "max_batch_tokens": config.engine.sample_tokens or MOST_SAMPLE_TOKENS,
        "mixed": config.engine.dtype == "mixed",
    }


def _beside(ready: Prepared, engine: LocalEngine) -> tuple[LocalEngine, dict[str, Busy]]:
    """The engine with the sampler that the settings ask for, and how busy it and the learner are."""
    config = ready.config
    if config.engine.sampler is None:
        return engine, {}
    busy = Busy()
    learner, critic = busy.watch(engine.learner), None if engine.critic is None else busy.watch(engine.critic)
    sampler = config.engine.sampler(
        Serving(
            model=config.model,
            dtype=config.engine.weights,
            mixed=config.engine.dtype == "mixed",
            device=ready.device,
            threads=torch.get_num_threads(),
            stop_ids=engine.stop_ids,
            temperature=config.sampling.temperature,
            weights=learner.weights,
            logprobs=learner.logprobs,
            loaded=partial(engine.sampler.load, ()),
        )
    )
    sides = {"sampler": sampler.busy, "learner": busy} if isinstance(sampler, Running) else {}
    return engine._replace(sampler=sampler, learner=learner, critic=critic), sides


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
    known = outline(config.model, findings, config.lora if training else None)
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
        task = _checked(task, config.data, known, config.sampling.max_tokens)
    with findings, _of_evaluation(config.evaluation):
        data = config.evaluation.data
        held_out = load_task(data, config.rewards) if held_out is None and data is not None else held_out
        if held_out is not None:
            longest = config.evaluation.sampling(config.sampling).max_tokens
            held_out = _checked(held_out, data or config.data, known, longest)
    if training:
        if isinstance(config.engine.sampler, Vllm):
            with findings:
                config.engine.sampler.check()
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


def _checked(task: Task, data: Data, known: Outline, max_tokens: int) -> Task:
    return check_task(task, known.chat, max_tokens=max_tokens, context=known.context, long_prompts=data.long_prompts)


@contextlib.contextmanager
def _of_evaluation(evaluation: Evaluation) -> Generator[None]:
    """What is wrong with held-out data is said of `evaluation.data`, and of `evaluation.max_tokens` if that is set."""
    try:
        yield
    except GroupwiseError as error:
        raise type(error)(*(_held_out_problem(problem, evaluation) for problem in error.args)) from error


def _held_out_problem(problem: str, evaluation: Evaluation) -> str:
    if evaluation.max_tokens is not None:
        problem = problem.replace("sampling.max_tokens", "evaluation.max_tokens")
    if problem.startswith("data"):
        return f"evaluation.{problem}"
    return f"evaluation.data: {problem}" if problem.startswith("rewards.") else problem


def load_sampler(model: str, engine: Engine) -> tuple[Sampler, Chat]:
    """A sampler for a model that is not to be trained, and its tokenizer.

    Raises:
        GroupwiseError: the model cannot be loaded, the engine's device is not there, or another sampler is asked for.
    """
    if engine.sampler is not None:
        raise ConfigError("engine.sampler: is that of training; here this process samples: leave it out")
    policy, tokenizer, stop_ids = load_policy(model, engine.weights, device_of(engine))
    sampler = LocalSampler(
        policy,
        stop_ids,
        max_batch_tokens=engine.sample_tokens or MOST_SAMPLE_TOKENS,
        mixed=engine.dtype == "mixed",
    )
    return sampler, Chat(tokenizer, stop_ids)


def device_of(engine: Engine) -> torch.device:
    """The device that `engine.device` names; also sets the number of CPU threads.

    Raises:
        ConfigError: there is no such device here.
    """
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    return find_device(engine.device, "engine.device")
