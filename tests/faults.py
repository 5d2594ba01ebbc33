"""Reward functions that go wrong in every way there is, as the completion asks them to; workers import this file."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from toy_reward import starts_low

from groupwise.records import Rollout

LEAKED: list[bytes] = []


def endless() -> None:
    while True:
        pass


def family() -> None:
    """Two processes below this one, of which one is in a session of its own; then for ever."""
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    endless()


def ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def grow() -> None:
    kept: list[bytes] = []
    while True:
        kept.append(bytes(1 << 24))


def raise_value_error() -> None:
    raise ValueError("no such answer")


ACTS: dict[str, Any] = {
    "raise": raise_value_error,
    "sys.exit": sys.exit,
    "recurse": lambda: ACTS["recurse"](),
    "grow": grow,
    "endless": endless,
    "sleep": lambda: time.sleep(1000),
    "power": lambda: 9**9**9,
    "regex": lambda: re.fullmatch(r"(a+)+b", "a" * 60),
    "stop itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ignore signals": ignore_signals,
    "family": family,
    "exit": lambda: os._exit(3),
    "kill itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
}
RETURNS: dict[str, Any] = {
    "none": None,
    "nan": math.nan,
    "inf": math.inf,
    "huge": 10**400,
    "text": "1.0",
    "dict": {"a": 1.0},
    "list": [1.0],
    "complex": 1j,
}


def judge_text(text: str) -> Any:
    if text in ACTS:
        ACTS[text]()
    return RETURNS.get(text, float(len(text)))


def judge(rollout: Rollout) -> Any:
    return judge_text(rollout.text)


async def judge_async(rollout: Rollout) -> Any:
    if rollout.text == "sleep":
        await asyncio.sleep(1000)
    await asyncio.sleep(0.2)
    return judge_text(rollout.text)


def judge_all(completions: list[str], **columns: Any) -> list[Any]:
    return [judge_text(text) for text in completions]


def drops_some(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions if text != "drop"]


def process(rollout: Rollout) -> float:
    return float(os.getpid())


def leaks(rollout: Rollout) -> float:
    LEAKED.append(b"x" * (30 << 20))
    return float(os.getpid())


def knows_torch(rollout: Rollout) -> float:
    return float("torch" in sys.modules)


def fails_once(rollout: Rollout) -> float:
    """Raises until the file that the completion names is there."""
    file = Path(rollout.text)
    if not file.exists():
        file.touch()
        raise ConnectionError("try again")
    return 1.0


def chance(text: str) -> float:
    """A number in [0, 1) that the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def starts_low_but_fails(rollout: Rollout) -> float:
    """The reward of the toy task, of which 10 % of the calls raise, 5 % hang and 2 % kill their worker."""
    dice = chance(rollout.text + rollout.example["prompt"])
    if dice < 0.10:
        raise ValueError("a fault")
    if dice < 0.15:
        time.sleep(1000)
    if dice < 0.17:
        os._exit(1)
    return starts_low(rollout)
