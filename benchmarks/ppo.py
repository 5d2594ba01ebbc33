"""What PPO's critic costs beside GRPO: step time and peak memory on the same model and prompts, interleaved."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import machine, publish, table
from benchmarks.workloads import MODELS, Shape, make

ROUNDS, STEPS = 3, 4
SHAPES = {"tiny": Shape(16, 64, 8, 16), "mid": Shape(128, 64, 8, 4)}


def worker(algorithm: str, shape: Shape, folder: Path) -> None:
    """Train for a few steps without a reference model and print what they took."""
    import resource

    from rich.console import Console

    import groupwise as gw

    tree = {
        "model": str(folder),
        "data": {"path": str(folder / "prompts.jsonl")},
        "rewards": [f"{Path(__file__).parent / 'workloads.py'}:some_reward"],
        "algorithm": {"preset": algorithm, "kl": "none"},
        "steps": STEPS + 1,
        "prompts_per_step": shape.prompts,
        "group_size": shape.group,
        "sampling": {"max_tokens": shape.completion},
        "engine": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 0},
        "output": str(folder / "run"),
    }
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = gw.train(gw.Config.parse(tree), console=Console(quiet=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()][1:]
    learning = [record["seconds/credit"] + record["seconds/update"] for record in records]
    print(
        json.dumps(
            {
                "step": statistics.median(record["seconds"] for record in records),
                "learning": statistics.median(learning),
                "peak_mb": peak / 1024,
                "added_mb": (peak - start) / 1024,
            }
        )
    )


def measure(algorithm: str, model: str) -> dict[str, Any]:
    """One run in a process and a folder of its own."""
    shape = SHAPES[model]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make(folder, MODELS[model], shape)
        command = [sys.executable, "-m", "benchmarks.ppo", "worker", algorithm, model, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Interleave GRPO and PPO on both models."""
    where = machine() | {"threads": "1"}
    rows: list[list[str]] = []
    data: dict[str, Any] = {}
    for model, shape in SHAPES.items():
        runs: dict[str, list[dict[str, Any]]] = {"grpo": [], "ppo": []}
        for _ in range(ROUNDS):
            for name, measured in runs.items():
                measured.append(measure(name, model))
        medians = {
            name: {key: statistics.median(one[key] for one in measured) for key in measured[0]}
            for name, measured in runs.items()
        }
        lengths = f"{shape.prompt}, {shape.completion}, {shape.group}, {shape.prompts}"
        for name, m in medians.items():
            figures = [f"{m['step']:.2f} s", f"{m['learning']:.2f} s", f"{m['peak_mb']:.0f}", f"{m['added_mb']:.0f}"]
            rows.append([model, lengths, f"`{name}`", *figures])
        ratios = [f"**{medians['ppo'][key] / medians['grpo'][key]:.2f}**" for key in medians["ppo"]]
        rows.append([model, "", "PPO / GRPO", *ratios])
        data[model] = runs
    head = ("model", "P, R, G, prompts", "", "step", "learning part of it", "peak MB", "of it above the imports")
    text = (
        f"Random weights (tiny: 0.8 M parameters, mid: 26 M), medians of {STEPS} steps in each of {ROUNDS} interleaved "
        "processes, no reference model on either side. The critic is a second decoder of the same size with its own "
        "AdamW.\n\n" + table(head, rows)
    )
    publish("ppo", "What PPO's critic costs", text, data, where)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], SHAPES[sys.argv[3]], Path(sys.argv[4]))
    else:
        main()
