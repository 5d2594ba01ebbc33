"""What a run folder says about its run, arranged for the rules of the diagnosis."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from groupwise.errors import CheckpointError
from groupwise.files import whole_lines
from groupwise.trees import read_yaml

NEWEST = 3
"""Steps at the end of a run whose completions are read, beside those of the first."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sampled:
    """One stored completion."""

    step: int
    group: int
    text: str
    reward: float
    rewards: Mapping[str, float]
    """Of each reward function; NaN where it had no opinion."""
    valid: bool
    problem: str
    finish_reason: str
    length: int
    """Tokens that the policy sampled."""

    @property
    def ending(self) -> str:
        """What stands where an answer does: the last number of the text, or its last word."""
        return next(reversed(re.findall(r"-?\d+(?:\.\d+)?", self.text) or self.text.split()), "")


@dataclass(frozen=True)
class Evidence:
    """A run as its files tell it."""

    config: Mapping[str, Any]
    """The tree of config.yaml."""
    steps: Sequence[Mapping[str, float | None]]
    """The records of metrics.jsonl that are about a step."""
    evaluations: Sequence[Mapping[str, float | None]]
    """Those about an evaluation."""
    completions: Sequence[Sampled]
    """Of the first step and of the newest ones."""

    def setting(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path of the configuration."""
        place: Any = self.config
        for name in path.split("."):
            place = cast(Any, place.get(name, default)) if isinstance(place, Mapping) else default
        return place

    def series(self, name: str) -> Array:
        """A metric over the steps that have it."""
        return np.array([value for record in self.steps if (value := record.get(name)) is not None], dtype=float)

    @cached_property
    def reward_names(self) -> list[str]:
        """The reward functions; the first is the headline."""
        names = dict.fromkeys(name for record in self.steps for name in record if name.startswith("reward/"))
        return [name.removeprefix("reward/") for name in names]

    @cached_property
    def groups(self) -> list[list[Sampled]]:
        """The valid completions of each stored group that has more than one."""
        found: dict[tuple[int, int], list[Sampled]] = {}
        for one in self.completions:
            if one.valid:
                found.setdefault((one.step, one.group), []).append(one)
        return [group for group in found.values() if len(group) > 1]

    def within_groups(self, value: Callable[[Sampled], float]) -> Array:
        """A number of each completion, less its mean over the group: what a group's comparison sees of it."""
        parts = [np.array([value(one) for one in group]) for group in self.groups]
        return np.concatenate([part - part.mean() for part in parts]) if parts else np.zeros(0)


def read_run(folder: Path) -> Evidence:
    """The evidence in a run folder, also while the run writes it.

    Raises:
        CheckpointError: there is no run in the folder.
    """
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder}: holds no run; name the folder that `groupwise train` printed")
    records: list[dict[str, float | None]] = [json.loads(line) for line in whole_lines(folder / "metrics.jsonl")]
    files = sorted(folder.glob("rollouts/step-*.parquet"))
    read = dict.fromkeys([*files[:1], *files[-NEWEST:]])
    return Evidence(
        config=read_yaml(folder / "config.yaml"),
        steps=[record for record in records if "reward" in record],
        evaluations=[record for record in records if any(name.startswith("eval/") for name in record)],
        completions=[one for file in read for one in _completions(file)],
    )


def _completions(file: Path) -> Iterator[Sampled]:
    names = [name for name in pq.read_schema(file).names if name.startswith("reward/")]
    plain = ["step", "group", "text", "reward", "valid", "problem", "finish_reason"]
    table = pq.read_table(file, columns=[*plain, *names, "loss_mask"])
    lengths = [int(np.sum(row.values.to_numpy(zero_copy_only=False))) for row in _rows(table["loss_mask"])]
    for row, length in zip(table.select([*plain, *names]).to_pylist(), lengths, strict=True):
        rewards = {name.removeprefix("reward/"): _number(row.pop(name)) for name in names}
        row["reward"] = _number(row["reward"])
        yield Sampled(**row, rewards=rewards, length=length)


def _rows(column: pa.ChunkedArray) -> Iterator[Any]:
    return iter(cast(Any, column))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
