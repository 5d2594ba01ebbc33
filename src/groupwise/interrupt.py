"""Being asked to stop: Ctrl-C, SIGTERM, or the end of the time that a run was given.

A run is stopped by `Stopped`, raised wherever it is, except where the state on disk and in memory is being moved to the
next step (`Stop.held`): there it waits until that is done.  Asked a second time, the process leaves at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, NoReturn

from groupwise.errors import ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The run was asked to stop; the text says by what.  No `Exception`: the reward boundary lets it through."""


class Stop:
    """Turns signals and a time limit into `Stopped`, inside `with stop:` and in the main thread."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self._asked: str | None = None
        self._limit: str | None = None
        self._held = 0
        self._before: dict[signal.Signals, Any] = {}
        self._timer = None if max_seconds is None else threading.Timer(max_seconds, self._time_is_over, [max_seconds])

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """What runs inside is finished before a stop takes place.

        Raises:
            Stopped: the run was asked to stop, before or inside.
        """
        self._raise_if_asked()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self._raise_if_asked()

    def _raise_if_asked(self) -> None:
        if self._asked is not None:
            raise Stopped(self._asked)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            _leave(number)
        self._asked = self._limit or signal.Signals(number).name
        if not self._held:
            raise Stopped(self._asked)

    def _time_is_over(self, max_seconds: float) -> None:
        if self._asked is not None:
            return
        self._limit = f"the end of --max-time ({max_seconds:g} s)"
        if self._before:
            os.kill(os.getpid(), signal.SIGTERM)  # only a signal reaches the main thread wherever it is
        else:
            self._asked = self._limit


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """What runs inside is finished before a signal to stop is heard; a second one ends the process at once."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if heard:
            _leave(number)
        heard.append(number)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, hear) for number in SIGNALS} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard:
            signal.raise_signal(heard[0])


def _leave(number: int) -> NoReturn:
    os.write(2, b"asked twice: leaving at once\n")
    os._exit(128 + number)


def seconds(text: str) -> float:
    """A duration in seconds: `3h30m`, `90s`, `1d`, or a number of seconds.

    Raises:
        ConfigError: it is none, or not above 0.
    """
    units = (86400, 3600, 60, 1)
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    total = 0.0 if parts is None else sum(float(n or 0) * unit for n, unit in zip(parts.groups(), units, strict=True))
    if total <= 0:
        raise ConfigError(f"--max-time: {text!r}; accepted: a duration above 0, such as 3h30m, 45m, 90s, or seconds")
    return total
