"""Every error that a user can cause, and the words that lead out of it.

    GroupwiseError (ValueError)
    |- ConfigError       a setting, or a combination of settings
    |- DataError         a dataset: its file, its columns, its rows
    |- ModelError        a model folder, its tokenizer, its chat template
    |- RewardError       a reward function: its name, its signature, what it returned
    |- NumericalError    a loss or gradient that is not finite, and where it comes from
    `- CheckpointError   a run folder or a checkpoint in it

The command line prints the message and exits with 2.  Broken invariants are `assert`s, not these.
A message names the path, the value, what is accepted and the way out.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any


class GroupwiseError(ValueError):
    """The user's input is wrong; the message says where and what to do."""


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


class CheckpointError(GroupwiseError):
    """A run folder or checkpoint is missing, damaged or belongs to another run."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean clip_high?)` for the nearest known name, or the empty string."""
    names = list(known)
    for guess in (name, name.rpartition("_")[2]):  # clip_hihg is nearest to high by its last word
        nearest = difflib.get_close_matches(guess, names, n=1, cutoff=0.6)
        if nearest:
            return f" (did you mean {nearest[0]}?)"
    return ""
