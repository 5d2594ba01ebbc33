"""A step of ours beside that of an older commit of ours, interleaved: `make bench-self OLD=COMMIT`.

The older sources are checked out into a temporary folder; benchmarks, weights, prompts and versions are today's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, SMOKE, machine, publish, table
from benchmarks.workloads import MODELS, Run, Shape, measure

ROUNDS, STEPS = (1, 1) if SMOKE else (3, 4)
CASES = {
    ("tiny", "long prompt"): Shape(1024, 64, 8, 1),
    ("tiny", "long answer"): Shape(128, 512, 8, 1),
    ("tiny", "ragged"): Shape(64, 256, 8, 4, ragged=True),
    ("mid", "long prompt"): Shape(1024, 64, 8, 1),
    ("mid", "long answer"): Shape(128, 256, 8, 1),
}


def main() -> None:
    """Compare with the commit named first on the command line."""
    if len(sys.argv) < 2:
        raise SystemExit("name the older commit: make bench-self OLD=COMMIT")
    older = git("rev-parse", "--short", sys.argv[1])
    where = machine() | {"commit": git("rev-parse", "--short", "HEAD"), "older": older}
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "older"
        git("worktree", "add", "--detach", str(tree), older)
        try:
            for (model, name), shape in CASES.items():
                sources = {"older": tree / "src", "now": ROOT / "src"}
                runs = {which: Run() for which in sources}
                for _ in range(ROUNDS):
                    for which, source in sources.items():
                        runs[which] += measure("ours", MODELS[model], shape, STEPS, source)
                rows.append([model, name, str(shape), *compared(runs["older"], runs["now"])])
                print(rows[-1], flush=True)
                data.append({"model": model, "case": name} | {which: asdict(run) for which, run in runs.items()})
        finally:
            git("worktree", "remove", "--force", str(tree))
    head = ("model", "case", "P, R, G, prompts", older, "now", "ratio", f"peak above the model, {older}", "now")
    text = f"Medians of {STEPS} steps in each of {ROUNDS} interleaved processes, float32.\n\n" + table(head, rows)
    publish("against_older", "A training step beside an older one of ours", text, data, where)


def compared(older: Run, now: Run) -> list[str]:
    """The figures of a line."""
    before, after = statistics.median(older.wall), statistics.median(now.wall)
    peaks = [f"{max(run.peak_mb):.0f} MB" for run in (older, now)]
    return [f"{before:.2f} s", f"{after:.2f} s", f"**{before / after:.2f}x**", *peaks]


def git(*arguments: str) -> str:
    """What a git command on this repository says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
