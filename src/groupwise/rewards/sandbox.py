"""Run a program that nobody has read: under bubblewrap, within limits, and killed at the latest when its time is up.

The program gets its own user, pid, network, ipc, uts, mount and cgroup namespaces, an empty environment, no
capabilities, no /proc, and a read-only system of the Python interpreter and its shared libraries; it can write to a
small /tmp in memory, which is new in every sandbox.  `inside/` sets the resource limits from within.

A fork bomb is bounded by RLIMIT_NPROC, which Linux counts per user and user namespace, so per sandbox (since Linux
5.14); the kernel exempts root, so a trainer that is root has the program run as nobody.  Memory is limited for each
process and for /tmp.  When the first process ends, by itself or at a limit, the kernel kills the whole pid namespace.
"""

from __future__ import annotations

import fcntl
import logging
import marshal
import math
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, cast

from pydantic import Field

from groupwise.errors import RewardError
from groupwise.rewards import inside
from groupwise.rewards.bubblewrap import INTERPRETER, MB, SandboxError, can_be_nobody, memory_file, start
from groupwise.slots import Slot

LOG = logging.getLogger(__name__)

How = Literal["bwrap", "none"]
"""`none` is a subprocess with the same limits, which sees what the trainer's user sees."""

INSTALL = "install it with `apt install bubblewrap` (Debian, Ubuntu) or `dnf install bubblewrap` (Fedora, RHEL)"
UNCONFINED = "or say `sandbox: none` there to run programs of the model as plain subprocesses, which see your files"
# The interpreter's whole life before it obeys: modules and orders from the file that its argument names.
BOOT = """
import marshal, sys, types
receipt = int(sys.argv[1])
with open(receipt, 'rb', closefd=False) as file:
    modules, orders = marshal.load(file), marshal.load(file)
for name, code in modules:
    sys.modules[name] = types.ModuleType(name)
    exec(code, sys.modules[name].__dict__)
sys.modules[modules[0][0]].confine(orders, receipt)
sys.modules[modules[-1][0]].play(orders)
"""
_PARTS = {"script": ("confine", "script"), "serve": ("confine", "wire", "serve"), "judge": ("confine", "wire", "judge")}


class Limits(Slot):
    """What one run of a program may use."""

    cpu_seconds: float = Field(default=5.0, gt=0)
    """Processor time of each process, rounded up to whole seconds."""
    wall_seconds: float = Field(default=10.0, gt=0)
    """Time on the clock for all of them together."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space of each process, interpreter included."""
    processes: int = Field(default=16, ge=1)
    """Processes and threads at a time (`sandbox: none` leaves them unlimited)."""
    open_files: int = Field(default=64, ge=16)
    """Files that a process has open at a time."""
    file_mb: int = Field(default=16, ge=1)
    """Size of each file, and of /tmp."""
    output_kb: int = Field(default=1024, ge=1)
    """Standard output and standard error, each."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    status: int
    """The exit status; 128 + N after signal N."""
    stdout: bytes
    stderr: bytes
    limit: str
    """The limit that ended it: `wall_seconds`, `cpu_seconds`, `output_kb`, or the empty string."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it came to its own end, without an error."""
        return self.status == 0 and not self.limit


class Running:
    """A sandbox that has been started."""

    def __init__(self, process: subprocess.Popen[bytes], orders: int, limits: Limits, how: How) -> None:
        self._process, self._orders, self._limits, self._how = process, orders, limits, how
        self._began = time.perf_counter()

    def finish(self) -> Result:
        """Wait for the end, or bring it about, and kill whatever is left.

        Raises:
            SandboxError: the sandbox could not be set up.
        """
        said = {"stdout": bytearray(), "stderr": bytearray()}
        limit = self._listen(said)
        self.kill()
        status = self._process.wait()
        status = status if status >= 0 else 128 - status
        if status == 128 + signal.SIGXCPU and not limit:
            limit = "cpu_seconds"
        stdout, stderr = (bytes(text[: self._limits.output_kb * 1024]) for text in said.values())
        result = Result(status, stdout, stderr, limit, time.perf_counter() - self._began)
        if not self.confined:
            raise SandboxError(f"the sandbox was not set up: {_tail(result.stderr) or f'status {status}'}")
        return result

    @property
    def confined(self) -> bool:
        """Whether the process inside had put on its limits: it empties its orders then, which the program cannot."""
        return os.fstat(self._orders).st_size == 0

    def kill(self) -> None:
        """End everything in it.  Bubblewrap's death is that of the first process inside, and so of the namespace."""
        if self._process.returncode is not None:
            return  # its number may be another's by now
        patience = time.perf_counter() + 1
        while not self.confined and self._process.poll() is None and time.perf_counter() < patience:
            time.sleep(0.001)  # earlier, bubblewrap's death may not reach the one it has started
        try:
            if self._how == "none":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        except ProcessLookupError:
            pass

    def _listen(self, said: dict[str, bytearray]) -> str:
        """Fill `said` until both streams are closed or a limit is passed, and return that limit."""
        deadline = self._began + self._limits.wall_seconds
        with selectors.DefaultSelector() as open_ends, ExitStack() as closing:
            ended = os.pidfd_open(self._process.pid)
            closing.callback(os.close, ended)
            open_ends.register(ended, selectors.EVENT_READ, "")
            for name in said:
                stream = cast("IO[bytes] | None", getattr(self._process, name))
                if stream:
                    open_ends.register(closing.enter_context(stream), selectors.EVENT_READ, name)
            while open_ends.get_map():
                left = deadline - time.perf_counter()
                if left <= 0:
                    return "wall_seconds"
                for key, _ in open_ends.select(left):
                    chunk = os.read(key.fd, 1 << 16) if key.data else b""
                    if not chunk:
                        open_ends.unregister(key.fileobj)
                    if not key.data:
                        self.kill()  # children that it left behind may hold the other ends open
                        continue
                    said[key.data] += chunk
                    if len(said[key.data]) > self._limits.output_kb * 1024:
                        return "output_kb"
        return ""


