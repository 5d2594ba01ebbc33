"""The program's end of the socket: its functions, for the judge to call."""

from __future__ import annotations

from groupwise.rewards.inside.confine import PROGRAM, load
from groupwise.rewards.inside.wire import Peer, call

TYPE_CHECKING = False  # typing and collections would double the time that a sandbox takes to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _item(target: Any, key: Any) -> Any:
    return target[key]


def _put(target: Any, key: Any, value: Any) -> None:
    target[key] = value


EVERY_VERB: dict[str, Callable[..., Any]] = {
    "call": call,
    "get": getattr,
    "set": setattr,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "iter": iter,
    "next": next,
    "item": _item,
    "put": _put,
}


def play(orders: dict[str, Any]) -> None:
    """Load the program and do what the judge asks until it hangs up; a program that cannot be loaded is the end."""
    peer = Peer(orders["socket"], EVERY_VERB, trusts=True)
    module = load(orders["program"], PROGRAM)
    peer.shown.append(module)
    peer.send("done", None)
    while True:
        _, *said = peer.receive()
        peer.answer(*said)
