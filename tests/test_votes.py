"""Two answers are one vote when the reward that grades them takes one for the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from groupwise.records import Rollout
from groupwise.rewards import Reward, as_rewards, made_up, score, votes


def voted(use: Any, texts: Sequence[str], row: dict[str, Any], groups: Sequence[int] | None = None) -> list[int] | None:
    """The votes of completions that the reward has scored."""
    (reward,) = as_rewards(use)
    numbers = groups or [0] * len(texts)
    rollouts = [made_up(text, row, group) for text, group in zip(texts, numbers, strict=True)]
    found = votes(reward, score(rollouts, (reward,), lambda row: ""))
    return None if found is None else found.tolist()


def test_a_number_is_one_answer_however_it_is_written() -> None:
    texts = [
        r"\boxed{1/2}",
        r"so \boxed{0.5}",
        "The answer is 0.5.",
        "0.5",
        r"\boxed{\frac12}",
        r"\boxed{5}",
        "So be it",
    ]
    assert voted("math_answer", texts, {"answer": "7"}) == [0, 0, 0, 0, 0, 1, -1]


def test_formulas_are_asked_about_whether_they_are_right_or_wrong() -> None:
    texts = [
        r"\boxed{x+1}",
        r"\boxed{1+x}",
        r"\boxed{2x}",
        r"\boxed{x \cdot 2}",
        r"\boxed{3}",
        r"\boxed{50\%}",
        r"\boxed{.5}",
    ]
    for reference in ("1+x", "x^2"):
        assert voted("math_answer", texts, {"answer": reference}) == [0, 0, 2, 2, 4, 5, 5]


def test_a_number_without_end_is_an_answer_like_others() -> None:
    endless = r" \times ".join(["10^{999}"] * 60)
    assert voted("math_answer", [f"\\boxed{{{endless}}}", r"\boxed{1}"], {"answer": "4"}) == [0, 1]


def test_what_may_only_stand_in_a_box_votes_only_there() -> None:
    strict = {"type": "math_answer", "only_boxed": True}
    assert voted(strict, [r"\boxed{4}", "It is 4."], {"answer": "4"}) == [0, -1]


def test_an_answer_is_what_each_reward_reads() -> None:
    row = {"answer": "B"}
    assert voted("exact_match", ["x</think>B ", r"\boxed{B}", "b", ""], row) == [0, 0, 1, -1]
    assert voted({"type": "exact_match", "ignore_case": True}, ["B", "b"], row) == [0, 0]
    assert voted("multiple_choice", ["Answer: B", r"\boxed{(B)}", "The answer is (C).", "who knows"], row) == [
        0,
        0,
        1,
        -1,
    ]
    pattern = {"type": "regex_match", "pattern": r"is (\w+)", "column": "answer"}
    assert voted(pattern, ["it is B", "that is C, no, is B", "is C", "no"], row) == [0, 0, 1, -1]
    game = {"nums": [1, 2], "target": 3}
    assert voted("countdown", ["<answer>1 + 2</answer>", r"\boxed{1+2}", "2+1"], game) == [0, 0, 1]


def test_groups_vote_on_their_own() -> None:
    texts = [r"\boxed{4}", r"\boxed{5}", r"\boxed{5}", r"\boxed{4}"]
    assert voted("math_answer", texts, {"answer": "4"}, groups=[0, 0, 1, 1]) == [0, 1, 0, 1]


@pytest.mark.parametrize("use", ["format", "repetition", {"type": "regex_match", "pattern": "is"}, len])
def test_a_reward_that_judges_completions_has_nothing_to_vote_on(use: Any) -> None:
    assert votes(Reward(use=use), [made_up("it is", {})]) is None


class Last:
    """A reward of one's own, with an answer."""

    def __call__(self, rollout: Rollout) -> float:
        return float(self.answer(rollout.text) == rollout.example["answer"])

    def answer(self, text: str) -> str:
        return text.split()[-1]


def last(rollout: Rollout) -> float:
    return Last()(rollout)


last.answer = Last().answer  # type: ignore[attr-defined]


@pytest.mark.parametrize("use", [Last(), last])
def test_a_reward_of_ones_own_votes_with_what_it_calls_answer(use: Any) -> None:
    reward = Reward(use=use)
    rollouts = [dataclasses.replace(made_up(text, {}), rewards={reward.title: 0.0}) for text in ("a b", "c b", "b c")]
    found = votes(reward, rollouts)
    assert found is not None
    assert found.tolist() == [0, 0, 1]


def test_without_a_verdict_there_is_no_vote() -> None:
    rollouts = [dataclasses.replace(made_up("b", {}), rewards={"Last": value}) for value in (1.0, np.nan)]
    found = votes(Reward(use=Last()), rollouts)
    assert found is not None
    assert found.tolist() == [0, -1]
