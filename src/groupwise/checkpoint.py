"""What a run continues from: written beside, synced to disk and renamed, so that a checkpoint is whole or absent.

    RUN/checkpoints/step-00040/   whatever `Learner.save` writes, and state.json

Sampling needs no state of its own: everything random is a function of (seed, step, group, sample).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from groupwise.engines import Learner
from groupwise.errors import CheckpointError

STATE = "state.json"


def save(run: Path, steps_done: int, learner: Learner, keep_last: int) -> Path:
    """Write the checkpoint after `steps_done` steps and delete all but the last `keep_last`."""
    folder = run / "checkpoints"
    target = folder / f"step-{steps_done:05d}"
    beside = folder / f".{target.name}.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    learner.save(beside)
    (beside / STATE).write_text(json.dumps({"steps_done": steps_done}))
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
    return sorted(path.parent for path in run.glob(f"checkpoints/step-*/{STATE}"))


def restore(run: Path, learner: Learner) -> int:
    """Load the newest checkpoint; returns the number of steps it has done.

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
    learner.restore(found[-1])
    return int(json.loads((found[-1] / STATE).read_text())["steps_done"])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
