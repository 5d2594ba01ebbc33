"""A curriculum by measured pass rate: prompts that are always or never solved are skipped for a while.

All of a group's rewards are then equal, and nothing can be learned from it.  What to skip is a pure function of (seed,
step, what the run has measured), and what it has measured is part of the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from groupwise.engines import Snapshot
from groupwise.files import write_whole
from groupwise.groups import by_group
from groupwise.records import Rollout
from groupwise.rewards import PASSED
from groupwise.seeding import generator, key
from groupwise.slots import Slot
from groupwise.tasks import LABEL, Task, normal_form


class Curriculum(Slot):
    """Skip prompts that are always or never solved, and try them again later."""

    visits: int = Field(default=2, ge=1)
    """A prompt is skipped once its whole group was right, or none of it, in this many visits in a row."""
    retry_after: int = Field(default=100, ge=1)
    """Steps after which a skipped prompt is asked again: the policy has changed since."""


@dataclass(frozen=True)
class Seen:
    """How one prompt has fared."""

    visits: int
    """How often it was asked."""
    last: int
    """The step of the last visit."""
    rate: float
    """The share of that visit's completions that were right: a headline reward above 0.5."""
    streak: int
    """Visits in a row, up to that one, with this same rate, when it is 0 or 1; else 0."""


class History:
    """What a run has measured of each prompt, told apart by `normal_form`."""

    def __init__(self, curriculum: Curriculum, task: Task) -> None:
        self.curriculum, self.task = curriculum, task
        self.seen: dict[str, Seen] = {}

    def record(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Take note of the groups of a step; a group without a valid rollout says nothing."""
        headline = self.task.rewards[0].title
        for group in by_group(rollout for rollout in rollouts if rollout.valid).values():
            name = self._name(group[0].example)
            before = self.seen.get(name, Seen(visits=0, last=step, rate=-1.0, streak=0))
            rate = sum(rollout.rewards[headline] > PASSED for rollout in group) / len(group)
            streak = (before.streak if rate == before.rate else 0) + 1 if rate in (0.0, 1.0) else 0
            self.seen[name] = Seen(before.visits + 1, step, rate, streak)

    def forget(self) -> None:
        """Nothing has been asked yet."""
        self.seen = {}

    def skips(self, row: int, step: int) -> bool:
        """Whether the row's prompt is not to be asked in this step."""
        seen = self.seen.get(self._names[row])
        return (
            seen is not None
            and seen.streak >= self.curriculum.visits
            and step - seen.last < self.curriculum.retry_after
        )

    def instead_of(self, rows: Sequence[int], step: int, draw: int, seed: int) -> list[int]:
        """These rows, with another one in the place of each that is skipped: of its dataset, asked least often so far.

        Where all others are skipped as well, a row stays.
        """
        if not any(self.skips(row, step) for row in rows):
            return list(rows)
        taken, all_rows = set(rows), self.task.rows
        order = generator(seed, "curriculum", step, draw).permutation(len(all_rows)).tolist()
        free = [row for row in order if row not in taken and not self.skips(row, step)]
        free.sort(key=self._visits)  # a stable sort: among equals, the order stays drawn
        spare: dict[Any, list[int]] = {}
        for row in reversed(free):
            spare.setdefault(all_rows[row].get(LABEL), []).append(row)
        chosen: list[int] = []
        for row in rows:
            others = spare.get(all_rows[row].get(LABEL), [])
            chosen.append(others.pop() if others and self.skips(row, step) else row)
        return chosen

    def snapshot(self) -> Snapshot:
        """It as it is now, to be written into a folder."""
        content = json.dumps({name: asdict(seen) for name, seen in self.seen.items()})
        return lambda path: write_whole(path / "history.json", content.encode())

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote."""
        found = json.loads((path / "history.json").read_text())
        self.seen = {name: Seen(**seen) for name, seen in found.items()}

    def _visits(self, row: int) -> int:
        seen = self.seen.get(self._names[row])
        return 0 if seen is None else seen.visits

    @cached_property
    def _names(self) -> list[str]:
        return [self._name(row) for row in self.task.rows]

    def _name(self, row: Mapping[str, Any]) -> str:
        return f"{key('prompt', normal_form(self.task.prompt_of(row))):016x}"
