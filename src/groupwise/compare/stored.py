"""What a run has stored for a comparison: a step's rollouts as they were, and the weights that it kept.

RUN/rollouts/step-00040.parquet   the rollouts of step 40, sampled by the weights after 39 steps
RUN/checkpoints/step-00039/       the weights after 39 steps; those after 0 are the model that the run began with
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from groupwise.checkpoint import complete
from groupwise.config import Config
from groupwise.engines.local import Local
from groupwise.errors import CheckpointError, ConfigError
from groupwise.records import Rollout

SCALARS = ("group", "text", "reward", "valid", "finish_reason", "policy_version")
TOKENS = ("tokens", "loss_mask", "logprobs")
FLOATS = ("entropies", "old_logprobs", "ref_logprobs", "new_logprobs", "values", "advantages")


@dataclass(frozen=True)
class Weights:
    """A policy of the run that can be loaded."""

    steps_done: int
    """Training steps that it has seen."""
    path: str
    """Its checkpoint, or its model folder or hub id."""
    name: str
    """The same, as the run folder sees it."""
    is_checkpoint: bool = False

    def as_json(self) -> dict[str, Any]:
        """What a reader needs to know of them."""
        return {"steps_done": self.steps_done, "name": self.name}


@dataclass(frozen=True)
class Stored:
    """One step of a run, as it is on disk."""

    step: int
    """From 1."""
    rollouts: list[Rollout]
    """With the advantages that they had in the run."""
    kept: list[Weights]
    """By the steps that they have seen; those of the model that the run began with are among them."""


def read_step(run: Path, config: Config, step: int | None) -> Stored:
    """The step asked for, by default the last.

    Raises:
        CheckpointError: there are no rollouts, or they were written by another version.
        ConfigError: there are none of that step.
    """
    found = {int(file.stem.removeprefix("step-")): file for file in run.glob("rollouts/step-*.parquet")}
    if not found:
        raise CheckpointError(
            f"{run / 'rollouts'}: holds no rollouts to compare on; a run writes them from its first step on"
        )
    chosen = max(found) if step is None else step
    if chosen not in found:
        raise ConfigError(f"--step {chosen}: {run} has no rollouts of it; accepted: {_ranges(sorted(found))}")
    return Stored(chosen, read_rollouts(found[chosen], config), kept_weights(run, config))


def _ranges(steps: Sequence[int]) -> str:
    """`1 to 40, 42`."""
    edges = [i for i, step in enumerate(steps) if not i or step != steps[i - 1] + 1]
    spans = [(steps[begin], steps[end - 1]) for begin, end in zip(edges, [*edges[1:], len(steps)], strict=True)]
    return ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in spans)


def read_rollouts(file: Path, config: Config) -> list[Rollout]:
    """The rollouts in a file that a run of this configuration wrote, with the advantages that they had.

    Raises:
        CheckpointError: a column is missing.
    """
    there = pq.read_schema(file).names
    if missing := [name for name in (*SCALARS, *TOKENS) if name not in there]:
        raise CheckpointError(
            f"{file}: has no column {missing[0]}, so it was written by another version of groupwise; compare with "
            "that version, or run again"
        )
    named = {reward.title: reward.weight for reward in config.rewards}
    optional = [name for name in ("greedy_reward", "step_rewards") if name in there]
    table = pq.read_table(file)
    rows = table.select([*SCALARS, *optional, *(f"reward/{name}" for name in named)]).to_pylist()
    arrays = {name: table.column(name).to_numpy() for name in (*TOKENS, *FLOATS) if name in there}
    return [_rollout(row, {name: array[i] for name, array in arrays.items()}, named) for i, row in enumerate(rows)]


def _rollout(row: dict[str, Any], arrays: dict[str, Any], weights: dict[str, float]) -> Rollout:
    said = {name: row.pop(f"reward/{name}") for name in weights}
    steps = row.pop("step_rewards", None) or ()
    kinds = {"tokens": np.int32, "loss_mask": np.bool_, "advantages": np.float64}
    known: dict[str, Any] = {
        name: np.array(array, dtype=kinds.get(name, np.float32)) for name, array in arrays.items() if array is not None
    }
    return Rollout(
        **row,
        **known,
        rewards={name: value for name, value in said.items() if value is not None},
        reward_weights=weights,
        step_rewards=tuple((one["token"], one["reward"]) for one in steps),
    )


def kept_weights(run: Path, config: Config) -> list[Weights]:
    """Every policy of the run that can be loaded, by the steps that it has seen."""
    found = {0: Weights(0, config.model, config.model)}
    if (run / "model").is_dir():
        found[config.steps] = Weights(config.steps, str(run / "model"), "model")
    # The checkpoints of other learners are in pieces, one for each of their processes.
    for path in complete(run) if isinstance(config.engine.learner, Local) else ():
        steps_done = int(path.name.removeprefix("step-"))
        found[steps_done] = Weights(steps_done, str(path), f"checkpoints/{path.name}", is_checkpoint=True)
    return sorted(found.values(), key=lambda weights: weights.steps_done)


def nearest(kept: Sequence[Weights], steps_done: int) -> Weights:
    """The weights nearest to those after so many steps; of equally near ones the later."""
    return min(kept, key=lambda weights: (abs(weights.steps_done - steps_done), -weights.steps_done))
