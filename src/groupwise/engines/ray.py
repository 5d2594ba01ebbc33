"""Ray: samplers and the learner as actors, on this machine or on a cluster; the loop stays in the process that asked.

    driver: the loop, rewards, checkpoints, log
      |- learner actor     the policy that is trained, its reference, the critic; puts weights into the object store
      `- sampler actors    a copy of the policy each; newer weights are taken over with the groups to sample

Rewards stay with the driver: their worker processes have limits of time and memory there, and need no model.
A sampler that dies is started anew, and others sample its groups (`engines/pool.py`).  When the learner dies, so does
the state since the last checkpoint: its actor is started anew, and `train` continues from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYetError
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from groupwise.demands import Demands, Remarks
from groupwise.engines import Completion, LossFn, Request, Sampling, Snapshot, ValueLossFn
from groupwise.engines.actors import LearnerActor, SamplerActor
from groupwise.engines.local import LocalEngine, Recipe
from groupwise.engines.pool import Pool, Published
from groupwise.errors import ConfigError, EngineError, LearnerLostError
from groupwise.records import Batch
from groupwise.slots import Slot, loaded_files

LOG = logging.getLogger(__name__)
STORE_BYTES = 2 * 2**30
"""Shared memory of a local cluster, for weights and batches; what does not fit is spilled to disk."""
CONNECT_SECONDS = 10.0
"""How long a cluster may take to answer."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor without a GPU is not told that there is none
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # we say so ourselves, and not on standard output
}


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
        with _speaking("the object store"):
            return iter(_ray().get(self.content).items())


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
        self.name = f"{self._title} ({_started(self._title, self._actor, self._patience)})"

    def sample(self, requests: Sequence[Request], sampling: Sampling, weights: Published) -> list[list[Completion]]:
        """See `Member.sample`."""
        ask = partial(self._actor.sample.remote, requests, sampling, weights.version, weights.number)
        with _speaking(self.name):
            return _ray().get(ask(weights.content))

    def close(self) -> None:
        """See `Member.close`."""
        _ray().kill(self._actor)


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


class Actors:
    """The actors of a run.  See `groupwise.engines.Processes`."""

    def __init__(self, settings: Ray, recipe: Recipe) -> None:
        ray, count, cores = _ray(), settings.samplers + 1, os.cpu_count() or 1
        self._settings, self._recipe, self.restarts = settings, recipe, settings.learner_restarts
        # Beside each other on one machine, they share its cores.
        self._threads = recipe.threads if settings.address else max(1, min(recipe.threads, cores // count))
        self._own = _connect(settings.address, max(cores, count * self._threads))
        self._lock, self._busy, self._since = threading.Lock(), 0.0, time.monotonic()
        for name in loaded_files():  # what the user wrote is not installed where the actors are
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
        self._group: Any = None
        self._pool: Pool | None = None
        try:
            self._group = self._room(count)
            self._learner = self._actor(LearnerActor, 0)
            self._samplers = [
                RemoteSampler(i, partial(self._actor, SamplerActor, i), settings.patience_seconds)
                for i in range(1, count)
            ]
            self._name = self._ready()
            for sampler in self._samplers:
                sampler.ready()
        except BaseException:
            self.close()
            raise

    def engine(self) -> LocalEngine:
        """What the loop works with."""
        known = self.ask("known")
        self._pool = Pool(self._samplers, patience=self._settings.patience_seconds, publish=_published)
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
            LearnerLostError: the actor is lost.
        """
        began = time.monotonic()
        try:
            doing = str(arguments[1]) if method == "call" else method
            return self._wait(getattr(self._learner, method).remote(*arguments, **named), doing)
        finally:
            with self._lock:
                self._busy += time.monotonic() - max(began, self._since)

    def publish(self) -> Weights:
        """The policy's weights as they are now."""
        well, content = self._learner.weights.options(num_returns=2).remote()
        self._wait(well, "weights")  # a sampler that fetched them from a learner that died would seem to be at fault
        return Weights(content)

    def restart(self) -> None:
        """See `Processes.restart`."""
        _ray().kill(self._learner)
        self._learner = self._actor(LearnerActor, 0)
        self._name = self._ready()

    def idle(self) -> dict[str, float]:
        """See `Processes.idle`."""
        assert self._pool is not None, "there is an engine"
        with self._lock:
            now = time.monotonic()
            learner = 1 - self._busy / max(now - self._since, 1e-9)
            self._busy, self._since = 0.0, now
        return {"idle/sampler": self._pool.idle(), "idle/learner": min(max(learner, 0.0), 1.0)}

    def close(self) -> None:
        """See `Processes.close`."""
        ray = _ray()
        if self._pool is not None:
            self._pool.close()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)  # kills the actors in it
        if self._own:
            ray.shutdown()

    def _save_adapter(self, folder: Path) -> None:
        self.ask("save_adapter", folder.resolve())

    def _room(self, count: int) -> Any:
        """A place for each actor, kept while the run lasts."""
        ray, patience = _ray(), self._settings.patience_seconds
        each = {"CPU": float(self._threads), **({"GPU": self._settings.gpus} if self._recipe.gpu else {})}
        group = ray.util.placement_group([each] * count, strategy="PACK")
        whole = ray.cluster_resources()
        fits = all(whole.get(name, 0) >= amount * count for name, amount in each.items())
        if group.wait(patience if fits or not self._own else 0):  # a cluster of this machine alone does not grow
            return group
        ray.util.remove_placement_group(group)
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
        there = ", ".join(f"{whole.get(name, 0):g} {name}" for name in each)
        raise ConfigError(
            f"engine.placement.samplers: {self._settings.samplers}; a learner and so many samplers of {wanted} each "
            f"found no room within {patience:g} s; the cluster has {there} in all, and others may use it: lower "
            "samplers, engine.threads or gpus, or add machines"
        )

    def _actor(self, kind: type, place: int) -> Any:
        ray = _ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, place)
        gpus = self._settings.gpus if self._recipe.gpu else 0
        options = {"num_cpus": self._threads, "num_gpus": gpus, "scheduling_strategy": strategy}
        return ray.remote(kind).options(**options).remote(self._recipe, self._threads)

    def _ready(self) -> str:
        return f"the learner ({_started('the learner', self._learner, self._settings.patience_seconds)})"

    def _wait(self, reference: Any, doing: str) -> Any:
        """The result, by way of a future of Python's: a signal would be lost inside of Ray."""
        future, began = reference.future(), time.monotonic()
        while True:
            try:
                with _speaking(self._name, LearnerLostError):
                    return future.result(self._settings.patience_seconds)
            except NotYetError:
                LOG.warning("the run waits since %.0f s for %s: %s", time.monotonic() - began, self._name, doing)


