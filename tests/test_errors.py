"""Every mistake gets its message, with a place, a value, what is accepted and a way out, before anything is sampled.

`mistakes.py` has the cases, docs/errors.md quotes their messages, and `trl_rows.py` compares them with TRL's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import MISTAKES
from safetensors.torch import load_file
from toys import metrics, sampled, terminal, toy_config, toy_folder, toy_rows
from trl_rows import ROWS
from workplace import says

from groupwise.build import device_of
from groupwise.config import Engine
from groupwise.engines import Completion, Request, Sampling
from groupwise.engines.local_sampler import LocalSampler
from groupwise.errors import DataError, Findings, GroupwiseError, RewardError
from groupwise.slots import load_code
from groupwise.train import train

ROOT = Path(__file__).parents[1]
SAID: dict[str, str] = {}
"""What has been said so far: making a mistake once is enough."""


@pytest.mark.parametrize("did", MISTAKES)
def test_a_mistake_gets_a_message_with_its_four_parts_before_any_sampling(did: str, toys: Path, tmp_path: Path) -> None:
    mistake = MISTAKES[did]
    SAID[did] = says(mistake, tmp_path, toys / "model")
    for part in ("place", "value", "accepted", "way_out"):
        piece = getattr(mistake, part)
        assert piece
        assert piece in SAID[did], part


def test_there_are_sixty_and_more() -> None:
    assert len(MISTAKES) >= 60


def test_the_page_quotes_every_message(toys: Path, tmp_path: Path) -> None:
    for number, (did, mistake) in enumerate(MISTAKES.items()):
        if did not in SAID:
            (tmp_path / str(number)).mkdir()
            SAID[did] = says(mistake, tmp_path / str(number), toys / "model")
    page = load_code(f"{ROOT / 'tools' / 'errors.py'}:page")(SAID)
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == page, "docs/errors.md is stale: run `make docs`"


def test_every_row_of_the_comparison_is_a_mistake_or_a_test() -> None:
    for row in ROWS:
        assert row.ours or row.test, row.given
        assert set(row.ours) <= set(MISTAKES), row.given
        assert not row.test or (row.text and callable(globals()[row.test])), row.given


# -------------------------------------------------------------------------------------------------- several at a time


def test_findings_are_one_error_of_their_common_class_without_repetitions() -> None:
    findings = Findings()
    for problem in ("first", "second", "first"):
        with findings:
            raise DataError(problem)
    with pytest.raises(DataError) as raised:
        findings.settle()
    assert str(raised.value) == "2 problems\n1. first\n2. second"
    with findings:
        raise RewardError("third", "fourth")
    with pytest.raises(GroupwiseError) as raised:
        findings.settle()
    assert type(raised.value) is GroupwiseError
    assert raised.value.args == ("first", "second", "third", "fourth")


def test_findings_let_through_what_is_not_the_users() -> None:
    findings = Findings()
    with pytest.raises(ZeroDivisionError), findings:
        raise ZeroDivisionError
    findings.settle()


# --------------------------------------------------------------------------- what can only be seen while a run is going


def reward_file(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"import math\nimport numpy as np\nimport torch\n{body}\n")
    return f"{folder / 'mine.py'}:f"


def run(toys: Path, folder: Path, **changes: Any) -> tuple[Path, str]:
    """(the run folder, what was shown) of a small run."""
    console, screen = terminal()
    done = train(toy_config(toys, **{"steps": 2, "output": str(folder / "run"), **changes}), console=console)
    return done.folder, screen.getvalue()


def test_without_a_gpu_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(Engine()) == torch.device("cpu")


def test_of_several_gpus_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_of(Engine()).type == "cuda"
    assert device_of(Engine()).index in (None, 0)
    assert device_of(Engine(device="cuda:3")).index == 3


@pytest.mark.parametrize(("failure", "problem"), [("1 / 0", "raised ZeroDivisionError"), ("math.nan", "returned nan")])
def test_a_sample_that_cannot_be_scored_is_left_out_and_too_many_stop_the_run(
    toys: Path, tmp_path: Path, failure: str, problem: str
) -> None:
    picky = f"def f(rollout):\n    return {failure} if rollout.text[:2] == 'w1' else float(len(rollout.text) % 3)"
    changes: dict[str, Any] = {"rewards": [reward_file(tmp_path, picky)]}
    folder, shown = run(toys, tmp_path, max_invalid_fraction=1.0, **changes)
    assert f"warning: rewards.f: {problem}" in shown
    left_out = [r for r in sampled(folder, 1) if not r["valid"]]
    assert left_out
    assert all(problem in r["problem"] and r["advantage"] == 0 for r in left_out)
    with pytest.raises(RewardError, match=r"completions have no trustworthy reward, more than max_invalid_fraction: 0"):
        run(toys, tmp_path / "strict", max_invalid_fraction=0.0, **changes)


def test_one_infinite_reward_leaves_the_weights_finite(toys: Path, tmp_path: Path) -> None:
    first_is_infinite = "[math.inf if i == 0 else len(c) % 3 for i, c in enumerate(completions)]"
    body = f"def f(completions):\n    return {first_is_infinite}"
    rewards = [{"use": reward_file(tmp_path, body), "trial": False}]
    for scale in ("none", "group_std"):
        folder, _ = run(toys, tmp_path / scale, rewards=rewards, algorithm={"scale": scale})
        assert all(torch.isfinite(weight).all() for weight in load_file(folder / "model/model.safetensors").values())
        rollouts = sampled(folder, 1)
        assert [r["valid"] for r in rollouts].count(False) == 1
        assert any(r["advantage"] for r in rollouts if r["group"] == 0), "the rest of the group is compared"


def test_rewards_without_an_opinion_stop_the_run(toys: Path, tmp_path: Path) -> None:
    rewards = [reward_file(tmp_path, "def f(completions):\n    return [None for _ in completions]")]
    with pytest.raises(RewardError, match="rewards: none has an opinion on this sample"):
        run(toys, tmp_path, rewards=rewards)


@pytest.mark.parametrize(
    "body",
    [
        "def f(rollout):\n    return np.float32(len(rollout.text) % 3)",
        "def f(rollout):\n    return torch.tensor(1.0)",
        "def f(rollout):\n    return len(rollout.text) % 2 == 0",
        "def f(completions):\n    return np.ones(len(completions))",
    ],
)
def test_numbers_of_any_library_are_rewards(toys: Path, tmp_path: Path, body: str) -> None:
    folder, _ = run(toys, tmp_path, rewards=[reward_file(tmp_path, body)], steps=1)
    assert metrics(folder)[0]["invalid"] == 0


def test_a_reward_is_called_with_what_it_takes(toys: Path, tmp_path: Path) -> None:
    body = "def f(completions):\n    return [float(len(c)) for c in completions]"
    folder, _ = run(toys, tmp_path, rewards=[reward_file(tmp_path, body)], steps=1)
    assert all(r["reward"] == len(r["text"]) for r in sampled(folder, 1))


def test_a_constant_reward_is_said_to_teach_nothing(toys: Path, tmp_path: Path) -> None:
    rewards = [reward_file(tmp_path, "def f(rollout):\n    return 1.0")]
    _, shown = run(toys, tmp_path, rewards=rewards, algorithm={"filter": "drop_zero_variance"})
    assert "left nothing to learn from, so nothing was updated: all rewards were equal in 100%" in shown


def test_completions_that_are_all_left_out_are_said_to_teach_nothing(toys: Path, tmp_path: Path) -> None:
    _, shown = run(toys, tmp_path, algorithm={"drop_truncated": True}, sampling={"max_tokens": 1})
    assert "nothing was updated" in shown
    assert "of its completions were truncated" in shown


def test_a_learning_rate_that_overflows_stops_the_run_with_its_name(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(GroupwiseError, match=r"optimizer\.learning_rate"):
        run(toys, tmp_path, optimizer={"learning_rate": 1e38}, steps=6)


def test_prompts_that_do_not_fill_a_last_step_are_not_left_out(toys: Path, tmp_path: Path) -> None:
    rows = toy_rows(tmp_path / "five.jsonl", [{"prompt": f"w{i}"} for i in range(2, 7)])
    folder, _ = run(toys, tmp_path, data={"path": str(rows)}, prompts_per_step=2, steps=5)
    asked = [{r["prompt"] for r in sampled(folder, step)} for step in range(1, 6)]
    assert len(asked[0] | asked[1] | asked[2]) == 5
    assert sorted(prompt for step in asked for prompt in step) == sorted([f"w{i}" for i in range(2, 7)] * 2)


def test_no_number_has_to_divide_another(toys: Path, tmp_path: Path) -> None:
    engine = {"train_tokens": 7, "sample_tokens": 13}
    folder, _ = run(toys, tmp_path, prompts_per_step=3, group_size=5, updates_per_step=2, engine=engine)
    assert len(sampled(folder, 1)) == 15


def test_the_reference_is_the_folder_that_is_trained(toys: Path, tmp_path: Path) -> None:
    folder, _ = run(toys, tmp_path, algorithm={"kl": {"coef": 0.1}})
    kl = [record["kl"] for record in metrics(folder)]
    assert kl[0] == pytest.approx(0.0, abs=1e-5), "at first the policy is its own reference"
    assert kl[1] > 1e-4


def test_an_empty_completion_is_scored_and_trains_nothing(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalSampler.sample

    def with_an_empty_one(self: LocalSampler, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        groups = original(self, requests, sampling)
        none = np.zeros(0, dtype=np.float32)
        groups[0][0] = dataclasses.replace(groups[0][0], tokens=none.astype(np.int32), logprobs=none, entropies=none)
        return groups

    monkeypatch.setattr(LocalSampler, "sample", with_an_empty_one)
    folder, _ = run(toys, tmp_path)
    first = sampled(folder, 1)[0]
    assert (first["text"], first["valid"], first["reward"]) == ("", True, 0.0)
    assert not any(first["loss_mask"])


def test_prompts_of_several_lengths_score_alike_with_absolute_positions(tmp_path: Path) -> None:
    toy_folder(tmp_path / "model", "gpt2")
    toy_rows(tmp_path / "rows.jsonl", [{"prompt": " ".join(["w5", "w9"] * i)} for i in range(1, 9)])
    folder, shown = run(tmp_path, tmp_path)
    assert all(record["sampler_mismatch"] < 1e-5 for record in metrics(folder))
    assert "disagree" not in shown
