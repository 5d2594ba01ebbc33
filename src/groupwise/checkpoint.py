"""What a run continues from: checkpoints that are whole or absent, checked before use, written while training goes on.

    RUN/checkpoints/step-00040/   a folder for each part that has something to save, state.json, a manifest of hashes

Sampling needs no state of its own: everything random is a function of (seed, step, group, sample).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from pydantic import Field

from groupwise.algorithms import Algorithm
from groupwise.engines import Snapshot
from groupwise.errors import CheckpointError
from groupwise.files import MANIFEST, damage, whole_folder
from groupwise.slots import Slot

STATE = "state.json"


class Checkpoint(Slot):
    """What a run keeps to continue from."""

    every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest are kept; older ones are deleted, but for those that the next two settings keep."""
    keep_every: int = Field(default=0, ge=0)
    """Keep each checkpoint whose step is a multiple of this; 0 keeps none for that."""
    keep_best: int = Field(default=0, ge=0)
    """Keep this many with the best evaluation (mean of the first reward), of those that were evaluated."""


class Saved(Protocol):
    """A part of a run that can be written and read back: a learner, a critic."""

    def snapshot(self) -> Snapshot: ...
    def restore(self, path: Path) -> None: ...


class Checkpoints:
    """Saves in the background: the run waits for the copy of what is saved, and for the save before.

    Used as a context, which ends when everything is written.
    """

    def __init__(self, run: Path, keep: Checkpoint, covered: Callable[[int], None] = lambda steps_done: None) -> None:
        """
        Args:
            covered: called when a checkpoint is on disk, with the number of steps it has done.
        """
        self._run, self._keep, self._covered = run, keep, covered
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self.newest: int | None = None
        """Steps done in the checkpoint saved last, written or not."""

    def save(self, steps_done: int, parts: Mapping[str, Saved], algorithm: Algorithm, score: float | None) -> None:
        """Copy the state after `steps_done` steps and start to write it; `score` is that of its evaluation.

        The algorithm is part of it because coefficients that follow a target move.

        Raises:
            CheckpointError: the save before this one could not be written.
        """
        self.wait()
        state = {"steps_done": steps_done, "algorithm": algorithm.model_dump(mode="json"), "score": score}
        snapshots = {name: part.snapshot() for name, part in parts.items()}
        self._writing = self._thread.submit(self._write, state, snapshots)
        self.newest = steps_done

    def wait(self) -> None:
        """Until what was saved is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown()
        if error is None:
            self.wait()

    def _write(self, state: Mapping[str, Any], snapshots: Mapping[str, Snapshot]) -> None:
        with whole_folder(_folder(self._run, state["steps_done"])) as folder:
            for name, write in snapshots.items():
                (folder / name).mkdir()
                write(folder / name)
            (folder / STATE).write_text(json.dumps(state))
        # What is above this step was damaged when the run continued below it; this run will replace it.
        paths = [path for path in complete(self._run) if _step(path) <= state["steps_done"]]
        keep = kept({_step(path): _score(path) for path in paths}, self._keep)
        for path in paths:
            if _step(path) not in keep:
                shutil.rmtree(path)
        self._covered(state["steps_done"])


def kept(scores: Mapping[int, float | None], keep: Checkpoint) -> set[int]:
    """Which of some steps' checkpoints are kept, from the score of each (None where it was not evaluated)."""
    steps = sorted(scores)
    spaced = [step for step in steps if keep.keep_every and step % keep.keep_every == 0]
    ranked = sorted((score, step) for step, score in scores.items() if score is not None and math.isfinite(score))
    best = [step for _, step in ranked[len(ranked) - keep.keep_best :]] if keep.keep_best else []
    return {*steps[-keep.keep_last :], *spaced, *best}


def complete(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first; that they are undamaged is checked by `newest`."""
    return sorted((path.parent for path in run.glob(f"checkpoints/step-*/{MANIFEST}")), key=_step)


def check_run(run: Path) -> None:
    """
    Raises:
        CheckpointError: the folder is no run.
    """
    if not (run / "config.yaml").is_file():
        raise CheckpointError(f"{run}: not a run folder (it has no config.yaml); pass the folder that a run printed")


def model_of(path: str) -> str:
    """The trained model of a run folder, or the path itself.

    Raises:
        CheckpointError: it is the folder of a run that has not ended.
    """
    if not (Path(path) / "config.yaml").is_file():
        return path
    trained = Path(path) / "model"
    if not trained.is_dir():
        raise CheckpointError(
            f"{path}: a run without a trained model; finish it with `groupwise train --resume {path}`, or name a model"
        )
    return str(trained)


def newest(run: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint of a run; None when it was stopped before its first.

    Raises:
        CheckpointError: every checkpoint is damaged.
    """
    problems: list[str] = []
    for path in sorted(run.glob("checkpoints/step-*"), key=_step, reverse=True):
        problem = damage(path)
        if problem is None:
            for text in problems:
                warn(f"{text}; this checkpoint is passed over, and the run continues from {path.name}")
            return path
        problems.append(problem)
    if problems:
        raise CheckpointError(
            f"{run}: every checkpoint is damaged: {'; '.join(problems)}; put the files back from a copy, or delete "
            f"{run / 'checkpoints'} to start this run over from its first step"
        )
    return None


def restore(found: Path, parts: Mapping[str, Saved]) -> tuple[int, Algorithm]:
    """Load a checkpoint; the number of steps it has done, and the algorithm as it stood then.

    Raises:
        CheckpointError: it is that of another model.
    """
    for name, part in parts.items():
        part.restore(found / name)
    state = json.loads((found / STATE).read_text())
    return int(state["steps_done"]), Algorithm.model_validate(state["algorithm"])


def _folder(run: Path, steps_done: int) -> Path:
    return run / "checkpoints" / f"step-{steps_done:05d}"


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _score(checkpoint: Path) -> float | None:
    """Of its evaluation; None when there was none, or when the file is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads((checkpoint / STATE).read_text())["score"]
    return None
