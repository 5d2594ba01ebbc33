"""Calling a reward function: the two signatures, and reading what comes back.

Ours is `f(rollout) -> float | StepRewards`.  TRL's is `f(prompts, completions, **columns) -> list[float | None]`, one
entry per completion.  Either may be `async`.  Whatever goes wrong in a call is data about its samples: a verdict with a
cause.  This runs in the trainer's process and in workers (`workers.py`) alike, so it imports no torch.

A built-in that holds a model or connections judges all rollouts of a step `Together`, in the trainer's process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from groupwise.chat import Prompt
from groupwise.errors import GroupwiseError, RewardError, did_you_mean
from groupwise.records import Rollout
from groupwise.rewards.steps import StepRewards

RewardFunction = Callable[..., Any]
Run = Callable[[Coroutine[Any, Any, Any]], Any]
Cause = Literal["", "raised", "timeout", "crashed", "returned"]
TRL_NAMES = ("prompts", "completions", "completion_ids")
SIGNATURES = "f(rollout) -> float, or f(prompts, completions, **columns) -> list[float]"
LONGEST_PROBLEM = 500
"""Characters of a problem that are kept: an exception may quote all of its input."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one reward function says about one rollout."""

    value: float
    """nan when there is no value: the function failed, or has no opinion on this sample."""
    problem: str = ""
    """Why there is no trustworthy value; empty when it is fine, or withheld on purpose."""
    cause: Cause = ""
    """The kind of problem: it raised, took too long, took its process down, or returned what is no number."""
    steps: Sequence[tuple[int, float]] = ()
    """The rewards of its steps, where the function gives some; see `StepRewards.steps`."""


@runtime_checkable
class Together(Protocol):
    """A reward that stays in the trainer's process and judges all rollouts of a step in one call."""

    in_process: ClassVar[bool]

    def prepare(self, prompts: Mapping[int, Prompt]) -> None:
        """Load what it needs, before anything is sampled; `prompts` are all of them, by their row in the data.

        Raises:
            GroupwiseError: it cannot be loaded, or a prompt cannot be judged.
        """
        ...

    def __call__(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Verdict]:
        """A verdict on each rollout; `prompts` are aligned with `rollouts`."""
        ...


def failed(cause: Cause, problem: str) -> Verdict:
    """The verdict on a sample that could not be judged."""
    short = problem if len(problem) <= LONGEST_PROBLEM else problem[:LONGEST_PROBLEM] + "..."
    return Verdict(math.nan, short, cause)


def too_late(seconds: float) -> Verdict:
    """The verdict on a call that took longer than it may."""
    return failed("timeout", f"gave no answer within {seconds:g} s")


def run_apart(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, in a thread of its own, because a notebook already runs a loop in this one."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def call(
    name: str,
    function: RewardFunction,
    rollouts: Sequence[Rollout],
    prompts: Sequence[Prompt],
    *,
    seconds: float,
    run: Run = run_apart,
) -> list[Verdict] | Verdict:
    """What the reward `name` says about each rollout, or one verdict on the call when all of it failed.

    Args:
        name: the reward's title.
        function: of either signature.
        rollouts: what to judge.
        prompts: aligned with `rollouts`.
        seconds: the time limit of each completion, where an `async` function of our signature judges several at once.
        run: what waits for a coroutine.

    Raises:
        GroupwiseError: the signature is neither, or the function stops the run on purpose.
    """
    columns = takes_columns(name, function)
    try:
        if isinstance(function, Together):
            return function(rollouts, prompts)
        if columns:
            return _listed(_finished(function(**_arguments(function, rollouts, prompts)), run), len(rollouts))
        if is_async(function):
            return run(_ask_each(function, rollouts, seconds))
        return [_read(_finished(function(rollout), run), rollout) for rollout in rollouts]
    except GroupwiseError:
        raise
    except (Exception, SystemExit) as error:
        return _raised(error)


def is_together(name: str, function: RewardFunction) -> bool:
    """Whether one call judges all rollouts: TRL's signature does, and `async` functions wait for each other's.

    Raises:
        RewardError: the signature is neither.
    """
    return isinstance(function, Together) or takes_columns(name, function) or is_async(function)


