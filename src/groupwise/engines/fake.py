"""Engines without a model: a sampler that follows a script and a learner that keeps what it was given.

For testing your own loops, tasks and rewards in milliseconds; they ship with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from groupwise.engines import Completion, LossFn, Request, Sampling, Snapshot
from groupwise.records import Batch, Ints

Script = Callable[[Ints, int], Sequence[int]]
"""(prompt int32[P], key) -> the tokens of the completion, its stop token included."""


class ScriptedSampler:
    """A `Sampler` whose completions are written down beforehand.

    A list of completions serves every request alike: sample s of a group gets number s, starting over at the end.  A
    function is asked for each completion.  What is longer than `sampling.max_tokens` is cut off there, as a model would
    be.  The script is certain of what it says: all log-probabilities and entropies are 0.
    """

    def __init__(self, script: Script | Sequence[Sequence[int]]) -> None:
        self.script = script
        self.requests: list[Request] = []
        """Every request so far."""
        self.version = 0
        """What was last loaded."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """For each request, its completions in the order of its keys."""
        self.requests.extend(requests)
        return [[self._say(request, sample, sampling) for sample in range(len(request.keys))] for request in requests]

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Note the version; a script has no weights."""
        self.version = version

    def _say(self, request: Request, sample: int, sampling: Sampling) -> Completion:
        if callable(self.script):
            said = self.script(request.prompt, request.keys[sample])
        else:
            said = self.script[sample % len(self.script)]
        tokens = np.asarray(said[: sampling.max_tokens], dtype=np.int32)
        return Completion(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            entropies=np.zeros(len(tokens), dtype=np.float32),
            finish_reason="length" if len(said) > sampling.max_tokens else "stop",
            policy_version=self.version,
        )


class RecordingLearner:
    """A `Learner` that learns nothing: every log-probability is 0, and each batch it should learn from is kept."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        """What `update` was given, in order."""
        self.updates = 0
        """How many updates there were, those before `restore` included."""

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Zeros, float[B, T]."""
        return torch.zeros_like(batch.rollout_logprobs)

    def update(self, batch: Batch, loss: LossFn, *, per_token: bool = False) -> dict[str, float]:
        """Keep the batch; the loss and metrics of a policy that has not moved."""
        self.batches.append(batch)
        self.updates += 1
        zeros = torch.zeros_like(batch.rollout_logprobs)
        total, sums = loss(zeros, zeros, batch)
        means = {name: float(pair[0] / pair[1].clamp(min=1)) for name, pair in sums.items()}
        return {"loss": float(total), **means}

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """None."""
        return ()

    def refresh_reference(self) -> None:
        """Nothing: the reference, too, has never moved."""

    def snapshot(self) -> Snapshot:
        """The number of updates so far."""
        count = str(self.updates)

        def write(path: Path) -> None:
            (path / "updates").write_text(count, encoding="utf-8")

        return write

    def restore(self, path: Path) -> None:
        """Continue counting from what a snapshot wrote."""
        self.updates = int((path / "updates").read_text(encoding="utf-8"))
