"""Groups that dynamic sampling drew beyond what a step needs, kept for the step after instead of being thrown away.

They were sampled by the policy before the last step, which their `policy_version` says; the update weighs them by their
ratio to that policy (`train.annotate`).  What is left over a second time is let go, so no group is older than one step.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from groupwise.engines import Snapshot
from groupwise.errors import CheckpointError
from groupwise.files import write_whole
from groupwise.records import Rollout

FILE = "surplus.pickle"


class Surplus:
    """The groups that the next step may use, and, while a step is under way, those for the one after it."""

    def __init__(self) -> None:
        self.groups: list[list[Rollout]] = []
        """Whole groups, informative ones."""
        self._next: list[list[Rollout]] = []

    def leave(self, groups: Sequence[list[Rollout]]) -> None:
        """What the step under way does not need; nothing changes yet, for it may be interrupted and begun anew."""
        self._next = list(groups)

    def advance(self) -> None:
        """The step is done."""
        self.groups, self._next = self._next, []

    def forget(self) -> None:
        """No step has been done."""
        self.groups, self._next = [], []

    def snapshot(self) -> Snapshot:
        """The groups as they are now, to be written into a folder."""
        content = pickle.dumps(self.groups)
        return lambda path: write_whole(path / FILE, content)

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote.

        Raises:
            CheckpointError: the file is missing.
        """
        if not (path / FILE).is_file():
            raise CheckpointError(f"{path / FILE}: not a complete checkpoint: there is no such file")
        self.groups, self._next = pickle.loads((path / FILE).read_bytes()), []
