"""The quickstart from nothing on several seeds: accuracy before and after, and the time, base model included."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Measured, machine, publish, quickstart, table

SEEDS = (0, 1, 2)


def row(seed: int, measured: Measured) -> list[str]:
    """A line of the table."""
    r = measured.result
    return [str(seed), f"{r['before']:.1%}", f"{r['after']:.1%}", f"{r['seconds']:.0f} s", f"{measured.peak_mb:.0f} MB"]


def main() -> None:
    """Run each seed in an empty folder, so that nothing is cached."""
    where = machine()
    measured: dict[int, Measured] = {}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as home:
            measured[seed] = quickstart(Path(home), "--seed", str(seed))
    text = (
        "Held-out greedy accuracy on 256 problems that neither the warm-up nor the training saw; base model included, "
        "imports (about 6 s) not.\n\n"
        + table(
            ("seed", "before", "after", "time", "peak memory"),
            [row(seed, one) for seed, one in measured.items()],
        )
    )
    data = [one.result | {"seed": seed, "peak_mb": one.peak_mb} for seed, one in measured.items()]
    publish("seeds", "The quickstart on three seeds", text, data, where)


if __name__ == "__main__":
    main()
