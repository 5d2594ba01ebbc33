"""How processes that train one model find each other: what their environment says, a store, and a device for each."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed

from groupwise.errors import ConfigError

STORES = cast(Any, distributed)
"""Where torch has its stores, unknown to type checkers."""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""What the environment of a process says that has nobody to meet, and what it means when it says nothing."""


class Meeting:
    """Where ranks find each other, as long as this object lives.

    It is in the process that starts them, so that they can still say who is lost when any of them is."""

    def __init__(self, host: str, size: int) -> None:
        """
        Args:
            host: the address at which the ranks reach this process.
            size: how many of them there are.
        """
        self._store = STORES.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._shared = {"MASTER_ADDR": host, "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(size)}
        self._shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def place(self, rank: int, device: int) -> dict[str, str]:
        """What a rank has in its environment; `device` is the number of its GPU among those that it sees."""
        return {**self._shared, "RANK": str(rank), "LOCAL_RANK": str(device)}


def started() -> int:
    """As how many processes somebody has started this program; 0 when nobody says."""
    return int(os.environ.get("WORLD_SIZE", 0))


def check_alone(setting: str, way_out: str) -> None:
    """Look that this program was started once, for there is nobody to meet.

    Raises:
        ConfigError: it was not, and all would train the same.
    """
    if (size := started()) > 1:
        raise ConfigError(
            f"{setting}; this program was started as {size} processes, each of which would train the same: {way_out}"
        )


def place() -> tuple[int, int, int]:
    """This process's rank, how many there are, and which of the devices that it sees is its own."""
    rank, size, device = (int(os.environ.get(name, usual)) for name, usual in ALONE.items())
    return rank, size, device


def own_device(device: str, number: int) -> torch.device:
    """The device of this rank, which from now on is torch's current one.

    Args:
        device: as in `engine.device`.
        number: which GPU of those that this process sees is its own.

    Raises:
        ConfigError: it is not there, or `device` names one for all ranks.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"engine.device: {device}; with engine.learner: fsdp each rank takes its own; use auto, cuda or cpu"
        )
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.learner: fsdp; rank {number} of this machine finds {torch.cuda.device_count()} GPUs: start at "
            "most as many ranks, or set engine.device: cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def open_store(rank: int, size: int, timeout: timedelta) -> Any:
    """The store that all ranks share."""
    if size == 1:
        return STORES.HashStore()
    # torchrun keeps its store when it restarts the ranks, and with it the addresses of those that have died.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = STORES.TCPStore(address, port, is_master=rank == 0 and not hosted, timeout=timeout)
    return STORES.PrefixStore(f"attempt-{attempt}", store)
