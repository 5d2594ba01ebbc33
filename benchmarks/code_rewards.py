"""2,000 code rewards at once, right, wrong, slow and hostile: none is lost, none hangs, and what the sandbox costs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, publish, table
from groupwise.records import Rollout
from groupwise.rewards import Code, as_rewards, score, workers_end
from groupwise.rewards.sandbox import Limits, run
from groupwise.rewards.workers import LEAST_WORKERS

CALLS, WORKERS, ROUNDS = 2000, max(LEAST_WORKERS, os.cpu_count() or 1), 200
REWARD = Code(limits=Limits(cpu_seconds=1, wall_seconds=4))
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\nassert add(10**20, 1) == 10**20 + 1"
CASES = [{"input": "1 2", "output": "3"}, {"input": "-1 1", "output": "0"}]
FUNCTION, SCRIPT = "def add(a, b):\n    return {}", "a, b = map(int, input().split())\nprint({})"
HOSTILE = (
    "import os\nwhile True: os.fork()",
    "x = []\nwhile True: x.append('a' * (1 << 20))",
    "while True: print('passed 111' * 100)",
    "import os\nos.kill(-1, 9); os.kill(os.getppid(), 9)",
    "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(3600)\nos._exit(0)",
    "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)",
    "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
)
# (kind, share of the calls in per cent, tests, programs)
MIX: tuple[tuple[str, int, Any, Sequence[str]], ...] = (
    ("right", 40, ASSERTS, [FUNCTION.format("a + b")]),
    ("right, printed", 15, CASES, [SCRIPT.format("a + b")]),
    ("wrong", 25, ASSERTS, [FUNCTION.format("a - b"), "def add(a, b:", FUNCTION.format("undefined")]),
    ("wrong, printed", 10, CASES, [SCRIPT.format("a - b"), "raise SystemExit"]),
    ("slow", 3, ASSERTS, ["while True: pass", "import time\ntime.sleep(3600)"]),
    ("hostile", 7, ASSERTS, HOSTILE),
)


def rollout(program: str, tests: Any, number: int) -> Rollout:
    """A completion with this program."""
    nothing = np.zeros(1, dtype=np.float32)
    text = f"```python\n{program}\n```"
    return Rollout(nothing.astype(np.int32), nothing > 0, nothing, number, text=text, example={"tests": tests})


def everything() -> list[tuple[str, Rollout]]:
    """The calls, each with its kind, well mixed."""
    calls = [
        (kind, rollout(programs[number % len(programs)], tests, number))
        for kind, share, tests, programs in MIX
        for number in range(CALLS * share // 100)
    ]
    return [calls[index] for index in np.random.default_rng(0).permutation(len(calls))]


def score_all(rollouts: Sequence[Rollout]) -> list[float]:
    """The reward of each, as a training run asks for it: through the pool of worker processes."""
    (reward,) = as_rewards([REWARD])
    with workers_end():
        return [one.reward for one in score(rollouts, [reward], lambda _: "")]


def children() -> list[str]:
    """The command lines of sandboxes and programs that are alive."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:
            continue
        if b"bwrap" in line or b"confine(orders" in line:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def interleaved(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way to do it, one after the other, many times."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    return taken


def overhead(source: Path) -> dict[str, list[float]]:
    """A program that adds two numbers, in every way that it can be run and judged; `source` is where to write it."""
    program = SCRIPT.format("a + b")
    source.write_text(program)
    limits, plain = REWARD.limits, Code(limits=REWARD.limits, sandbox="none")
    one_case, asserts = rollout(program, CASES[:1], 0), rollout(FUNCTION.format("a + b"), ASSERTS, 0)

    def subprocess_run(*options: str) -> None:
        subprocess.run([sys.executable, *options, source], input=b"1 2", capture_output=True, check=True)

    return interleaved(
        {
            "`subprocess.run([python, file])`": subprocess_run,
            "the same with `python -I -S`": lambda: subprocess_run("-I", "-S"),
            "one run, `sandbox: none`": lambda: run(program, limits, "none", stdin=b"1 2"),
            "one run in the sandbox": lambda: run(program, limits, stdin=b"1 2"),
            "reward, one printed case, `sandbox: none`": lambda: plain(one_case),
            "reward, one printed case": lambda: REWARD(one_case),
            "reward, asserts, `sandbox: none`": lambda: plain(asserts),
            "reward, asserts (two sandboxes)": lambda: REWARD(asserts),
        },
        ROUNDS,
    )


def main() -> None:
    """Measure both, check that nothing was lost or left, and write the page."""
    where = machine()
    calls = everything()
    assert not children(), "other sandboxes are running"
    with tempfile.TemporaryDirectory() as folder:
        taken = overhead(Path(folder) / "program.py")
    began = time.perf_counter()
    scored = score_all([one for _, one in calls])
    seconds = time.perf_counter() - began
    time.sleep(1)
    left = children()
    assert len(scored) == CALLS, f"{CALLS - len(scored)} were lost"
    assert not left, f"left behind: {left}"
    wrong = Counter(kind for (kind, _), value in zip(calls, scored, strict=True) if value != kind.startswith("right"))
    assert not wrong, f"wrong verdicts: {wrong}"
    counts = Counter(kind for kind, _ in calls)
    kinds = [[kind, str(counts[kind]), "1" if kind.startswith("right") else "0"] for kind, *_ in MIX]
    ways = [[name, f"{statistics.median(one) * 1e3:.1f} ms"] for name, one in taken.items()]
    text = (
        f"{CALLS:,} rewards through {WORKERS} worker processes, each with 1 s of processor time and 4 s on the clock, "
        f"took {seconds:.0f} s: **{CALLS / seconds:.1f} a second**. Every one came back with the reward it should "
        "have, and no process was left. Slow and hostile ones are a tenth of the calls and most of the time.\n\n"
        + table(("kind", "calls", "reward"), kinds)
        + f"\n\nOne at a time, a program that adds two numbers, medians of {ROUNDS} interleaved rounds:\n\n"
        + table(("", "per call"), ways)
    )
    data = {"seconds": seconds, "overhead": {name: sorted(round(s, 5) for s in one) for name, one in taken.items()}}
    publish("code_rewards", "Code rewards in the sandbox", text, data, where)


if __name__ == "__main__":
    main()
