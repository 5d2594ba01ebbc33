"""Programs that nobody has read stay where they are put: every way out that we know is tried here."""

from __future__ import annotations

import errno
import logging
import os
import platform
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from bwrap import NEEDS_BWRAP
from processes import LIGHT

from groupwise.errors import RewardError
from groupwise.rewards import bubblewrap, sandbox, workers_end
from groupwise.rewards.bubblewrap import SandboxError
from groupwise.rewards.sandbox import Limits, Result, require, run
from groupwise.rewards.seccomp import seccomp_filter

pytestmark = NEEDS_BWRAP

QUICK = Limits(cpu_seconds=1, wall_seconds=1.5)


def ran(program: str, limits: Limits = QUICK, **more: Any) -> Result:
    return run(textwrap.dedent(program), limits, **more)


def said(program: str, limits: Limits = QUICK, **more: Any) -> str:
    """What a program that must end well has printed."""
    result = ran(program, limits, **more)
    assert result.ok, result
    return result.stdout.decode().strip()


def processes_with(word: str) -> list[str]:
    """Command lines on this machine that hold the word."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue  # it has ended meanwhile
    return [line for line in found if word in line]


def descendants() -> list[int]:
    """Every process below this one, sandboxes included."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below - {os.getpid()})


@pytest.fixture(autouse=True, scope="module")
def no_reward_workers() -> None:
    """They would be among the descendants."""
    with workers_end():
        pass


