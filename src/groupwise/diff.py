"""Where two runs part: their settings, and the first step and quantity that differ.

Times are left out, and so is `output`; everything else that a run writes down is compared exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.checkpoint import check_run
from groupwise.errors import CheckpointError
from groupwise.trees import read_yaml

TIMINGS = ("seconds", "tokens_per_second", "memory/", "idle/", "queue")
FIRST_COLUMNS = ("tokens", "reward")
"""What decides the rest of a rollout is compared before it."""


def settings_apart(a: Path, b: Path) -> Iterator[str]:
    """Each setting that differs.

    Raises:
        CheckpointError: one of the folders is no run.
    """
    for run in (a, b):
        check_run(run)
    left, right = (dict(_leaves(read_yaml(run / "config.yaml"))) for run in (a, b))
    for name in dict.fromkeys([*left, *right]):
        if name != "output" and left.get(name) != right.get(name):
            yield f"{name}: {left.get(name)!r} and {right.get(name)!r}"


def first_apart(a: Path, b: Path) -> str | None:
    """The first step and quantity at which two runs part; None when they are the same.

    A step's rollouts are compared before its metrics, which follow from them.

    Raises:
        CheckpointError: a file of a run cannot be read.
    """
    left, right = _records(a), _records(b)
    for key in sorted({*left, *right}):
        step, evaluation = key
        where = f"evaluation after step {step}" if evaluation else f"step {step}"
        for run, records in ((a, left), (b, right)):
            if key not in records:
                return f"{where}: {run} has none"
        problem = None if evaluation else _rollouts_apart(a, b, step)
        problem = problem or _metrics_apart(left[key], right[key])
        if problem is not None:
            return f"{where}: {problem}"
    return None


def _records(run: Path) -> dict[tuple[int, bool], dict[str, Any]]:
    """The records of metrics.jsonl by (step, whether it is an evaluation)."""
    path = run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return {(int(r["step"]), any(name.startswith("eval/") for name in r)): r for r in records}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from error


def _metrics_apart(left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
    for name in dict.fromkeys([*left, *right]):
        if not name.startswith(TIMINGS) and left.get(name) != right.get(name):
            return f"{name}: {left.get(name)} and {right.get(name)}"
    return None


def _rollouts_apart(a: Path, b: Path, step: int) -> str | None:
    left, right = (_rollouts(run / "rollouts" / f"step-{step:05d}.parquet") for run in (a, b))
    if left.num_rows != right.num_rows:
        return f"{left.num_rows} and {right.num_rows} rollouts"
    names = list(dict.fromkeys([*FIRST_COLUMNS, *left.column_names, *right.column_names]))
    for name in names:
        columns = [table[name].to_pylist() if name in table.column_names else None for table in (left, right)]
        if repr(columns[0]) == repr(columns[1]):  # where nan equals itself
            continue
        if columns[0] is None or columns[1] is None:
            return f"rollouts: only one has the column {name}"
        row = next(i for i, pair in enumerate(zip(*columns, strict=True)) if repr(pair[0]) != repr(pair[1]))
        return f"rollout {row} (group {left['group'][row].as_py()}): {name}{_values(columns[0][row], columns[1][row])}"
    return None


def _values(one: Any, other: Any) -> str:
    """`: 1 and 2`, or where two lists part."""
    if not isinstance(one, list) or not isinstance(other, list):
        return f": {one!r} and {other!r}"
    pairs = list(zip(cast(list[Any], one), cast(list[Any], other), strict=False))
    place = next((i for i, pair in enumerate(pairs) if repr(pair[0]) != repr(pair[1])), None)
    return f": {len(one)} and {len(other)}" if place is None else f"[{place}]: {pairs[place][0]} and {pairs[place][1]}"


def _rollouts(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each value in a tree of mappings."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for name, below in cast(dict[str, Any], tree).items():
        yield from _leaves(below, f"{path}.{name}" if path else name)
