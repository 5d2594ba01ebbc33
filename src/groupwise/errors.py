"""Every error that a user can cause, and the words that lead out of it.

    GroupwiseError (ValueError)
    |- ConfigError       a setting, or a combination of settings
    |- DataError         a dataset: its file, its columns, its rows
    |- ModelError        a model folder, its tokenizer, its chat template
    |- RewardError       a reward function: its name, its signature, what it returned
    |- NumericalError    a loss or gradient that is not finite, and where it comes from
    |- EngineError       a process that takes part in the run is lost, or cannot be started
    |   `- LearnerLostError  it was the learner, which may be started anew
    `- CheckpointError   a run folder or a checkpoint in it

The command line prints the message and exits with 2 (an `EngineError`: 1).  Broken invariants are `assert`s, not these.
A message names the path, the value, what is accepted and the way out.  `Findings` gathers those of independent checks,
so that the user mends everything at once and not one thing a run.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any


class GroupwiseError(ValueError):
    """The user's input is wrong; the message says where and what to do.  Several problems are several arguments."""

    def __str__(self) -> str:
        problems = [str(problem) for problem in self.args]
        if len(problems) < 2:
            return "".join(problems)
        return "\n".join([f"{len(problems)} problems", *(f"{i}. {text}" for i, text in enumerate(problems, start=1))])


class ConfigError(GroupwiseError):
    """A setting is unknown, out of range, or does not go with another."""


class DataError(GroupwiseError):
    """A dataset cannot be read, or a row of it cannot be used."""


class ModelError(GroupwiseError):
    """A model folder is missing something, or the model cannot be served."""


class RewardError(GroupwiseError):
    """A reward function cannot be found or called, or broke its contract."""


class NumericalError(GroupwiseError):
    """The loss of an update or its gradient is not finite; the update was not applied."""

    def __init__(self, message: str, grad_norm: float = math.nan) -> None:
        super().__init__(message)
        self.grad_norm = grad_norm
        self.findings: Sequence[Any] = ()
        """What of which rollout is not finite (`guards.Finding`), once it has been looked for."""


class EngineError(GroupwiseError):
    """A process that takes part in a run has died, does not answer, or cannot be started where it was asked for."""


class LearnerLostError(EngineError):
    """The process that learns has died; what it knew is in the newest checkpoint."""


class CheckpointError(GroupwiseError):
    """A run folder or checkpoint is missing, damaged or belongs to another run."""


class Findings:
    """What independent checks object to: each runs in a `with findings:`, and `settle` raises all of it as one error.

    Behind a check that objects, the next one goes on.
    """

    def __init__(self) -> None:
        self._errors: list[GroupwiseError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, GroupwiseError):
            self._errors.append(error)
        return isinstance(error, GroupwiseError)

    def settle(self) -> None:
        """Go on if nothing was found.

        Raises:
            GroupwiseError: every problem, once; of the class that all errors share, if they do.
        """
        if not self._errors:
            return
        if len(self._errors) == 1:
            raise self._errors[0]
        kinds = {type(error) for error in self._errors}
        kind = kinds.pop() if len(kinds) == 1 else GroupwiseError
        raise kind(*dict.fromkeys(problem for error in self._errors for problem in error.args)) from self._errors[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean clip_high?)` for the nearest known name, or the empty string."""
    names = list(known)
    for guess in (name, name.rpartition("_")[2]):  # clip_hihg is nearest to high by its last word
        nearest = difflib.get_close_matches(guess, names, n=1, cutoff=0.6)
        if nearest:
            return f" (did you mean {nearest[0]}?)"
    return ""
