"""Settings: read from anywhere, strict, written back equal, and wrong ones explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from groupwise.cautions import cautions
from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.losses import Cispo, Clip
from groupwise.presets import DAPO, PRESETS
from groupwise.schema import reference
from groupwise.slots import replace
from groupwise.trees import read_yaml

TREE: dict[str, Any] = {"model": "some/model", "data": {"path": "rows.jsonl"}, "rewards": ["math_answer"]}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: some/model\ndata: {path: rows.jsonl}\n"
        "rewards: [math_answer, {type: format, weight: 0.2}]\nalgorithm: dapo\noptimizer: {learning_rate: 1e-5}\n"
    )
    return file


def test_overrides_lie_over_the_file_and_reach_into_presets_and_lists(run_file: Path) -> None:
    config = Config.load(run_file, ["algorithm.surrogate.high=0.3", "rewards.1.weight=2", "steps=3"])
    assert config.algorithm == replace(DAPO, surrogate=Clip(low=0.2, high=0.3))
    assert config.rewards[1].weight == 2
    assert config.optimizer.learning_rate == 1e-5


def test_a_member_of_another_type_replaces_the_one_of_the_preset() -> None:
    config = Config.parse({**TREE, "algorithm": {"preset": "dapo", "surrogate": {"type": "cispo", "cap": 4.0}}})
    assert config.algorithm.surrogate == Cispo(cap=4.0)
    assert Config.parse({**TREE, "algorithm": {"preset": "dapo", "surrogate": "cispo"}}).algorithm.surrogate == Cispo()
    assert Config.parse({**TREE, "algorithm": {"preset": "grpo", "kl": None}}).algorithm.kl is None


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_what_is_written_reads_back_equal(name: str) -> None:
    config = Config.parse({**TREE, "algorithm": name}).resolve()
    assert Config.parse(yaml.safe_load(config.to_yaml())) == config


def test_every_slot_that_may_be_empty_may_be_none() -> None:
    tree = {"preset": "ppo", "kl": "none", "whiten": "none", "critic": "none", "credit_over_time": "return_to_go"}
    algorithm = Config.parse({**TREE, "algorithm": tree}).algorithm
    assert (algorithm.kl, algorithm.whiten, algorithm.critic) == (None, None, None)
    assert Config.parse({**TREE, "output": "none"}).output == "none"  # a word where words are settings


def test_code_in_a_slot_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def surrogate(x):\n    return -x.log_ratio.exp() * x.advantages, {}\n")
    config = Config.parse({**TREE, "algorithm": {"surrogate": f"{tmp_path / 'mine.py'}:surrogate"}})
    assert Config.parse(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize("code", ["raise KeyError('key')", "undefined_name", "import nowhere_to_be_found", "def ("])
def test_a_file_that_fails_to_load_is_the_users_to_mend(tmp_path: Path, code: str) -> None:
    (tmp_path / "broken.py").write_text(f"{code}\n")
    with pytest.raises(ConfigError, match=r"broken\.py:f cannot be imported: .+; write package"):
        Config.parse({**TREE, "rewards": f"{tmp_path / 'broken.py'}:f"})


def test_what_has_no_effect_is_said() -> None:
    kimi = Config.parse({**TREE, "algorithm": "kimi_k15"})
    assert any("algorithm.kl.to: old" in caution for caution in cautions(kimi))
    assert not cautions(Config.parse({**TREE, "algorithm": "kimi_k15", "updates_per_step": 2}))
    several = Config.parse({**TREE, "evaluation": {"data": {"path": "x"}, "samples": 4}})
    assert any("evaluation.samples" in caution for caution in cautions(several))


def test_a_group_of_one_needs_a_baseline_from_elsewhere_and_no_spread_of_its_own() -> None:
    alone = {**TREE, "group_size": 1}
    assert Config.parse({**alone, "algorithm": "reinforce"}).group_size == 1
    assert Config.parse({**alone, "algorithm": {"baseline": "ema", "scale": "none"}}).group_size == 1
    with pytest.raises(ConfigError, match=r"no spread to divide by: set algorithm\.scale: none"):
        Config.parse({**alone, "algorithm": {"baseline": "ema"}})


def test_lengths_left_open_are_resolved() -> None:
    config = Config.parse({**TREE, "algorithm": "dr_grpo", "sampling": {"max_tokens": 77}}).resolve()
    assert config.algorithm.aggregate.length == 77  # type: ignore[attr-defined]
    assert Config.parse({**TREE, "algorithm": "dapo"}).resolve().algorithm.shaping.limit == 256  # type: ignore[union-attr]


WRONG = {  # override -> what the message must say
    "stepz=3": "stepz: no such setting (did you mean steps?); accepted: model, data",
    "algorithm.surrogate.clip_hihg=3": "algorithm.surrogate.clip_hihg: no such setting (did you mean high?)",
    "optimizer.lerning_rate=1": "optimizer.lerning_rate: no such setting (did you mean learning_rate?)",
    "algorithm=dap": "algorithm: 'dap'; no such algorithm (did you mean dapo?); accepted: grpo,",
    "algorithm.surrogate=cisp": "algorithm.surrogate: 'cisp'; no such choice (did you mean cispo?); accepted: clip",
    "algorithm.baseline.type=group": "algorithm.baseline: no such choice (did you mean group_std?)",
    "rewards=math_answr": "no such choice (did you mean math_answer?); accepted: math_answer",
    "rewards=[]": "there is none; name at least one",
    "optimizer.learning_rate=fast": "optimizer.learning_rate: 'fast'; input should be a valid number",
    "optimizer.learning_rate=-1": "optimizer.learning_rate: -1; input should be greater than or equal to 0",
    "steps=0": "steps: 0; input should be greater than or equal to 1",
    "steps=2.5": "steps: 2.5; input should be a valid integer",
    "engine.dtype=float33": "engine.dtype: 'float33'; input should be 'auto', 'float32', 'mixed', 'bfloat16'",
    "group_size=1": "group_size: 1; a group of one has no baseline to beat: use 2 or more",
    "sampling.temperature=0": "sampling.temperature: 0; all completions of a group would be the same: use a value",
    "sampling.top_p=0.9": "training scores the whole distribution",
    "updates_per_step=99": "updates_per_step: 99; each update needs at least one group",
    "algorithm.kl={estimator: k1}": "kl.estimator k1 in the loss",
    "algorithm.surrogate=nofile.py:f": "nofile.py:f cannot be imported: no such file",
    "algorithm.surrogate=os:pth": "os has no function pth",
    "steps.much=3": "steps",
    "steps": "steps: not a setting; write dotted.key=value",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_is_wrong_is_explained(run_file: Path, override: str) -> None:
    overrides = ["steps=4", override] if override.startswith("steps.") else [override]
    with pytest.raises(ConfigError) as raised:
        Config.load(run_file, overrides)
    assert WRONG[override] in str(raised.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        Config.parse({"data": {"path": "x", "splitt": "a"}, "rewards": ["format"], "steps": -1})
    text = str(raised.value)
    assert "model: missing; set model: Folder or hub id" in text
    assert "data.splitt" in text
    assert "steps: -1" in text


def test_a_missing_or_broken_run_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such run file; write one"):
        Config.load(tmp_path / "nowhere.yaml")
    (tmp_path / "broken.yaml").write_text("steps: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="holds list; a run file is a mapping"):
        read_yaml(tmp_path / "list.yaml")


def test_settings_without_effect_are_said() -> None:
    config = Config.parse({**TREE, "sampling_rounds": 2, "evaluation": {"every": 5}})
    assert [caution.split(" ")[0] for caution in cautions(config)] == ["sampling_rounds", "evaluation.every"]


def test_every_setting_is_documented() -> None:
    paths = [path for path, _, text in reference(Config) if not text]
    assert paths == []
    assert len(list(reference(Config))) > 50
