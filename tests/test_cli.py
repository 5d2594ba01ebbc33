"""The command line: what it does, its exit codes, and one clear message for each mistake, before any sampling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from texts import byte_tokenizer
from toys import metrics, toy_folder
from workplace import TINY, training, workplace

from groupwise import cli
from groupwise.arithmetic import Recipe, build_base_model
from groupwise.config import Config
from groupwise.engines.local_sampler import LocalSampler
from groupwise.log import RunLog
from groupwise.schema import reference

SRC = Path(__file__).parents[1] / "src"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Groupwise = Callable[..., Outcome]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: model/, rows.jsonl, mine.py and run.yaml."""
    monkeypatch.chdir(tmp_path)
    workplace(tmp_path, model)
    return tmp_path


@pytest.fixture
def groupwise(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Groupwise:
    """The `groupwise` command in this process; an exception that is no message is let through."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["groupwise", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(int(exit.value.code or 0), captured.out, captured.err)

    return run


def last_json(outcome: Outcome) -> dict[str, Any]:
    return json.loads(outcome.out.splitlines()[-1])


# -------------------------------------------------------------------------------------------------------------- train


def test_a_run_file_is_trained(groupwise: Groupwise) -> None:
    done = groupwise("train", "run.yaml")
    assert done.code == 0
    assert done.out == "trained model: run/model\n"
    assert "step 2/2" in done.err
    assert [record["step"] for record in metrics(Path("run"))] == [1, 2]
    assert Path("run/model/config.json").is_file()


def test_flags_and_overrides_are_trained(groupwise: Groupwise) -> None:
    flags = ["--model", "model", "--data", "rows.jsonl", "--algorithm", "dapo", "--reward", "mine.py:in_a_batch"]
    done = groupwise("train", *flags, "--reward", "mine.py:low", *TINY, "algorithm.surrogate.high=0.4", "--quiet")
    assert done.code == 0
    assert done.err == ""
    (run,) = Path("runs").iterdir()
    assert done.out == f"trained model: {run / 'model'}\n"
    config = Config.load(run / "config.yaml")
    assert config.algorithm.filter == "dynamic_sampling"
    assert config.algorithm.surrogate.high == 0.4  # type: ignore[attr-defined]
    assert [reward.title for reward in config.rewards] == ["in_a_batch", "low"]
    assert {"reward/in_a_batch", "reward/low"} <= set(metrics(run)[0])


def test_flags_and_overrides_lie_over_the_run_file(groupwise: Groupwise) -> None:
    shown = groupwise("config", "run.yaml", "--algorithm", "rloo", "--data", "other.jsonl", "steps=7")
    tree = yaml.safe_load(shown.out)
    assert (tree["steps"], tree["data"]["path"], tree["model"]) == (7, "other.jsonl", "model")
    assert tree["algorithm"]["baseline"]["type"] == "leave_one_out"


def test_the_last_line_of_json_is_one_object(groupwise: Groupwise) -> None:
    done = groupwise("train", "run.yaml", "--json", "evaluation.data.path=rows.jsonl", "evaluation.data.limit=8")
    assert done.code == 0
    result = last_json(done)
    assert set(result) == {"run", "before", "after"}
    assert result["run"] == "run"
    assert 0 <= result["before"] <= 1
    assert 0 <= result["after"] <= 1
    assert last_json(groupwise("train", "run.yaml", "--json", "output=again"))["before"] is None


def test_a_run_is_resumed(groupwise: Groupwise, monkeypatch: pytest.MonkeyPatch) -> None:
    assert groupwise("train", "run.yaml", "output=whole", "checkpoint.every=1").code == 0
    original = RunLog.step

    def dies(self: RunLog, step: int, *arguments: Any) -> None:
        if step == 1:
            raise KeyboardInterrupt
        original(self, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "step", dies)
        assert groupwise("train", "run.yaml", "checkpoint.every=1").code not in (0, 2)
    resumed = groupwise("train", "--resume", "run")
    assert resumed.code == 0
    assert "continuing run after step 1" in resumed.err
    assert "warning" not in resumed.err
    assert metrics(Path("run"), timings=False) == metrics(Path("whole"), timings=False)
    weights = [(Path(run) / "model/model.safetensors").read_bytes() for run in ("run", "whole")]
    assert weights[0] == weights[1]


def test_resuming_takes_no_other_settings(groupwise: Groupwise) -> None:
    (Path("run")).mkdir()
    refused = groupwise("train", "--resume", "run", "steps=9")
    assert refused.code == 2
    assert refused.err == "groupwise: --resume: continues with the settings of the run; pass no others\n"
    refused = groupwise("train", "--resume", "run")
    assert refused.code == 2
    assert refused.err.startswith("groupwise: run: not a run folder (it has no config.yaml); pass the folder that")


# ---------------------------------------------------------------------------------------------- sample, config, others


def test_a_model_is_asked(groupwise: Groupwise) -> None:
    asked = groupwise("sample", "model", "w5 w6", "-n", "3", "--max-tokens", "4")
    assert asked.code == 0
    assert len(asked.out.splitlines()) == 3
    assert all(word.startswith("w") for word in asked.out.split())
    assert groupwise("sample", "model", "w5 w6", "-n", "3", "--max-tokens", "4") == asked
    assert groupwise("sample", "model", "w5 w6", "-n", "3", "--max-tokens", "4", "--seed", "1") != asked
    greedy = groupwise("sample", "model", "w5 w6", "-n", "2", "--max-tokens", "4", "--temperature", "0").out
    assert len(set(greedy.splitlines())) == 1


def test_what_cannot_be_asked_is_said(groupwise: Groupwise) -> None:
    assert "PROMPT: '' has no tokens to continue; write a prompt" in groupwise("sample", "model", "").err
    long = groupwise("sample", "model", "w5 " * 80)
    assert long.code == 2
    assert "a prompt of 80 tokens leaves no room in the context of 64; shorten it" in long.err


def test_the_printed_config_reads_back(groupwise: Groupwise) -> None:
    shown = groupwise("config", "run.yaml", "--algorithm", "dr_grpo")
    assert shown.code == 0
    Path("again.yaml").write_text(shown.out)
    assert groupwise("config", "again.yaml").out == shown.out
    assert Config.load("again.yaml") == Config.load("run.yaml", ["algorithm=dr_grpo"]).resolve()


def test_the_reference_has_every_setting(groupwise: Groupwise) -> None:
    shown = groupwise("config", "--reference")
    assert shown.code == 0
    told = [line.split(" (default")[0] for line in shown.out.splitlines() if not line.startswith(" ")]
    assert told == [path for path, _, _ in reference(Config)]
    assert {"model", "data.path", "algorithm.surrogate[clip].high", "optimizer.learning_rate"} <= set(told)
    assert "    Peak learning rate." in shown.out


def test_help_lists_the_commands(groupwise: Groupwise) -> None:
    assert groupwise("--help").code == 0
    assert "quickstart" in groupwise("-h").out


def test_a_wrong_command_or_option_is_a_usage_error(groupwise: Groupwise) -> None:
    for arguments in (["traiin"], ["train", "--modle", "x"], ["eval", "model", "--data", "rows.jsonl"]):
        refused = groupwise(*arguments)
        assert refused.code == 2
        assert refused.out == ""
        assert "Usage: groupwise" in refused.err
        assert "Traceback" not in refused.err


# ---------------------------------------------------------------------------------------------------------- quickstart

SMALL = Recipe(layers=1, hidden=32, intermediate=32, heads=2, steps=2, batch=4)
QUICK = ["steps=2", "prompts_per_step=2", "group_size=2", "sampling.max_tokens=6", "evaluation.data.limit=4"]


@pytest.fixture
def small_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.quickstart.build_base_model", partial(build_base_model, recipe=SMALL))


@pytest.mark.usefixtures("small_recipe")
def test_the_quickstart_shows_what_it_did_and_is_cached(groupwise: Groupwise) -> None:
    first = groupwise("quickstart", "--json", *QUICK)
    assert first.code == 0
    result = last_json(first)
    assert set(result) == {"before", "after", "seconds", "run"}
    assert len(first.out.splitlines()) == 1
    assert 0 <= result["before"] <= 1
    assert result["seconds"] > 0
    run = Path(result["run"])
    folders = {"rollouts", "evaluations", "checkpoints", "model"}
    files = {"config.yaml", "environment.json", "metrics.jsonl"}
    assert {path.name for path in run.iterdir()} == files | folders
    assert "building a base model" in first.err
    assert "step 2/2" in first.err
    assert first.err.count("advantage") >= 2, "groups of the first and the last step"
    assert "What the training changed" in first.err
    assert f"groupwise sample {run}" in first.err

    second = groupwise("quickstart", "--json", *QUICK)
    assert second.code == 0
    assert "base model: runs/base-models/seed-0 (cached)" in second.err
    again = last_json(second)
    assert again["run"] != result["run"]
    assert (again["before"], again["after"]) == (result["before"], result["after"])
    weights = [(Path(r["run"]) / "model/model.safetensors").read_bytes() for r in (result, again)]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("small_recipe")
def test_the_seed_of_the_quickstart_changes_the_model_and_the_prompts(groupwise: Groupwise) -> None:
    for seed in ("0", "1"):
        assert groupwise("quickstart", "--seed", seed, "--quiet", *QUICK).code == 0
    for file in ("data/seed-{}/train.jsonl", "data/seed-{}/held_out.jsonl", "base-models/seed-{}/model.safetensors"):
        contents = [(Path("runs") / file.format(seed)).read_bytes() for seed in (0, 1)]
        assert contents[0] != contents[1]


@pytest.mark.usefixtures("small_recipe")
def test_the_quickstart_takes_other_rewards_and_algorithms(groupwise: Groupwise) -> None:
    done = groupwise("quickstart", "--algorithm", "dapo", *QUICK, "rewards=[math_answer]")
    assert done.code == 0
    assert "well formatted" not in done.err


@pytest.mark.usefixtures("small_recipe")
def test_the_quickstart_compares_before_and_after(groupwise: Groupwise) -> None:
    refused = groupwise("quickstart", *QUICK[:-1], "evaluation.data=null")
    assert refused.code == 2
    assert "evaluation.data: null; the quickstart compares before and after" in refused.err


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_a_traceback_is_shown_on_demand(groupwise: Groupwise) -> None:
    refused = groupwise(*training(model="./modle"), "--traceback")
    assert refused.code == 2
    assert "Traceback (most recent call last)" in refused.err
    assert refused.err.splitlines()[-1].startswith("groupwise: ./modle: looked for a folder")


def test_what_is_not_the_users_mistake_is_not_hidden(groupwise: Groupwise, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(RunLog, "step", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        groupwise(*training())


# ------------------------------------------------------------------------------------------------------------ processes


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "groupwise.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("here")
def test_a_process_exits_with_the_code_of_its_outcome() -> None:
    done = process("train", "run.yaml", "--json", "-q", "steps=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1])["run"] == "run"
    refused = process("train", "run.yaml", "steps=1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("groupwise: run: holds a run already")
    assert len(refused.stderr.splitlines()) == 1


def test_a_chat_model_is_asked_with_its_template(here: Path, groupwise: Groupwise, tmp_path: Path) -> None:
    folder = toy_folder(tmp_path / "chat", vocab_size=300)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    asked: list[str] = []
    sample = LocalSampler.sample

    def listening(self: LocalSampler, requests: Any, sampling: Any) -> Any:
        asked.append(tokenizer.decode(requests[0].prompt))
        return sample(self, requests, sampling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSampler, "sample", listening)
        assert groupwise("sample", str(folder), "2+2?", "--max-tokens", "2").code == 0
        assert groupwise("sample", str(folder), "2+2?", "--max-tokens", "2", "--raw").code == 0
    assert asked == ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "2+2?"]
