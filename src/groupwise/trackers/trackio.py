"""trackio: a SQLite database on this machine that `trackio show --project groupwise` draws.

It is where trackio keeps all projects: `TRACKIO_DIR`, by default a folder in the Hugging Face cache.  With
`TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` in the environment the numbers go there instead.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio as installed  # pyright: ignore[reportMissingImports]

from groupwise.hub import offline

trackio: Any = installed  # where it is not installed, the type checker takes this very file for it
ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """A run of trackio, without what it collects by itself: the machine's load, and the user's name."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        # It would ask the hub whose token there is, also for a run that stays here.
        alone = not any(os.environ.get(name) for name in ELSEWHERE)
        with _quiet(), offline() if alone else contextlib.nullcontext():
            self._run: Any = trackio.init(
                project="groupwise",
                name=folder.name,
                config=dict(config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        with _quiet():
            trackio.finish()  # the run's own `finish` would be called, and print, once more at the exit


def _quiet() -> contextlib.AbstractContextManager[object]:
    """What it prints would be in the way of a result on standard output."""
    return contextlib.redirect_stdout(io.StringIO())


def open_tracker(folder: Path, config: Mapping[str, Any]) -> Trackio:
    """See `groupwise.trackers.open_trackers`."""
    return Trackio(folder, config)
