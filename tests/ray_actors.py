"""Placements for tests/test_ray.py: actors of Ray that take their time, so that they can be killed in the middle.

A file of its own, for the actors import it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupwise.drawing import Drawn
from groupwise.engines import Completion, Request, Sampler, Sampling
from groupwise.engines.local import LocalEngine, Recipe
from groupwise.engines.ray import Ray

MARKS = "GROUPWISE_TEST_MARKS"
"""Names the folder in which an actor says what it is doing, as PID.WHAT.NUMBER."""
SECONDS_A_TOKEN = 0.05


def mark(what: str, number: int) -> None:
    (Path(os.environ[MARKS]) / f"{os.getpid()}.{what}.{number}").touch()


class SlowSampler:
    """The sampler that it is made of, with a pause before each token; it says when it is in the midst of a group."""

    def __init__(self, make: Callable[[], Sampler]) -> None:
        self._inner, self._calls = make(), 0
        draw = Drawn.draw

        @functools.wraps(draw)
        def slowly(drawn: Drawn, *arguments: Any, **named: Any) -> Any:
            found = draw(drawn, *arguments, **named)
            mark("sampling", self._calls)
            time.sleep(SECONDS_A_TOKEN)
            return found

        Drawn.draw = slowly  # type: ignore[method-assign]

    def load(self, weights: Any, version: int) -> None:
        self._inner.load(weights, version)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self._calls += 1
        return self._inner.sample(requests, sampling)


def marking(make: Callable[..., LocalEngine], **of_rank: Any) -> LocalEngine:
    """An engine whose learner says which update it is in, and takes a moment for it."""
    engine, calls = make(**of_rank), 0
    update = engine.learner.update

    def slowly(*arguments: Any, **named: Any) -> dict[str, float]:
        nonlocal calls
        calls += 1
        mark("updating", calls)
        time.sleep(SECONDS_A_TOKEN)
        return update(*arguments, **named)

    engine.learner.update = slowly  # type: ignore[method-assign]
    return engine


def slow(recipe: Recipe) -> LocalEngine:
    """Two samplers and a learner that can be caught in the act."""
    slowed = dataclasses.replace(
        recipe,
        sampler=functools.partial(SlowSampler, recipe.sampler),
        engine=functools.partial(marking, recipe.engine),
    )
    return Ray(samplers=2)(slowed)
