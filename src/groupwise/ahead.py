"""Making things before they are asked for, up to a bound: how samplers work while the learner trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_advance(
    make: Callable[[int], T], first: int, last: int, ahead: int, waiting: Callable[[int], None] = lambda ready: None
) -> Iterator[tuple[int, T]]:
    """(number, what `make` makes of it) for first <= number < last.

    When number n is asked for, those up to n + `ahead` are begun, each in a thread; so that number n was not begun
    before n - `ahead` was asked for.  With `ahead` 0 each is made when it is asked for, by who asks.

    Args:
        waiting: told, each time, how many were finished before they were asked for; not told without `ahead`.

    Raises:
        Exception: what `make` raised, when that number is asked for.
    """
    if not ahead:
        for number in range(first, last):
            yield number, make(number)
        return
    threads = ThreadPoolExecutor(ahead + 1, thread_name_prefix="ahead")
    begun: deque[Future[T]] = deque()
    try:
        for number in range(first, last):
            waiting(sum(future.done() for future in begun))
            while len(begun) <= ahead and number + len(begun) < last:
                begun.append(threads.submit(make, number + len(begun)))
            yield number, begun.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
