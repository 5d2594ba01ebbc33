"""`Finding`: one thing that is wrong with a run, why, and what to try; and the statistics that rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from groupwise.diagnosis.evidence import Array, Evidence

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""What keeps a run from learning, what may spoil it, what is good to know; the worst first."""
FEWEST = 8
"""Steps below which a trend is not told from noise."""


@dataclass(frozen=True)
class Finding:
    """What a rule has found."""

    rule: str
    severity: Severity
    title: str
    why: str
    advice: str
    """What to try."""
    evidence: str
    """The numbers that it follows from."""

    def as_dict(self) -> dict[str, str]:
        """For JSON, and for the report; `advice` is `try` there."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "title": self.title,
            "why": self.why,
            "try": self.advice,
            "evidence": self.evidence,
        }


Rule = Callable[[Evidence], Finding | None]


@dataclass(frozen=True)
class Trend:
    """The first and the last quarter of a series."""

    first: float
    last: float
    error: float
    """Standard error of their difference."""

    @property
    def rises(self) -> bool:
        """By more than two standard errors."""
        return self.last - self.first > 2 * self.error

    @property
    def text(self) -> str:
        return f"{self.first:.3g} in the first quarter of the steps, {self.last:.3g} in the last"


def trend(values: Array) -> Trend | None:
    """Where a series goes; None when it is too short to say."""
    if len(values) < FEWEST:
        return None
    quarter = len(values) // 4
    first, last = values[:quarter], values[-quarter:]
    spread = first.var(ddof=1) + last.var(ddof=1)
    return Trend(float(first.mean()), float(last.mean()), float(np.sqrt(spread / quarter)))


def correlation(a: Array, b: Array) -> float:
    """Pearson's, of centred numbers; 0 where one of them does not vary."""
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0
