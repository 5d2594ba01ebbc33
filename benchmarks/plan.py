"""What `groupwise plan --calibrate` predicts beside what is measured: peak memory and the time of a step.

Every case is a model with random weights, made on the spot, whose completions all have the same length.  It is
measured in a process of its own, above what that process held once the run file, the data and the tokenizer were read;
another process predicts, and neither knows of the other.  `--memory-only` takes fewer steps and does not calibrate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT, SMOKE, grown_mb, machine, publish, resident_mb, table
from benchmarks.workloads import Clock, Model, Shape, make

MEMORY_ONLY = "--memory-only" in sys.argv
STEPS = 2 if SMOKE or MEMORY_ONLY else 5
WITHIN_MEMORY, WITHIN_TIME = 0.15, 0.30
"""What a prediction is held to."""


@dataclass(frozen=True)
class Case:
    """A model, lengths, and what of the run is not usual."""

    model: str
    shape: Shape
    algorithm: str = "grpo"
    lora: int = 0
    dtype: str = "float32"
    checkpointing: bool = False

    def __str__(self) -> str:
        unusual = [f"LoRA {self.lora}" * bool(self.lora), "checkpointing" * self.checkpointing]
        return ", ".join([self.algorithm, self.dtype, *filter(None, unusual)])

    @property
    def settings(self) -> dict[str, Any]:
        """Of the run, its folder aside."""
        return {
            "algorithm": self.algorithm,
            "lora": {"rank": self.lora} if self.lora else None,
            "prompts_per_step": self.shape.prompts,
            "group_size": self.shape.group,
            "steps": STEPS + 1,
            "sampling": {"max_tokens": self.shape.completion},
            "engine": {"device": "cpu", "dtype": self.dtype, "threads": 1,
                       "gradient_checkpointing": self.checkpointing},
        }  # fmt: skip


MODELS = {
    "1M": Model(4, 128, 80, threads=1),
    "5M": Model(6, 192, 8000, threads=1),
    "26M": Model(8, 384, 32000, threads=1),
    "58M": Model(12, 576, 32000, threads=1),
    "120M": Model(16, 768, 32000, threads=1),
}
CASES = [
    Case("1M", Shape(16, 16, 16, 8)),
    Case("1M", Shape(512, 32, 8, 2)),
    Case("1M", Shape(64, 256, 8, 4), "ppo"),
    Case("5M", Shape(128, 64, 8, 4)),
    Case("5M", Shape(32, 128, 16, 2), "dapo", checkpointing=True),
    Case("5M", Shape(64, 64, 4, 8), lora=16),
    Case("26M", Shape(1024, 32, 8, 1)),
    Case("26M", Shape(128, 64, 8, 1), dtype="mixed"),
    Case("26M", Shape(64, 64, 8, 2), "ppo"),
    Case("26M", Shape(64, 64, 8, 2), lora=8, dtype="mixed"),
    Case("58M", Shape(128, 32, 8, 2), dtype="mixed"),
    Case("58M", Shape(64, 64, 4, 2), checkpointing=True),
    Case("120M", Shape(64, 32, 4, 2), dtype="mixed"),
    Case("120M", Shape(64, 32, 4, 2), lora=16),
    Case("120M", Shape(64, 32, 4, 1), "ppo", dtype="mixed"),
]


def alternating(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """0 and 1 in turn, so that every group teaches."""
    return [float(index % 2) for index in range(len(completions))]


def config_of(case: Case, folder: Path) -> Any:
    """The run."""
    import groupwise as gw

    files = {"model": str(folder), "data": {"path": str(folder / "prompts.jsonl")}, "output": str(folder / "run")}
    return gw.Config.parse({**files, "rewards": [{"use": f"{__file__}:alternating"}], **case.settings})


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """The run, for real."""
    from rich.console import Console

    import groupwise as gw
    from groupwise.build import prepare
    from groupwise.engines import local

    local.stop_token_ids = lambda *_: (-1,)  # nothing ends a completion but its length
    config, clock = config_of(case, folder), Clock()
    prepare(config)
    clock.watch_ours()
    before = resident_mb()
    run = gw.train(config, console=Console(quiet=True))
    peak, took = grown_mb(before), clock.run()
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(record["completion_length"] == case.shape.completion for record in records), "completions ended early"
    phases = {
        name: median(r.get(f"seconds/{name}", 0.0) for r in records[1:]) for name in ("sample", "credit", "update")
    }
    return {"peak_mb": peak, "wall": median(took.wall), "cpu": median(took.cpu), "phases": phases, "process_mb": before}


def predicted(case: Case, folder: Path) -> dict[str, Any]:
    """The plan."""
    from groupwise.plan.outlook import look_ahead, subject_of

    began = time.perf_counter()
    found = look_ahead(subject_of(config_of(case, folder)), measure=not MEMORY_ONLY)
    memory = found.step.memory
    return {
        "parameters": memory.parameters,
        "peak_mb": found.peak / 2**20,
        "peaks_mb": {name: size / 2**20 for name, size in found.peaks.items()},
        "held_mb": {name: size / 2**20 for name, size in found.step.held.items()},
        "seconds": found.step_seconds,
        "phases": found.seconds,
        "planning": time.perf_counter() - began,
    }


def in_a_process(task: str, number: int, folder: Path) -> dict[str, Any]:
    """What a process of its own prints."""
    command = [sys.executable, "-m", "benchmarks.plan", task, str(number), str(folder)]
    command += ["--memory-only"] * MEMORY_ONLY + ["--smoke"] * SMOKE
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAGGED": "0",
                                "XDG_CACHE_HOME": str(folder.parent / "cache"),
                                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{CASES[number]}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def both(number: int) -> dict[str, Any]:
    """A case, predicted and measured."""
    case = CASES[number]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make(folder, MODELS[case.model], case.shape)
        plan, real = (in_a_process(task, number, folder) for task in ("predicted", "measured"))
    clock = "cpu" if "--cpu-time" in sys.argv else "wall"
    found = {"model": case.model, "shape": asdict(case.shape), "what": str(case), "predicted": plan, "measured": real}
    found["memory_error"] = plan["peak_mb"] / real["peak_mb"] - 1
    found["time_error"] = None if MEMORY_ONLY else plan["seconds"] / real[clock] - 1
    print(number, case.model, case.shape, str(case), f"memory {plan['peak_mb']:.0f} {real['peak_mb']:.0f} MB",
          f"{found['memory_error']:+.1%}", {k: round(v) for k, v in plan["peaks_mb"].items()},
          "" if MEMORY_ONLY else f"time {plan['seconds']:.3f} {real['wall']:.3f} wall {real['cpu']:.3f} cpu "
          f"{found['time_error']:+.1%} {plan['phases']} {real['phases']} planned in {plan['planning']:.0f} s",
          flush=True)  # fmt: skip
    return found


def main() -> None:
    """All cases, and the section of the page."""
    only = [int(text) for text in sys.argv[1:] if text.isdigit()]
    where = machine()
    results = [both(number) for number in only or range(2 if SMOKE else len(CASES))]
    if only or MEMORY_ONLY:
        return
    rows = [
        [
            f"{r['predicted']['parameters'] / 1e6:.1f} M",
            str(Shape(**r["shape"])),
            r["what"],
            f"{r['predicted']['peak_mb']:.0f} MB", f"{r['measured']['peak_mb']:.0f} MB", f"{r['memory_error']:+.0%}",
            f"{r['predicted']['seconds']:.2f} s", f"{r['measured']['wall']:.2f} s", f"{r['time_error']:+.0%}",
        ]
        for r in results
    ]  # fmt: skip
    head = ["parameters", "P, R, G, N", "run", "memory: plan", "measured", "error", "step: plan", "measured", "error"]
    good = [sum(abs(r[name]) <= within for r in results)
            for name, within in (("memory_error", WITHIN_MEMORY), ("time_error", WITHIN_TIME))]  # fmt: skip
    text = (
        "Peak memory above the process with its libraries, checkpoints included, and the median step, on one thread: "
        "what `groupwise plan --calibrate` says before the run, and the run. P prompt tokens, R completion tokens, G "
        f"completions a prompt, N prompts a step. Memory is within {WITHIN_MEMORY:.0%} in {good[0]} of {len(results)} "
        f"cases, time within {WITHIN_TIME:.0%} in {good[1]}.\n\n{table(head, rows)}"
    )
    publish("plan", "What a plan says, and what comes of it", text, results, where)


if __name__ == "__main__":
    tasks = {"predicted": predicted, "measured": measured}
    if len(sys.argv) > 3 and sys.argv[1] in tasks:
        print(json.dumps(tasks[sys.argv[1]](CASES[int(sys.argv[2])], Path(sys.argv[3]))))
    else:
        main()
