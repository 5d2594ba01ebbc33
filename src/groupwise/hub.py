"""The Hugging Face hub, asked in a way that fails at once on a machine that cannot reach it."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Generator
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

PATIENCE = 3.0
"""Seconds to wait for the hub to answer at all."""


@contextlib.contextmanager
def asked_once() -> Generator[None]:
    """Inside, what is cached serves and nothing else, unless the hub can be reached.

    Its libraries would otherwise try six times over half a minute before they say that a name is wrong.
    """
    with contextlib.nullcontext() if constants.HF_HUB_OFFLINE or reachable() else offline():
        yield


@contextlib.contextmanager
def offline() -> Generator[None]:
    """Inside, the hub is asked nothing."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@functools.cache
def reachable() -> bool:
    """Whether the hub takes a connection; behind a proxy that is for the proxy to find out."""
    if getproxies():
        return True
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), PATIENCE).close()
    except OSError:
        return False
    return True
