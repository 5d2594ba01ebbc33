"""The quickstart with a reward of which 10 % of the calls raise, 5 % hang and 2 % kill their worker.

Its second half is that reward: `benchmarks/faulty_rewards.py:math_answer_with_faults`.  The text decides what happens,
so the same completion always fails in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import math_verify  # noqa: F401  (imported once, where workers are forked, rather than by each of them)

from groupwise.records import Rollout
from groupwise.rewards import MathAnswer

FAULTS = {"raised": 0.10, "timeout": 0.05, "crashed": 0.02}
TIMEOUT_SECONDS = 0.5
NAME = "math_answer_with_faults"
GRADE = MathAnswer()


def math_answer_with_faults(rollout: Rollout) -> float:
    """`math_answer`, if the hash of the question and the completion is kind."""
    said = f"{rollout.example['prompt']}{rollout.text}".encode()
    dice = int.from_bytes(hashlib.sha256(said).digest()[:8], "big") / 2**64
    if dice < 0.10:
        raise ConnectionError("the judge is not there")
    if dice < 0.15:
        while True:
            pass
    if dice < 0.17:
        os.kill(os.getpid(), signal.SIGKILL)
    return GRADE(rollout)


def rates(records: list[dict[str, Any]]) -> Mapping[str, float]:
    """The mean share of each cause over the steps, as the run's metrics state it."""
    return {cause: statistics.mean(r.get(f"invalid/{NAME}/{cause}", 0.0) for r in records) for cause in FAULTS}


def accuracy(model: Path, home: Path) -> float:
    """Greedy accuracy of a trained model on the held-out problems, by `math_answer` without faults."""
    held_out = home.resolve() / "data" / "seed-0" / "held_out.jsonl"
    command = [sys.executable, "-m", "groupwise.cli", "eval", str(model), "--data", str(held_out)]
    settings = ["--reward", "math_answer", "--json", "--quiet", "sampling.max_tokens=64", "engine.device=cpu"]
    printed = subprocess.run([*command, *settings], check=True, capture_output=True, text=True).stdout
    return float(json.loads(printed.splitlines()[-1])["figures"]["greedy"]["mean"])


def main() -> None:
    """Measure, with the base model of seed 0 cached in the folder given (default: `runs/bench`)."""
    from benchmarks.common import machine, publish, quickstart, table

    home = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/bench")
    where = machine()
    faulty = f'{{use: "{Path(__file__).resolve()}:{NAME}", timeout_seconds: {TIMEOUT_SECONDS}, trial: false}}'
    changes = {
        "as it is": (),
        "with faults": (f"rewards=[{faulty}, {{type: format, weight: 0.2}}]", "max_invalid_fraction=0.5"),
    }
    measured = {name: quickstart(home, "--seed", "0", *extra) for name, extra in changes.items()}
    after = {name: accuracy(one.run, home / "runs") for name, one in measured.items()}
    stated = {name: rates(one.steps) for name, one in measured.items()}
    rows = [
        [name, *(f"{stated[name][cause]:.1%}" for cause in FAULTS), f"{measured['as it is'].result['before']:.1%}",
         f"{after[name]:.1%}", f"{one.step_seconds:.2f} s", f"{one.peak_mb:.0f} MB"]
        for name, one in measured.items()
    ]  # fmt: skip
    text = (
        "One base model (seed 0), 45 steps of 16 prompts x 8 completions. A hash of the question and the completion "
        "decides that 10 % of the calls raise, 5 % loop for ever and 2 % kill their worker; the rates are those that "
        f"the run's metrics state, the time limit of a call is {TIMEOUT_SECONDS:g} s. Completions without a verdict "
        "are left out of training. Greedy accuracy on 256 held-out problems, before and after, by the reward as it "
        "is.\n\n"
        + table(("reward", "raised", "timed out", "crashed", "before", "after", "step (median)", "peak memory"), rows)
    )
    data = {
        name: {"result": one.result, "after": after[name], "peak_mb": one.peak_mb, "rates": stated[name],
               "seconds": [step["seconds"] for step in one.steps], "sample": [s["seconds/sample"] for s in one.steps]}
        for name, one in measured.items()
    }  # fmt: skip
    publish("faulty_rewards", "A reward that fails one time in six", text, data, where)


if __name__ == "__main__":
    main()
