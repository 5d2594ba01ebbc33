"""The nursery: a small process that forks the workers in which rewards run, and what a worker does.

    trainer  --starts-->  nursery  --forks-->  worker, worker, ...

The trainer never forks itself: it has threads, and gigabytes.  The nursery imports the reward functions and calls none,
so that a worker is there in milliseconds and a lost one costs nothing.  Each worker leads a session of its own and is
killed with everything in it; what fled from its session falls to the nursery as a child, and is killed, too.  When the
trainer goes, however it goes, the nursery sees its end of the socket close, kills all and ends; when the nursery goes,
the kernel kills the workers.

Requests are pickles, answers are JSON: nothing that a reward function made is ever unpickled in the trainer.  This file
is run as a script, so at its top it imports the standard library alone.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import ctypes
import importlib.util
import io
import json
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_AROUND_SECONDS = 1.0


def send(to: socket.socket, message: bytes) -> None:
    """One message: eight bytes of length, and what it says.

    Raises:
        OSError: nobody is there to read it, or nobody does in time.
    """
    to.sendall(len(message).to_bytes(8, "big") + message)


def receive(source: socket.socket) -> bytes:
    """The next message.

    Raises:
        EOFError: the other side is gone.
        OSError: the same, or it stopped in the middle of a message.
    """
    return _exactly(int.from_bytes(_exactly(8, source), "big"), source)


def _exactly(count: int, source: socket.socket) -> bytes:
    parts: list[bytes] = []
    while count:
        part = source.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# Reward functions ----------------------------------------------------------------------------------------------------


def without_torch() -> None:
    """Let `import groupwise` import nothing, and each public name what it needs: rewards need no torch."""
    folder = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(
        "groupwise", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    package = sys.modules["groupwise"] = importlib.util.module_from_spec(spec)
    homes: dict[str, str] = {}
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {alias.name: node.module for alias in node.names}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            package.__dict__[node.targets[0].id] = ast.literal_eval(node.value)  # __all__ and __version__

    def public(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module 'groupwise' has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    package.__dict__["__getattr__"] = public


class _Reader(pickle.Unpickler):
    """Unpickles what refers to code that the trainer loaded from a file (`mine.py:reward`)."""

    def __init__(self, data: bytes, files: Mapping[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name in self._files and module_name not in sys.modules:
            _import_file(module_name, self._files[module_name])
        return super().find_class(module_name, global_name)


def _import_file(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Functions:
    """The reward functions that this process can call, by key."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def load(self, key: str, data: bytes, files: Mapping[str, str], path: Sequence[str]) -> dict[str, Any]:
        """Unpickle a function, and import what it says it will need (`preload`); how many threads there are then."""
        sys.path[:] = path
        try:
            function = _Reader(data, files).load()
            for name in getattr(function, "preload", ()):
                importlib.import_module(name)
        except BaseException as error:  # whatever the user's module does when it is imported is the user's to mend
            return {"error": f"{type(error).__name__}: {error}"}
        self.known[key] = function
        return {"threads": _threads()}


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1


# The nursery ---------------------------------------------------------------------------------------------------------


