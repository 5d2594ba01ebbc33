"""Start a process in namespaces of its own with bubblewrap, on a read-only system of what Python needs.

As root we map two users into the new user namespace, root and nobody, so that the process can become nobody: root is
exempt from the kernel's limit on processes.  Bubblewrap maps one user only, so it waits while we write the map.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from groupwise.rewards.inside.confine import NOBODY

MB = 1 << 20
INTERPRETER: str = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
"""Python without the virtual environment."""


class SandboxError(RuntimeError):
    """The sandbox itself failed, so nothing is known about the program."""


def start(
    words: Sequence[str], fds: Sequence[int], stdin: int, output: int, *, tmp_bytes: int
) -> subprocess.Popen[bytes]:
    """The command `words` in a new sandbox that inherits `fds`; `output` is as `Popen` takes it.

    Raises:
        SandboxError: the namespace could not be given its users.
        OSError: there is no bubblewrap.
    """

    def popen(*more: str, pipes: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        tmp = ("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/")
        command = [*_namespaces(), *tmp, *more, "--", *words]
        inherited = [*fds, *pipes]
        return subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, pass_fds=inherited, env={})

    if not can_be_nobody():
        return popen()
    told, telling = os.pipe()
    waiting, go = os.pipe()
    capabilities = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")  # given up with the first use of them
    try:
        pipes = ("--info-fd", str(telling), "--userns-block-fd", str(waiting))
        process = popen(*capabilities, *pipes, pipes=[telling, waiting])
    except OSError:
        os.close(told)
        os.close(go)
        raise
    finally:
        os.close(telling)
        os.close(waiting)
    try:
        with open(told, "rb") as info, open(go, "wb", buffering=0) as gate:
            _map_nobody(info.read(), gate)
    except OSError as error:
        with process:
            process.kill()
        raise SandboxError(f"the user nobody cannot be mapped into it: {error}") from error
    return process


@cache
def can_be_nobody() -> bool:
    """Whether we are root and may map another user into a namespace."""
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return os.geteuid() == 0 and any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in spans)


def _map_nobody(info: bytes, gate: IO[bytes]) -> None:
    """Write the user namespace's map, and let bubblewrap go on."""
    if not info:
        return  # bubblewrap has failed, and its orders will be found unread
    pid = json.loads(info)["child-pid"]
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
    gate.write(b"1")


@cache
def _namespaces() -> tuple[str, ...]:
    """Bubblewrap and what does not change from run to run: namespaces and the read-only system."""
    shared = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
    words = [shutil.which("bwrap") or "bwrap", *(f"--unshare-{name}" for name in shared), "--hostname", "sandbox"]
    words += ["--clearenv", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    prefix = Path(sys.base_prefix).resolve()
    own = Path(INTERPRETER) if prefix == Path("/usr") else prefix
    libraries = [Path(root, name) for root in ("/usr", "/") for name in ("lib", "lib32", "lib64", "libx32")]
    for path in [*libraries, Path("/usr/share/zoneinfo"), own]:
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            # Left to itself, bubblewrap makes the folders above for their owner alone, who is not nobody.
            above = [word for folder in reversed(path.parents[:-1]) for word in ("--dir", str(folder))]
            words += [*above, "--ro-bind", str(path), str(path)]
    return (*words, "--dir", "/dev", "--dev-bind", "/dev/null", "/dev/null")
