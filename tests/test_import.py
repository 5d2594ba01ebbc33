"""`groupwise import`: the run file on standard output or in a file, a note on each key on standard error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from groupwise.cli import app
from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.presets import GRPO_ROLL
from groupwise.slots import replace

ROLL = "pretrain: some/model\nadv_estimator: grpo\nnum_return_sequences_in_group: 8\nreward_norm: null\nmystery: 1\n"


def test_the_run_file_is_alone_on_standard_output_and_each_key_has_a_note(tmp_path: Path) -> None:
    (tmp_path / "roll.yaml").write_text(ROLL)
    result = CliRunner().invoke(app, ["import", "roll", str(tmp_path / "roll.yaml")])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["model"] == "some/model"
    for key in yaml.safe_load(ROLL):
        assert any(line.startswith(f"{key}: ") for line in result.stderr.splitlines())
    assert "to do: data.path: " in result.stderr


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    arguments = ["import", "trl", "loss_type=grpo", "dataset_name=rows.jsonl", "-o", str(out)]
    assert CliRunner().invoke(app, arguments).stdout == ""
    written = out.read_text()
    assert Config.load(out, ["model=some/model"]).data.path == "rows.jsonl"
    failed = CliRunner().invoke(app, arguments)
    assert isinstance(failed.exception, ConfigError)
    assert "name another file with -o" in str(failed.exception)
    assert out.read_text() == written


@pytest.mark.parametrize("arguments", [["roll", "missing.yaml"], ["trl", "a.yaml", "b.yaml"], ["trl", "loss_type=x"]])
def test_what_cannot_be_read_is_a_mistake_of_the_user(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, ["import", *arguments]).exception, ConfigError)


def test_the_page_of_roll_is_the_preset_of_its_name_and_the_clip_of_its_rewards(tmp_path: Path) -> None:
    (tmp_path / "roll.yaml").write_text(
        "use_kl_loss: true\nkl_loss_coef: 0.001\nwhiten_advantages: true\nadvantage_clip: 2.0\ndual_clip_loss: true\n"
        "adv_estimator: grpo\nreward_clip: 10\n"
    )
    result = CliRunner().invoke(app, ["import", "roll", str(tmp_path / "roll.yaml")])
    tree = yaml.safe_load(result.stdout) | {"model": "m", "data": {"path": "d"}, "group_size": 8}
    whiten = GRPO_ROLL.whiten
    assert whiten is not None
    expected = replace(GRPO_ROLL, reward_clip=10.0, whiten=replace(whiten, eps=1e-8))
    assert Config.parse(tree).algorithm == expected
