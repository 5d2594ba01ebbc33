"""Line charts as SVG, written by hand; `tools/plot.py runs/.../metrics.jsonl out.svg` draws a run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LEFT, RIGHT, TOP, BOTTOM, GAP = 640, 56, 24, 54, 40, 34
INK, GREY, RULE, BLUE, ORANGE = "#111827", "#6b7280", "#e5e7eb", "#2563a8", "#c2571a"
COLOURS = (BLUE, ORANGE, "#2f855a", "#b83280", "#6b46c1", "#b7791f", "#0f766e", "#c53030", "#4a5568", "#1a202c")
Points = Sequence[tuple[float, float]]


class Series(NamedTuple):
    """A curve: its name and its values, at 1, 2, ... or where `at` says."""

    name: str
    values: Sequence[float]
    at: Sequence[float] = ()

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.at or range(1, len(self.values) + 1), self.values, strict=True))


class Frame(NamedTuple):
    """Where a plot stands and which values it shows."""

    top: float
    height: float
    low: float
    high: float
    last: float
    """The last step."""
    right: float = WIDTH - RIGHT

    def x(self, step: float) -> float:
        return LEFT + (self.right - LEFT) * step / self.last

    def y(self, value: float) -> float:
        return self.top + self.height * (self.high - value) / (self.high - self.low)

    def rules(self, title: str, ticks: Sequence[float], unit: str = "") -> list[str]:
        """The title, and horizontal lines with their values."""
        parts = [text(LEFT, self.top - 8, title, anchor="start", weight=600, colour=INK)]
        for tick in ticks:
            y = self.y(tick)
            parts.append(f'<line x1="{LEFT}" x2="{self.right:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
            parts.append(text(LEFT - 8, y + 4, f"{tick:g}{unit}", anchor="end"))
        return parts

    def steps(self, label: str) -> list[str]:
        """The labels below."""
        below = self.top + self.height
        apart = max(1, 10 ** round(math.log10(self.last / 4)))
        parts = [text(self.x(step), below + 18, f"{step}") for step in range(0, int(self.last) + 1, apart)]
        return [*parts, text((LEFT + self.right) / 2, below + 34, label)]

    def line(self, points: Points, colour: str) -> str:
        at = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)
        return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'

    def dots(self, points: Points, colour: str) -> list[str]:
        """A dot at each point, with its value beside it."""
        parts: list[str] = []
        for step, value in points:
            x, y = self.x(step), self.y(value)
            below, anchor = (16, "start") if step < self.last / 2 else (-10, "end")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
            parts.append(text(x, y + below, f"{value:.1f}", anchor=anchor, colour=colour))
        return parts


def text(x: float, y: float, words: str, *, anchor: str = "middle", weight: int = 400, colour: str = GREY) -> str:
    """One line of text."""
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def svg(height: float, parts: Sequence[str]) -> str:
    """A whole picture, on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif"'
    back = f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>'
    return "\n".join([f'{head} font-size="12">', back, *parts, "</svg>\n"])


def nice(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`, about as many as wanted."""
    rough = max(high - low, 1e-9) / wanted
    power = 10 ** math.floor(math.log10(rough))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [round(index * apart, 10) for index in range(first, last + 1)]


def chart(title: str, curves: Sequence[Series], x_label: str = "step") -> str:
    """Curves over the steps in one plot, their names on the right in the order in which they end."""
    values = [value for curve in curves for value in curve.values]
    ticks = nice(min(values), max(values))
    last = max(curve.points[-1][0] for curve in curves)
    frame = Frame(40, 300, ticks[0], ticks[-1], last, right=WIDTH - 170)
    parts = frame.rules(title, ticks)
    coloured = [(curve, COLOURS[index % len(COLOURS)]) for index, curve in enumerate(curves)]
    parts += [frame.line(curve.points, colour) for curve, colour in coloured]
    below = frame.top
    for curve, colour in sorted(coloured, key=lambda pair: -pair[0].values[-1]):
        below = max(frame.y(curve.values[-1]) + 4, below + 15)
        parts.append(text(frame.right + 8, below, curve.name, anchor="start", colour=colour))
    return svg(max(frame.top + frame.height + BOTTOM + 6, below + 10), [*parts, *frame.steps(x_label)])


def of_run(records: Sequence[dict[str, Any]], headline: str) -> str:
    """The picture of a run whose first reward function is called `headline`."""

    def of(key: str, times: float = 1) -> list[tuple[float, float]]:
        return [(record["step"], times * record[key]) for record in records if record.get(key) is not None]

    sampled, held_out = of(f"reward/{headline}", 100), of(f"eval/{headline}", 100)
    lengths, held_out_lengths = of("completion_length"), of("eval/completion_length")
    last = max(record["step"] for record in records)
    ticks = nice(0, max(value for _, value in lengths + held_out_lengths), 2)
    upper = Frame(TOP, 136, 0, 105, last)
    lower = Frame(TOP + 136 + GAP, 136, 0, ticks[-1], last)
    parts = [
        text(WIDTH - RIGHT, 16, "● held-out prompts, greedy", anchor="end", colour=ORANGE),
        text(WIDTH - RIGHT - 190, 16, "— training prompts, sampled", anchor="end", colour=BLUE),
        *upper.rules("right answers", (0, 25, 50, 75, 100), "%"),
        upper.line(sampled, BLUE),
        *upper.dots(held_out, ORANGE),
        *lower.rules("tokens per answer", ticks),
        lower.line(lengths, BLUE),
        *lower.dots(held_out_lengths, ORANGE),
        *lower.steps("training step"),
    ]
    return svg(lower.top + lower.height + BOTTOM, parts)


if __name__ == "__main__":
    metrics, out = Path(sys.argv[1]), Path(sys.argv[2])
    lines = [json.loads(record) for record in metrics.read_text(encoding="utf-8").splitlines()]
    first = next(name for name in lines[0] if name.startswith("eval/")).removeprefix("eval/")
    out.write_text(of_run(lines, first), encoding="utf-8")
