"""The trainer's ends of the nursery and of the workers that it forks."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from groupwise.rewards import nursery
from groupwise.rewards.questions import Call

LOAD_SECONDS = 300.0
"""How long the import of a reward function may take."""
ANSWER_SECONDS = 10.0
"""How long a message may take that has begun to arrive."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class NurseryLostError(Exception):
    """The process that forks workers is gone."""


class Nursery:
    """The trainer's end of the nursery."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(LOAD_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", nursery.__file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the nursery
                env={**ONE_THREAD, **os.environ},
            )

    def request(self, *command: Any, descriptor: int | None = None) -> dict[str, Any]:
        """What it answers to a command.

        Raises:
            NurseryLostError: it is gone.
        """
        try:
            nursery.send(self._control, pickle.dumps(command))
            if descriptor is not None:
                socket.send_fds(self._control, [b"."], [descriptor])
            return json.loads(nursery.receive(self._control))
        except (OSError, EOFError) as error:
            raise NurseryLostError from error

    def close(self) -> None:
        """End it, and with it all workers."""
        self._control.close()
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(eq=False)
class Worker:
    """The trainer's end of a worker."""

    pid: int
    work: socket.socket
    known: set[str]
    """Keys of the functions that it can call."""
    asked: Call | None = None
    deadline: float = 0.0
