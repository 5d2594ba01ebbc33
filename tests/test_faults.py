"""Disks, clocks and signals that do not do as they are told: a message, nothing overwritten, and the run goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import LIGHT
from rich.console import Console
from toy_reward import starts_low
from toys import final_bytes, metrics, sampled, terminal, toy_config
from typer.testing import CliRunner

from groupwise import build, files
from groupwise.checkpoint import Checkpoint, Checkpoints, complete, kept
from groupwise.cli import app
from groupwise.config import Config
from groupwise.engines.local_sampler import LocalSampler
from groupwise.engines.steps import Steps
from groupwise.errors import CheckpointError, ConfigError
from groupwise.interrupt import Stop, seconds
from groupwise.log import RunLog
from groupwise.rewards import as_rewards
from groupwise.rows import read_rows
from groupwise.tasks import Task
from groupwise.train import Run, train


def config_of(toys: Path, folder: Path, **changes: Any) -> Config:
    evaluation = {"data": {"path": str(toys / "rows.jsonl"), "limit": 4}, "every": 3}
    shared = {"checkpoint": {"every": 2, "keep_last": 3}, "evaluation": evaluation, **changes}
    return toy_config(toys, output=str(folder), **shared)


@pytest.fixture(scope="module")
def whole(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nothing happened to."""
    return train(config_of(toys, tmp_path_factory.mktemp("runs") / "whole"), console=Console(quiet=True)).folder


