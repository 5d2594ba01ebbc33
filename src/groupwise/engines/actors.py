"""What runs in a process of its own, and is asked from elsewhere: a sampler, or a learner and its critic.

Plain classes, which `engines/ray.py` makes actors of.  What goes in and out is numpy and tensors on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.engines import Completion, Request, Sampling, Snapshot
from groupwise.engines.local import Recipe
from groupwise.errors import CheckpointError


class SamplerActor:
    """Has a sampler of its own."""

    def __init__(self, recipe: Recipe, threads: int) -> None:
        torch.set_num_threads(threads)
        self._sampler, self._number = recipe.sampler(), 0

    def where(self) -> str:
        """What finds this process again."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, version: int, number: int, weights: Mapping[str, Tensor]
    ) -> list[list[Completion]]:
        """Take the weights over, unless it has them, and sample."""
        if number != self._number:
            self._sampler.load(weights.items(), version)
            self._number = number
        return self._sampler.sample(requests, sampling)


class LearnerActor:
    """Has a learner, and a critic where the algorithm needs one; or one rank of them."""

    def __init__(self, recipe: Recipe, threads: int, place: Mapping[str, str]) -> None:
        """
        Args:
            place: what the environment says to this rank; see `Meeting.place`.
        """
        torch.set_num_threads(threads)
        os.environ.update(place)
        self._joined = contextlib.ExitStack()
        self._ranks = self._joined.enter_context(recipe.join())
        self._engine = recipe.engine(ranks=self._ranks)
        self._snapshots: dict[int, Snapshot] = {}

    def where(self) -> str:
        """What finds this process again."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def serve(self) -> None:
        """Of any rank but the first: carry out what that one is asked for, until it is lost.

        Raises:
            EngineError: it is, or another.
        """
        assert self._ranks is not None, "it is one of several"
        try:
            self._ranks.serve()
        except SystemExit:  # another rank says who is lost; an actor that ended now would seem to be the one
            threading.Event().wait()

    def known(self) -> dict[str, Any]:
        """What the driver needs of the engine itself."""
        engine = self._engine
        known = engine._asdict()
        kept = {name: known[name] for name in ("tokenizer", "stop_ids", "context")}
        return kept | {"critic": engine.critic is not None, "save_adapter": engine.save_adapter is not None}

    def call(self, part: str, method: str, *arguments: Any, **named: Any) -> Any:
        """What a method of `learner` or `critic` returns."""
        return getattr(getattr(self._engine, part), method)(*arguments, **named)

    def weights(self) -> tuple[bool, dict[str, Tensor]]:
        """That it went well, and the policy's weights, of which a copy goes into the object store."""
        return True, {name: tensor.detach().cpu() for name, tensor in self._engine.learner.weights()}

    def snapshot(self, part: str) -> int:
        """Copy the state of a part; the number by which `write` finds it."""
        number = max(self._snapshots, default=0) + 1
        self._snapshots[number] = self.call(part, "snapshot")
        return number

    def write(self, number: int, folder: Path) -> None:
        """Write a copy into a folder, which every machine sees at the same path.

        Raises:
            CheckpointError: this machine does not.
        """
        self._see(folder)
        self._snapshots.pop(number)(folder)

    def restore(self, part: str, folder: Path) -> None:
        """Continue from what was written.

        Raises:
            CheckpointError: this machine does not see it.
        """
        self._see(folder)
        self.call(part, "restore", folder)

    def save_adapter(self, folder: Path) -> None:
        """With LoRA: write the adapter alone."""
        self._see(folder)
        assert self._engine.save_adapter is not None
        self._engine.save_adapter(folder)

    def _see(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(
                f"output: {folder}; the learner's machine {socket.gethostname()} does not see that folder: choose one "
                "on a file system that all machines share, with output=DIR"
            )
