"""How much of the time something is being done, for sampler and learner that work at the same time."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Generator
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Busy:
    """Counts the time in which at least one thread is at it."""

    def __init__(self) -> None:
        self._lock, self._threads, self._spent = threading.Lock(), 0, 0.0
        self._asked = self._began = time.monotonic()

    @contextlib.contextmanager
    def working(self) -> Generator[None]:
        """What runs inside counts."""
        with self._lock:
            if not self._threads:
                self._began = time.monotonic()
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._spent += time.monotonic() - self._began

    def idle(self) -> float:
        """The share of the time since this was last asked, or the start, in which nobody was at it."""
        with self._lock:
            now = time.monotonic()
            spent = self._spent + (now - self._began if self._threads else 0.0)
            whole = max(now - self._asked, 1e-9)
            self._spent, self._asked, self._began = 0.0, now, now
            return min(max(1 - spent / whole, 0.0), 1.0)

    def watch(self, part: T) -> T:
        """The same part, of which every call counts."""
        return cast(T, _Watched(part, self))


class _Watched:
    def __init__(self, part: object, busy: Busy) -> None:
        self._part, self._busy = part, busy

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._part, name)

        @functools.wraps(method)
        def counted(*arguments: Any, **named: Any) -> Any:
            with self._busy.working():
                return method(*arguments, **named)

        return counted
