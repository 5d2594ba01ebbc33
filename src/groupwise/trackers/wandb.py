"""Weights & Biases, offline: files under RUN/wandb that `wandb sync` sends, if anyone asks it to.

`WANDB_MODE=online` in the environment sends them while the run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read once, at the import

import wandb


class WeightsAndBiases:
    """A run of W&B, without what it collects by itself: console, code, machine, packages."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project="groupwise",
            name=folder.name,
            dir=folder,
            config=dict(config),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            settings=settings,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(folder: Path, config: Mapping[str, Any]) -> WeightsAndBiases:
    """See `groupwise.trackers.open_trackers`."""
    return WeightsAndBiases(folder, config)
