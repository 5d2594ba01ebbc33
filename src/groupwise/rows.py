"""Rows as they are stored: read from a file in one of several formats, or from a dataset on the Hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from groupwise.errors import DataError, did_you_mean
from groupwise.hub import asked_once


def read_rows(path: str | Path, *, split: str = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a file, or of a dataset on the Hub.

    Args:
        path: a .jsonl, .json (a list of objects), .csv or .parquet file, or a Hub id: `org/name`, or
            `org/name:configuration`.
        split: which split of a Hub dataset; a file has no splits.
        limit: how many rows from the beginning; None: all.

    Raises:
        DataError: there is no such file or dataset, or it cannot be read, or it has no rows.
    """
    file = Path(path)
    if file.is_file():
        reader = _READERS.get(file.suffix)
        if reader is None:
            accepted = f"{', '.join(_READERS)}, or a Hub id"
            raise DataError(f"data.path: {path}: unknown suffix {file.suffix!r}; accepted: {accepted}")
        try:
            rows = reader(file)
        except UnicodeDecodeError as error:
            raise DataError(f"data.path: {path}: not UTF-8: {error}; save it as UTF-8") from error
    elif _looks_like_hub_id(str(path)) and not file.exists():
        rows = _from_hub(str(path), split)
    else:
        siblings = [str(file.parent / sibling.name) for sibling in sorted(file.parent.glob("*")) if sibling.is_file()]
        raise DataError(
            f"data.path: {path}: no such file{did_you_mean(str(path), siblings)}; "
            f"accepted: a {', '.join(_READERS)} file, or a Hub id such as org/name"
        )
    if not rows:
        raise DataError(f"data.path: {path}: it has no rows; accepted: at least one row with a prompt")
    return rows[:limit]


def _looks_like_hub_id(path: str) -> bool:
    return path.count("/") == 1 and path[0] not in "./~" and Path(path).suffix not in _READERS


def _from_hub(path: str, split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    name, _, configuration = path.partition(":")
    try:
        with asked_once():
            return [dict(row) for row in load_dataset(name, configuration or None, split=split)]
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.path: {path}, split {split!r}: no such file, and the Hub does not give it: {error}; "
            "accepted: a file, or a Hub id as org/name or org/name:configuration"
        ) from error


def _from_jsonl(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(_object(json.loads(line), f"{file}, line {number}"))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"data.path: {file}, line {number}, column {error.colno}: not JSON ({error.msg}): "
                    f"{line.strip()[:60]!r}; accepted: one JSON object per line"
                ) from error
    return rows


def _from_json(file: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"data.path: {file}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}); accepted: a list "
            "of objects; one object per line belongs in a .jsonl file"
        ) from error
    if not isinstance(found, list):
        raise DataError(f"data.path: {file}: holds one {type(found).__name__}; accepted: a list of objects")
    return [_object(row, f"{file}, [{index}]") for index, row in enumerate(cast(list[object], found))]


def _object(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"data.path: {where}: is the {type(row).__name__} {row!r}; accepted: an object with a prompt")
    return cast(dict[str, Any], row)


def _from_csv(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _from_parquet(file: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"data.path: {file}: not a Parquet file: {error}; accepted: {', '.join(_READERS)}") from error
    return rows


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _from_jsonl,
    ".json": _from_json,
    ".csv": _from_csv,
    ".parquet": _from_parquet,
}
