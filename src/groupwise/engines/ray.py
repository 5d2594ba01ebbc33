"""Ray: samplers and the learner as actors, on this machine or on a cluster; the loop stays in the process that asked.

    driver: the loop, rewards, checkpoints, log
      |- learner actor     the policy that is trained, its reference, the critic; puts weights into the object store
      |   `- rank 1 ...    with `engine.learner: fsdp`, shares of it; they follow the first (`engines/ranks.py`)
      `- sampler actors    a copy of the policy each; newer weights are taken over with the groups to sample

Rewards stay with the driver: their worker processes have limits of time and memory there, and need no model.
A sampler that dies is started anew, and others sample its groups (`engines/pool.py`).  When the learner dies, or any
rank of it, so does the state since the last checkpoint: all its actors are started anew, and `train` continues from
there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import Field
from torch import Tensor

from groupwise.busy import Busy
from groupwise.demands import Demands, Remarks
from groupwise.devices import find_device
from groupwise.engines import Completion, LossFn, Request, Sampling, Snapshot, ValueLossFn
from groupwise.engines.actors import LearnerActor, SamplerActor
from groupwise.engines.cluster import Room, api, connect, once_loaded, own_address, speaking
from groupwise.engines.local import LocalEngine, Recipe
from groupwise.engines.pool import Pool, Published
from groupwise.errors import EngineError, LearnerLostError
from groupwise.meeting import ALONE, Meeting
from groupwise.records import Batch
from groupwise.slots import Slot, changed, loaded_files

LOG = logging.getLogger(__name__)


class Ray(Slot):
    """Samplers and the learner as actors of Ray; needs the extra `ray`."""

    type: Literal["ray"] = "ray"
    samplers: int = Field(default=2, ge=1)
    """Actors that sample, each with a copy of the policy."""
    address: str | None = None
    """A cluster that runs already: `auto` for the one that this machine is part of, or HOST:PORT; null starts one here
    that ends with the run."""
    gpus: float = Field(default=1.0, gt=0)
    """GPUs of each actor, where `engine.device` is a GPU; 0.5 lets two share one.  Each takes `engine.threads` CPUs."""
    patience_seconds: float = Field(default=600.0, gt=0)
    """After so long without a sign of life the run says who waits for whom; starting an actor may take no longer."""
    learner_restarts: int = Field(default=3, ge=0)
    """How often a run starts its learner anew and continues from the last checkpoint, before it gives up."""

    def refusals(self, demands: Demands) -> Remarks:
        """One GPU for all; see `Refuses.refusals`."""
        yield (
            demands.device.startswith("cuda:"),
            f"engine.device: {demands.device}; with engine.placement: ray each actor gets its own; use auto, cuda or "
            "cpu",
        )

    def cautions(self, demands: Demands) -> Remarks:
        """Of GPUs that are not wanted; see `Cautions.cautions`."""
        device = find_device(demands.device, "engine.device")
        yield (
            "gpus" in changed(self) and device.type != "cuda",
            f"engine.placement.gpus has no effect with engine.device: {demands.device}, which is no GPU here",
        )

    def copies(self, *, gpu: bool) -> int:
        """Those of the samplers: of all on one machine, of as many as fit beside the learner on its GPU; none that are
        known of a cluster.  See `Copies.copies`."""
        beside = int(1 / self.gpus) - 1 if gpu else self.samplers
        return 0 if self.address else max(0, min(self.samplers, beside))

    def __call__(self, recipe: Recipe) -> LocalEngine:
        """Start the actors; they have loaded the model when this returns.

        Raises:
            ConfigError: Ray is not installed, or the cluster is not there or too small.
            EngineError: an actor cannot be started.
        """
        return Actors(self, recipe).engine()


# What the loop sees --------------------------------------------------------------------------------------------------


class Weights:
    """Weights in the object store: samplers fetch them from there, and here only who looks at them."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with speaking("the object store"):
            return iter(api().get(self.content).items())


