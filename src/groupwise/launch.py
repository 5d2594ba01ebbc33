"""One command on one machine: start a process for each rank, hand signals on to them, and say which of them died.

torchrun does the same for several machines; this one ends with the exit code and the messages of rank 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from groupwise.interrupt import SIGNALS
from groupwise.meeting import Meeting

GRACE_SECONDS = 10.0
"""What the other ranks have to end in when rank 0 has ended: they notice at once, and tell each other why."""


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `python ARGUMENTS` once for each rank, and wait for rank 0; its exit code, 1 where a signal ended it."""
    meeting = Meeting("127.0.0.1", ranks)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    shared = {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": threads}
    processes = [
        # In a session of its own, so that Ctrl-C reaches it once, through us.
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **shared, **meeting.place(rank, rank)},
            start_new_session=True,
        )
        for rank in range(ranks)
    ]

    def hand_on(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in SIGNALS}
    try:
        return _wait(processes)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes:
            process.kill()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended, or some time after rank 0 has."""
    deadline: float | None = None
    running = dict(enumerate(processes))
    while running and (deadline is None or time.monotonic() < deadline):
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            if code < 0:
                name = signal.Signals(-code).name
                print(f"groupwise: rank {rank} (process {process.pid}) was ended by {name}", file=sys.stderr)
            if rank == 0:
                deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(0.05)
    code = processes[0].returncode
    return code if code >= 0 else 1
