"""`groupwise eval`: what it prints, by category and against another model, and what it refuses before it samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from toys import toy_config, toy_folder, toy_rows
from typer.testing import CliRunner
from workplace import workplace

from groupwise.cli import app
from groupwise.errors import CheckpointError, ConfigError, DataError
from groupwise.train import train

LEAST = ["model", "--data", "rows.jsonl", "--reward", "mine.py:low", "sampling.max_tokens=4"]
PICKY = "def f(rollout):\n    return 1.0 if rollout.text == '' or 'boxed' in rollout.text else 0 / 0\n"


class Outcome(NamedTuple):
    out: str
    err: str


Evaluate = Callable[..., Outcome]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ and a run/ that has learned something."""
    folder = tmp_path_factory.mktemp("models")
    toy_folder(folder / "model")
    toy_rows(folder / "rows.jsonl")
    train(toy_config(folder, steps=20, output=str(folder / "run")))
    return folder


@pytest.fixture
def evaluate(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """`groupwise eval` in a workplace; what goes wrong is raised."""
    monkeypatch.chdir(tmp_path)
    workplace(tmp_path, models / "model")
    (tmp_path / "run").symlink_to(models / "run")

    def run(*arguments: str) -> Outcome:
        done = CliRunner().invoke(app, ["eval", *arguments])
        if done.exception is not None:
            raise done.exception
        return Outcome(done.stdout, done.stderr)

    return run


def read(done: Outcome) -> dict[str, Any]:
    assert "NaN" not in done.out
    return json.loads(done.out)


def test_the_greedy_answer_has_its_accuracy(evaluate: Evaluate) -> None:
    done = evaluate(*LEAST)
    assert "low on 32 prompts" in done.out
    assert [line.split()[1] for line in done.out.splitlines() if "│" in line] == ["greedy"]
    assert "model, greedy: " in done.out
    assert done.err == ""
    assert evaluate(*LEAST) == done


def test_samples_have_mean_pass_and_majority_at_each_k(evaluate: Evaluate) -> None:
    first_digit = "rewards.0={type: regex_match, pattern: 'w(.)', column: answer}"
    question = [*LEAST[1:], first_digit, "-k", "4,1,2", "--json"]
    toy_rows(Path("rows.jsonl"), [{"prompt": f"w{index}", "answer": "1"} for index in range(2, 34)])
    figures = read(evaluate("run", *question))["figures"]
    assert list(figures) == ["greedy", "mean@4", *(f"{kind}@{k}" for kind in ("pass", "maj") for k in (1, 2, 4))]
    mean = {name: one["mean"] for name, one in figures.items()}
    assert mean["mean@4"] == pytest.approx(mean["pass@1"]) == pytest.approx(mean["maj@1"])
    assert 0 < mean["pass@1"] < mean["pass@2"] < mean["pass@4"] <= 1
    assert mean["maj@4"] < mean["pass@4"]
    assert all(one["low"] <= one["mean"] <= one["high"] for one in figures.values())
    assert read(evaluate("run/model", *question))["figures"] == figures
    assert read(evaluate("model", *question))["figures"] != figures


def test_what_cannot_vote_is_said(evaluate: Evaluate) -> None:
    done = evaluate(*LEAST, "--k", "2")
    assert "warning: maj@k is left out: low judges completions and has no method `answer`" in done.err
    assert "maj@" not in done.out
    assert evaluate(*LEAST, "--k", "2", "--quiet").err == ""


def test_a_table_by_category_has_the_prompts_of_each(evaluate: Evaluate) -> None:
    toy_rows(Path("rows.jsonl"), [{"prompt": f"w{i}", "level": 10 if i % 4 else 9} for i in range(2, 34)])
    done = read(evaluate("run", *LEAST[1:], "-k", "2", "--by", "level", "--json"))
    assert (done["by"], list(done["categories"])) == ("level", ["9", "10"])
    parts = list(done["categories"].values())
    assert [part["prompts"] for part in parts] == [8, 24]
    for name, whole in done["figures"].items():
        assert whole["mean"] == pytest.approx(sum(p["figures"][name]["mean"] * p["prompts"] for p in parts) / 32)
    shown = evaluate("run", *LEAST[1:], "-k", "2,1", "--by", "level").out
    headings = [line for line in shown.splitlines() if "level" in line]
    assert [cell.strip() for cell in headings[0].split("┃")[1:-1]] == ["level", "prompts", "greedy", "mean@2", "pass@2"]


def test_two_models_are_compared_on_the_same_prompts(evaluate: Evaluate) -> None:
    arguments = ["run", *LEAST[1:], "-k", "3", "--against", "model", "--json"]
    done = read(evaluate(*arguments))
    assert [one["model"] for one in done["models"]] == ["run/model", "model"]
    for name, found in done["differences"].items():
        assert found["mean"] == pytest.approx(done["figures"][name]["mean"] - done["against"][name]["mean"])
        assert found["low"] <= found["mean"] <= found["high"]
        assert found["test"] == ("sign flips" if name == "mean@3" else "McNemar's exact")
    assert done["differences"]["mean@3"]["mean"] > 0
    assert done["differences"]["mean@3"]["p"] < 0.05
    alone = read(evaluate("model", *LEAST[1:], "-k", "3", "--json"))
    assert alone["figures"] == done["against"]
    shown = evaluate(*arguments[:-1]).out
    assert "run/model minus model" in shown
    assert "McNemar's exact" in shown


def test_a_model_against_itself_differs_in_nothing(evaluate: Evaluate) -> None:
    done = read(evaluate(*LEAST, "-k", "2", "--against", "model", "--by", "answer", "--json"))
    for part in (done, *done["categories"].values()):
        assert [(one["mean"], one["p"]) for one in part["differences"].values()] == [(0, 1)] * 3


def test_completions_without_a_reward_count_as_0_and_are_said(evaluate: Evaluate) -> None:
    Path("picky.py").write_text(PICKY)
    done = evaluate("model", *LEAST[1:3], "--reward", "picky.py:f", "sampling.max_tokens=4", "--json")
    assert read(done)["models"][0]["greedy"]["means"] == {"f": None}
    assert read(done)["figures"]["greedy"]["mean"] == 0
    text = "32 of 32 completions have no reward and count as 0: rewards.f: raised ZeroDivisionError"
    assert f"warning: model: {text}" in done.err


def test_samples_are_drawn_with_settings_of_their_own(evaluate: Evaluate) -> None:
    def samples(*settings: str) -> dict[str, Any]:
        return read(evaluate(*LEAST, "-k", "3", "--json", *settings))["models"][0]

    usual = samples()
    assert samples("evaluation.temperature=1.0") == usual
    nearly_greedy = samples("evaluation.top_k=1")
    assert nearly_greedy["samples"] == nearly_greedy["greedy"] == usual["greedy"]
    assert samples("seed=1")["samples"] != usual["samples"]
    short = samples("evaluation.max_tokens=1")
    assert short["samples"]["completion_length"] == short["greedy"]["completion_length"] == 1


@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        ("sampling.temperature=0.5", "is that of training; use evaluation.temperature"),
        ("evaluation.temperature=0.5", "has no effect without --k"),
        ("evaluation.samples=4", "use --k"),
        ("steps=4", "has no effect on an evaluation; accepted: data, rewards"),
    ],
)
def test_a_setting_without_effect_is_refused(setting: str, way_out: str, evaluate: Evaluate) -> None:
    with pytest.raises(ConfigError, match=f"^{setting.partition('=')[0]}: .*{way_out}"):
        evaluate(*LEAST, setting)


def test_the_run_of_an_evaluation_has_to_have_ended(evaluate: Evaluate) -> None:
    Path("half").mkdir()
    Path("half/config.yaml").write_text("model: x")
    for arguments in (["half", *LEAST[1:]], [*LEAST, "--against", "half"]):
        with pytest.raises(CheckpointError, match="half: a run without a trained model; finish it with"):
            evaluate(*arguments)


def test_the_prompts_have_to_fit_both_models(evaluate: Evaluate) -> None:
    toy_folder(Path("short"), max_position_embeddings=8)
    toy_rows(Path("rows.jsonl"), [{"prompt": "w3"}, {"prompt": "w3 " * 6}, {"prompt": "w4"}])
    with pytest.raises(DataError, match="1 of 3 prompts are too long"):
        evaluate(*LEAST, "--against", "short")
    done = read(evaluate(*LEAST, "--against", "short", "data.long_prompts=drop", "--json"))
    assert done["prompts"] == 2
    cut = read(evaluate(*LEAST, "--against", "short", "data.long_prompts=truncate-left", "--json"))
    assert cut["prompts"] == 3
