"""Rewards that raise, hang, crash or return nonsense cost their own sample and nothing else; no process is left."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from processes import LIGHT, wait_until
from toys import REWARD, metrics, sampled, terminal, toy_config, toy_folder, toy_rows

from groupwise.advantages import GroupStd
from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards import Reward, as_rewards, check_rewards, nursery, score, workers_end
from groupwise.rewards.calls import Verdict
from groupwise.rewards.here import pickled
from groupwise.rewards.questions import Question
from groupwise.rewards.workers import Workers
from groupwise.train import train

SECONDS = 1.5
STEPS = 35


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    with workers_end():
        yield


def rollout(text: str, **example: Any) -> Rollout:
    return Rollout(
        tokens=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        group=0,
        text=text,
        example={"prompt": "2+2=", **example},
    )


def limited(function: Any, **settings: Any) -> tuple[Reward, ...]:
    return as_rewards(Reward(use=function, **{"timeout_seconds": SECONDS, **settings}))


def scored(rewards: Sequence[Reward], texts: Sequence[str]) -> list[Rollout]:
    return score([rollout(text) for text in texts], rewards, lambda row: row["prompt"])


def ask(workers: Workers, reward: Reward, texts: Sequence[str]) -> list[Verdict]:
    return workers.ask([Question(reward, [rollout(text) for text in texts], ["2+2="] * len(texts))])[0]


# -------------------------------------------------------------------------------------------------------------- faults

FAULTS = {
    "raise": ("raised", r"raised ValueError: no such answer \(faults.py:\d+\)"),
    "sys.exit": ("raised", "raised SystemExit"),
    "recurse": ("raised", "raised RecursionError"),
    "grow": ("raised", "raised MemoryError"),
    "endless": ("timeout", f"gave no answer within {SECONDS:g} s"),
    "sleep": ("timeout", f"gave no answer within {SECONDS:g} s"),
    "power": ("timeout", f"gave no answer within {SECONDS:g} s"),
    "regex": ("timeout", f"gave no answer within {SECONDS:g} s"),
    "stop itself": ("timeout", f"gave no answer within {SECONDS:g} s"),
    "ignore signals": ("timeout", f"gave no answer within {SECONDS:g} s"),
    "exit": ("crashed", "took its worker process down, which ended with exit code 3"),
    "kill itself": ("crashed", r"took its worker process down, which was killed by signal 9 \(Killed\)"),
    "segfault": ("crashed", r"took its worker process down, which was killed by signal 11 \(Segmentation fault\)"),
    "none": ("returned", r"returned None \(accepted: one number"),
    "nan": ("returned", "returned nan"),
    "inf": ("returned", "returned inf"),
    "huge": ("returned", "returned inf"),
    "text": ("returned", r"returned the str '1.0' \(accepted"),
    "dict": ("returned", "returned the dict"),
    "list": ("returned", "returned the list"),
    "complex": ("returned", "returned the complex"),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_costs_its_own_sample_and_no_other(text: str) -> None:
    cause, problem = FAULTS[text]
    first, bad, last = scored(limited(faults.judge, memory_mb=200), ["ab", text, "abc"])
    assert (first.reward, first.valid, last.reward, last.valid) == (2.0, True, 3.0, True)
    assert not bad.valid
    assert math.isnan(bad.reward)
    assert math.isnan(bad.rewards["judge"])
    assert bad.faults == {"judge": cause}
    with pytest.raises(AssertionError, match=f"^rewards.judge: {problem}"):
        raise AssertionError(bad.problem)
    assert first.faults == last.faults == {}


@pytest.mark.parametrize("text", [name for name in FAULTS if name != "none"])
def test_a_fault_in_a_list_costs_its_own_sample_and_no_other(text: str) -> None:
    first, bad, last = scored(limited(faults.judge_all, memory_mb=200), ["ab", text, "abc"])
    assert (first.reward, bad.valid, last.reward) == (2.0, False, 3.0)
    assert bad.faults == {"judge_all": FAULTS[text][0]}


def test_a_list_of_the_wrong_length_is_asked_again_one_by_one() -> None:
    first, bad, last = scored(limited(faults.drops_some), ["ab", "drop", "abc"])
    assert (first.reward, bad.valid, last.reward) == (2.0, False, 3.0)
    assert bad.problem.startswith("rewards.drops_some: returned 0 values for 1 completions (accepted: a list of 1")


def test_async_calls_wait_for_each_other_and_each_has_its_own_time_limit() -> None:
    began = time.monotonic()
    texts = ["a"] * 20 + ["sleep", "raise", "nan"]
    rollouts = scored(limited(faults.judge_async, timeout_seconds=1.0), texts)
    assert time.monotonic() - began < 3.5  # one after the other: 5.4 seconds
    assert [r.reward for r in rollouts[:20]] == [1.0] * 20
    assert [r.faults for r in rollouts[20:]] == [{"judge_async": c} for c in ("timeout", "raised", "returned")]


def test_an_async_function_that_blocks_its_loop_costs_its_own_sample() -> None:
    first, bad, last = scored(limited(faults.judge_async), ["ab", "endless", "abc"])
    assert (first.reward, bad.faults, last.reward) == (2.0, {"judge_async": "timeout"}, 3.0)


def test_a_call_that_failed_is_made_again_as_often_as_asked(tmp_path: Path) -> None:
    once, again = limited(faults.fails_once), limited(faults.fails_once, retries=1)
    assert scored(once, [str(tmp_path / "a")])[0].faults == {"fails_once": "raised"}
    assert scored(again, [str(tmp_path / "b")])[0].reward == 1.0
    assert scored(limited(faults.judge, retries=2), ["exit", "nan"])[0].faults == {"judge": "crashed"}


def test_a_function_that_stays_in_this_process_has_a_time_limit_too() -> None:
    def closure(rollout: Rollout) -> float:
        time.sleep(3.0 if rollout.text == "slow" else 0.0)
        return float(os.getpid())

    assert pickled(closure) is None
    first, bad, last = scored(limited(closure, timeout_seconds=0.3), ["", "slow", ""])
    assert first.reward == last.reward == os.getpid()
    assert bad.problem == "rewards.closure: gave no answer within 0.3 s"
    assert bad.faults == {"closure": "timeout"}


def test_rows_that_cannot_be_sent_to_a_worker_are_named() -> None:
    (bad,) = score([rollout("a", row=lambda: 0)], limited(faults.judge), lambda row: row["prompt"])
    assert "when its rollout was sent to a worker" in bad.problem


# ------------------------------------------------------------------------------------------------------------- workers


def test_what_is_said_depends_neither_on_the_number_of_workers_nor_on_who_is_first() -> None:
    texts = ["raise", "a", "exit", "bb", "nan", "sleep", "ccc", "kill itself", "dddd"] * 2
    for function in (faults.judge, faults.judge_all):
        (reward,) = limited(function)
        said = []
        for count in (1, 5):
            workers = Workers(count)
            try:
                said.append([(str(v.value), v.cause, v.problem) for v in ask(workers, reward, texts)])
            finally:
                workers.close()
        assert said[0] == said[1]


def test_a_worker_that_leaks_is_replaced_before_it_costs_a_verdict() -> None:
    workers = Workers(1)
    try:
        (stays,), (leaks,) = limited(faults.process), limited(faults.leaks, memory_mb=128)
        assert len({verdict.value for verdict in ask(workers, stays, ["a"] * 9)}) == 1
        verdicts = ask(workers, leaks, ["a"] * 9)
    finally:
        workers.close()
    assert [verdict.problem for verdict in verdicts] == [""] * 9
    assert len({verdict.value for verdict in verdicts}) == 3


def test_workers_have_no_torch_and_only_what_can_be_pickled_goes_there(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(
        "import groupwise as gw\nimport os, sys\nclass Checker:\n    def __call__(self, rollout):\n"
        "        return float(os.getpid())\nchecker = Checker()\ndef public(rollout):\n"
        "    return float(gw.Rollout is type(rollout))\n"
    )
    assert scored(limited(faults.knows_torch), ["a"])[0].reward == 0.0
    assert scored(limited(f"{mine}:checker"), ["a"])[0].reward != os.getpid()
    assert scored(limited(lambda rollout: os.getpid(), name="mine"), ["a"])[0].reward == os.getpid()
    assert scored(limited(f"{mine}:public"), ["a"])[0].reward == 1.0


def test_what_holds_a_tensor_stays_in_this_process() -> None:
    import torch

    assert pickled(torch.nn.Linear(2, 2)) is None
    assert pickled(torch.nn.Linear(2, 2).forward) is None
    assert pickled(faults.judge) is not None


def test_a_module_that_starts_threads_is_imported_in_each_worker(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "def f(rollout):\n    return float(threading.active_count())\n"
    )
    rewards = as_rewards([f"{tmp_path / 'threads.py'}:f", Reward(use=faults.judge, timeout_seconds=SECONDS)])
    first, bad = scored(rewards, ["a", "exit"])
    assert first.rewards == {"f": 2.0, "judge": 1.0}
    assert bad.faults == {"judge": "crashed"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise ImportError('no such licence')",
            "cannot be imported in a worker process: ImportError: no such licence",
        ),
        ("import os; os._exit(1)", "importing it ended the process that does so"),
    ],
)
def test_a_module_that_cannot_be_imported_in_a_worker_is_refused_before_sampling(
    tmp_path: Path, body: str, message: str
) -> None:
    here = f"import os\nif os.getpid() != {os.getpid()}:\n    {body}\n"
    (tmp_path / "elsewhere.py").write_text(f"{here}def f(rollout):\n    return 1.0\n")
    rewards = limited(f"{tmp_path / 'elsewhere.py'}:f", trial=False)
    with pytest.raises(RewardError, match=rf"rewards\.f: {message}"):
        check_rewards(rewards, [{"prompt": "2+2="}], lambda row: row["prompt"])
    assert scored(limited(faults.judge), ["a"])[0].reward == 1.0


def test_a_reward_in_a_worker_may_stop_the_run_on_purpose(tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(
        "from groupwise.errors import RewardError\n"
        "def f(rollout):\n    raise RewardError('rewards.f: start the judge')\n"
    )
    with pytest.raises(RewardError, match=r"^rewards\.f: start the judge$"):
        scored(as_rewards(f"{tmp_path / 'strict.py'}:f"), ["a"])


def test_workers_stay_until_the_last_who_holds_them_lets_go() -> None:
    """So runs inside one `workers_end` share their workers, each of which ends them when it is alone."""
    workers, (reward,) = Workers(1), limited(faults.process)

    def worker() -> float:
        return ask(workers, reward, ["a"])[0].value

    try:
        with workers.hold():
            with workers.hold():
                first = worker()
            assert worker() == first
        assert worker() != first
    finally:
        workers.close()


def test_a_nursery_that_is_killed_is_started_again() -> None:
    workers = Workers(2)
    try:
        (reward,) = limited(faults.judge)
        assert ask(workers, reward, ["a"])[0].value == 1.0
        assert workers._nursery is not None
        os.kill(workers._nursery._process.pid, signal.SIGKILL)
        assert [verdict.value for verdict in ask(workers, reward, ["a", "bb", "ccc"])] == [1.0, 2.0, 3.0]
    finally:
        workers.close()


# ----------------------------------------------------------------------------------------------------------- processes

SCRIPT = f"""{LIGHT}
import faults, numpy
from groupwise.records import Rollout
from groupwise.rewards import Reward, score