def _ray() -> Any:
    """Ray, told to be quiet.

    Raises:
        ConfigError: it is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if find_spec("ray") is None:
        raise ConfigError(
            'engine.placement: ray; needs Ray, which is not installed; install it with: pip install "groupwise[ray]", '
            "or set engine.placement: local"
        )
    import ray

    return ray


def _connect(address: str | None, cpus: int) -> bool:
    """Connect to a cluster, unless that was done; whether it is one of this run's own.

    Raises:
        ConfigError: there is none at this address.
    """
    ray = _ray()
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address is None:
        if not any(name.startswith("RAY_AUTH") for name in os.environ):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)  # else Ray leaves one in the home directory
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        return True
    try:
        if address != "auto":  # Ray would try for minutes, deaf to signals
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address, **quiet)
    except (OSError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"engine.placement.address: {address}; no cluster answers there ({str(error).splitlines()[0]}); accepted: "
            "auto on a machine of one, HOST:PORT, or null to start one here; start one with `ray start --head`"
        ) from error
    return True


def _published(weights: Any) -> Any:
    """Where samplers find weights that a learner hands over."""
    if isinstance(weights, Weights):
        return weights.content
    return _ray().put({name: tensor.detach().cpu() for name, tensor in weights})


def _started(title: str, actor: Any, patience: float) -> str:
    """Where an actor is, once it has loaded the model.

    Raises:
        EngineError: it died, or takes too long.
    """
    exceptions = _ray().exceptions
    try:
        return _ray().get(actor.where.remote(), timeout=patience)
    except exceptions.GetTimeoutError as error:
        raise EngineError(
            f"{title} has not loaded its model within engine.placement.patience_seconds: {patience:g}"
        ) from error
    except exceptions.RayActorError as error:
        reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        raise EngineError(f"{title} cannot be started: {reason}") from error


@contextlib.contextmanager
def _speaking(who: str, lost: type[EngineError] = EngineError) -> Generator[None]:
    """What our code raised over there is raised here as it was; what Ray says is that an actor is lost."""
    exceptions = _ray().exceptions
    try:
        yield
    except exceptions.RayTaskError as error:
        raise error.cause from error
    except exceptions.RayActorError as error:
        raise lost(f"{who} died: it was killed, ran out of memory, or its machine was lost") from error
    except exceptions.RayError as error:
        raise lost(f"{who} is lost: {str(error).splitlines()[0]}") from error
