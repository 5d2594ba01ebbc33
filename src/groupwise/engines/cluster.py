"""What we ask of Ray: a cluster, room for actors in it, and plain words about those that are lost."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Generator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from groupwise.errors import ConfigError, EngineError

STORE_BYTES = 2 * 2**30
"""Shared memory of a local cluster, for weights and batches; what does not fit is spilled to disk."""
CONNECT_SECONDS = 10.0
"""How long a cluster may take to answer."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor without a GPU is not told that there is none
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # we say so ourselves, and not on standard output
}


def api() -> Any:
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


def connect(address: str | None, cpus: int) -> bool:
    """Connect to a cluster, unless that was done; whether it is one of this run's own.

    Raises:
        ConfigError: there is none at this address.
    """
    ray = api()
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


def own_address() -> str:
    """Where the other machines of the cluster reach this one."""
    return api().util.get_node_ip_address()


class Room:
    """A place in the cluster for each actor of a run, kept as long as the run lasts."""

    def __init__(self, count: int, each: Mapping[str, float], patience: float, *, grows: bool, wanted: str) -> None:
        """
        Args:
            count: how many actors there will be.
            each: what one of them takes: `CPU`, and `GPU` where it needs one.
            patience: seconds to wait until others leave room.
            grows: whether there may be more machines later.
            wanted: which setting asks for how much, for the message.

        Raises:
            ConfigError: there is not so much room.
        """
        ray, self._each = api(), dict(each)
        self._group = ray.util.placement_group([self._each] * count, strategy="PACK")
        whole = ray.cluster_resources()
        fits = all(whole.get(name, 0) >= amount * count for name, amount in each.items())
        if self._group.wait(patience if fits or grows else 0):
            return
        self.close()
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
        there = ", ".join(f"{whole.get(name, 0):g} {name}" for name in each)
        raise ConfigError(
            f"{wanted} of {amounts} each found no room within {patience:g} s; the cluster has {there} in all, and "
            "others may use it: lower samplers, engine.threads or gpus, or add machines"
        )

    def actor(self, kind: type, number: int, *arguments: Any) -> Any:
        """An actor of this class in one of the places, made with these arguments."""
        ray = api()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, number)
        options = {"num_cpus": self._each["CPU"], "num_gpus": self._each.get("GPU", 0)}
        return ray.remote(kind).options(**options, scheduling_strategy=strategy).remote(*arguments)

    def close(self) -> None:
        """Give it up, which ends the actors in it."""
        api().util.remove_placement_group(self._group)


def once_loaded(titles: Sequence[str], actors: Sequence[Any], patience: float) -> list[str]:
    """Where actors are, as `TITLE (pid 7 on HOST)`, once all have loaded the model.

    Raises:
        EngineError: one died, or takes too long.
    """
    ray, names = api(), dict[str, str]()
    waiting = {actor.where.remote(): title for title, actor in zip(titles, actors, strict=True)}
    while waiting:  # whoever is first: one that died may be what the others wait for
        done, _ = ray.wait(list(waiting), timeout=patience)
        if not done:
            who = ", ".join(waiting.values())
            raise EngineError(f"{who} has not loaded its model within engine.placement.patience_seconds: {patience:g}")
        title = waiting.pop(done[0])
        try:
            names[title] = f"{title} ({ray.get(done[0])})"
        except ray.exceptions.RayActorError as error:
            reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
            raise EngineError(f"{title} cannot be started: {reason}") from error
    return [names[title] for title in titles]


@contextlib.contextmanager
def speaking(who: str, lost: type[EngineError] = EngineError) -> Generator[None]:
    """What our code raised over there is raised here as it was; what Ray says is that an actor is lost."""
    exceptions = api().exceptions
    try:
        yield
    except exceptions.RayTaskError as error:
        cause = error.cause
        raise (lost(str(cause)) if isinstance(cause, EngineError) else cause) from error
    except exceptions.RayActorError as error:
        raise lost(f"{who} died: it was killed, ran out of memory, or its machine was lost") from error
    except exceptions.RayError as error:
        raise lost(f"{who} is lost: {str(error).splitlines()[0]}") from error
