"""Files that are whole or absent: written beside, synced to disk and renamed; and how one says that it is not whole.

write_whole(path, content)        one file
with whole_folder(path) as new:   a folder with a manifest: the size and SHA-256 of each of its files
damage(path)                      which file of such a folder is not what was written
with alone(path):                 no other process may hold this folder meanwhile
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import safetensors

from groupwise.errors import CheckpointError

MANIFEST = "manifest.json"
FAILURES = (OSError, RuntimeError, safetensors.SafetensorError)
"""What a full or failing disk raises through Python, torch and safetensors."""
NO_LOCKS = (errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP)
"""What file systems say, some network ones among them, that cannot lock a folder."""


@contextlib.contextmanager
def writing(path: Path) -> Generator[None]:
    """What goes wrong with the disk inside is said of `path`.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        yield
    except FAILURES as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        raise CheckpointError(
            f"{path}: cannot be written: {reason}; is the disk full, or the folder read-only?"
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, and whoever comes after a crash, finds the old content or the new.

    Raises:
        CheckpointError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.partial")
    with writing(path):
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync(path.parent)


def append(path: Path, line: str) -> None:
    """Add a line to a file and sync it.

    Raises:
        CheckpointError: it cannot be written; the line may then be there in part.
    """
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that others append to, none where there is no file; the last may not be whole yet."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def whole_folder(target: Path) -> Generator[Path]:
    """A new folder to fill, which gets a manifest and then takes the place of `target`.

    Raises:
        CheckpointError: it cannot be written; what was at `target` is still there.
    """
    beside, before = (target.with_name(f".{target.name}.{word}") for word in ("partial", "before"))
    try:
        with writing(target):
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            files = sorted(path for path in beside.rglob("*") if path.is_file())
            manifest = {path.relative_to(beside).as_posix(): _fingerprint(path) for path in files}
            (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in [*beside.rglob("*"), beside]:
                sync(path)
            shutil.rmtree(before, ignore_errors=True)
            if target.exists():
                target.rename(before)
            beside.rename(target)
            sync(target.parent)
            shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """Which file of a folder that `whole_folder` wrote is missing or not what was written; None when it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, expected in manifest.items():
            path = folder / name
            if not path.is_file():
                return f"{path} is missing"
            found = _fingerprint(path)
            if found["bytes"] != expected["bytes"]:
                return f"{path} has {found['bytes']} bytes instead of {expected['bytes']}"
            if found != expected:
                return f"{path} is not what was written (its SHA-256 differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder / MANIFEST} cannot be read: {error!r}"
    return None


@contextlib.contextmanager
def alone(folder: Path) -> Generator[None]:
    """Hold a folder: two runs that write into one would mix their steps.  The lock goes with the process, however it
    ends.  Where the file system has no locks, nobody is refused.

    Raises:
        CheckpointError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(
            f"{folder}: another process is training in it; wait for that run, stop it, or take another folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