@pytest.fixture
def ended(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def resume(folder: Path, task: Task | None = None) -> tuple[Run, str]:
    console, screen = terminal()
    return train(Config.load(folder / "config.yaml"), task, resume=folder, console=console), screen.getvalue()


def same(left: Path, right: Path) -> None:
    assert final_bytes(left) == final_bytes(right)
    assert metrics(left, timings=False) == metrics(right, timings=False)
    assert [sampled(left, step) for step in range(1, 7)] == [sampled(right, step) for step in range(1, 7)]


def at_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, act: Callable[[], None]) -> None:
    """Do something just before the n-th call of a method."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[None] = []

    def acting(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            act()
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, acting)


# --------------------------------------------------------------------------------------------------------- checkpoints


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("learner/model.safetensors", cut_short, "bytes instead of"),
        ("learner/model.safetensors", flip_a_bit, "is not what was written"),
        ("learner/optimizer.pt", Path.unlink, "is missing"),
        ("state.json", flip_a_bit, "is not what was written"),
        ("manifest.json", cut_short, "cannot be read"),
        ("manifest.json", Path.unlink, "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    file: str, damage: Callable[[Path], None], said: str, ended: Path, whole: Path
) -> None:
    path = ended / "checkpoints" / "step-00006" / file
    damage(path)
    _, screen = resume(ended)
    (warning,) = [line for line in screen.splitlines() if line.startswith("warning")]
    assert str(path) in warning
    assert said in warning
    assert warning.endswith("this checkpoint is passed over, and the run continues from step-00004")
    assert f"continuing {ended} after step 4" in screen
    same(ended, whole)
    assert [files.damage(path) for path in complete(ended)] == [None, None, None]


def test_when_every_checkpoint_is_damaged_nothing_is_touched(ended: Path) -> None:
    for path in complete(ended):
        cut_short(path / "learner" / "model.safetensors")
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged: .*step-00006.*step-00002.*start this run"):
        resume(ended)
    assert {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()} == before


def test_a_folder_in_which_another_process_is_training_is_left_alone(ended: Path) -> None:
    hold = (
        f"{LIGHT}\nimport pathlib, sys, time\nfrom groupwise.files import alone\n"
        "with alone(pathlib.Path(sys.argv[1])):\n    print(1, flush=True)\n    time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(ended)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
        with pytest.raises(CheckpointError, match="another process is training in it; wait for that run"):
            resume(ended)
        assert {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()} == before
        other.kill()
    resume(ended)


def test_a_full_disk_while_saving_names_the_last_good_state(
    toys: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, limit = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk() -> None:  # Python ignores SIGXFSZ, so that a write fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limit[1]))

    try:
        with monkeypatch.context() as patch:
            at_call(patch, RunLog, "step", 4, fill_the_disk)
            with pytest.raises(CheckpointError) as raised:
                train(config_of(toys, folder), console=Console(quiet=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    text = str(raised.value)
    assert text.startswith(f"{folder}/checkpoints/step-00004: cannot be written: ")
    assert f"the last good state is {folder}/checkpoints/step-00002; " in text
    assert text.endswith(f"then `groupwise train --resume {folder}`")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00002"]
    resume(folder)
    same(folder, whole)


@pytest.mark.parametrize("name", ["completions.write_whole", "journal.append"])
def test_a_full_disk_while_logging_is_said_too(
    name: str, toys: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(*arguments: Any) -> None:
        with files.writing(arguments[0]):
            full()

    with monkeypatch.context() as patch:
        at_call(patch, RunLog, "step", 4, lambda: patch.setattr(f"groupwise.{name}", broken))
        with pytest.raises(CheckpointError, match=r"No space left on device; .*step-00002; mend this"):
            train(config_of(toys, folder), console=Console(quiet=True))
    resume(folder)
    same(folder, whole)


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_sampled(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def read_only(self: Path, *arguments: Any, **named: Any) -> None:
        if self.name == "rollouts":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        mkdir(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(LocalSampler, "sample", None)  # nobody gets there
    with pytest.raises(CheckpointError, match=r"run: cannot be written: Read-only file system"):
        train(config_of(toys, tmp_path / "run"), console=Console(quiet=True))


def test_the_clock_decides_nothing(ended: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, path in enumerate(complete(ended)):
        for file in [*path.rglob("*"), path]:
            os.utime(file, (1e9 - age * 1e6,) * 2)  # the newest is the oldest
    monkeypatch.setattr("time.time", lambda: -1e6)
    _, screen = resume(ended)
    assert "after step 6" in screen
    same(ended, whole)


def test_the_run_does_not_wait_for_the_disk(
    toys: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_step, waited = threading.Event(), []
    write = Checkpoints._write

    def slow(self: Checkpoints, state: Any, snapshots: Any) -> None:
        waited.append(next_step.wait(30) or state["steps_done"] > 2)
        write(self, state, snapshots)

    monkeypatch.setattr(Checkpoints, "_write", slow)
    at_call(monkeypatch, RunLog, "step", 3, next_step.set)  # the third step ends while the second is not on disk
    folder = train(config_of(toys, tmp_path / "run"), console=Console(quiet=True)).folder
    assert waited == [True, True, True]
    same(folder, whole)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 2}, {8, 10}),
        ({"keep_last": 1, "keep_every": 4}, {4, 8, 10}),
        ({"keep_last": 1, "keep_best": 2}, {2, 6, 10}),
        ({"keep_last": 9}, {2, 4, 6, 8, 10}),
    ],
)
def test_which_checkpoints_are_kept(keep: dict[str, int], left: set[int]) -> None:
    assert kept({2: 0.5, 4: 0.1, 6: 0.7, 8: None, 10: 0.2}, Checkpoint(**keep)) == left


# ------------------------------------------------------------------------------------------------- rollouts and metrics


class KilledError(Exception):
    pass


def die() -> None:
    raise KilledError


@pytest.mark.parametrize("damaged", [False, True])
def test_sampled_groups_are_read_back_and_a_damaged_file_is_sampled_again(
    damaged: bool, toys: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_call(patch, Steps, "take", 4, die)
        with pytest.raises(KilledError):
            train(config_of(toys, folder), console=Console(quiet=True))
    kept_files = sorted((folder / "pending").iterdir())
    assert [path.name for path in kept_files] == ["step-00003.0.pickle", "step-00004.0.pickle"]
    if damaged:
        flip_a_bit(kept_files[1])
    batches: list[int] = []
    original = LocalSampler.sample
    monkeypatch.setattr(LocalSampler, "sample", lambda s, r, how: batches.append(how.max_tokens) or original(s, r, how))
    _, screen = resume(folder)
    sampled_steps, evaluations = 2 + damaged, 2  # steps 5 and 6; evaluations after steps 3 and 6
    assert len(batches) == sampled_steps + evaluations
    assert (f"{kept_files[1]} is damaged; its completions are sampled again" in screen) == damaged
    same(folder, whole)
    assert not (folder / "pending").exists()


def test_groups_sampled_under_other_settings_are_not_used(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_call(patch, Steps, "take", 1, die)
        with pytest.raises(KilledError):
            train(config_of(toys, folder), console=Console(quiet=True))
    train(config_of(toys, folder, seed=7), resume=folder, console=Console(quiet=True))
    other = train(config_of(toys, tmp_path / "other", seed=7), console=Console(quiet=True)).folder
    same(folder, other)


def test_a_damaged_line_of_metrics_is_named(ended: Path) -> None:
    path = ended / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "garbage", *lines[3:]]) + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 3 is damaged"):
        resume(ended)
    assert "garbage" in path.read_text()


# -------------------------------------------------------------------------------------------------------------- signals


def ask(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


STOPS = {
    "sampling": (LocalSampler, "_decoding", 6, 3),  # two of the calls before are evaluations
    "updating": (Steps, "take", 4, 4),
    "evaluating": (build, "evaluate", 2, 3),
    "logging": (RunLog, "_write", 7, 5),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", STOPS)
def test_a_run_that_is_asked_to_stop_does_so_where_it_can_be_resumed(
    where: str, number: signal.Signals, toys: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call, steps_done = STOPS[where]
    folder, handlers = tmp_path / "run", [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    console, screen = terminal()
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, lambda: ask(number))
        run = train(config_of(toys, folder, checkpoint={"every": 2, "keep_last": 3}), console=console)
    assert run.stopped == number.name
    assert screen.getvalue().splitlines()[-1] == (
        f"stopped by {number.name}; continue with: groupwise train --resume {folder}"
    )
    assert complete(folder)[-1].name == f"step-{steps_done:05d}"
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    resumed, _ = resume(folder)
    assert resumed.stopped is None
    same(folder, whole)


def test_a_run_stopped_before_its_first_step_starts_over(
    toys: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_call(patch, build, "evaluate", 1, ask)
        assert train(config_of(toys, folder), console=Console(quiet=True)).stopped == "SIGTERM"
    assert complete(folder) == []
    run, _ = resume(folder)
    assert run.before is not None
    same(folder, whole)


def test_asked_twice_it_leaves_at_once() -> None:
    child = os.fork()
    if not child:
        with Stop() as stop, stop.held():
            ask(signal.SIGINT)
            ask(signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_a_stop_passes_through_a_reward_that_takes_every_exception(toys: Path, tmp_path: Path) -> None:
    calls: list[None] = []

    def reward(rollout: Any) -> float:
        calls.append(None)
        if len(calls) == 40:
            ask()
        return starts_low(rollout)

    task = Task(read_rows(toys / "rows.jsonl"), as_rewards([reward]))
    run = train(toy_config(toys, output=str(tmp_path / "run")), task, console=Console(quiet=True))
    assert run.stopped == "SIGTERM"
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2]


def test_the_time_limit_stops_a_run_and_the_command_says_how_to_go_on(toys: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(config_of(toys, folder, steps=100_000).to_yaml())
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--max-time", "1.5s"])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == f"groupwise train --resume {folder}"
    assert "stopped by the end of --max-time (1.5 s)" in done.stderr
    steps = [record["step"] for record in metrics(folder) if "reward" in record]
    assert complete(folder)[-1].name == f"step-{steps[-1]:05d}"


@pytest.mark.parametrize(("text", "expected"), [("3h30m", 12600), ("90s", 90), ("90", 90), ("1d", 86400), ("0.5", 0.5)])
def test_durations(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "0", "soon", "-5", "3m4h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-time: .*accepted: a duration above 0, such as 3h30m"):
        seconds(text)