@contextmanager
def running(
    part: str,
    orders: Mapping[str, Any],
    limits: Limits,
    how: How = "bwrap",
    *,
    stdin: bytes = b"",
    sockets: Sequence[int] = (),
    listen: bool = True,
) -> Generator[Running]:
    """A sandbox in which `inside/` plays its `part`; everything in it is dead afterwards.

    `sockets` are file descriptors that it inherits; without `listen` its output goes nowhere.
    """
    as_nobody = how == "bwrap" and can_be_nobody()
    with ExitStack() as stack:
        questions = memory_file(stdin)
        stack.callback(os.close, questions)
        # Nothing may change what the program reads, the program included.
        fcntl.fcntl(questions, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        leash, ours = os.pipe()
        stack.callback(os.close, leash)
        stack.callback(os.close, ours)
        whole = {**orders, "limits": _resource_limits(limits, how), "as_nobody": as_nobody, "leash": leash}
        paper = memory_file(_modules(part) + marshal.dumps(whole))
        stack.callback(os.close, paper)
        words, fds = (INTERPRETER, *_PYTHON, BOOT, str(paper)), (paper, leash, *sockets)
        output = subprocess.PIPE if listen else subprocess.DEVNULL
        if how == "none":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="groupwise-"))
            process = subprocess.Popen(
                words, stdin=questions, stdout=output, stderr=output, pass_fds=fds, env={}, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        else:
            process = start(words, fds, questions, output, tmp_bytes=limits.file_mb * MB)
        stack.enter_context(process)  # closes its pipes and waits for it
        box = Running(process, paper, limits, how)
        stack.callback(box.kill)
        yield box


def run(program: str, limits: Limits, how: How = "bwrap", *, stdin: bytes = b"") -> Result:
    """Run a Python program that reads `stdin`, in a sandbox of its own.

    Raises:
        SandboxError: the sandbox could not be set up.
    """
    with running("script", {"program": program}, limits, how, stdin=stdin) as box:
        return box.finish()


def require(how: How, name: str) -> None:
    """Make sure that programs can be run this way; `name` is the reward that wants to.

    Raises:
        RewardError: there is no bubblewrap, or it is not allowed to make its namespaces.
    """
    problem = _obstacle() if how == "bwrap" else _warn_once(name)
    if problem:
        raise RewardError(f"rewards.{name}: {problem}; {UNCONFINED}")


@cache
def _warn_once(name: str) -> str:
    LOG.warning("rewards.%s: sandbox is none, so programs written by the model run with your rights", name)
    return ""


@cache
def _obstacle() -> str:
    if not shutil.which("bwrap"):
        return f"runs programs in a sandbox, which needs bubblewrap, and there is no `bwrap` here; {INSTALL}"
    try:
        result = run("import math, json", Limits())
        if not result.ok:
            raise SandboxError(_tail(result.stderr) or f"status {result.status} at {result.limit}")
    except SandboxError as error:
        return (
            f"bubblewrap cannot make its namespaces here ({error}); allow unprivileged user namespaces "
            "(`sysctl kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu; in a container, a seccomp profile "
            "that admits `unshare` and `mount`)"
        )
    return ""


# ------------------------------------------------------------------------------------------------------ how it is made

_PYTHON = ("-I", "-S", "-B", "-X", "utf8", "-c")


@cache
def _modules(part: str) -> bytes:
    """The files of `inside/` that play the part, compiled."""
    folder = Path(inside.__file__).parent
    return marshal.dumps(
        [
            (f"{inside.__name__}.{name}", compile((folder / f"{name}.py").read_text(), f"{name}.py", "exec"))
            for name in _PARTS[part]
        ]
    )


def _resource_limits(limits: Limits, how: How) -> dict[str, tuple[int, int]]:
    """(soft, hard) of each resource; at the soft one of processor time comes SIGXCPU, at the hard one SIGKILL."""
    seconds = math.ceil(limits.cpu_seconds)
    values = {
        "RLIMIT_AS": limits.memory_mb * MB,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_mb * MB,
        "RLIMIT_CORE": 0,
    }
    if how == "bwrap":  # outside a namespace, everything else of the user counts, too
        values["RLIMIT_NPROC"] = limits.processes
    return {"RLIMIT_CPU": (seconds, seconds + 1), **{name: (value, value) for name, value in values.items()}}


def _tail(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip().rpartition("\n")[2][-200:]
