"""Trackers: the numbers of metrics.jsonl, also in the files that other tools draw.  Each is an extra, in a file of its
own, and nothing leaves the machine unless its tool is told to send it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from groupwise.errors import ConfigError


class Tracker(Protocol):
    """Takes the numbers of a run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """The finite numbers of a record of metrics.jsonl."""
        ...

    def close(self) -> None:
        """Write what is not yet written."""
        ...


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """The named trackers of the run in a folder; `config` is the tree of its settings.

    Raises:
        ConfigError: one of them is not installed.
    """
    return [_open(name, folder, config) for name in names]


def _open(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    try:
        module = import_module(f"groupwise.trackers.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"trackers: {name}; not installed; run `pip install 'groupwise[{name}]'`") from error
    return module.open_tracker(folder, config)
