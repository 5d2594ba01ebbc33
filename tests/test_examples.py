"""Every example runs as it stands, on what the quickstart would leave."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from groupwise.arithmetic import Recipe, build_base_model, problems
from groupwise.cautions import cautions
from groupwise.config import Config

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
SMALL = Recipe(layers=1, hidden=32, intermediate=32, heads=2, steps=2, batch=4)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quickstart leaves, with a smaller model."""
    root = tmp_path_factory.mktemp("quickstart")
    build_base_model(root / "runs/base-models/seed-0", 0, recipe=SMALL)
    data = root / "runs/data/seed-0"
    data.mkdir(parents=True)
    for name, split in (("train", "train"), ("held_out", "test")):
        rows = problems(0, split, 64)  # type: ignore[arg-type]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_an_example_runs_on_what_the_quickstart_left(
    script: Path, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [left / "runs/base-models/seed-0", left / "runs/data/seed-0/train.jsonl"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, paths)])
    runpy.run_path(str(script), run_name="__main__")
    named = capsys.readouterr().out
    monkeypatch.chdir(left)
    assert all(f'"{path.relative_to(left)}"' in script.read_text() for path in paths), "these are its defaults"
    if script.stem == "own_loop":
        assert named.count("trained on 64 of 128") == 5
        return
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == (2 if script.stem == "custom_algorithm" else 1)
    for run in runs:
        assert run.name in named
        assert (run / "model" / "config.json").is_file()


def test_the_scripts_are_the_ones_that_are_known() -> None:
    assert {script.stem for script in SCRIPTS} == {"five_lines", "custom_reward", "custom_algorithm", "own_loop"}


FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_run_file_means_something_and_nothing_in_it_is_without_effect(
    file: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(left)
    config = Config.load(file)
    assert cautions(config) == []
    assert Config.parse(yaml.safe_load(config.to_yaml())) == config
    assert Path(config.model).is_dir()
    assert Path(config.data.path).is_file()
    assert config.evaluation.data is None or Path(config.evaluation.data.path).is_file()


def test_the_functions_of_an_example_fit_into_a_run_file() -> None:
    code = f"{EXAMPLES / 'custom_reward.py'}"
    rewards = f"[math_answer, {{use: '{code}:brevity', weight: 0.1}}, '{code}:right_length']"
    mine = f"{EXAMPLES / 'custom_algorithm.py'}:soft_clip"
    config = Config.load(EXAMPLES / "run.yaml", [f"rewards={rewards}", f"algorithm.surrogate={mine}"])
    assert [reward.title for reward in config.rewards] == ["math_answer", "brevity", "right_length"]
    assert config.algorithm.surrogate.__name__ == "soft_clip"  # type: ignore[attr-defined]
    assert Config.parse(yaml.safe_load(config.to_yaml())) == config
