"""Runs that are killed and resumed, for tests/test_resume.py:  python killed.py PLAN.json

A process of its own, which imports everything once, computes nothing, and forks a child for each attempt: torch's
threads do not survive a fork.  The plan is a list of runs, {config, folder, kills}; each kill is `after` seconds, or at
the `call`-th call of `at`, a key of MOMENTS, in the child itself.  A run is attempted once for each kill, from where
the last one died, and then once more until it ends.  Prints a list of what became of each attempt.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from groupwise.checkpoint import Checkpoints
from groupwise.config import Config
from groupwise.drawing import Drawn
from groupwise.engines.local_learner import LocalLearner
from groupwise.engines.local_sampler import LocalSampler
from groupwise.engines.steps import Steps
from groupwise.log import RunLog

# By name, for the package has functions of the same names.
BUILD, FILES, JOURNAL, ROLLOUT, TRAIN = (
    importlib.import_module(f"groupwise.{name}") for name in ("build", "files", "journal", "rollout", "train")
)

MOMENTS: Mapping[str, tuple[Any, str, str]] = {
    "sampling": (Drawn, "draw", "before"),
    "sampled": (LocalSampler, "sample", "after"),
    "rewarding": (ROLLOUT, "score", "before"),
    "rewarded": (ROLLOUT, "score", "after"),
    "scoring": (LocalLearner, "logprobs", "after"),
    "updating": (Steps, "take", "before"),
    "updated": (Steps, "take", "after"),
    "refreshing": (LocalLearner, "refresh_reference", "after"),
    "copying": (LocalLearner, "snapshot", "after"),
    "saving": (FILES, "_fingerprint", "before"),
    "saved": (Checkpoints, "_write", "after"),
    "logging": (RunLog, "_write", "after"),
    "metrics": (JOURNAL, "append", "half"),
    "logged": (RunLog, "step", "after"),
    "evaluating": (BUILD, "evaluate", "after"),
    "exporting": (TRAIN, "save_model", "after"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def half_a_line(path: Path, line: str) -> None:
    """What a write that was cut short leaves."""
    with path.open("a") as file:
        file.write(line[: len(line) // 2])


def die_at(moment: str, call: int) -> None:
    owner, name, when = MOMENTS[moment]
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    @functools.wraps(original)
    def dying(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == call
        if last and when == "half":
            half_a_line(*arguments)
        if last and when != "after":
            die()
        result = original(*arguments, **named)
        if last:
            die()
        return result

    setattr(owner, name, dying)


def attempt(tree: Mapping[str, Any], folder: Path, kill: Mapping[str, Any] | None) -> str:
    """A child trains, from the start or from where the last one died; how it ended."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    try:
        torch.set_num_threads(1)
        if kill is not None and "after" in kill:
            threading.Timer(kill["after"], die).start()
        elif kill is not None:
            die_at(kill["at"], kill["call"])
        resume = folder if (folder / "config.yaml").exists() else None
        config = Config.parse(tree) if resume is None else Config.load(folder / "config.yaml")
        TRAIN.train(config, resume=resume, console=Console(file=sys.stderr))
        os._exit(0)
    finally:  # a child never runs what is the parent's
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


def main(plan: str) -> None:
    ends = []
    for run in json.loads(Path(plan).read_text()):
        ends.append([attempt(run["config"], Path(run["folder"]), kill) for kill in [*run["kills"], None]])
    print(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1])