def assert_soon(condition: Any, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------- what it gives


def test_a_program_reads_its_input_and_says_its_output() -> None:
    result = ran("import sys; print(input()[::-1]); print('ü', file=sys.stderr); exit(3)", stdin="añb\n".encode())
    assert (result.status, result.stdout, result.stderr) == (3, "bña\n".encode(), "ü\n".encode())
    assert not result.limit


def test_the_standard_library_is_there_and_a_folder_to_write_in() -> None:
    program = """
        import ctypes, decimal, json, sqlite3, ssl, tempfile, threading, zoneinfo, os
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        open("here", "w").write("y")
        thread = threading.Thread(target=print, args=("threads",)); thread.start(); thread.join()
        print(os.getcwd(), os.listdir("."))
    """
    assert said(program) == "threads\n/tmp ['here']"


def test_a_sandbox_begins_empty_every_time() -> None:
    said("open('/tmp/left', 'w').write('secret')")
    assert said("import os; print(os.listdir('/tmp'))") == "[]"


def test_a_program_is_the_main_module_and_sees_nothing_of_ours() -> None:
    program = """
        import sys
        assert __name__ == "__main__" and sys.argv == ["program.py"] and sys.modules["__main__"].__dict__ is globals()
        import os
        for fd in range(3, 1024):
            try:
                os.fstat(fd)
            except OSError:
                continue
            print("an open file", fd)
    """
    assert said(program) == ""


# ----------------------------------------------------------------------------------------------- the host, from inside


def test_files_of_the_host_cannot_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    paths = ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/1/root", "/sys/kernel", "/run"]
    paths += ["/home", "/var", "/opt", "/boot", "/usr/src", "/usr/bin/env", "/bin/sh", "/dev/sda", "/dev/mem"]
    paths += [str(secret), __file__, str(Path(sandbox.__file__)), str(Path.home() / ".ssh"), os.getcwd()]
    outside = [path for path in paths if not path.startswith(sys.base_prefix)]
    program = f"import os; print([path for path in {outside!r} if os.path.exists(path)])"
    assert said(program) == "[]"


def test_folders_on_the_way_to_the_interpreter_hold_nothing_else() -> None:
    above = [str(path) for path in Path(sys.base_prefix).parents]
    seen = said(f"import os; print([len(os.listdir(path)) for path in {above[:-1]!r} if path != '/usr'])")
    assert set(seen) <= set("[1, ]")


def test_the_environment_and_the_names_of_the_host_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    program = "import os, socket; print(sorted(os.environ), socket.gethostname(), os.getpid() < 10)"
    assert said(program) == "['LC_CTYPE', 'PWD'] sandbox True"


def test_no_other_process_can_be_seen() -> None:
    program = """
        import os
        def exists(pid):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                pass
            return True
        print(len([pid for pid in range(1, 70000) if exists(pid)]), os.path.exists("/proc/self"))
    """
    assert said(program) == "2 False"  # bubblewrap's reaper and the program


def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        program = f"""
            import socket
            for address in (("127.0.0.1", {listener.getsockname()[1]}), ("192.0.2.1", 80)):
                try:
                    socket.create_connection(address, timeout=0.3)
                    print("connected")
                except OSError as error:
                    print(type(error).__name__)
        """
        assert said(program).split() == ["ConnectionRefusedError", "OSError"]
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_an_abstract_socket_of_the_host_is_out_of_reach() -> None:
    name = f"\0groupwise-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        program = f"import socket; print(socket.socket(socket.AF_UNIX).connect_ex({name!r}))"
        assert said(program) != "0"


def test_nothing_outside_its_folder_can_be_written(tmp_path: Path) -> None:
    paths = [f"{folder}/x" for folder in ("", "/usr", "/usr/lib", "/dev", "/dev/shm", sys.base_prefix, tmp_path)]
    program = f"""
        import os
        for path in [*{paths!r}, os.__file__]:
            try:
                open(path, "a").write("x")
                print("written", path)
            except OSError:
                pass
    """
    before = Path(os.__file__).read_bytes()
    assert said(program) == ""
    assert Path(os.__file__).read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_the_program_is_nobody_of_importance() -> None:
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for call in (lambda: os.setuid(0), lambda: os.chroot("/tmp"), lambda: os.nice(-5)):
            try:
                call()
                print("allowed")
            except OSError:
                pass
        print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.prctl(39, 0, 0, 0, 0))  # PR_GET_NO_NEW_PRIVS
    """
    words = said(program).split()
    # Setting oneself to 0 is no step up where 0 is nobody's number; with root there, it must fail.
    assert words[-2:] == ["-1", "1"]
    assert "allowed" not in words


@pytest.mark.skipif(not seccomp_filter(), reason="no filter of system calls for this processor")
def test_system_calls_around_the_limits_are_refused() -> None:
    program = """
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {
            "shmget": lambda: libc.shmget(0, 1 << 20, 0o1600),
            "memfd_create": lambda: libc.memfd_create(b"x", 0),
            "unshare": lambda: libc.unshare(0x10000000),
            "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
            "clone": lambda: libc.syscall(CLONE, 0x10000011, 0, 0, 0, 0),
        }
        for name, call in calls.items():
            ctypes.set_errno(0)
            if call() != -1 or ctypes.get_errno() != errno.EPERM:
                print(name, ctypes.get_errno())
    """
    assert said(program.replace("CLONE", str({"x86_64": 56, "aarch64": 220}[platform.machine()]))) == ""


# --------------------------------------------------------------------------------------------------------- its limits


def test_a_loop_ends_at_its_processor_time() -> None:
    result = ran("while True: pass", Limits(cpu_seconds=1, wall_seconds=20))
    assert result.limit == "cpu_seconds"
    assert 0.5 < result.seconds < 15


def test_sleep_ends_at_the_clock() -> None:
    result = ran("import time; time.sleep(60)", Limits(wall_seconds=0.3))
    assert result.limit == "wall_seconds"
    assert result.seconds < 3


def test_ignoring_every_signal_does_not_help() -> None:
    program = """
        import signal, time
        for number in signal.valid_signals():
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        print("ready", flush=True)
        while True: {}
    """
    slept = ran(program.format("time.sleep(9)"), Limits(wall_seconds=0.5))
    looped = ran(program.format("pass"), Limits(cpu_seconds=1, wall_seconds=20))
    assert (slept.limit, slept.stdout) == ("wall_seconds", b"ready\n")
    assert looped.status == 128 + 9


def test_endless_output_is_cut_and_killed() -> None:
    for where in ("stdout", "stderr"):
        result = ran(f"import sys\nwhile True: sys.{where}.write('x' * 4096)", Limits(output_kb=64))
        assert result.limit == "output_kb"
        assert len(getattr(result, where)) == 64 * 1024


def test_a_trickle_of_output_does_not_stop_the_clock() -> None:
    result = ran("import time\nwhile True: print('x', flush=True); time.sleep(0.01)", Limits(wall_seconds=0.4))
    assert result.limit == "wall_seconds"
    assert 10 < len(result.stdout) < 200


def test_a_memory_bomb_is_refused_its_memory() -> None:
    result = ran("x = 'a' * (1 << 30)", Limits(memory_mb=128))
    assert not result.ok
    assert b"MemoryError" in result.stderr


def test_a_fork_bomb_comes_to_an_end() -> None:
    program = """
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(9)
                    os._exit(0)
                made += 1
        except OSError:
            print(made, flush=True)
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """
    result = ran(program, Limits(processes=8, wall_seconds=1, cpu_seconds=1))
    assert int(result.stdout.split()[0]) < 8
    assert result.limit or result.status == 128 + 9
    assert_soon(lambda: not descendants())


def test_a_file_grows_no_larger_than_its_limit_nor_do_all_together() -> None:
    program = """
        def fill(path):
            with open(path, "wb", buffering=0) as file:
                while file.write(b"x" * 65536) == 65536:
                    pass
        sizes = []
        for name in ("one", "two"):
            try:
                fill(name)
            except OSError as error:
                sizes.append(error.errno)
        print(sizes)
    """
    full, large = errno.ENOSPC, errno.EFBIG
    assert said(program, Limits(file_mb=1)) in (f"[{large}, {full}]", f"[{full}, {full}]")


def test_open_files_are_limited() -> None:
    program = """
        kept = []
        try:
            while True: kept.append(open("/dev/null"))
        except OSError:
            print(len(kept))
    """
    assert int(said(program, Limits(open_files=32))) < 32


def test_limits_cannot_be_raised_from_inside() -> None:
    program = """
        import resource
        for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_FSIZE"):
            try:
                resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                print("raised", name)
            except (ValueError, PermissionError):
                pass
    """
    assert said(program) == ""


# ------------------------------------------------------------------------------------------------ what it leaves behind


def test_killing_the_parent_and_everyone_hurts_nobody_else() -> None:
    witness = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        for target in ("os.getppid()", "-1", "1"):
            result = ran(
                f"import os, signal\ntry: os.kill({target}, signal.SIGKILL)\nexcept OSError: pass\nprint('on')"
            )
            assert result.status in (0, 128 + 9)
        assert witness.poll() is None
    finally:
        witness.kill()
        witness.wait()


def test_children_left_in_the_background_end_with_the_program() -> None:
    before = descendants()
    program = """
        import os, time, signal
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
                if os.fork() == 0: time.sleep(30)
                time.sleep(30)
        print("done", flush=True)
    """
    result = ran(program, Limits(wall_seconds=8))
    assert result.ok
    assert result.stdout == b"done\n"
    assert result.seconds < 5
    assert_soon(lambda: descendants() == before)


def test_when_the_trainer_is_killed_its_sandboxes_end() -> None:
    word = f"groupwise-{uuid.uuid4()}"  # in the sandbox's command line: a folder that bubblewrap makes
    script = f"""{LIGHT}
