"""Time to 90 % right answers on the quickstart task, ours and TRL's, from the same base model with the same settings.

Both train on the same prompts, each in its own order, with the same rewards, algorithm, learning rate and batch, on one
thread in float32.  What counts is the share of right answers among those sampled for training, which both log, as the
mean of five steps: nothing is evaluated, so nothing has to be left out of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.plot import Series, chart

from benchmarks.algorithms import smooth
from benchmarks.common import ROOT, SMOKE, machine, publish, save_picture, table
from benchmarks.workloads import TRL, Clock, trl_settings

GOAL, WIDTH, STEPS = 0.9, 5, 2 if SMOKE else 70
SYSTEMS = ("ours", "trl tuned")
HOME = ROOT / "runs" / "bench"
"""Where the base model stays cached."""


def prepare() -> dict[str, Any]:
    """Build the base model and its prompts; the run file."""
    from rich.console import Console

    from groupwise.arithmetic import problems
    from groupwise.quickstart import TRAIN_PROMPTS, base_model, settings
    from groupwise.train import fresh_folder

    HOME.mkdir(parents=True, exist_ok=True)
    model = base_model(HOME / "base-models" / "seed-0", 0, Console(stderr=True))
    rows = problems(0, "train", TRAIN_PROMPTS)
    (HOME / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = settings(0, model, HOME, fresh_folder(HOME, "race"))
    del tree["evaluation"], tree["checkpoint"]
    return tree | {"steps": STEPS}


def ours(tree: dict[str, Any]) -> dict[str, list[float]]:
    """The curve of `groupwise.train`."""
    from rich.console import Console

    import groupwise as gw

    clock = Clock()
    clock.watch_ours()
    run = gw.train(gw.Config.parse(tree), console=Console(quiet=True))
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {"seconds": clock.elapsed, "right": [record["reward/math_answer"] for record in records]}


def trl(tree: dict[str, Any]) -> dict[str, list[float]]:
    """The curve of TRL's trainer, which stops at the goal."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from groupwise.algorithms import Algorithm
    from groupwise.rewards import Format, MathAnswer

    clip: Any = Algorithm().surrogate
    clock = Clock()
    right: list[float] = []

    def math_answer(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        judge: Any = MathAnswer()
        return [judge(SimpleNamespace(text=c[0]["content"], example={"answer": a}))
                for c, a in zip(completions, answer, strict=True)]  # fmt: skip

    def form(completions: Sequence[Any], **_: Any) -> list[float]:
        judge: Any = Format()
        return [judge(SimpleNamespace(text=c[0]["content"])) for c in completions]

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "rewards/math_answer/mean" in kwargs["logs"]:
                clock.step()
                right.append(kwargs["logs"]["rewards/math_answer/mean"])
                control.should_training_stop |= reached(right) is not None

    group = tree["group_size"]
    arguments = GRPOConfig(
        output_dir=tree["output"],
        per_device_train_batch_size=group * tree["prompts_per_step"],
        num_generations=group,
        max_completion_length=tree["sampling"]["max_tokens"],
        max_steps=tree["steps"],
        learning_rate=tree["optimizer"]["learning_rate"],
        epsilon=clip.low,
        epsilon_high=clip.high,
        reward_weights=[1.0, 0.2],
        **trl_settings(),
        **TRL["trl tuned"],
    )
    rows = [json.loads(line) for line in Path(tree["data"]["path"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=tree["model"],
        reward_funcs=[math_answer, form],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Watch()],
    )
    clock.loaded()
    trainer.train()
    return {"seconds": clock.elapsed, "right": right}


def reached(right: Sequence[float]) -> int | None:
    """The first step (from 0) at which the mean of the last `WIDTH` is at the goal, or None."""
    means = smooth(list(right), WIDTH)
    return next((step for step in range(WIDTH - 1, len(means)) if means[step] >= GOAL), None)


def measure(system: str, tree: dict[str, Any]) -> dict[str, list[float]]:
    """One system in a process of its own."""
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": source}
    command = [sys.executable, "-m", "benchmarks.race", "worker", system, json.dumps(tree)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{system}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def conclusion(found: dict[str, dict[str, list[float]]]) -> str:
    """The race in a sentence."""
    at = {system: reached(curve["right"]) for system, curve in found.items()}
    mine, theirs = at["ours"], at["trl tuned"]
    if mine is None or theirs is None:
        slow = " and ".join(system for system, step in at.items() if step is None)
        return f"Not at the goal within {STEPS} steps: {slow}."
    share = found["ours"]["seconds"][mine] / found["trl tuned"]["seconds"][theirs]
    told = "met" if share <= 0.5 else f"**missed** by {share - 0.5:.2f}"
    return f"Ours needs {share:.2f} of TRL's time; the target, at most 0.5, is {told}."


def main() -> None:
    """Run both."""
    where = machine() | {"threads": "1"}
    tree = prepare()
    found: dict[str, dict[str, list[float]]] = {}
    rows: list[list[str]] = []
    for system in SYSTEMS:
        found[system] = measure(system, tree | {"output": f"{tree['output']}-{system.replace(' ', '-')}"})
        seconds, step = found[system]["seconds"], reached(found[system]["right"])
        figures = ["-", "-"] if step is None else [f"{seconds[step]:.1f} s", str(step + 1)]
        rows.append([system, *figures, f"{seconds[-1] / len(seconds):.2f} s"])
        print(rows[-1], flush=True)
    curves = [Series(system, smooth(curve["right"], WIDTH), curve["seconds"]) for system, curve in found.items()]
    shown = save_picture("race", chart("Share of right answers (mean of 5 steps)", curves, x_label="seconds"))
    text = (
        "Quickstart task and base model (seed 0), one seed, 16 prompts x 8 completions a step, our default algorithm "
        "and TRL's `dapo` loss with the same clip, scale, learning rate and optimizer. Right answers among those "
        f"sampled for training, the mean of {WIDTH} steps; from the loaded model on. {conclusion(found)}\n\n{shown}\n\n"
        + table(("system", "90 % after", "steps", "a step"), rows)
    )
    publish("race", "Time to 90 % right answers beside TRL", text, found, where)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        print(json.dumps({"ours": ours, "trl tuned": trl}[sys.argv[2]](json.loads(sys.argv[3]))))
    else:
        main()
