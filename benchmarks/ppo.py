"""What PPO's critic costs beside GRPO: step time and peak memory on the same task, interleaved."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.common import Measured, machine, publish, quickstart, table

ROUNDS = 3
BARE = ("steps=10", "algorithm.kl=none")
"""Without a reference model on either side, the critic is the only difference."""


def main() -> None:
    """Interleave GRPO and PPO on the cached base model of seed 0."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/bench")
    where = machine()
    quickstart(home, "--seed", "0", "steps=1")  # the base model, if it is not there yet
    measured: dict[str, list[Measured]] = {"grpo": [], "ppo": []}
    for _ in range(ROUNDS):
        for name, runs in measured.items():
            runs.append(quickstart(home, "--seed", "0", "--algorithm", name, *BARE))
    seconds = {name: statistics.median(run.step_seconds for run in runs) for name, runs in measured.items()}
    learning = {
        name: statistics.median(
            statistics.median(step["seconds/update"] + step["seconds/credit"] for step in run.steps) for run in runs
        )
        for name, runs in measured.items()
    }
    memory = {name: statistics.median(run.peak_mb for run in runs) for name, runs in measured.items()}
    rows = [
        [f"`{name}`", f"{seconds[name]:.2f} s", f"{learning[name]:.2f} s", f"{memory[name]:.0f} MB"]
        for name in measured
    ]
    ratios = [f"{figures['ppo'] / figures['grpo']:.2f}" for figures in (seconds, learning, memory)]
    text = (
        f"The quickstart's 0.9 M parameters, 10 steps, medians of {ROUNDS} interleaved runs, no reference model. The "
        "critic is a second decoder of the same size with its own AdamW. The process itself (Python, torch) is most of "
        "the memory of a model this small.\n\n"
        + table(("", "step", "learning part of it", "peak memory"), [*rows, ["PPO / GRPO", *ratios]])
    )
    publish(
        "ppo", "What PPO's critic costs", text, {"seconds": seconds, "learning": learning, "peak_mb": memory}, where
    )


if __name__ == "__main__":
    main()