import time
import groupwise.rewards.bubblewrap as b
from groupwise.rewards.sandbox import Limits, running
plain = b._system()
b._system = lambda: (*plain, "--dir", "/{word}")
with running("script", {{"program": "import time; time.sleep(60)"}}, Limits(wall_seconds=60)) as box:
    while not box.confined:
        time.sleep(0.01)
    print("up", flush=True)
    box.finish()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "up\n"
        assert len(processes_with(f"--dir /{word}")) == 2  # bubblewrap outside and inside
        trainer.kill()
    assert_soon(lambda: not processes_with(f"/{word}"))


def test_many_at_once_do_not_disturb_each_other() -> None:
    results: dict[int, str] = {}

    def one(number: int) -> None:
        results[number] = said(f"import threading; print({number} + int(input()))", Limits(), stdin=b"1000")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(1000 + number) for number in range(12)}
    assert_soon(lambda: not descendants())


# -------------------------------------------------------------------------------------------------- where there is none


@pytest.fixture
def forgetful() -> Any:
    """What is found out once about the machine is found out again, before and after."""

    def forget() -> None:
        for known in (sandbox._obstacle, sandbox._warn_once, bubblewrap._system, bubblewrap.can_be_nobody):
            known.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("forgetful")
def test_without_bubblewrap_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RewardError, match=r"rewards\.code: .*no `bwrap`.*apt install bubblewrap.*sandbox: none"):
        require("bwrap", "code")


@pytest.mark.usefixtures("forgetful")
def test_where_namespaces_are_refused_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RewardError, match=r"No permissions to create.*user namespaces.*sandbox: none"):
        require("bwrap", "code")
    with pytest.raises(SandboxError, match="No permissions"):
        run("print(1)", QUICK)


@pytest.mark.usefixtures("forgetful")
def test_no_sandbox_at_all_is_a_warning_and_keeps_the_limits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require("none", "code")
    assert "sandbox is none" in caplog.text
    assert said("import os; print(dict(os.environ))", how="none").startswith("{'LC_CTYPE'")
    assert ran("while True: pass", Limits(cpu_seconds=1, wall_seconds=20), how="none").limit == "cpu_seconds"
    assert b"MemoryError" in ran("x = 'a' * (1 << 30)", how="none").stderr
    left = ran("import os, time\nif os.fork() == 0: time.sleep(30)\nprint('done')", Limits(wall_seconds=8), how="none")
    assert left.ok
    assert left.seconds < 5
    assert_soon(lambda: not descendants())
