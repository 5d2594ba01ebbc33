"""`groupwise quickstart`: make a small model, watch it learn to think, and see what it learned.

The base model and its task are in `arithmetic.py`; the training is the same `train` that every run uses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from groupwise.arithmetic import build_base_model, problems
from groupwise.build import fresh_folder
from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.evaluate import Scores
from groupwise.train import Run, train
from groupwise.trees import apply

TRAIN_PROMPTS = 2000
HELD_OUT_PROMPTS = 256
THREADS = 1
"""A model this small gains little from a second thread, and loses a lot when something else runs on that core."""


def settings(seed: int, model: Path, data: Path, output: Path) -> dict[str, Any]:
    """The run file of the quickstart."""
    return {
        "model": str(model),
        "data": {"path": str(data / "train.jsonl")},
        "rewards": ["math_answer", {"type": "format", "weight": 0.2}],
        "steps": 45,
        "prompts_per_step": 16,
        "group_size": 8,
        "seed": seed,
        "sampling": {"max_tokens": 64},
        "optimizer": {"learning_rate": 8e-5},
        "engine": {"device": "cpu", "threads": THREADS},
        "evaluation": {"data": {"path": str(data / "held_out.jsonl")}},
        "checkpoint": {"every": 20},
        "output": str(output),
    }


def quickstart(
    *,
    seed: int = 0,
    algorithm: str | None = None,
    overrides: Sequence[str] = (),
    home: Path = Path("runs"),
    console: Console | None = None,
) -> dict[str, Any]:
    """Build the base model (or find it cached), train it, and show what changed.

    Args:
        seed: changes everything random: weights, corpus, prompts, sampling.
        algorithm: the name of a preset instead of the default algorithm.
        overrides: `dotted.key=value` settings.
        home: where runs and base models are kept.
        console: where progress and results are shown.

    Returns:
        `before` and `after`, held-out greedy accuracy in [0, 1]; `seconds`; `run`, the run folder.
    """
    began = time.perf_counter()
    console = console or Console(stderr=True)
    torch.set_num_threads(THREADS)
    model = base_model(home / "base-models" / f"seed-{seed}", seed, console)
    run = train(configure(seed, algorithm, overrides, model, home), console=console)
    if run.stopped is not None:
        return {"run": str(run.folder), "stopped": run.stopped}
    assert run.before is not None and run.after is not None, "the quickstart always evaluates"
    seconds = time.perf_counter() - began
    for group in sample_groups(run.folder):
        console.print(group)
    console.print(comparison(run.before, run.after))
    ask = f'groupwise sample {run.folder} "What is 478 + 356?"'
    text = f"{seconds:.0f} seconds. The run is in {run.folder}; ask the model yourself:\n{ask}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return result(run, seconds)


def result(run: Run, seconds: float) -> dict[str, Any]:
    """What `--json` prints."""
    assert run.before is not None and run.after is not None
    return {
        "before": round(run.before.headline, 4),
        "after": round(run.after.headline, 4),
        "seconds": round(seconds, 1),
        "run": str(run.folder),
    }


def configure(seed: int, algorithm: str | None, overrides: Sequence[str], model: Path, home: Path) -> Config:
    """The configuration of a quickstart run, its prompts written beside the other data of this seed.

    Raises:
        ConfigError: an override is wrong.
    """
    data = home / "data" / f"seed-{seed}"
    data.mkdir(parents=True, exist_ok=True)
    prompts = {"train": problems(seed, "train", TRAIN_PROMPTS), "held_out": problems(seed, "test", HELD_OUT_PROMPTS)}
    for name, rows in prompts.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = settings(seed, model, data, fresh_folder(home, f"quickstart-seed{seed}"))
    if algorithm is not None:
        tree["algorithm"] = algorithm
    for override in overrides:
        apply(tree, override)
    config = Config.parse(tree)
    if config.evaluation.data is None:
        raise ConfigError("evaluation.data: null; the quickstart compares before and after, so leave its held-out data")
    return config


def base_model(folder: Path, seed: int, console: Console) -> Path:
    """The base model of a seed, built with a progress bar the first time."""
    if (folder / "quickstart.json").is_file():
        console.print(f"base model: {folder} (cached)", highlight=False)
        return build_base_model(folder, seed)
    console.print("building a base model: warm-up on worked solutions, most of them hasty", highlight=False)
    columns = (TextColumn("base model"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, loss=0.0)

        def show(step: int, steps: int, loss: float) -> None:
            bar.update(task, completed=step, total=steps, loss=loss)
            if not console.is_terminal and step % 70 == 0:
                console.print(f"base model: {step}/{steps} steps, loss {loss:.3f}", highlight=False)

        began = time.perf_counter()
        build_base_model(folder, seed, show)
    console.print(f"base model: {folder} ({time.perf_counter() - began:.0f} s)", highlight=False)
    return folder


def comparison(before: Scores, after: Scores) -> Table:
    """Before and after, with 95 % intervals."""
    table = Table("held-out greedy", "before", "after", title="What the training changed")
    table.add_row(
        "accuracy", *(f"{s.headline:.1%}  ({s.interval[0]:.1%} to {s.interval[1]:.1%})" for s in (before, after))
    )
    if "format" in after.means:  # an override may have taken that reward away
        table.add_row("well formatted", *(f"{s.means['format']:.1%}" for s in (before, after)))
    table.add_row("tokens per answer", *(f"{s.completion_length:.1f}" for s in (before, after)))
    table.add_row("prompts", *(str(s.prompts) for s in (before, after)))
    return table


def sample_groups(run: Path, shown: int = 4) -> Iterator[Table]:
    """A group with something to learn from the first step, the middle and the end of a run."""
    files = sorted((run / "rollouts").glob("step-*.parquet"))
    for file in dict.fromkeys((files[0], files[len(files) // 2], files[-1])):
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row)
        group = max(groups.values(), key=_distinct_rewards)
        question = group[0]["prompt"].split("<|im_end|>")[0].rpartition("\n")[2]
        title = f"step {group[0]['step']}: {question}"
        table = Table("completion", "reward", "advantage", title=title, title_justify="left")
        best_first = sorted({row["text"]: row for row in group}.values(), key=_reward, reverse=True)
        for row in best_first[:shown]:
            table.add_row(row["text"], f"{row['reward']:.2f}", f"{row['advantage']:+.2f}", end_section=True)
        yield table


def _reward(row: dict[str, Any]) -> float:
    return row["reward"]


def _distinct_rewards(group: Sequence[dict[str, Any]]) -> int:
    return len({row["reward"] for row in group})
