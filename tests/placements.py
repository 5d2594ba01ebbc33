"""Placements in this process, for tests: samplers with weights of their own in threads, and a learner that can be lost.

They stand in for machines: what the loop sees of them is what it sees of Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from groupwise.engines import Completion, Request, Sampler, Sampling
from groupwise.engines.local import LocalEngine, Recipe
from groupwise.engines.pool import Pool, Published
from groupwise.errors import LearnerLostError


class Beside:
    """A member of a pool: a sampler in this process."""

    def __init__(self, number: int, sampler: Sampler) -> None:
        self.name, self._sampler, self._number = f"sampler {number}", sampler, 0
        self.lock = threading.Lock()  # torch's generators and settings are the process's

    def sample(self, requests: Sequence[Request], sampling: Sampling, weights: Published) -> list[list[Completion]]:
        with self.lock:
            if weights.number != self._number:
                self._sampler.load(weights.content.items(), weights.version)
                self._number = weights.number
            return self._sampler.sample(requests, sampling)

    def start(self) -> None: ...

    def close(self) -> None: ...


def copied(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights}


def pool_of(recipe: Recipe, count: int) -> Pool:
    return Pool([Beside(i + 1, recipe.sampler()) for i in range(count)], patience=60, publish=copied)


def one(recipe: Recipe) -> LocalEngine:
    """One sampler with weights of its own."""
    return beside(recipe, 1)


def two(recipe: Recipe) -> LocalEngine:
    """Two of them, as `Ray(samplers=2)` has."""
    return beside(recipe, 2)


def beside(recipe: Recipe, count: int) -> LocalEngine:
    pool, engine = pool_of(recipe, count), recipe.engine()
    return engine._replace(sampler=pool, processes=Losable(recipe, engine, pool))


class Losable:
    """A learner that dies at some of its updates; see `groupwise.engines.Processes` and `Learner`."""

    restarts = 2
    dies_at: Sequence[int] = ()
    """Which updates, counted over all of its lives."""

    def __init__(self, recipe: Recipe, engine: LocalEngine, pool: Pool) -> None:
        self._recipe, self._learner, self._pool, self._updates = recipe, engine.learner, pool, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def update(self, *arguments: Any, **named: Any) -> dict[str, float]:
        metrics = self._learner.update(*arguments, **named)
        self._updates += 1
        if self._updates in self.dies_at:
            del self._learner
            raise LearnerLostError("the learner died")
        return metrics

    def restart(self) -> None:
        self._learner = self._recipe.engine().learner

    def idle(self) -> dict[str, float]:
        return {"idle/sampler": self._pool.idle(), "idle/learner": 0.0}

    def close(self) -> None:
        self._pool.close()


class LostTwice(Losable):
    dies_at = (2, 6)


class LostOften(Losable):
    dies_at = (1, 2, 3)


def lost_twice(recipe: Recipe) -> LocalEngine:
    """A learner that dies before the first checkpoint, and once more behind one."""
    return lost(recipe, LostTwice)


def lost_often(recipe: Recipe) -> LocalEngine:
    """A learner that dies more often than it may."""
    return lost(recipe, LostOften)


def lost(recipe: Recipe, kind: type[Losable]) -> LocalEngine:
    engine, pool = recipe.engine(), pool_of(recipe, 1)
    learner = kind(recipe, engine, pool)
    return engine._replace(sampler=pool, learner=learner, processes=learner)