def scored(*texts):
    nothing = numpy.zeros(0)
    rollouts = [Rollout(nothing, nothing, nothing, 0, text=text) for text in texts]
    return score(rollouts, [Reward(use=faults.judge, timeout_seconds=100.0)], lambda row: "2+2=")

print(scored("a")[0].reward, flush=True)
scored("family", "sleep", "endless", "ignore signals", "power", "a")
"""


def alive(mark: str) -> dict[int, str]:
    """The processes in whose environment the mark is, with their command lines."""
    found: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_trainer_is_interrupted_or_killed(number: int) -> None:
    mark = uuid.uuid4().hex
    trainer = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "MARK": mark, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"1.0\n"
        # Trainer, nursery, at least three workers, two below one of them.
        wait_until(lambda: sum("sleep 1000" in line for line in alive(mark).values()) == 2 and len(alive(mark)) >= 7)
        trainer.send_signal(number)
        assert trainer.wait(10) != 0
    deadline = time.monotonic() + 2
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(mark) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_no_process_is_left_when_the_trainer_dies_in_the_middle_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    (tmp_path / "restless.py").write_text("import subprocess\nPROCESS = subprocess.Popen(['sleep', '1000'])\n")
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", nursery.__file__, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        named = b"crestless\nPROCESS\n."
        nursery.send(ours, pickle.dumps(("load", "key", named, {"restless": str(tmp_path / "restless.py")}, sys.path)))
        assert "threads" in json.loads(nursery.receive(ours))
        wait_until(lambda: sum("sleep" in line for line in alive(mark).values()) == 1)
        nursery.send(ours, pickle.dumps(("spawn",)))  # the socket of the new worker, which should follow, never comes
    assert process.wait(10) == 0
    assert alive(mark) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_what_a_call_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    workers = Workers(1)
    try:
        (reward,) = limited(faults.judge)
        assert [verdict.cause for verdict in ask(workers, reward, ["family", "a"])] == ["timeout", ""]
        left = alive(mark)
        assert len(left) == 2  # the nursery, and the worker that judged the second
        assert not any("sleep" in line for line in left.values())
    finally:
        workers.close()
    assert alive(mark) == {}


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.slow
def test_a_run_learns_while_a_sixth_of_its_reward_calls_fail_and_says_so(tmp_path: Path) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    console, screen = terminal()
    name = "starts_low_but_fails"
    rewards = [{"use": f"{faults.__file__}:{name}", "timeout_seconds": 0.4, "trial": False}]
    config = toy_config(
        tmp_path,
        rewards=rewards,
        steps=STEPS,
        prompts_per_step=8,
        group_size=8,
        max_invalid_fraction=0.6,
        output=str(tmp_path / "run"),
    )
    run = train(config, console=console)
    records = metrics(run.folder)
    assert np.mean([record["reward"] for record in records[:3]]) < 0.3
    assert np.mean([record["reward"] for record in records[-3:]]) > 0.7
    rows = [row for step in range(1, STEPS + 1) for row in sampled(run.folder, step)]
    for cause, low, high in (("raised", 0.0, 0.10), ("timeout", 0.10, 0.15), ("crashed", 0.15, 0.17)):
        expected = [low <= faults.chance(row["text"] + row["prompt"]) < high for row in rows]
        assert [row[f"fault/{name}"] == cause for row in rows] == expected
        said = np.mean([record.get(f"invalid/{name}/{cause}", 0.0) for record in records])
        assert said == pytest.approx(np.mean(expected))
        assert f"{cause} {said:.1%}" in screen.getvalue()
    assert np.mean([record[f"invalid/{name}"] for record in records]) == pytest.approx(
        np.mean([not r["valid"] for r in rows])
    )
    assert all(row["advantage"] == 0 for row in rows if not row["valid"])


def normal(values: Any, scale: GroupStd) -> Any:
    spread = np.ptp(values) > 0
    return (values - values.mean()) / (values.std(ddof=scale.ddof) + scale.eps) if spread else 0 * values


@pytest.mark.parametrize("algorithm", ["grpo", {"preset": "gdpo", "whiten": None}])
def test_rewards_are_normalised_together_or_each_on_its_own_as_the_run_file_says(
    tmp_path: Path, algorithm: Any
) -> None:
    """By hand: GRPO normalises the weighted sum, GDPO sums what is normalised."""
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    rewards = [{"use": REWARD, "weight": 0.5}, f"{faults.__file__}:judge"]
    config = toy_config(tmp_path, rewards=rewards, algorithm=algorithm, steps=1, output=str(tmp_path / "run"))
    rows = sampled(train(config, console=terminal()[0]).folder, 1)
    scale = config.algorithm.scale
    assert isinstance(scale, GroupStd)
    for group in range(4):
        own = [row for row in rows if row["group"] == group]
        low, length = (np.array([row[f"reward/{name}"] for row in own]) for name in ("starts_low", "judge"))
        together = normal(0.5 * low + length, scale)
        alone = 0.5 * normal(low, scale) + normal(length, scale)
        expected = together if algorithm == "grpo" else alone
        assert [row["advantage"] for row in own] == pytest.approx(expected, abs=1e-5)
