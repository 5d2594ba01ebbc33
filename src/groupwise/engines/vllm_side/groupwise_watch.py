"""Runs a command for as long as whoever started it lives: `python groupwise_watch.py COMMAND...`.

Standard input is a pipe whose other end the trainer holds.  It closes when the trainer closes it or dies, be it by
SIGKILL, and then the command ends with all that it started.  The first line of standard output is the number of the
command's process group; what the command itself says goes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 5.0
"""How long a server may take to leave by itself; one whose engine is dead may hang."""


def main(command: list[str]) -> int:
    """The command's exit code, or 128 + the signal that killed it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    print(child.pid, flush=True)
    threading.Thread(target=_end_with_holder, args=(child,), daemon=True).start()
    code = child.wait()
    _kill(child.pid)
    return code if code >= 0 else 128 - code


def _end_with_holder(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held when the interpreter ends
        pass
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(child.pid)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
