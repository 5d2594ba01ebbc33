"""Sampled and scored groups, kept on disk until a checkpoint covers their step: a crash never pays for sampling twice.

    RUN/pending/step-00041.0.pickle   the groups of a step's first draw (dynamic sampling draws again)

A file begins with two SHA-256: of the settings that its groups were sampled under, and of the rest.  Pickle keeps
every float and every value of a dataset row as it was; it can also run code, which a run folder can anyway: its
config.yaml names the code of rewards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

from groupwise.files import write_whole, writing
from groupwise.records import Rollout

DIGEST = hashlib.sha256().digest_size
FIELDS = [field.name for field in dataclasses.fields(Rollout)]


class Pending:
    """What was sampled since the last checkpoint of a run."""

    def __init__(self, run: Path, settings: str, warn: Callable[[str], None]) -> None:
        """
        Args:
            settings: of the run, in words; what was sampled under others is not used.
            warn: told of a file that is damaged.
        """
        self._folder, self._settings, self._warn = run / "pending", _digest(f"{FIELDS} {settings}".encode()), warn
        self._closed = False

    def recall(self, step: int, draw: int, play: Callable[[], list[Rollout]]) -> list[Rollout]:
        """The groups of a draw: as they were kept or, when there is no such file, as `play` makes them, then kept.

        Raises:
            CheckpointError: they cannot be written.
        """
        path = self._folder / f"step-{step + 1:05d}.{draw}.pickle"
        known = self._read(path) if path.is_file() else None
        if known is not None:
            return known
        rollouts = play()
        self._write(path, rollouts)
        return rollouts

    def forget(self, steps_done: int) -> None:
        """Delete what a checkpoint after `steps_done` steps makes needless."""
        self._delete(lambda step: step <= steps_done)

    def forget_step(self, step: int) -> None:
        """Delete what was sampled for the step with this index: it is to be sampled anew."""
        self._delete(lambda kept: kept == step + 1)

    def close(self) -> None:
        """Remove the folder if nothing is left in it; not before the run's end, for another thread forgets."""
        self._closed = True
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _delete(self, which: Callable[[int], bool]) -> None:
        for path in self._folder.glob("step-*.pickle"):
            if which(int(path.name.removeprefix("step-").split(".")[0])):
                path.unlink(missing_ok=True)

    def _write(self, path: Path, rollouts: list[Rollout]) -> None:
        if self._closed:  # by a thread that was sampling ahead: the folder may be another process's by now
            return
        try:
            content = pickle.dumps(rollouts)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._warn(f"a dataset row cannot be kept on disk ({error}); after a crash its step is sampled again")
            return
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        write_whole(path, self._settings + _digest(content) + content)

    def _read(self, path: Path) -> list[Rollout] | None:
        content = path.read_bytes()
        settings, digest, pickled = content[:DIGEST], content[DIGEST : 2 * DIGEST], content[2 * DIGEST :]
        if digest != _digest(pickled):
            self._warn(f"{path} is damaged; its completions are sampled again")
            return None
        return pickle.loads(pickled) if settings == self._settings else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
