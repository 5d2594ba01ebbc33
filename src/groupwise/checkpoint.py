"""What a run continues from: written beside, synced to disk and renamed, so that a checkpoint is whole or absent.

    RUN/checkpoints/step-00040/   a folder for each part that has something to save, and state.json

Sampling needs no state of its own: everything random is a function of (seed, step, group, sample).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from groupwise.algorithms import Algorithm
from groupwise.errors import CheckpointError

STATE = "state.json"


class Saved(Protocol):
    """A part of a run that can be written and read back: a learner, a critic."""

    def save(self, path: Path) -> None: ...
    def restore(self, path: Path) -> None: ...


def save(run: Path, steps_done: int, parts: Mapping[str, Saved], algorithm: Algorithm, keep_last: int) -> Path:
    """Write the checkpoint after `steps_done` steps and delete all but the last `keep_last`.

    The algorithm is part of it because coefficients that follow a target move.
    """
    folder = run / "checkpoints"
    target = folder / f"step-{steps_done:05d}"
    beside = folder / f".{target.name}.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name, part in parts.items():
        part.save(beside / name)
    state = {"steps_done": steps_done, "algorithm": algorithm.model_dump(mode="json")}
    (beside / STATE).write_text(json.dumps(state))
    for path in [*beside.rglob("*"), beside]:
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    _sync(folder)
    for old in complete(run)[:-keep_last]:
        shutil.rmtree(old)
    return target


def complete(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = (path.parent for path in run.glob(f"checkpoints/step-*/{STATE}"))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def newest(run: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        CheckpointError: the folder is no run, or has no finished checkpoint.
    """
    if not (run / "config.yaml").is_file():
        raise CheckpointError(f"{run}: not a run folder (it has no config.yaml); pass the folder that a run printed")
    found = complete(run)
    if not found:
        raise CheckpointError(
            f"{run}: no finished checkpoint in {run / 'checkpoints'}; start the run again in a new folder, "
            "with checkpoint.every set to save more often"
        )
    return found[-1]


def restore(run: Path, parts: Mapping[str, Saved]) -> tuple[int, Algorithm]:
    """Load the newest checkpoint; the number of steps it has done, and the algorithm as it stood then.

    Raises:
        CheckpointError: see `newest`.
    """
    found = newest(run)
    for name, part in parts.items():
        part.restore(found / name)
    state = json.loads((found / STATE).read_text())
    return int(state["steps_done"]), Algorithm.model_validate(state["algorithm"])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