def is_async(function: RewardFunction) -> bool:
    """Whether the function, or the object's `__call__`, is `async`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def takes_columns(name: str, function: RewardFunction) -> bool:
    """Whether the function has TRL's signature rather than ours.

    Raises:
        RewardError: it has neither.
    """
    if isinstance(function, Together):
        return False
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(f"rewards.{name}: has no readable signature; wrap it in a function {SIGNATURES}") from error
    if any(parameter in TRL_NAMES for parameter in signature.parameters):
        return True
    try:
        signature.bind(None)
    except TypeError as error:
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            return True
        raise RewardError(f"rewards.{name}: its signature is {signature}; accepted: {SIGNATURES}") from error
    return False


def check_columns(name: str, function: RewardFunction, rows: Mapping[int, Mapping[str, Any]]) -> None:
    """Make sure that the data has every column which the function cannot do without.

    A built-in lists them in `columns` and needs a value in each row; TRL's signature names them as parameters.  `rows`
    are those that the reward grades, by their place in the data.

    Raises:
        RewardError: a column is missing, or is null in a row.
    """
    needed: tuple[str, ...] = getattr(function, "columns", ())
    known = dict.fromkeys(column for row in rows.values() for column in row)
    for column in (*needed, *_named_columns(name, function)):
        if column not in known:
            raise RewardError(
                f"rewards.{name}: needs the column {column!r}, which no row has{did_you_mean(column, known)}; "
                f"columns: {', '.join(known)}; rename the column, or name another in the reward"
            )
    for column in needed:
        empty = next((index for index, row in rows.items() if row.get(column) is None), None)
        if empty is not None:
            raise RewardError(
                f"rewards.{name}: needs a value in the column {column!r}, but rows[{empty}].{column} is null; "
                "fill it in, or leave that row out of the data"
            )


def _named_columns(name: str, function: RewardFunction) -> list[str]:
    if not takes_columns(name, function):
        return []
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.kind in keyword and p.default is p.empty]
    return [parameter for parameter in required if parameter not in TRL_NAMES]


async def _ask_each(function: RewardFunction, rollouts: Sequence[Rollout], seconds: float) -> list[Verdict]:
    async def ask(rollout: Rollout) -> Verdict:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return _read(await function(rollout), rollout)
        except GroupwiseError:
            raise
        except (Exception, SystemExit) as error:
            return too_late(seconds) if limit.expired() else _raised(error)

    return list(await asyncio.gather(*map(ask, rollouts)))


def _arguments(function: RewardFunction, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> dict[str, Any]:
    columns = dict.fromkeys(column for rollout in rollouts for column in rollout.example)
    offered: dict[str, Any] = {column: [rollout.example.get(column) for rollout in rollouts] for column in columns}
    offered["prompts"] = list(prompts)
    offered["completions"] = [
        rollout.text if isinstance(prompt, str) else [{"role": "assistant", "content": rollout.text}]
        for rollout, prompt in zip(rollouts, prompts, strict=True)
    ]
    offered["completion_ids"] = [rollout.tokens[rollout.loss_mask].tolist() for rollout in rollouts]
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {column: offered[column] for column in offered if column not in ("prompt", "completion")}
    return {parameter: offered[parameter] for parameter in parameters if parameter in offered}


def _raised(error: BaseException) -> Verdict:
    return failed("raised", f"raised {type(error).__name__}: {error}{_place(error)}")


def _place(error: BaseException) -> str:
    """The line of the reward function that the error came through, rather than one of a library it called."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = max(index for index, frame in enumerate(frames) if frame.filename == __file__)
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames[ours + 1 : ours + 2])


def _finished(answer: Any, run: Run) -> Any:
    """The answer itself, awaited if need be."""
    if not inspect.isawaitable(answer):
        return answer

    async def wait() -> Any:
        return await answer

    return run(wait())


def _plain(value: Any) -> Any:
    """Numbers and lists instead of the arrays and tensors of any library."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _read(returned: Any, rollout: Rollout) -> Verdict:
    if isinstance(returned, StepRewards):
        return _judged_steps(returned, rollout.text)
    value = _plain(returned)
    if not isinstance(value, int | float):
        return failed("returned", f"returned {_described(returned)} (accepted: one number for f(rollout))")
    return _judged(value)


def _listed(returned: Any, expected: int) -> list[Verdict] | Verdict:
    accepted = f"(accepted: a list of {expected} numbers, one per completion; None: no opinion on that one)"
    values = _plain(returned)
    if not isinstance(values, list | tuple):
        return failed("returned", f"returned {_described(returned)} {accepted}")
    if len(values) != expected:
        return failed("returned", f"returned {len(values)} values for {expected} completions {accepted}")
    return [_entry(_plain(value), index, accepted) for index, value in enumerate(values)]


def _entry(value: Any, index: int, accepted: str) -> Verdict:
    if value is None:
        return Verdict(math.nan)
    if not isinstance(value, int | float):
        return failed("returned", f"returned {_described(value)} at [{index}] of its list {accepted}")
    return _judged(value)


def _judged(value: float) -> Verdict:
    try:
        number = float(value)
    except OverflowError:  # an int may be larger than any float
        number = math.inf
    return Verdict(number) if math.isfinite(number) else failed("returned", f"returned {number}")


def _judged_steps(said: StepRewards, text: str) -> Verdict:
    if problem := said.problem(text):
        return failed("returned", f"returned StepRewards in which {problem}")
    return Verdict(said.value, steps=said.steps)


def _described(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
