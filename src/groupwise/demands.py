"""What a run asks of the parts that serve it, and how a part says which of that it cannot serve, or ignores.

A part is a slot that is chosen: an engine's learner, sampler and placement, an adapter.  Its refusals and cautions
stand in its own file, so that a new part brings its own.  It is told of the run in plain values, for an engine knows
no algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Remarks = Iterator[tuple[bool, str]]
"""(whether this is so, what to say then)"""


@dataclass(frozen=True)
class Demands:
    """What a run asks for."""

    parts: tuple[str, ...]
    """The settings of `engine` that name another part than this process's own, such as `engine.learner: fsdp`."""
    device: str
    """`engine.device`, as it is set."""
    sample_tokens: int
    """`engine.sample_tokens`, as it is set; 0 where it is open."""
    largest_request: int
    """Most completions of one prompt, in training or evaluation."""
    entropies: tuple[str, ...]
    """Paths of the settings that need the entropies of what was sampled."""
    starts_ranks: bool
    """Whether it is the placement that starts the ranks of the learner."""
    refresh_every: int
    """Steps after which the policy becomes the reference; 0 never."""
    ahead: int
    """Steps that may be sampled while the learner trains."""
    own_sampler: bool
    """Whether the engine samples itself: no `engine.sampler` is set."""


@runtime_checkable
class Refuses(Protocol):
    """A part that cannot serve every run."""

    def refusals(self, demands: Demands) -> Remarks:
        """What of these it cannot serve: path, value, what is accepted and the way out."""
        ...


@runtime_checkable
class Cautions(Protocol):
    """A part of which some settings may have no effect."""

    def cautions(self, demands: Demands) -> Remarks:
        """What it will run with, but is rarely meant or has no effect."""
        ...


@runtime_checkable
class Copies(Protocol):
    """A part that holds weights of its own."""

    def copies(self, *, gpu: bool) -> int:
        """How many copies of the policy it holds in the memory that the learner has: of the GPU, or of the machine."""
        ...


def refusals(parts: Iterable[object], demands: Demands) -> Remarks:
    """Of all parts that refuse anything."""
    for part in parts:
        if isinstance(part, Refuses):
            yield from part.refusals(demands)


def cautions(parts: Iterable[object], demands: Demands) -> Remarks:
    """Of all parts that caution against anything."""
    for part in parts:
        if isinstance(part, Cautions):
            yield from part.cautions(demands)


def copies(parts: Iterable[object], *, gpu: bool) -> int:
    """Of all parts that hold weights of their own; see `Copies.copies`."""
    return sum(part.copies(gpu=gpu) for part in parts if isinstance(part, Copies))
