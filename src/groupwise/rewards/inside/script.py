"""A program on its own: it reads standard input and prints."""

from __future__ import annotations

from groupwise.rewards.inside.confine import load

TYPE_CHECKING = False  # typing and collections would double the time that a sandbox takes to start
if TYPE_CHECKING:
    from typing import Any


def play(orders: dict[str, Any]) -> None:
    """Run `orders["program"]` as the main program."""
    load(orders["program"], "__main__")