class RemoteSampler:
    """A member of the pool: an actor, and the way to start another in its place."""

    def __init__(self, number: int, make: Callable[[], Any], patience: float) -> None:
        self._title, self._make, self._patience = f"sampler {number}", make, patience
        self.name, self._actor = self._title, make()

    def start(self) -> None:
        """See `Member.start`."""
        self._actor = self._make()
        self.ready()

    def ready(self) -> None:
        """Wait until it has loaded the model.

        Raises:
            EngineError: it died, or takes too long.
        """
        (self.name,) = once_loaded([self._title], [self._actor], self._patience)

    def sample(self, requests: Sequence[Request], sampling: Sampling, weights: Published) -> list[list[Completion]]:
        """See `Member.sample`."""
        ask = partial(self._actor.sample.remote, requests, sampling, weights.version, weights.number)
        with speaking(self.name):
            return api().get(ask(weights.content))

    def close(self) -> None:
        """See `Member.close`."""
        api().kill(self._actor)


class RemoteLearner:
    """The learner, or the critic beside it, in its actor.  See `groupwise.engines.Learner` and `Critic`."""

    def __init__(self, actors: Actors, part: str) -> None:
        self._actors, self._part = actors, part

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._actors.ask("call", self._part, method, *arguments, **named)

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """See `Learner.logprobs`."""
        return self._call("logprobs", batch, reference=reference)

    def values(self, batch: Batch) -> Tensor:
        """See `Critic.values`."""
        return self._call("values", batch)

    def update(self, batch: Batch, loss: LossFn | ValueLossFn, **named: Any) -> dict[str, float]:
        """See `Learner.update` and `Critic.update`."""
        return self._call("update", batch, loss, **named)

    def weights(self) -> Weights:
        """See `Learner.weights`: a copy, in the object store."""
        return self._actors.publish()

    def refresh_reference(self) -> None:
        """See `Learner.refresh_reference`."""
        self._call("refresh_reference")

    def snapshot(self) -> Snapshot:
        """See `Learner.snapshot`; the actor writes, into a folder that its machine has to see."""
        number = self._actors.ask("snapshot", self._part)
        return lambda folder: self._actors.ask("write", number, folder.resolve())

    def restore(self, path: Path) -> None:
        """See `Learner.restore`."""
        self._actors.ask("restore", self._part, path.resolve())


class RemoteRanks:
    """The actors of the learner, one for each rank: the first is asked, and has the others carry it out with it."""

    def __init__(self, make: Callable[[int, Mapping[str, str]], Any], size: int, patience: float) -> None:
        """
        Args:
            make: starts the actor of a rank, which has this in its environment.
            size: how many ranks there are.
            patience: seconds in which they have to load the model, and after which the run says that it waits.
        """
        self._make, self._size, self._patience = make, size, patience
        self._actors: list[Any] = []
        self._names: list[str] = []
        self._others: dict[Future[None], str] = {}
        """What the others do, which never ends unless one is lost, and their names."""

    def start(self) -> None:
        """Start them, without waiting for it."""
        places = [ALONE]
        if self._size > 1:
            self._meeting = Meeting(own_address(), self._size)
            places = [self._meeting.place(rank, 0) for rank in range(self._size)]  # Ray shows each its own GPU alone
        self._actors = [self._make(rank, place) for rank, place in enumerate(places)]

    def ready(self) -> None:
        """Wait until they have loaded the model.

        Raises:
            EngineError: one died, or takes too long.
        """
        titles = [f"rank {rank} of the learner" for rank in range(self._size)] if self._size > 1 else ["the learner"]
        self._names = once_loaded(titles, self._actors, self._patience)
        others = zip(self._actors[1:], self._names[1:], strict=True)
        self._others = {actor.serve.remote().future(): name for actor, name in others}

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """What a method of the first returns, or raises.

        Raises:
            LearnerLostError: one of them is lost.
        """
        doing = str(arguments[1]) if method == "call" else method
        return self.wait(getattr(self._actors[0], method).remote(*arguments, **named), doing)

    def weights(self) -> Any:
        """Where the policy's weights are in the object store, as they are now."""
        well, content = self._actors[0].weights.options(num_returns=2).remote()
        self.wait(well, "weights")  # a sampler that fetched them from a learner that died would seem to be at fault
        return content

    def wait(self, reference: Any, doing: str) -> Any:
        """The result, by way of a future of Python's: a signal would be lost inside of Ray."""
        future, began = reference.future(), time.monotonic()
        while True:
            done, _ = wait([future, *self._others], self._patience, FIRST_COMPLETED)
            if future in done:
                with speaking(self._names[0], LearnerLostError):
                    return future.result()
            for other in done:
                self._lost(other)
            LOG.warning("the run waits since %.0f s for %s: %s", time.monotonic() - began, self._names[0], doing)

    def close(self) -> None:
        """End them."""
        for actor in self._actors:
            api().kill(actor)

    def _lost(self, other: Future[None]) -> NoReturn:
        name, problem = self._others[other], api().exceptions.RayTaskError
        with speaking(name, LearnerLostError):
            try:
                other.result()
            except problem as error:
                if isinstance(error.cause, EngineError):
                    raise
                what = f"{type(error.cause).__name__}: {error.cause}"
                raise LearnerLostError(f"{name} ended with {what}") from error
        raise AssertionError(f"{name} has left, and nobody has dismissed it")


