"""`docs/extending.md` is true: what it says makes a surrogate, in two files, and the laws hold for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")

# Runs in a process of its own, where `groupwise` is the edited copy.
SCRIPT = """
import json, torch
from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.explain import equations, worked_example
from groupwise.losses import Clip
from groupwise.records import Rollout
from groupwise.slots import replace
import numpy as np

LEAST = {"model": "m", "data": {"path": "r.jsonl"}, "rewards": ["math_answer"]}
def algorithm(surrogate):
    return Config.parse({**LEAST, "algorithm": {"preset": "dr_grpo", "surrogate": surrogate}}).algorithm.resolve(8)
def pushes(a):
    return [worked.push.tolist() for worked in worked_example(a)]

parabola = algorithm({"type": "parabola", "width": 0.3})
try:
    algorithm({"type": "parabola", "widht": 0.3})
except ConfigError as error:
    said = str(error)

def rollout(reward, tokens=4):
    return Rollout(tokens=np.arange(tokens, dtype=np.int32), loss_mask=np.ones(tokens, dtype=bool), group=0,
                   logprobs=np.full(tokens, -1.0), old_logprobs=np.full(tokens, -1.0), reward=reward)
batch = next(parabola.batches(parabola.credit([rollout(1.0), rollout(0.0)]), dtype=torch.float64))
logprobs = batch.old_logprobs.clone().requires_grad_()
optimizer = torch.optim.SGD([logprobs], lr=1.0)
for _ in range(500):
    optimizer.zero_grad()
    loss, metrics = parabola.loss(logprobs, torch.zeros_like(logprobs), batch)
    loss.backward()
    optimizer.step()
print(json.dumps({
    "formula": dict(equations(parabola))["Φ"],
    "typo": said,
    "pushes": pushes(parabola),
    "pushes of clip": pushes(replace(parabola, surrogate=Clip())),
    "pushes of mine.py": pushes(algorithm("mine.py:parabola")),
    "ratios": (logprobs.detach() - batch.old_logprobs).exp().tolist(),
    "logged": sorted(metrics),
    "shape": list(parabola.surrogate(parabola.inputs(logprobs, torch.zeros_like(logprobs), batch))[0].shape),
}))
"""


def edits() -> list[tuple[str, str, str]]:
    """(file, start of the line to insert before, code) of each edit that the page describes."""
    found = re.findall(r"<!-- (\S+), before:\s*(.*?) -->\n```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    return [(file, before, code + ("\n\n" if kind == "python" else "")) for file, before, kind, code in found]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SCRIPT finds out in a copy of the package with the edits of the page."""
    home = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file, before, code in edits():
        lines = (home / file).read_text(encoding="utf-8").splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.lstrip().startswith(before)]
        assert len(places) == 1, f"{file} has {len(places)} lines that start with {before!r}"
        lines.insert(places[0], code)
        (home / file).write_text("".join(lines), encoding="utf-8")
    mine = re.search(r"```python\n(# mine\.py\n.*?)```", PAGE, re.DOTALL)
    assert mine is not None
    (home / "mine.py").write_text(mine[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_surrogate_touches_at_most_two_files() -> None:
    assert {file for file, _, _ in edits()} == {"src/groupwise/losses.py", "src/groupwise/formula.py"}


def test_the_documented_surrogate_is_a_setting_with_errors_and_a_formula(result: dict[str, Any]) -> None:
    assert result["formula"] == "ρ A − |A| (ρ − 1)² / 0.6"
    assert "algorithm.surrogate.widht: no such setting (did you mean width?)" in result["typo"]


def test_the_documented_surrogate_keeps_the_laws(result: dict[str, Any]) -> None:
    assert result["shape"] == [2, 4]  # it maps tokens to tokens
    for own, clip in zip(result["pushes"], result["pushes of clip"], strict=True):
        assert own == pytest.approx(clip, rel=1e-12)  # on-policy, every surrogate has the same gradient


def test_the_documented_function_does_the_same_as_the_member(result: dict[str, Any]) -> None:
    for own, function in zip(result["pushes"], result["pushes of mine.py"], strict=True):
        assert own == pytest.approx(function, rel=1e-12)


def test_training_with_the_documented_surrogate_ends_where_its_formula_says(result: dict[str, Any]) -> None:
    better, worse = result["ratios"]
    assert better == pytest.approx([1.3] * 4, rel=1e-6)  # the maximum of the parabola for A > 0 is at 1 + width
    assert worse == pytest.approx([0.7] * 4, rel=1e-6)
    assert "beyond_width" in result["logged"]


def test_contributing_links_the_worked_example() -> None:
    assert "docs/extending.md" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
