"""What the measurements share: running the quickstart in a process of its own, and writing down what came out."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SMOKE = "--smoke" in sys.argv
"""Whether to run each benchmark at its smallest, to see that it runs; its figures stay out of docs/."""
DOCS = ROOT / "runs" / "smoke" if SMOKE else ROOT / "docs"


@dataclass(frozen=True)
class Measured:
    """One run of the command line in a process of its own."""

    result: dict[str, Any]
    """What `--json` printed."""
    metrics: list[dict[str, Any]]
    """The run's metrics.jsonl."""
    run: Path
    peak_mb: float
    """Largest resident memory of the process."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of training steps, without evaluations."""
        return [record for record in self.metrics if "reward" in record]

    @property
    def step_seconds(self) -> float:
        """Median duration of a training step."""
        return statistics.median(record["seconds"] for record in self.steps)


def quickstart(home: Path, *arguments: str) -> Measured:
    """`groupwise quickstart --json ARGUMENTS` in the folder `home`, where base models stay cached."""
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "groupwise.cli", "quickstart", "--json", "--quiet", *arguments]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, cwd=home, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = out.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{printed}")
    result = json.loads(printed.splitlines()[-1])
    run = home / result["run"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Measured(result, metrics, run, usage.ru_maxrss / 1024)


def machine() -> dict[str, str]:
    """Where the figures come from."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    packages = ("torch", "transformers", "trl")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "load at the start": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
        "groupwise": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
    }


def _status(name: str) -> float:
    """A size in /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def resident_mb() -> float:
    """Resident memory of this process now, from where its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def grown_mb(before: float) -> float:
    """How far resident memory has risen above `before` at its highest since `resident_mb`."""
    return _status("VmHWM") - before


def save_picture(name: str, picture: str) -> str:
    """Write `docs/benchmarks/NAME.svg`; how a page shows it."""
    (DOCS / "benchmarks").mkdir(parents=True, exist_ok=True)
    (DOCS / "benchmarks" / f"{name}.svg").write_text(picture)
    return f"![{name.replace('_', ' ')}](benchmarks/{name}.svg)"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(name: str, title: str, text: str, data: Any, where: dict[str, str]) -> None:
    """Write `docs/benchmarks/NAME.json` and the section NAME of `docs/benchmarks.md`, leaving the others alone."""
    (DOCS / "benchmarks").mkdir(parents=True, exist_ok=True)
    (DOCS / "benchmarks" / f"{name}.json").write_text(json.dumps({"machine": where, "data": data}, indent=1) + "\n")
    page = DOCS / "benchmarks.md"
    head = "# Benchmarks\n\nEvery figure here was measured by the command above it; the raw data is in `benchmarks/`.\n"
    content = page.read_text() if page.exists() else head
    measured = "Measured on " + ", ".join(f"{key} {value}" for key, value in where.items()) + "."
    command = f"```\npython -m benchmarks.{name}\n```"
    section = f"<!-- {name} -->\n\n## {title}\n\n{command}\n\n{text.strip()}\n\n{measured}\n\n<!-- end {name} -->\n"
    pattern = re.compile(rf"<!-- {name} -->.*<!-- end {name} -->\n", re.DOTALL)
    replaced, found = pattern.subn(lambda _: section, content)
    page.write_text(replaced if found else f"{content.rstrip()}\n\n{section}")
    print(text)