class Nursery:
    """Loads functions, forks workers, and ends them, as the trainer asks."""

    def __init__(self, control: socket.socket, trainer: int) -> None:
        self._control, self._trainer = control, trainer
        self._functions, self._workers = Functions(), set[int]()

    def serve(self) -> None:
        """Do what the trainer asks until it is gone."""
        commands = {"load": self._functions.load, "spawn": self._spawn, "end": self._end}
        try:
            while self._is_asked():
                command, *arguments = pickle.loads(receive(self._control))
                send(self._control, json.dumps(commands[command](*arguments)).encode())
        except (EOFError, OSError):
            pass  # the trainer is gone
        finally:
            for worker in list(self._workers):
                self._end(worker)
            self._end_strays()

    def _is_asked(self) -> bool:
        """Wait for the next request; False when there is no trainer any more, even if a child of it holds its end."""
        while os.getppid() == self._trainer:
            if select.select([self._control], [], [], LOOK_AROUND_SECONDS)[0]:
                return True
        return False

    def _spawn(self) -> dict[str, Any]:
        _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not descriptors:
            raise EOFError
        (descriptor,), nursery = descriptors, os.getpid()
        with socket.socket(fileno=descriptor) as work:
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(KeyboardInterrupt):
                    os.setsid()
                    die_with_parent(nursery)
                    self._control.close()
                    Worker(work, self._functions).serve()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        self._workers.add(pid)
        return {"pid": pid}

    def _end(self, worker: int) -> dict[str, Any]:
        """Kill a worker and all that it started; how it ended (as `os.waitstatus_to_exitcode`)."""
        self._workers.discard(worker)
        with contextlib.suppress(ProcessLookupError):  # one just born leads no session yet, a dead one no more
            os.killpg(worker, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
        self._end_strays()
        return {"exit": os.waitstatus_to_exitcode(status)}

    def _end_strays(self) -> None:
        """Kill what has fallen to this process."""
        while strays := children() - self._workers:
            for stray in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
                os.waitpid(stray, 0)


def children() -> set[int]:
    """The processes whose parent is this one."""
    if sys.platform != "linux":
        return set()
    found: set[int] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it may be gone by now
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.add(int(process.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that forked it is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the kernel was told
        os._exit(0)


# A worker ------------------------------------------------------------------------------------------------------------


class Worker:
    """Answers one request after the other."""

    def __init__(self, work: socket.socket, functions: Functions) -> None:
        self._work, self._functions = work, functions
        self._resident, self._data = _memory()
        self._runner = asyncio.Runner()  # one loop for all calls, so that connections outlive a call

    def serve(self) -> None:
        """Do what the trainer asks until it hangs up."""
        commands = {"load": self._functions.load, "judge": self._judge}
        with contextlib.suppress(EOFError):
            while True:
                command, *arguments = pickle.loads(receive(self._work))
                send(self._work, json.dumps(commands[command](*arguments)).encode())

    def _judge(self, key: str, name: str, payload: bytes, seconds: float, memory_mb: int) -> dict[str, Any]:
        """`verdicts`, or one `failed` call, or `stop`; `retire` says that this worker has grown too large."""
        from groupwise.errors import GroupwiseError
        from groupwise.rewards.calls import Verdict, call

        self._limit_memory(memory_mb << 20)
        try:
            rollouts, prompts = pickle.loads(payload)
            run = self._runner.run
            said = call(name, self._functions.known[key], rollouts, prompts, seconds=seconds, run=run)
        except GroupwiseError as error:
            return {"stop": str(error)}
        kind, values = ("failed", [said]) if isinstance(said, Verdict) else ("verdicts", said)
        # Half of its memory is every call's own: what earlier ones left behind must not cost a later one its verdict.
        grown = _memory()[0] - self._resident
        return {kind: [_fields(verdict) for verdict in values], "retire": 2 * grown > memory_mb << 20}

    def _limit_memory(self, limit: int) -> None:
        import resource  # not on Windows, where the trainer imports this file but there are no workers

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = self._data + limit
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _fields(verdict: Any) -> list[Any]:
    return [getattr(verdict, name) for name in verdict.__slots__]


def _memory() -> tuple[int, int]:
    """(resident, data) of this process in bytes; zeros where the system does not say."""
    if sys.platform != "linux":
        return 0, 0
    fields = Path("/proc/self/statm").read_text().split()
    page = os.sysconf("SC_PAGE_SIZE")
    return int(fields[1]) * page, int(fields[5]) * page


if __name__ == "__main__":
    without_torch()
    importlib.import_module("groupwise.rewards.calls")  # once, rather than in each worker
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    Nursery(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
