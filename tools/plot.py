"""Draws accuracy and completion length of a run as SVG: tools/plot.py runs/.../metrics.jsonl out.svg."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, GAP = 640, 400, 56, 24, 54, 40, 34
PANEL = (HEIGHT - TOP - BOTTOM - GAP) / 2
Points = list[tuple[float, float]]
BLUE, ORANGE, GREY = "#2563a8", "#c2571a", "#6b7280"


def series(records: Sequence[dict[str, Any]], key: str) -> Points:
    """(step, value) wherever a run has the metric."""
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def panel(top: float, title: str, low: float, high: float, ticks: Sequence[float], unit: str) -> list[str]:
    """The frame of a plot: title and horizontal lines with their values."""
    parts = [text(LEFT, top - 8, title, anchor="start", weight="600", colour="#111827")]
    for tick in ticks:
        y = top + PANEL * (high - tick) / (high - low)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:g}{unit}", anchor="end"))
    return parts


def place(step: float, last: float) -> float:
    """The x of a step."""
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last


def line(points: Points, top: float, low: float, high: float, last: float, colour: str) -> str:
    """A polyline through the points."""
    at = " ".join(f"{place(x, last):.1f},{top + PANEL * (high - y) / (high - low):.1f}" for x, y in points)
    return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'


def dots(points: Points, top: float, low: float, high: float, last: float, colour: str) -> list[str]:
    """A dot at each point, with its value beside it."""
    parts: list[str] = []
    for x, y in points:
        cx, cy = place(x, last), top + PANEL * (high - y) / (high - low)
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4.5" fill="{colour}"/>')
        below, anchor = (16, "start") if x < last / 2 else (-10, "end")
        parts.append(text(cx, cy + below, f"{y:.1f}", anchor=anchor, colour=colour))
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "middle", weight: str = "400", colour: str = GREY) -> str:
    """One line of text."""
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def draw(records: Sequence[dict[str, Any]], headline: str) -> str:
    """The picture of a run whose first reward function is called `headline`."""
    last = max(record["step"] for record in records)
    sampled = [(step, 100 * value) for step, value in series(records, f"reward/{headline}")]
    held_out = [(step, 100 * value) for step, value in series(records, f"eval/{headline}")]
    lengths, held_out_lengths = series(records, "completion_length"), series(records, "eval/completion_length")
    longest = 10 * (int(max(value for _, value in lengths + held_out_lengths) / 10) + 1)
    second = TOP + PANEL + GAP
    parts = panel(TOP, "right answers", 0, 105, (0, 25, 50, 75, 100), "%")
    parts += [line(sampled, TOP, 0, 105, last, BLUE), *dots(held_out, TOP, 0, 105, last, ORANGE)]
    parts += panel(second, "tokens per answer", 0, longest, range(0, longest + 1, longest // 2), "")
    parts += [line(lengths, second, 0, longest, last, BLUE), *dots(held_out_lengths, second, 0, longest, last, ORANGE)]
    parts += [text(place(step, last), HEIGHT - BOTTOM + 18, str(step)) for step in range(0, int(last) + 1, 10)]
    parts += [
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "training step"),
        text(WIDTH - RIGHT, 16, "● held-out prompts, greedy", anchor="end", colour=ORANGE),
        text(WIDTH - RIGHT - 190, 16, "— training prompts, sampled", anchor="end", colour=BLUE),
    ]
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    metrics, out = Path(sys.argv[1]), Path(sys.argv[2])
    lines = [json.loads(record) for record in metrics.read_text(encoding="utf-8").splitlines()]
    first = next(name for name in lines[0] if name.startswith("eval/")).removeprefix("eval/")
    out.write_text(draw(lines, first), encoding="utf-8")
