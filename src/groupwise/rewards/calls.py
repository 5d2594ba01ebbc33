"""Calling reward functions: the two signatures, what they may return, and the boundary where failures are recorded.

Ours is `f(rollout) -> float | StepRewards`.  TRL's is `f(prompts, completions, **columns) -> list[float | None]`, one
entry per completion.  Either may be `async`.  A failure on a sample is data about that sample (its verdict has a
problem); a function that does not keep its contract is the user's error and stops the run.

A built-in that holds a model or connections judges all rollouts of a step `Together`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from groupwise.chat import Prompt
from groupwise.errors import GroupwiseError, RewardError, did_you_mean
from groupwise.records import Rollout
from groupwise.rewards.steps import StepRewards

T = TypeVar("T")
RewardFunction = Callable[..., Any]
TRL_NAMES = ("prompts", "completions", "completion_ids")
SIGNATURES = "f(rollout) -> float, or f(prompts, completions, **columns) -> list[float]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one reward function says about one rollout."""

    value: float
    """nan when there is no value: the function failed, or has no opinion on this sample."""
    problem: str = ""
    """Why there is no trustworthy value; empty when it is fine, or withheld on purpose."""
    steps: tuple[tuple[int, float], ...] = ()
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


def verdicts(
    name: str, function: RewardFunction, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
) -> list[Verdict]:
    """What the reward `name` says about each rollout; `prompts` are aligned with `rollouts`.

    Raises:
        RewardError: the signature, or what the function returned, breaks the contract.
    """
    if isinstance(function, Together):
        return function(rollouts, prompts)
    if takes_columns(name, function):
        return _ask_for_all(name, function, rollouts, prompts)
    return [_attempt(partial(_ask, name, function, rollout)) for rollout in rollouts]


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


def check_columns(name: str, function: RewardFunction, rows: Sequence[Mapping[str, Any]]) -> None:
    """Make sure that the data has every column which the function cannot do without.

    A built-in lists them in `columns` and needs a value in each row; TRL's signature names them as parameters.

    Raises:
        RewardError: a column is missing, or is null in a row.
    """
    needed: tuple[str, ...] = getattr(function, "columns", ())
    known = dict.fromkeys(column for row in rows for column in row)
    for column in (*needed, *_named_columns(name, function)):
        if column not in known:
            raise RewardError(
                f"rewards.{name}: needs the column {column!r}, which no row has{did_you_mean(column, known)}; "
                f"columns: {', '.join(known)}; rename the column, or name another in the reward"
            )
    for column in needed:
        empty = next((index for index, row in enumerate(rows) if row.get(column) is None), None)
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


def _ask(name: str, function: RewardFunction, rollout: Rollout) -> Verdict:
    returned = _finished(function(rollout))
    if isinstance(returned, StepRewards):
        return _judged_steps(returned, rollout.text)
    value = _plain(returned)
    if not isinstance(value, int | float):
        raise RewardError(
            f"rewards.{name}: returned {_described(returned)}; accepted: one number for f(rollout), or StepRewards. "
            "A sample that cannot be scored is told by raising an exception"
        )
    return _judged(float(value))


def _ask_for_all(
    name: str, function: RewardFunction, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
) -> list[Verdict]:
    def ask() -> list[Verdict]:
        return _listed(name, _finished(function(**_arguments(function, rollouts, prompts))), len(rollouts))

    answer = _attempt(ask)
    if isinstance(answer, list):
        return answer
    if len(rollouts) == 1:
        return [answer]
    # One bad sample must not cost the others theirs: TRL promises a function nothing about who shares its call.
    alone = [_ask_for_all(name, function, [r], [p]) for r, p in zip(rollouts, prompts, strict=True)]
    return [verdict for verdicts in alone for verdict in verdicts]


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


def _attempt(call: Callable[[], T]) -> T | Verdict:
    """The reward boundary: the one place where any exception is caught, and kept as a problem of the sample."""
    try:
        return call()
    except GroupwiseError:
        raise
    except Exception as error:
        return Verdict(math.nan, f"raised {type(error).__name__}: {error}{_place(error)}")


def _place(error: Exception) -> str:
    """The line of the reward function that the error came through, rather than one of a library it called."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = max(index for index, frame in enumerate(frames) if frame.filename == __file__)
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames[ours + 1 : ours + 2])


def _finished(answer: Any) -> Any:
    """The answer itself, awaited if need be; in a thread of its own, because a notebook already runs a loop."""
    if not inspect.isawaitable(answer):
        return answer

    async def wait() -> Any:
        return await answer

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(wait())).result()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else value


def _listed(name: str, returned: Any, expected: int) -> list[Verdict]:
    accepted = f"accepted: a list of {expected} numbers, one per completion (None: no opinion on that one)"
    values = _plain(returned)
    if not isinstance(values, list | tuple):
        raise RewardError(f"rewards.{name}: returned {_described(returned)}; {accepted}")
    if len(values) != expected:
        raise RewardError(f"rewards.{name}: returned {len(values)} values for {expected} completions; {accepted}")
    plain = [_plain(value) for value in values]
    for index, value in enumerate(plain):
        if not (value is None or isinstance(value, int | float)):
            raise RewardError(f"rewards.{name}: returned {_described(value)} at [{index}] of its list; {accepted}")
    return [Verdict(math.nan) if value is None else _judged(float(value)) for value in plain]


def _judged(value: float) -> Verdict:
    return Verdict(value) if math.isfinite(value) else Verdict(math.nan, f"returned {value}")


def _judged_steps(said: StepRewards, text: str) -> Verdict:
    if problem := said.problem(text):
        return Verdict(math.nan, f"returned StepRewards in which {problem}")
    return Verdict(said.value, steps=said.steps)


def _described(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