class Actors:
    """The actors of a run.  See `groupwise.engines.Processes`."""

    def __init__(self, settings: Ray, recipe: Recipe) -> None:
        ray, count, cores = api(), recipe.ranks + settings.samplers, os.cpu_count() or 1
        self._patience, self.restarts = settings.patience_seconds, settings.learner_restarts
        # Beside each other on one machine, they share its cores.
        threads = recipe.threads if settings.address else max(1, min(recipe.threads, cores // count))
        self._own = connect(settings.address, max(cores, count * threads))
        self._busy = Busy()
        for name in loaded_files():  # what the user wrote is not installed where the actors are
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
        recipe = replace(recipe, join=partial(recipe.join, dumps=ray.cloudpickle.dumps))  # nor is it among the ranks
        each = {"CPU": float(threads), **({"GPU": settings.gpus} if recipe.gpu else {})}
        learner = "a learner" if recipe.ranks == 1 else f"{recipe.ranks} ranks of a learner"
        wanted = f"engine.placement.samplers: {settings.samplers}; {learner} and so many samplers"
        self._pool: Pool | None = None
        self._room: Room | None = None
        try:
            # A cluster of this machine alone does not grow.
            self._room = room = Room(count, each, self._patience, grows=not self._own, wanted=wanted)

            def rank(number: int, place: Mapping[str, str]) -> Any:
                return room.actor(LearnerActor, number, recipe, threads, place)

            self._learner = RemoteRanks(rank, recipe.ranks, self._patience)
            self._learner.start()
            makes = [partial(room.actor, SamplerActor, i, recipe, threads) for i in range(recipe.ranks, count)]
            self._samplers = [RemoteSampler(i, make, self._patience) for i, make in enumerate(makes, 1)]
            self._learner.ready()
            for sampler in self._samplers:
                sampler.ready()
        except BaseException:
            self.close()
            raise

    def engine(self) -> LocalEngine:
        """What the loop works with."""
        known = self.ask("known")
        self._pool = Pool(self._samplers, patience=self._patience, publish=_published)
        return LocalEngine(
            self._pool,
            RemoteLearner(self, "learner"),
            known["tokenizer"],
            known["stop_ids"],
            known["context"],
            RemoteLearner(self, "critic") if known["critic"] else None,
            self._save_adapter if known["save_adapter"] else None,
            processes=self,
        )

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """What a method of the learner's actor returns, or raises.

        Raises:
            LearnerLostError: the actor is lost, or another rank.
        """
        with self._busy.working():
            return self._learner.ask(method, *arguments, **named)

    def publish(self) -> Weights:
        """The policy's weights as they are now."""
        with self._busy.working():
            return Weights(self._learner.weights())

    def restart(self) -> None:
        """See `Processes.restart`; all ranks are started anew.

        Raises:
            LearnerLostError: one is lost again, before it has loaded the model.
        """
        self._learner.close()
        try:
            self._learner.start()
            self._learner.ready()
        except EngineError as error:
            raise LearnerLostError(str(error)) from error

    def idle(self) -> dict[str, float]:
        """See `Processes.idle`."""
        assert self._pool is not None, "there is an engine"
        return {"idle/sampler": self._pool.idle(), "idle/learner": self._busy.idle()}

    def close(self) -> None:
        """See `Processes.close`."""
        if self._pool is not None:
            self._pool.close()
        if self._room is not None:
            self._room.close()
        if self._own:
            api().shutdown()

    def _save_adapter(self, folder: Path) -> None:
        self.ask("save_adapter", folder.resolve())


def _published(weights: Any) -> Any:
    """Where samplers find weights that a learner hands over."""
    if isinstance(weights, Weights):
        return weights.content
    return api().put({name: tensor.detach().cpu() for name, tensor in weights})
