"""The quickstart task with ten algorithms from the same base model: learning curves in one picture, accuracy, time."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.plot import Series, chart

from benchmarks.common import DOCS, Measured, machine, publish, quickstart, table

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": (),
    "dapo": (),
    "gspo": (),
    "gmpo": (),
    "rloo": (),
    "reinforce_pp_baseline": (),
    "cispo": (),
    "sapo": (),
    "ppo": ("critic_optimizer.learning_rate=3e-4",),
}
"""By preset, the settings that differ from the quickstart's."""


def smooth(values: list[float], width: int = 5) -> list[float]:
    """The mean of each value and those up to `width - 1` before it."""
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def main() -> None:
    """Run every algorithm on the base model of seed 0, cached in the folder given (default: `runs/bench`)."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/bench")
    where = machine()
    measured: dict[str, Measured] = {}
    for name, extra in ALGORITHMS.items():
        measured[name] = quickstart(home, "--seed", "0", "--algorithm", name, *extra)
        print(name, measured[name].result, flush=True)
    curves = [
        Series(name, smooth([step["reward/math_answer"] for step in one.steps])) for name, one in measured.items()
    ]
    (DOCS / "benchmarks").mkdir(parents=True, exist_ok=True)
    picture = chart("Accuracy of sampled answers (mean of 5 steps)", curves, x_label="step")
    (DOCS / "benchmarks" / "algorithms.svg").write_text(picture)
    rows = [
        [f"`{name}`", " ".join(f"`{setting}`" for setting in ALGORITHMS[name]), f"{one.result['before']:.1%}",
         f"{one.result['after']:.1%}", f"{one.step_seconds:.2f} s", f"{one.peak_mb:.0f} MB"]
        for name, one in measured.items()
    ]  # fmt: skip
    text = (
        "One base model (seed 0), 45 steps of 16 prompts x 8 completions, one update a step, AdamW at 8e-5 for all; "
        "greedy accuracy on 256 held-out problems.\n\n![learning curves](benchmarks/algorithms.svg)\n\n"
        + table(("algorithm", "changed", "before", "after", "step (median)", "peak memory"), rows)
    )
    data = {
        name: {"result": one.result, "peak_mb": one.peak_mb, "accuracy": [s["reward/math_answer"] for s in one.steps],
               "length": [s["completion_length"] for s in one.steps], "seconds": [s["seconds"] for s in one.steps]}
        for name, one in measured.items()
    }  # fmt: skip
    publish("algorithms", "Ten algorithms on the quickstart task", text, data, where)


if __name__ == "__main__":
    main()
