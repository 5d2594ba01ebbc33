"""Other processes: a Python with what it needs of groupwise alone, and from /proc whether it lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from groupwise.rewards import nursery

LIGHT = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("nursery", {nursery.__file__!r})
nursery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nursery)
nursery.without_torch()
"""
"""At the top of a program: it then imports of groupwise what it names, as a worker does; four seconds less for each."""


def wait_until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10.0
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def members(group: int) -> list[int]:
    """The processes of a group that live."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if alive(pid) and stat(pid)[2] == str(group)]


def stat(pid: int) -> list[str]:
    """State, parent, process group, ... of a process; as of a dead one when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["Z", "0", "0"]


def alive(pid: int) -> bool:
    return stat(pid)[0] != "Z"


def parent(pid: int) -> int:
    return int(stat(pid)[1])
