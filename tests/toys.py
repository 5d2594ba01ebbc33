"""A toy task that tiny models learn in seconds, as files: a model folder, prompts, and the reward."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import toy_reward
import yaml
from models import tiny_model, tiny_tokenizer
from rich.console import Console
from tokenizers import pre_tokenizers

from groupwise.config import Config

REWARD = f"{toy_reward.__file__}:starts_low"
TIMINGS = ("seconds", "tokens_per_second", "memory", "idle", "queue")


def toy_folder(path: Path, architecture: str = "qwen3", **changes: Any) -> Path:
    """A model folder whose policy is undecided at first, and whose tokenizer has a token for each word."""
    if "gemma" in architecture:
        changes = {"final_logit_softcapping": 30.0, **changes}
    tiny_model(architecture, **{"initializer_range": 0.05, **changes}).save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save_pretrained(path)
    return path


def toy_rows(path: Path, rows: Sequence[Any] | None = None) -> Path:
    """A JSONL file, by default of 32 prompts of one word."""
    rows = [{"prompt": f"w{index}", "answer": "w5"} for index in range(2, 34)] if rows is None else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def toy_config(folder: Path, **changes: Any) -> Config:
    """A run of a few small steps with what `toy_folder` and `toy_rows` left at folder/model and folder/rows.jsonl."""
    return Config.parse(
        {
            "model": str(folder / "model"),
            "data": {"path": str(folder / "rows.jsonl")},
            "rewards": [REWARD],
            "steps": 6,
            "prompts_per_step": 4,
            "group_size": 4,
            "sampling": {"max_tokens": 4},
            "optimizer": {"learning_rate": 1e-2},
            **changes,
        }
    )


def as_file(config: Config, file: Path, **learner: Any) -> str:
    """A run file for two ranks."""
    tree = json.loads(config.model_dump_json())
    tree["engine"]["learner"] = {"type": "fsdp", "ranks": 2, **learner}
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`groupwise train`, as a user starts it."""
    start = [sys.executable, "-m", "groupwise", "train", *arguments]
    return subprocess.run(start, capture_output=True, text=True, check=False, timeout=300)


def terminal() -> tuple[Console, StringIO]:
    """A terminal to look at afterwards."""
    screen = StringIO()
    return Console(file=screen, width=200), screen


def metrics(run: Path, *, timings: bool = True) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: r[name] for name in r if timings or not name.startswith(TIMINGS)} for r in records]


def sampled(run: Path, step: int) -> list[dict[str, Any]]:
    """The rollouts of a step (from 1)."""
    return pq.read_table(run / "rollouts" / f"step-{step:05d}.parquet").to_pylist()


def final_bytes(run: Path) -> bytes:
    """The weights of the trained model."""
    return (run / "model" / "model.safetensors").read_bytes()
