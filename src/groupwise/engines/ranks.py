"""Processes that train one model together: how they meet, how rank 0 has the others work, and who is to blame.

    rank 0     runs the training loop.  Its learner and its sampler have methods marked `everywhere`: ...
    rank 1..   `follow`: they carry out each such call with the arguments that rank 0 got, and nothing else.

So everything that decides, logs, grades or writes the run folder happens once, and a rank cannot be of another opinion.
Calls travel on a group of their own, on which the others wait as long as rank 0 has other things to do; inside a call a
rank that does not answer in time is given up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.errors import ConfigError, EngineError, GroupwiseError
from groupwise.interrupt import SIGNALS, uninterrupted
from groupwise.meeting import STORES, open_store, own_device, place

IDLE = timedelta(days=7)
"""How long a rank waits for the next call: rewards may take their time, and the end of rank 0 is noticed at once."""
ROLL_CALL_SECONDS = 5.0
"""How long those who are left wait for each other's word when one is lost."""

Dumps = Callable[[Any], bytes]
P = ParamSpec("P")
T = TypeVar("T")


class Member(Protocol):
    """A part of an engine that each rank has."""

    ranks: Ranks


def everywhere(method: Callable[P, T]) -> Callable[P, T]:
    """Called on rank 0, the method is carried out by every rank, with the same arguments; not from inside another."""
    return _told("calls", method)


def everywhere_in_background(method: Callable[P, T]) -> Callable[P, T]:
    """The same from another thread than the training loop's, beside whatever that does meanwhile."""
    return _told("background", method)


