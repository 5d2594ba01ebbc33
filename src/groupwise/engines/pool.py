"""Several samplers as one: whole groups are spread over them, and what a lost one had is sampled by whoever is free.

A completion is a function of its prompt, its key and the weights, so that groups sampled a second time are the same.
Each member has a thread of its own, which waits for it and, when it is lost, starts it anew; nobody else waits for
that.  Nothing here knows what a member is: `engines/ray.py` has actors.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from groupwise.engines import Completion, Request, Sampling
from groupwise.errors import EngineError

LOG = logging.getLogger(__name__)
TRIES = 3
"""How often the same groups may take a sampler down, and how often in a row a sampler may fail to start."""
BREATH_SECONDS = 0.2
"""How long a member without work may take to see that the pool is closed."""
LAST_WORDS_SECONDS = 10.0
"""How long `close` waits for the threads of members that were ended."""
Groups = list[list[Completion]]


@dataclass(frozen=True)
class Published:
    """Weights as they were handed over once."""

    version: int
    """Training steps that they have seen."""
    number: int
    """Counts the times that weights were handed over: a version that is trained again is another publication."""
    content: Any
    """What a member takes them from; None for those that it was started with."""


class Member(Protocol):
    """A sampler that can be lost."""

    name: str
    """With what identifies it to whoever looks for it: process and host."""

    def sample(self, requests: Sequence[Request], sampling: Sampling, weights: Published) -> Groups:
        """The groups, sampled with these weights.

        Raises:
            EngineError: it was lost.
        """
        ...

    def start(self) -> None:
        """Start it anew.

        Raises:
            EngineError: it cannot be started.
        """
        ...

    def close(self) -> None:
        """End it; a `sample` that is under way fails."""
        ...


@dataclass(eq=False)
class _Call:
    """One `sample` of the pool."""

    sampling: Sampling
    weights: Published | None = None
    """Fixed when its first groups begin, so that all of them are sampled alike."""


@dataclass(order=True)
class _Part:
    """Consecutive groups of a call, for one member."""

    place: tuple[int, int]
    """Earlier calls come first, so that a step that is waited for is not behind those sampled ahead."""
    call: _Call = field(compare=False)
    requests: Sequence[Request] = field(compare=False)
    result: Future[Groups] = field(compare=False, default_factory=Future[Groups])
    losses: int = field(compare=False, default=0)

    @property
    def title(self) -> str:
        """`groups 3 to 4`, counted from 1."""
        first, last = self.place[1] + 1, self.place[1] + len(self.requests)
        return f"group {first}" if first == last else f"groups {first} to {last}"


class Pool:
    """A `Sampler` made of members.  Its `sample` may be called from several threads."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        patience: float,
        publish: Callable[[Iterable[tuple[str, Tensor]]], Any] = dict,
    ) -> None:
        """
        Args:
            members: started already; closed with the pool.
            patience: seconds without a result after which it says who is waited for, again and again.
            publish: puts weights where members can take them from; what it returns is handed to each.
        """
        self._members, self._patience, self._publish = list(members), patience, publish
        self._todo = queue.PriorityQueue[_Part]()
        self._calls = itertools.count()
        self._weights = Published(0, 0, None)
        self._lock = threading.Lock()
        self._doing: dict[Member, tuple[_Part | None, float]] = {}
        """Of each member that is not free: the part that it samples, None while it is started; and since when."""
        self._busy, self._since = 0.0, time.monotonic()
        self._serving = len(self._members)
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(member,), daemon=True) for member in self._members]
        for thread in self._threads:
            thread.start()

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """What is begun from now on is sampled with these weights; each member takes them over before it samples."""
        self._weights = Published(version, self._weights.number + 1, self._publish(weights))

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Groups:
        """See `Sampler.sample`.

        Raises:
            EngineError: groups took down every member that tried them, or no member can be started any more.
        """
        number, call = next(self._calls), _Call(sampling)
        shares = np.array_split(np.arange(len(requests)), min(len(self._members), len(requests)) or 1)
        parts = [_Part((number, int(share[0])), call, [requests[i] for i in share]) for share in shares if len(share)]
        for part in parts:
            self._todo.put(part)
        if self._closed.is_set() or not self._serving:
            self._give_up("the samplers are closed, or lost and cannot be started anew")
        try:
            self._watch(parts)
            return [group for part in parts for group in part.result.result()]
        finally:
            for part in parts:
                part.result.cancel()  # those that wait, when one has failed or the run is stopped

    def idle(self) -> float:
        """The share of the members' time since this was last asked, or the start, in which they did not sample."""
        with self._lock:
            now = time.monotonic()
            busy = self._busy + sum(now - max(began, self._since) for part, began in self._doing.values() if part)
            whole = len(self._members) * max(now - self._since, 1e-9)
            self._busy, self._since = 0.0, now
            return min(max(1 - busy / whole, 0.0), 1.0)

    def close(self) -> None:
        """End the members; whoever waits for a sample gets an EngineError."""
        self._closed.set()
        for member in self._members:
            member.close()
        self._give_up("the samplers are closed")
        for thread in self._threads:
            thread.join(LAST_WORDS_SECONDS)

    # What the members' threads do --------------------------------------------------------------------------------

    def _serve(self, member: Member) -> None:
        while not self._closed.is_set():
            try:
                part = self._todo.get(timeout=BREATH_SECONDS)
            except queue.Empty:
                continue
            if not part.losses and not part.result.set_running_or_notify_cancel():
                continue
            try:
                groups = self._sample(member, part)
            except EngineError as error:
                if self._closed.is_set():
                    part.result.set_exception(error)
                elif not self._lost(member, part, error):
                    return
            except BaseException as error:  # raised again where the sample was asked for
                part.result.set_exception(error)
            else:
                part.result.set_result(groups)

    def _sample(self, member: Member, part: _Part) -> Groups:
        with self._lock:
            weights = part.call.weights = part.call.weights or self._weights
            self._doing[member] = part, time.monotonic()
        try:
            return member.sample(part.requests, part.call.sampling, weights)
        finally:
            with self._lock:
                _, began = self._doing.pop(member)
                self._busy += time.monotonic() - max(began, self._since)

    def _lost(self, member: Member, part: _Part, error: EngineError) -> bool:
        """Hand the groups on and start the member anew; False when it cannot be started."""
        assert part.call.weights is not None, "it was sampling"
        LOG.warning(
            "%s; it was sampling %s with the policy after step %d, which are sampled again by whoever is free",
            *(error, part.title, part.call.weights.version),
        )
        part.losses += 1
        if part.losses < TRIES:
            self._todo.put(part)
        else:
            part.result.set_exception(
                EngineError(
                    f"{error}; it is the sampler number {TRIES} that was lost over the same {part.title}: if they died "
                    "for want of memory, lower engine.sample_tokens or sampling.max_tokens"
                )
            )
        return self._start(member)

    def _start(self, member: Member) -> bool:
        """Start a member anew; False when it cannot be."""
        for number in range(1, TRIES + 1):
            with self._lock:
                self._doing[member] = None, time.monotonic()
            try:
                member.start()
                LOG.warning("%s has taken its place", member.name)
                return True
            except EngineError as problem:
                if self._closed.is_set():
                    return False
                LOG.warning("%s (attempt %d of %d)", problem, number, TRIES)
            finally:
                with self._lock:
                    del self._doing[member]
        with self._lock:
            self._serving -= 1
        if not self._serving:
            self._give_up(f"no sampler is left: {member.name} cannot be started anew")
        return False

    def _give_up(self, reason: str) -> None:
        """Nobody will take what still waits."""
        while True:
            try:
                part = self._todo.get_nowait()
            except queue.Empty:
                return
            if part.losses or part.result.set_running_or_notify_cancel():
                part.result.set_exception(EngineError(reason))

    # Who waits for whom ----------------------------------------------------------------------------------------------

    def _watch(self, parts: Sequence[_Part]) -> None:
        """Wait for the parts; after each `patience` without one that is done, say who is waited for."""
        left, began = {part.result for part in parts}, time.monotonic()
        while left:
            done, waiting = wait(left, timeout=self._patience, return_when=FIRST_EXCEPTION)
            if any(result.exception() for result in done):
                return
            if waiting and len(waiting) == len(left):
                LOG.warning("%s", self._who_waits(time.monotonic() - began))
            left = waiting

    def _who_waits(self, seconds: float) -> str:
        with self._lock:
            doing, now = dict(self._doing), time.monotonic()
        said = [
            f"{member.name}, which {'is being started' if part is None else f'samples {part.title}'} "
            f"since {now - began:.0f} s"
            for member, (part, began) in doing.items()
        ]
        free = ", ".join(member.name for member in self._members if member not in doing)
        return (
            f"the run waits since {seconds:.0f} s for completions (the policy is that after step "
            f"{self._weights.version}): for {'; for '.join(said) or 'nobody'}{f'; free: {free}' if free else ''}"
        )
