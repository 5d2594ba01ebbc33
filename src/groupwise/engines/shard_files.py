"""Checkpoints of a model in shards: every rank copies and writes its own, and any number of ranks reads them.

A state is what torch's distributed checkpoints hold: `weights`, AdamW's averages of them, `updates`, and what a learner
adds.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from groupwise.engines import Snapshot
from groupwise.engines.ranks import Ranks, everywhere, everywhere_in_background
from groupwise.engines.shards import Sharded
from groupwise.engines.steps import AVERAGES, UNREADABLE, Steps
from groupwise.errors import CheckpointError

State = dict[str, Any]
"""Tensors by name, nested, and plain values."""


def training_state(model: Sharded, steps: Steps) -> State:
    """What is trained, AdamW's averages of it and the number of updates, not copied."""
    weights, averages = dict(model.trained()), steps.averages()
    of_weights = {name: {of: one[name] for of, one in zip(weights, averages, strict=True)} for name in AVERAGES}
    return {"weights": weights, "updates": steps.updates, **of_weights}


def resume(steps: Steps, state: State) -> None:
    """Have the optimizer continue from a state that was read."""
    steps.resume(state["updates"], [{name: state[name][of] for name in AVERAGES} for of in state["weights"]])


class Snapshots(ABC):
    """What has a state that is split: copies of it, from the moment that they keep to the disk."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._cpus = init_device_mesh("cpu", (ranks.size,))
        self._waiting: Queue[tuple[int, State]] = Queue()
        self._taken = 0
        ranks.add(self)

    @abstractmethod
    def _state(self) -> State:
        """What a checkpoint holds, not copied."""

    def snapshot(self) -> Snapshot:
        """What is trained, AdamW's averages and whatever else has changed, as they are now; every rank writes its own.

        Writing it raises a `CheckpointError` where `write_state` does.
        """
        self._copy()
        return partial(self._write, self._taken)

    @everywhere
    def _copy(self) -> None:
        self._taken += 1
        self._waiting.put((self._taken, _copied(self._state(), self._cpus)))

    @everywhere_in_background
    def _write(self, number: int, path: Path) -> None:
        found, state = self._waiting.get()  # rank 0 may write while this rank is still copying
        while found < number:  # that one was never written
            found, state = self._waiting.get()
        write_state(path, state, self.ranks.background.group)


def write_state(path: Path, state: State, group: Any) -> None:
    """Write the shards of all ranks of the group into one folder, with torch's distributed checkpoint.

    Raises:
        CheckpointError: on every rank: one cannot write, or does not see the folder, or a weight is not finite.
    """
    problems = [
        f"the weight {name} is not finite, so it is not saved"
        for name, tensor in state["weights"].items()
        if not bool(tensor.to_local().isfinite().all())
    ]
    if not path.is_dir():  # torch would make one there, and each machine would have a part of the checkpoint
        problems.append(
            f"a rank on {socket.gethostname()} does not see that folder: choose one on a file system that all machines "
            "share, with output=DIR"
        )
    _refuse_together(path, problems, group)
    try:
        save(state, checkpoint_id=path, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be written: {_first(error)}") from error


def names_in(path: Path, ranks: Ranks) -> set[str]:
    """The first part of the names of what a distributed checkpoint holds; every rank has to ask.

    Raises:
        CheckpointError: on every rank: one of them does not see it whole.
    """
    names, problems = set[str](), list[str]()
    try:
        metadata: Metadata = FileSystemReader(path).read_metadata()
        names = {name.split(".")[0] for name in metadata.state_dict_metadata}
    except (*UNREADABLE, EOFError) as error:
        problems.append(f"not a complete checkpoint of engine.learner: fsdp: {error!r} (on rank {ranks.rank})")
    _refuse_together(path, problems)
    return names


def _refuse_together(path: Path, problems: Sequence[str], group: Any = None) -> None:
    """Every rank of the group says what it finds wrong: one that knew alone would leave the others waiting.

    Raises:
        CheckpointError: on every rank the same, where there is anything.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, problems, group=group)
    if said := sorted({problem for of_rank in found for problem in of_rank}):
        raise CheckpointError(f"{path}: {said[0]}")


def read_state(path: Path, state: State) -> None:
    """Fill the tensors and replace the plain values of a state from what was written, by however many ranks.

    Raises:
        CheckpointError: on every rank: a file is missing or damaged, or is that of another model.
    """
    try:
        with torch.no_grad():
            load(state, checkpoint_id=path)
    except (CheckpointException, *UNREADABLE) as error:
        raise CheckpointError(f"{path}: not a checkpoint of this model, or damaged: {_first(error)}") from error


def _first(error: BaseException) -> str:
    """One rank's problem stands for all."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return repr(failures[0][0] if failures else error)


def _copied(value: Any, mesh: DeviceMesh) -> Any:
    """The same with every shard copied to the CPU; the mesh is one of CPUs."""
    if isinstance(value, Mapping):
        return {name: _copied(inner, mesh) for name, inner in cast("Mapping[str, Any]", value).items()}
    if not isinstance(value, DTensor):
        return value
    local = value.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        local, mesh, value.placements, run_check=False, shape=value.shape, stride=cast("Any", value).stride()
    )
