"""Where rewards run: each call in a worker process, with a time and a memory limit; a worker that is lost is replaced.

`ask` takes questions (a reward, and rollouts to judge) and gives verdicts.  It sees to it that one sample costs nothing
but itself: a call that hangs or takes its process down is ended and recorded, a list that fails is asked again one by
one, and the outcome depends neither on how many workers there are nor on which of them answers first.

What cannot leave the trainer's process stays in it, see `here.py`.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from multiprocessing.connection import wait
from typing import Any

from groupwise.errors import RewardError
from groupwise.rewards import nursery
from groupwise.rewards.calls import Verdict, failed, is_async, too_late
from groupwise.rewards.here import answer_here, pickled
from groupwise.rewards.nurse import ANSWER_SECONDS, LOAD_SECONDS, Nursery, NurseryLostError, Worker
from groupwise.rewards.questions import Call, Ledger, Question
from groupwise.rewards.reward import Reward
from groupwise.slots import loaded_files

GRACE_SECONDS = 1.0
"""What a worker gets beyond the limit of calls that it ends itself (`async` ones)."""
LEAST_WORKERS = 4
"""Calls may wait rather than compute, so a few more than there are cores do no harm."""
RESTARTS = 2
"""How often the nursery may be lost while some questions are asked."""


class Workers:
    """Workers that are started when they are needed, and stay until `close`; at most `count` at the same time."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count or max(LEAST_WORKERS, os.cpu_count() or 1)
        self._nursery: Nursery | None = None
        self._workers: list[Worker] = []
        self._pickled: dict[int, tuple[Any, bytes | None]] = {}
        self._loaded: set[str] = set()
        """Keys of the functions that the nursery has, and so each worker from its birth."""
        self._late: set[str] = set()
        """Keys of those that start threads when they are imported, so that only workers may import them."""
        self._lock = threading.RLock()
        self._holders = 0
        """How many `hold` them at the moment."""

    def ask(self, questions: Sequence[Question]) -> list[list[Verdict]]:
        """The verdicts on the rollouts of each question, in order.

        Raises:
            RewardError: a function has neither signature, cannot be imported in a worker, or stops the run on purpose.
        """
        with self._lock:
            away = [question for question in questions if self._data(question.reward) is not None]
            here = [question for question in questions if self._data(question.reward) is None]
            ledger = Ledger(away)
            self.load([question.reward for question in away])
            self._run(ledger)
            stays = Ledger(here)
            while stays.calls:
                asked = stays.calls.popleft()
                stays.settle(asked, answer_here(asked))
            ledger.said |= stays.said
            return [ledger.verdicts(question) for question in questions]

    def load(self, rewards: Sequence[Reward]) -> None:
        """Import the functions where workers come from, before anything is asked.

        Raises:
            RewardError: one of them cannot be imported there.
        """
        with self._lock:
            for reward in rewards:
                if self._data(reward) is not None:
                    self._ready(reward)

    @contextmanager
    def hold(self) -> Generator[None]:
        """Close them at its end, unless someone else still holds them."""
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self.close()

    def close(self) -> None:
        """End all workers; the next question starts new ones."""
        with self._lock:
            if self._nursery is not None:
                self._nursery.close()
            for worker in self._workers:
                worker.work.close()
            self._nursery, self._workers, self._loaded = None, [], set()

    def _data(self, reward: Reward) -> bytes | None:
        function = reward.use
        if id(function) not in self._pickled:
            self._pickled[id(function)] = (function, pickled(function))  # the function itself keeps its id taken
        return self._pickled[id(function)][1]

    # Asking ----------------------------------------------------------------------------------------------------------

    def _run(self, ledger: Ledger) -> None:
        restarts = 0
        try:
            while ledger.calls or any(worker.asked for worker in self._workers):
                try:
                    self._hand_out(ledger)
                    self._collect(ledger)
                except NurseryLostError:
                    ledger.calls.extend(worker.asked for worker in self._workers if worker.asked)
                    self.close()
                    restarts += 1
                    if restarts > RESTARTS:
                        raise RewardError(
                            "rewards: the process that starts workers was killed again and again; is there enough "
                            "memory, and what kills processes here?"
                        ) from None
        except BaseException:
            self.close()  # whatever they are doing is for nobody any more
            raise

    def _hand_out(self, ledger: Ledger) -> None:
        while ledger.calls:
            free = next((worker for worker in self._workers if worker.asked is None), None)
            if free is None and len(self._workers) >= self._count:
                return
            reward = ledger.calls[0].question.reward
            key = self._ready(reward)
            worker = free or self._spawn()
            if key not in worker.known:
                self._load(worker, reward, key)
            self._hand(worker, ledger.calls.popleft(), key, ledger)

    def _hand(self, worker: Worker, asked: Call, key: str, ledger: Ledger) -> None:
        reward = asked.question.reward
        try:
            payload = pickle.dumps((asked.rollouts, asked.prompts))
        except Exception as error:  # whatever the user's rows hold
            problem = f"raised {type(error).__name__} when its rollout was sent to a worker: {error}"
            return ledger.settle(asked, failed("raised", problem))
        worker.asked = asked
        worker.deadline = time.monotonic() + reward.limit + GRACE_SECONDS * is_async(reward.use)
        request = ("judge", key, reward.title, payload, reward.limit, reward.memory_mb)
        try:
            nursery.send(worker.work, pickle.dumps(request))
        except OSError:
            self._lost(worker, ledger)
        return None

    def _collect(self, ledger: Ledger) -> None:
        busy = [worker for worker in self._workers if worker.asked]
        if not busy:
            return
        soonest = min(worker.deadline for worker in busy) - time.monotonic()
        answered = wait([worker.work for worker in busy], max(soonest, 0.0))
        for worker in busy:
            if worker.work in answered:
                self._answered(worker, ledger)
        for worker in busy:
            if worker.asked and worker.deadline <= time.monotonic():
                self._end(worker)
                ledger.settle(worker.asked, too_late(worker.asked.question.reward.limit))
                worker.asked = None

    def _answered(self, worker: Worker, ledger: Ledger) -> None:
        asked = worker.asked
        assert asked is not None
        try:
            answer = json.loads(nursery.receive(worker.work))
        except (OSError, EOFError):
            return self._lost(worker, ledger)
        if "stop" in answer:
            raise RewardError(answer["stop"])
        worker.asked = None
        verdicts = [Verdict(*fields) for fields in answer.get("failed") or answer["verdicts"]]
        ledger.settle(asked, verdicts[0] if "failed" in answer else verdicts)
        if answer["retire"]:
            self._end(worker)
        return None

    def _lost(self, worker: Worker, ledger: Ledger) -> None:
        assert worker.asked is not None
        fate = _fate(self._end(worker))
        ledger.settle(worker.asked, failed("crashed", f"took its worker process down, which {fate}"))
        worker.asked = None

    # Processes -------------------------------------------------------------------------------------------------------

    def _ready(self, reward: Reward) -> str:
        """The key of a reward function, once the nursery has it or is known to have to do without."""
        data = self._data(reward)
        assert data is not None
        key = sha256(data).hexdigest()
        if key in self._loaded or key in self._late:
            return key
        nurse = self._start()
        try:
            answer = nurse.request("load", key, data, loaded_files(), sys.path)
        except NurseryLostError as error:
            self.close()
            raise RewardError(
                f"rewards.{reward.title}: importing it ended the process that does so, or took more than "
                f"{LOAD_SECONDS:g} s; import its module in a Python of its own to see why"
            ) from error
        _refuse(reward, answer)
        if answer["threads"] > 1:  # to fork beside a thread may inherit a lock that nobody will ever open
            self._late.add(key)
            self.close()
        else:
            self._loaded.add(key)
        return key

    def _load(self, worker: Worker, reward: Reward, key: str) -> None:
        worker.work.settimeout(LOAD_SECONDS)
        try:
            nursery.send(worker.work, pickle.dumps(("load", key, self._data(reward), loaded_files(), sys.path)))
            answer = json.loads(nursery.receive(worker.work))
        except (OSError, EOFError):
            answer = {"error": f"the worker ended, or it took more than {LOAD_SECONDS:g} s"}
        _refuse(reward, answer)
        worker.work.settimeout(ANSWER_SECONDS)
        worker.known.add(key)

    def _start(self) -> Nursery:
        if self._nursery is None:
            self._nursery = Nursery()
        return self._nursery

    def _spawn(self) -> Worker:
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_SECONDS)
        with theirs:
            try:
                pid = self._start().request("spawn", descriptor=theirs.fileno())["pid"]
            except NurseryLostError:
                ours.close()
                raise
        worker = Worker(pid, ours, set(self._loaded))
        self._workers.append(worker)
        return worker

    def _end(self, worker: Worker) -> int:
        """Kill a worker with all that it started; its exit code, or the negative of the signal that had killed it."""
        code = int(self._start().request("end", worker.pid)["exit"])
        self._workers.remove(worker)
        worker.work.close()
        return code


def _refuse(reward: Reward, answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise RewardError(
            f"rewards.{reward.title}: cannot be imported in a worker process: {answer['error']}; accepted: a function "
            "of a module that `import` finds, or of a file named as file.py:function"
        )


def _fate(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal.strsignal(-code)})"


# The workers of this process -----------------------------------------------------------------------------------------

_SHARED = [Workers()]


def ask(questions: Sequence[Question]) -> list[list[Verdict]]:
    """`Workers.ask` of the workers that all rewards of this process share."""
    return _SHARED[-1].ask(questions)


def load(rewards: Sequence[Reward]) -> None:
    """`Workers.load` of the same."""
    _SHARED[-1].load(rewards)


@contextmanager
def workers_end() -> Generator[None]:
    """Ends the workers of this process afterwards; without it they stay until the process ends.

    Around several trainings it lets them share their workers: the outermost one ends them.
    """
    with _SHARED[-1].hold():
        yield


atexit.register(lambda: _SHARED[-1].close())
# A fork of the trainer must not talk to the workers of its parent, nor close what it shares with it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _SHARED.append(Workers()))
