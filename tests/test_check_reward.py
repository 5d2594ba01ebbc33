"""`groupwise check-reward`: a sound verifier passes, and each way to be fooled or to fail is found and said plainly."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from toys import REWARD, toy_folder, toy_rows

from groupwise import cli
from groupwise.check_reward import check_reward
from groupwise.probes import FIXED, OTHER, REFERENCE
from groupwise.records import Rollout
from groupwise.rewards import as_rewards, made_up, score
from groupwise.tasks import Task

ROWS = [{"prompt": f"{a} + {a}?", "answer": str(2 * a)} for a in range(40, 60)]
GRADERS = r"""
import math, re

def sound(rollout):
    found = re.findall(r"\\boxed\{(\w+)\}", rollout.text)
    return float(found[-1:] == [rollout.example["answer"]])

def likes_silence(rollout):
    return 1.0 if not rollout.text.strip() else sound(rollout)

def finds_it_anywhere(rollout):
    return float(rollout.example["answer"] in rollout.text)

def never(rollout):
    return 0.0

def chance(rollout):
    return 1.0

def takes_the_last_number(rollout):
    return float(int(re.findall(r"\d+", rollout.text)[-1]) == int(rollout.example["answer"]))

def wants_a_sentence(rollout):
    return float(rollout.text == f"The answer is {rollout.example['answer']}.")

