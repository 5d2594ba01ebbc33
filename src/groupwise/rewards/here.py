"""Rewards in the trainer's own process: which ones stay in it, and with which limit they are called.

What cannot be pickled stays (a lambda, a closure, a function of a notebook or of the script itself), what holds a
model, and built-ins that ask to (`in_process`): they can neither hang nor crash, or see to it themselves.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from groupwise.rewards.calls import call, too_late
from groupwise.rewards.questions import Call, Outcome


def answer_here(asked: Call) -> Outcome:
    """What a call brings that is made in this process, within its time limit unless the function asks for none."""
    reward = asked.question.reward
    ask = partial(call, reward.title, reward.use, asked.rollouts, asked.prompts, seconds=reward.limit)
    return ask() if getattr(reward.use, "in_process", False) else _within(reward.limit, ask)


def _within(seconds: float, ask: Callable[[], Outcome]) -> Outcome:
    """What a call brings, or that it took too long: then its thread, which cannot be ended, is left to itself."""
    brought: list[Outcome] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            brought.append(ask())
        except BaseException as error:  # an interrupt, or a function that stops the run: raised again below
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    return brought[0] if brought else too_late(seconds)


class _Light(pickle.Pickler):
    """Refuses tensors, and so whatever holds a model."""

    def persistent_id(self, obj: Any, /) -> None:
        if type(obj).__module__.partition(".")[0] == "torch":
            raise pickle.PicklingError("it holds a tensor")


def pickled(function: Any) -> bytes | None:
    """The function as a worker can have it, or None when it stays in this process."""
    if getattr(function, "in_process", False) or not hasattr(os, "fork"):
        return None
    data = io.BytesIO()
    try:
        _Light(data).dump(function)
    except Exception:  # whatever the user's object does when it is pickled: it stays here
        return None
    return None if b"__main__" in data.getvalue() else data.getvalue()  # of the script itself, or of a notebook
