"""`groupwise diff` finds the first step and quantity at which two runs part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from toys import toy_config, toy_folder, toy_rows
from typer.testing import CliRunner

from groupwise.cli import app
from groupwise.train import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders: first, again (the same once more) and other (another seed)."""
    home = tmp_path_factory.mktemp("runs")
    toy_folder(home / "model")
    toy_rows(home / "rows.jsonl")
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        evaluation = {"data": {"path": str(home / "rows.jsonl"), "limit": 4}}
        config = toy_config(home, output=str(home / name), steps=3, seed=seed, evaluation=evaluation)
        train(config, console=Console(quiet=True))
    return home


def diff(a: Path, b: Path) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["diff", str(a), str(b)])
    return done.exit_code, done.output.splitlines()


def test_the_same_run_twice_is_the_same(runs: Path) -> None:
    assert diff(runs / "first", runs / "again") == (0, ["the runs are the same"])


def test_settings_are_named_and_the_first_token_that_differs(runs: Path) -> None:
    code, lines = diff(runs / "first", runs / "other")
    assert code == 1
    assert lines[0] == "setting seed: 1 and 2"
    assert lines[1].startswith("step 1: rollout 0 (group 0): tokens[0]: ")  # another prompt


def change_rollouts(run: Path, name: str, change: Any) -> None:
    path = run / "rollouts" / "step-00002.parquet"
    table = pq.read_table(path)
    values = table[name].to_pylist()
    values[5] = change(values[5])
    column = table.column_names.index(name)
    pq.write_table(table.set_column(column, name, [values]), path)


def change_metrics(run: Path, **values: Any) -> None:
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[2].update(values)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: change_rollouts(run, "reward", lambda _: 0.25), "step 2: rollout 5 (group 1): reward: "),
        (lambda run: change_rollouts(run, "tokens", lambda t: [*t, 7]), "step 2: rollout 5 (group 1): tokens: "),
        (lambda run: change_rollouts(run, "advantage", lambda _: 9.0), "step 2: rollout 5 (group 1): advantage: "),
        (lambda run: change_metrics(run, loss=9.0), "step 2: loss: "),
        (lambda run: change_metrics(run, step=7), "step 2: "),
    ],
)
def test_the_quantity_is_named(change: Any, said: str, runs: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(runs / "first", tmp_path / "changed"))
    change(changed)
    code, lines = diff(runs / "first", changed)
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith(said)


def test_times_do_not_count(runs: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(runs / "first", tmp_path / "changed"))
    change_metrics(changed, seconds=99.0, tokens_per_second=0.0)
    assert diff(runs / "first", changed)[0] == 0
