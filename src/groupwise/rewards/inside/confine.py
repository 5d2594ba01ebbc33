"""The first thing inside: put on the limits, and say so."""

from __future__ import annotations

import builtins
import os
import resource
import sys
import types

TYPE_CHECKING = False  # typing and collections would double the time that a sandbox takes to start
if TYPE_CHECKING:
    from typing import Any

NOBODY = 65534
PROGRAM = "program"
"""What the program is called as a module."""


def confine(orders: dict[str, Any], receipt: int) -> None:
    """Limit this process, drop root, and empty the file `receipt` as the proof of it.

    Only standard input, output and error and `orders["socket"]` stay open.
    """
    for name, (soft, hard) in orders["limits"].items():
        limit = getattr(resource, name)
        most = resource.getrlimit(limit)[1]
        # A limit that is lower already stays: hard limits cannot be raised.
        fits = [value if most == resource.RLIM_INFINITY else min(value, most) for value in (soft, hard)]
        resource.setrlimit(limit, (fits[0], fits[1]))
    if orders["as_nobody"]:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.set_blocking(orders["leash"], False)
    try:
        os.read(orders["leash"], 1)
        os._exit(1)  # the other end is closed: the trainer died before its death could reach us
    except BlockingIOError:
        os.ftruncate(receipt, 0)
    first = 3
    for kept in (orders.get("socket", 2), 1 << 20):  # bubblewrap leaves a pipe of its own open
        os.closerange(first, kept)
        first = kept + 1


def load(source: str, name: str) -> types.ModuleType:
    """The module of this name that the source makes; whatever the source raises passes through."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["program.py"]
    for leave in ("exit", "quit"):  # which Python's `site` would have made
        setattr(builtins, leave, sys.exit)
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module
