"""Length bias: how long wrong answers are under GRPO, which divides by a completion's length, and under Dr. GRPO."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pyarrow.parquet as pq
from tools.plot import Series, chart

from benchmarks.common import DOCS, Measured, machine, publish, quickstart, table

SEEDS = (0, 1, 2)
ALGORITHMS = {"grpo": ("algorithm.kl=none",), "dr_grpo": ()}
"""Both without a KL, so that only the two normalisations differ."""


def wrong_lengths(measured: Measured) -> list[float]:
    """Mean tokens of the wrong completions of each step (the one before where a step has none)."""
    means: list[float] = []
    for file in sorted((measured.run / "rollouts").glob("step-*.parquet")):
        rows = pq.read_table(file, columns=["loss_mask", "reward/math_answer"]).to_pylist()
        lengths = [sum(row["loss_mask"]) for row in rows if not row["reward/math_answer"]]
        means.append(statistics.fmean(lengths) if lengths else means[-1])
    return means


def main() -> None:
    """Both algorithms on every seed, interleaved, on cached base models."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/bench")
    where = machine()
    curves: dict[str, list[list[float]]] = {name: [] for name in ALGORITHMS}
    after: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    for seed in SEEDS:
        for name, extra in ALGORITHMS.items():
            measured = quickstart(home, "--seed", str(seed), "--algorithm", name, *extra)
            curves[name].append(wrong_lengths(measured))
            after[name].append(measured.result["after"])
    means = {name: [statistics.fmean(step) for step in zip(*runs, strict=True)] for name, runs in curves.items()}
    picture = chart("Tokens of wrong answers", [Series(name, values) for name, values in means.items()], x_label="step")
    (DOCS / "benchmarks").mkdir(parents=True, exist_ok=True)
    (DOCS / "benchmarks" / "length_bias.svg").write_text(picture)

    def third(values: list[float], which: int) -> str:
        size = len(values) // 3
        return f"{statistics.fmean(values[which * size : (which + 1) * size]):.1f}"

    rows = [
        [f"`{name}`", *(third(means[name], i) for i in range(3)), " / ".join(f"{score:.1%}" for score in after[name])]
        for name in ALGORITHMS
    ]
    head = ("algorithm", "first third", "middle", "last third", "accuracy after, by seed")
    text = (
        f"Mean tokens of wrong completions, over {len(SEEDS)} seeds. A wrong answer of this task is mostly a hasty "
        "one, which is short; a careful one that went wrong is long.\n\n![lengths](benchmarks/length_bias.svg)\n\n"
        + table(head, rows)
    )
    publish(
        "length_bias", "Length of wrong answers: GRPO against Dr. GRPO", text, {"curves": curves, "after": after}, where
    )


if __name__ == "__main__":
    main()