def no_opinion(prompts, completions, **columns):
    return [None if not text else 0.0 for text in completions]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "graders.py").write_text(GRADERS)
    toy_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["groupwise", "check-reward", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def problems_of(*names: str, answer: str = "") -> list[str]:
    task = Task(ROWS, as_rewards([f"graders.py:{name}" for name in names]))
    return check_reward(task, 12, 0, (lambda row, _: answer.format(**row)) if answer else None).problems()


@pytest.mark.parametrize("rewards", ["math_answer", ["math_answer", "format"], ["graders.py:sound"]])
@pytest.mark.usefixtures("here")
def test_a_sound_reward_has_no_fault(rewards: Any) -> None:
    report = check_reward(Task(ROWS, as_rewards(rewards)), 12, 0)
    title = report.verifiers[0]
    assert report.problems() == []
    assert report.unchecked() == []
    assert report.share_right(title, of_right=True) == 1
    assert report.share_right(title, of_right=False) == 1
    said = report.judgements[title]
    assert {judgement.probe.kind for judgement in said} > {REFERENCE, OTHER, "the prompt", *FIXED}
    assert len({judgement.probe.row for judgement in said}) == 12
    typical, worst = report.seconds(title)
    assert 0 < typical <= worst


@pytest.mark.usefixtures("here")
def test_each_fault_is_said_in_a_sentence() -> None:
    (silence, blank) = problems_of("likes_silence")
    assert silence.startswith("likes_silence gives 1 to an empty answer (12 of 12 rows, such as rows[")
    assert blank.startswith("likes_silence gives 1 to blank space (12 of 12 rows")
    (anywhere,) = problems_of("finds_it_anywhere")
    assert anywhere.startswith("finds_it_anywhere gives 1 to many answers, the last one wrong (12 of 12 rows")
    (refused,) = problems_of("never")
    assert refused.startswith(r"never gives 0 to the reference answer '\\boxed{")
    assert refused.endswith("; if a right answer is written otherwise, say how with --answer")
    lenient = problems_of("chance")
    assert len(lenient) == len(FIXED) + 3
    assert any(text.startswith("chance gives 1 to another row's answer '") for text in lenient)
    failing = problems_of("takes_the_last_number")
    assert "takes_the_last_number fails on an empty answer (12 of 12): raised IndexError: list index out of range" in (
        text.split(" (graders")[0] for text in failing
    )


@pytest.mark.usefixtures("here")
def test_how_a_right_answer_is_written_can_be_told() -> None:
    assert len(problems_of("wants_a_sentence")) == 1
    assert problems_of("wants_a_sentence", answer="The answer is {answer}.") == []


@pytest.mark.usefixtures("here")
def test_no_opinion_is_no_fault() -> None:
    report = check_reward(Task(ROWS, as_rewards(["math_answer", "graders.py:no_opinion"])), 4, 0)
    assert report.problems() == []
    assert report.as_json()["rewards"]["no_opinion"]["accepted"]["an empty answer"] is None


def test_a_verifier_without_a_known_answer_is_told_apart() -> None:
    task = Task([{"prompt": "w3"}, {"prompt": "w4"}], as_rewards(REWARD))
    report = check_reward(task, 2, 0)
    assert report.unchecked() == ["starts_low"]
    assert math.isnan(report.share_right("starts_low", of_right=True))
    assert report.share_right("starts_low", of_right=False) == 18 / 20  # each prompt starts low


def test_agreement_is_the_share_of_answers_judged_alike() -> None:
    task = Task(ROWS, as_rewards(["math_answer", {"type": "exact_match"}]))
    report = check_reward(task, 8, 0)
    kinds = {judgement.probe.kind for judgement in report.judgements["exact_match"]}
    assert report.agreement == {"math_answer and exact_match": 1.0}
    strict = Task(ROWS, as_rewards(["math_answer", {"type": "format", "strict": True}]))
    accepted_by_one = 1  # the reference answer, without thinking; math_answer has no verdict on the endless power
    assert check_reward(strict, 8, 0).agreement["math_answer and format"] == pytest.approx(
        1 - accepted_by_one / (len(kinds) - 1)
    )


def test_samples_tell_the_spread_and_what_would_teach_nothing() -> None:
    task = Task(ROWS, as_rewards("math_answer"))
    said = [["80", "81"], ["82", "82"], ["7", "7"]]  # one right of two, both right, none right
    rollouts = [
        dataclasses.replace(made_up(f"\\boxed{{{text}}}", ROWS[row], group=row), finish_reason="stop")
        for row, texts in enumerate(said)
        for text in texts
    ]
    broken = dataclasses.replace(made_up("\\boxed{9^{9^{9^9}}}", ROWS[3], group=3), finish_reason="length")
    scored: list[Rollout] = score([*rollouts, broken, broken], task.rewards, task.prompt_of)
    samples = check_reward(task, 2, 0, sampled=scored).samples
    assert samples is not None
    assert (samples.prompts, samples.group_size) == (4, 2)
    assert samples.means["math_answer"] == pytest.approx(3 / 6)
    assert samples.reward_std == pytest.approx(math.sqrt(0.5) / 4)
    assert samples.frac_reward_zero_std == 3 / 4
    assert (samples.invalid, samples.truncated) == (0.25, 0.25)
    dull = check_reward(task, 2, 0, sampled=scored[2:])
    assert dull.problems() == [
        "none of the 3 sampled prompts would teach anything: within each, all 2 answers have the same reward"
    ]


@pytest.mark.usefixtures("here")
def test_the_command_prints_a_verdict_and_exits_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = run(capsys, monkeypatch, "--data", "rows.jsonl", "--reward", "math_answer", "--reward", "format")
    assert code == 0
    assert text.rstrip().endswith("no fault found")
    assert "agreement of math_answer and format" in text
    code, text = run(capsys, monkeypatch, "--data", "rows.jsonl", "--reward", "graders.py:likes_silence", "--rows", "5")
    assert code == 1
    assert "likes_silence gives 1 to an empty answer (5 of 5 rows, such as rows[" in text
    code, text = run(
        capsys, monkeypatch, "--data", "rows.jsonl", "--reward", "graders.py:wants_a_sentence",
        "--answer", "The answer is {{ answer }}.", "--json",
    )  # fmt: skip
    found = json.loads(text.splitlines()[-1])
    assert code == 0
    assert found["problems"] == []
    assert found["rewards"]["wants_a_sentence"]["accepts_right"] == 1
    code, text = run(capsys, monkeypatch, "--data", "rows.jsonl", "--reward", "format", "--answer", "{{ solution }}")
    assert code == 2
    assert "groupwise: --answer: rows[" in text
    assert "'solution' is undefined" in text


@pytest.mark.usefixtures("here")
def test_the_command_asks_a_model_when_it_is_to(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_rows(here / "words.jsonl")
    toy_folder(here / "model")
    settings = ["--data", "words.jsonl", "--reward", REWARD, "--sample", "6", "--rows", "4", "group_size=8"]
    code, text = run(capsys, monkeypatch, *settings)
    assert (code, "groupwise: model: missing; --sample needs one" in text) == (2, True)
    code, text = run(capsys, monkeypatch, *settings, "--model", "model", "sampling.max_tokens=3", "--json")
    samples = json.loads(text.splitlines()[-1])["samples"]
    assert (samples["prompts"], samples["group_size"]) == (6, 8)
    assert 0 < samples["means"]["starts_low"] < 1
    assert samples["reward_std"] > 0
    assert samples["frac_reward_zero_std"] < 1
    again = run(capsys, monkeypatch, *settings, "--model", "model", "sampling.max_tokens=3", "--json")[1]
    assert json.loads(again.splitlines()[-1])["samples"] == samples
