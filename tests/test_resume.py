"""A run killed with SIGKILL, at any moment and as often as one likes, ends exactly as one that nobody touched."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toys import final_bytes, metrics, sampled, toy_config

STEPS = 9  # of 4 prompts: an epoch of 32 ends inside

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several updates": {"updates_per_step": 2, "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"}},
    "refreshed reference": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.05, "refresh_every": 2}}},
    "dynamic sampling": {"algorithm": {"preset": "dapo", "filter": "dynamic_sampling"}},
    "critic": {"algorithm": "ppo", "updates_per_step": 2},
    "adaptive": {"algorithm": {"baseline": "ema", "scale": "none", "entropy": {"coef": 0.01, "target": 3.0}}},
}
# For each kind, where it is killed, one attempt after the other.
KILLS: dict[str, list[tuple[str, int]]] = {
    "plain": [("evaluating", 1), ("sampling", 10), ("logged", 4), ("saving", 3), ("evaluating", 1), ("exporting", 1)],
    "several updates": [("updated", 3), ("metrics", 4), ("scoring", 1), ("saved", 1)],
    "refreshed reference": [("refreshing", 1), ("copying", 1), ("updated", 2)],
    "dynamic sampling": [("rewarded", 3), ("sampled", 4), ("rewarding", 5), ("logging", 3)],
    "critic": [("updated", 3), ("updating", 6), ("saving", 4)],
    "adaptive": [("logged", 3), ("copying", 1)],
}


def config(toys: Path, folder: Path, kind: str) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "steps": STEPS,
        "output": str(folder),
        "evaluation": {"data": {"path": str(toys / "rows.jsonl"), "limit": 4}, "every": 3},
        "checkpoint": {"every": 2, "keep_last": 2, "keep_every": 4, "keep_best": 1},
    }
    return json.loads(toy_config(toys, **shared, **KINDS[kind]).model_dump_json())


def carry_out(plan: list[dict[str, Any]], at: Path) -> list[list[str]]:
    at.write_text(json.dumps(plan))
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    assert all(end[-1] == "exit 0" for end in ends), done.stderr
    return ends


@pytest.fixture(scope="module")
def runs(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Where the runs are, whole and killed; and how each attempt of the killed ones ended."""
    home = tmp_path_factory.mktemp("runs")
    names = {kind: (home / f"{kind} whole", home / f"{kind} killed") for kind in KINDS}
    plan = []
    for kind, (whole, killed) in names.items():
        kills = [{"at": moment, "call": call} for moment, call in KILLS[kind]]
        plan.append({"config": config(toys, whole, kind), "folder": str(whole), "kills": []})
        plan.append({"config": config(toys, killed, kind), "folder": str(killed), "kills": kills})
    ends = carry_out(plan, home / "plan.json")
    return home, {kind: ends[2 * i + 1] for i, kind in enumerate(KINDS)}


def same(whole: Path, killed: Path) -> None:
    assert final_bytes(killed) == final_bytes(whole)
    assert metrics(killed, timings=False) == metrics(whole, timings=False)
    assert [sampled(killed, step) for step in range(1, STEPS + 1)] == [sampled(whole, s) for s in range(1, STEPS + 1)]
    files = [sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()) for run in (whole, killed)]
    assert files[0] == files[1]


def test_there_are_enough_moments() -> None:
    assert sum(len(kills) for kills in KILLS.values()) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_as_if_nobody_had_touched_it(kind: str, runs: tuple[Path, dict[str, list[str]]]) -> None:
    home, ends = runs
    assert ends[kind] == ["signal 9"] * len(KILLS[kind]) + ["exit 0"], "every kill took place"
    same(home / f"{kind} whole", home / f"{kind} killed")


@pytest.mark.slow
def test_so_does_one_killed_from_outside_at_random_moments(
    toys: Path, tmp_path: Path, runs: tuple[Path, dict[str, list[str]]]
) -> None:
    chance = random.Random(6)
    kills = [{"after": 0.1 + 1.5 * chance.random()} for _ in range(12)]
    folder = tmp_path / "killed"
    (ends,) = carry_out(
        [{"config": config(toys, folder, "plain"), "folder": str(folder), "kills": kills}], tmp_path / "plan.json"
    )
    assert ends.count("signal 9") >= 3
    same(runs[0] / "plain whole", folder)