def _told(channel: str, method: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(method)
    def carried_out(*args: P.args, **named: P.kwargs) -> T:
        member = cast(Member, args[0])
        with getattr(member.ranks, channel).call(type(member).__name__, method.__name__, args[1:], named):
            return method(*args, **named)

    return carried_out


class Ranks:
    """This process among those that train together."""

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Any, timeout: timedelta, dumps: Dumps
    ) -> None:
        self.rank, self.size, self.device, self._store, self.dumps = rank, size, device, store, dumps
        self.timeout = timeout
        """How long a rank may take to answer."""
        self.members: dict[str, Member] = {}
        """What the others carry out calls of, by the name of its class."""
        self.steps_done: int | None = None
        """For messages: what the sampler was last told, if these processes have one."""
        self.calls, self.background = Channel(self, "calls"), Channel(self, "background")
        self._store.set(f"name/{rank}", f"rank {rank} on {socket.gethostname()} (process {os.getpid()})")

    def add(self, member: Member) -> None:
        """From now on, calls of its methods reach the other ranks' members of the same class."""
        self.members[type(member).__name__] = member

    def lead(self, settings: str) -> None:
        """Rank 0 is ready: have the others make their engines from these settings."""
        self.calls.send(settings)

    def follow(self, make: Callable[[str], object]) -> None:
        """Rank 0 returns at once.  Another makes its engine and carries out what rank 0 says until that ends, and then
        exits: what a script does after training is done once.

        Raises:
            EngineError: rank 0, or another, has died or does not answer.
        """
        if self.rank == 0:
            return
        logging.disable(logging.WARNING)  # rank 0 says the same
        for number in SIGNALS:  # rank 0 is asked to stop as well, and cannot save without the others
            signal.signal(number, signal.SIG_IGN)
        settings = self.calls.receive()
        if settings is not None:
            with contextlib.suppress(GroupwiseError):  # of which rank 0 has the same
                make(cast(str, settings))
            self.serve()
        dist.destroy_process_group()
        raise SystemExit(0)

    def serve(self) -> None:
        """Carry out the calls of rank 0 until it dismisses the others.

        Raises:
            EngineError: rank 0, or another, has died or does not answer.
        """
        background = threading.Thread(target=self._serve_background, daemon=True)
        background.start()
        self.calls.serve()
        background.join()

    def dismiss(self) -> None:
        """Rank 0 has nothing more to carry out."""
        self.calls.send(None)
        if self.members:
            self.background.send(None)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, of a tensor on the CPU, in place."""
        dist.all_reduce(values)
        return values

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, mine: T) -> list[T]:
        """On rank 0, what each rank has; elsewhere nothing."""
        found: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(mine, found or None)
        return found

    def word_of(self, error: BaseException) -> None:
        """Leave word of what ends this rank, for those who will miss it."""
        with contextlib.suppress(RuntimeError):  # the store may have died with its process
            self._store.set(f"end/{self.rank}", "" if is_loss(error) else f"{type(error).__name__}: {error}")

    def blame(self, what: str, error: RuntimeError) -> EngineError:
        """Who is lost, from who leaves word now; only the first of those who are left has something to say.

        Raises:
            SystemExit: another rank says it.
        """
        self.word_of(error)
        deadline, lost, words = time.monotonic() + ROLL_CALL_SECONDS, set(range(self.size)) - {self.rank}, list[str]()
        try:
            while lost and time.monotonic() < deadline:
                lost -= {rank for rank in lost if self._store.check([f"end/{rank}"])}
                time.sleep(0.1)
            silent = [f"{self._name(rank)} has died or does not answer" for rank in sorted(lost)]
            for rank in sorted(set(range(self.size)) - lost):
                if word := self._store.get(f"end/{rank}").decode():
                    words.append(f"{self._name(rank)} ended with {word}")
            me = self._name(self.rank)
        except RuntimeError:
            silent, me = ["rank 0, or what started it, has died"], f"rank {self.rank} on {socket.gethostname()}"
        if self.rank != min(set(range(self.size)) - lost):
            raise SystemExit(1) from error
        found = "; ".join(words or silent) or str(error)
        after = "" if self.steps_done is None else f" after step {self.steps_done}"
        return EngineError(f"{me}, in {what}{after}: {found}")

    def _name(self, rank: int) -> str:
        return self._store.get(f"name/{rank}").decode()

    def _serve_background(self) -> None:
        try:
            self.background.serve()
        except (SystemExit, EngineError):
            pass  # the main thread says it
        except Exception:
            traceback.print_exc()
            os._exit(1)  # the others notice, and must not wait for what this thread owes them


class Channel:
    """A line on which rank 0 tells the others what to carry out, one thing after the other."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks, self._name = ranks, name
        self.group: Any = dist.new_group(backend="gloo", timeout=IDLE if ranks.rank else ranks.timeout)
        """Of those that carry out the calls of this line."""
        self._busy = False
        self.in_step = True
        """False once a call of rank 0 was left in its middle: the others are waiting for something else."""

    @contextlib.contextmanager
    def call(self, member: str, method: str, args: Any, named: Any) -> Generator[None]:
        """What runs inside is run by every rank.

        Raises:
            EngineError: a rank has died or does not answer.
            ConfigError: the arguments cannot be sent to another process.
        """
        if self._ranks.rank:
            with self._together(method):
                yield
            return
        assert not self._busy, f"{method} is called inside a call that every rank is carrying out"
        self._busy = True
        try:
            with uninterrupted(), self._together(method):
                self.in_step = False
                try:
                    self.send((member, method, args, named))
                except (TypeError, AttributeError, ImportError, pickle.PicklingError) as error:  # say, of a lambda
                    self.in_step = True
                    raise ConfigError(
                        f"engine.learner: fsdp; {error}, so the other ranks cannot be told; name code of your own in "
                        "the run file as file.py:function"
                    ) from error
                try:
                    yield
                except GroupwiseError:
                    self.in_step = True  # of which the others have the same
                    raise
                self.in_step = True
        finally:
            self._busy = False

    def serve(self) -> None:
        """Carry out what rank 0 says until it says that this is all."""
        try:
            while (told := self.receive()) is not None:
                member, method, args, named = told
                try:
                    getattr(self._ranks.members[member], method)(*args, **named)
                except EngineError:
                    raise
                except GroupwiseError:
                    pass  # rank 0 raises the same
        except Exception as error:
            self._ranks.word_of(error)
            raise

    def send(self, told: Any) -> None:
        """To every other rank; None is the end."""
        if self._ranks.size > 1:
            dist.broadcast_object_list([self._ranks.dumps(told)], src=0, group=self.group)

    def receive(self) -> Any:
        """What rank 0 sends next.

        Raises:
            EngineError: it will not.
        """
        told: list[Any] = [None]
        with self._together("waiting for rank 0"):
            dist.broadcast_object_list(told, src=0, group=self.group)
        return pickle.loads(told[0])

    @contextlib.contextmanager
    def _together(self, what: str) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_loss(error):
                raise self._ranks.blame(what, error) from error
            self._ranks.word_of(error)
            raise


def is_loss(error: BaseException) -> bool:
    """Whether an error is about a process that has gone, not about this one."""
    text = str(error)
    return isinstance(error, dist.DistError | EngineError) or any(
        word in text for word in ("gloo", "NCCL", "Connection", "Timed out")
    )


@contextlib.contextmanager
def join(timeout_seconds: float, device: str, dumps: Dumps = pickle.dumps) -> Generator[Ranks]:
    """Meet the others that torchrun, or whoever sets RANK and WORLD_SIZE, has started; alone without any.

    Args:
        timeout_seconds: how long a rank may take to answer.
        device: as in `engine.device`.
        dumps: makes the bytes that rank 0 sends, from which `pickle` finds everything again.

    Raises:
        ConfigError: a device for each rank is not there.
    """
    timeout = timedelta(seconds=timeout_seconds)
    rank, size, number = place()
    own = own_device(device, number)
    store = open_store(rank, size, timeout)
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    ranks = Ranks(rank, size, own, STORES.PrefixStore("ranks", store), timeout, dumps)
    try:
        yield ranks
    except Exception as error:
        ranks.word_of(error)
        raise
    finally:
        if rank == 0 and ranks.calls.in_step and ranks.background.in_step:
            with contextlib.suppress(RuntimeError):  # who has died need not be told
                ranks.dismiss()
        if rank == 0:
            dist.destroy_process_group()
