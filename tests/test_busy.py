"""Shares of time in which nobody was at it, on a clock that the test sets."""

from __future__ import annotations

import threading

import pytest

from groupwise import busy
from groupwise.busy import Busy


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(busy, "time", made)
    return made


def test_the_time_of_threads_that_are_at_it_together_counts_once(clock: Clock) -> None:
    side = Busy()
    clock.now += 2
    with side.working():
        clock.now += 1
        with side.working():
            clock.now += 4
        clock.now += 1
    clock.now += 2
    assert side.idle() == pytest.approx(0.4)


def test_what_is_under_way_when_asked_counts_on_both_sides(clock: Clock) -> None:
    side = Busy()
    with side.working():
        clock.now += 3
        assert side.idle() == 0
        clock.now += 1
    clock.now += 1
    assert side.idle() == pytest.approx(0.5)
    clock.now += 1
    assert side.idle() == 1
    assert side.idle() == 1, "no time has passed"


def test_every_call_of_a_watched_part_counts_also_one_that_fails(clock: Clock) -> None:
    class Part:
        def work(self, seconds: float, *, fail: bool = False) -> str:
            clock.now += seconds
            if fail:
                raise ValueError("no")
            return threading.current_thread().name

    side = Busy()
    part = side.watch(Part())
    assert part.work(1) == threading.current_thread().name
    with pytest.raises(ValueError, match="no"):
        part.work(2, fail=True)
    clock.now += 1
    assert side.idle() == pytest.approx(0.25)
    with pytest.raises(AttributeError):
        part.rest()  # type: ignore[attr-defined]
