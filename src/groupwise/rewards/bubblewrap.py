"""Start a process in namespaces of its own with bubblewrap, on a read-only system of what Python needs.

As root we map two users into the user namespace, root and nobody, so that the process can become nobody: root is exempt
from the kernel's limit on processes.  Bubblewrap itself maps one user only, so we make that namespace for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from groupwise.rewards.inside.confine import NOBODY
from groupwise.rewards.seccomp import seccomp_filter

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

    command = [*_system(), "--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    command += ["--remount-ro", "/"]
    inherited = [*fds]
    try:
        if seccomp_filter():
            inherited.append(memory_file(seccomp_filter()))
            command += ["--seccomp", str(inherited[-1])]
        if can_be_nobody():
            inherited.append(_namespace_with_nobody())
            command += ["--userns", str(inherited[-1])]
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # given up with the first use of them
        else:
            command += ["--unshare-user"]
        return subprocess.Popen(
            [*command, "--", *words], stdin=stdin, stdout=output, stderr=output, pass_fds=inherited, env={}
        )
    finally:
        for fd in inherited[len(fds) :]:
            os.close(fd)


def memory_file(content: bytes) -> int:
    """A file descriptor of a file in memory, to be read from its beginning."""
    fd = os.memfd_create("groupwise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@cache
def can_be_nobody() -> bool:
    """Whether we are root and may map another user into a namespace."""
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return os.geteuid() == 0 and any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in spans)


def _namespace_with_nobody() -> int:
    """A file descriptor of a new user namespace, which lives as long as it or a process inside."""
    try:
        with subprocess.Popen(["unshare", "--user", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
            assert first.stdin is not None and first.stdout is not None
            first.stdin.write(b"1")
            first.stdin.flush()
            first.stdout.read(1)  # the echo comes from the other side of `unshare`
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{first.pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return os.open(f"/proc/{first.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"no user namespace with the user nobody in it: {error}") from error


@cache
def _system() -> tuple[str, ...]:
    """Bubblewrap and what does not change from run to run: the other namespaces and the read-only system."""
    own = ("ipc", "pid", "net", "uts", "cgroup-try")
    words = [shutil.which("bwrap") or "bwrap", *(f"--unshare-{name}" for name in own), "--hostname", "sandbox"]
    words += ["--clearenv", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    prefix = Path(sys.base_prefix).resolve()
    python = Path(INTERPRETER) if prefix == Path("/usr") else prefix
    libraries = [Path(root, name) for root in ("/usr", "/") for name in ("lib", "lib32", "lib64", "libx32")]
    for path in [*libraries, Path("/usr/share/zoneinfo"), python]:
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            # Left to itself, bubblewrap makes the folders above for their owner alone, who is not nobody.
            above = [word for folder in reversed(path.parents[:-1]) for word in ("--dir", str(folder))]
            words += [*above, "--ro-bind", str(path), str(path)]
    return (*words, "--dir", "/dev", "--dev-bind", "/dev/null", "/dev/null")
