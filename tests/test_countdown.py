"""Countdown: right expressions in any notation, wrong ones, and those made to fool it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.rewards import Countdown, made_up
from groupwise.rewards.countdown import calculated

ROW = {"nums": [44, 19, 35], "target": 98}


def grade(text: str, row: dict[str, object] = ROW, **settings: bool) -> float:
    return Countdown(**settings)(made_up(text, row))


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{44 + 19 + 35}",
        r"<think>44 * 19? No.</think> \boxed{(35+19)+44 = 98}",
        "<think>hm</think>\n<answer> 44+(19 + 35) </answer>",
        "35 + 44 + 19",
        "$19+35+44$.",
    ],
)
def test_a_right_expression_is_right_in_any_place_and_order(text: str) -> None:
    assert grade(text) == 1


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (r"\boxed{6 \div (1 - 3 \div 4)}", {"nums": [1, 3, 4, 6], "target": 24}),
        (r"\boxed{\frac{6}{1 - \frac{3}{4}}}", {"nums": [1, 3, 4, 6], "target": 24}),
        (r"\boxed{3 × 4 − 5}", {"nums": [3, 4, 5], "target": 7}),
        (r"\boxed{[2 + 3] \times 5}", {"nums": [5, 3, 2], "target": 25}),
        (r"\boxed{-2 + 5}", {"nums": [5, 2], "target": 3}),
        (r"\boxed{5 / 3 * 3}", {"nums": [3, 3, 5], "target": 5}),
    ],
)
def test_notations_of_mathematics_are_understood_and_fractions_are_exact(text: str, row: dict[str, object]) -> None:
    assert grade(text, row) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "98",
        r"\boxed{98}",
        r"\boxed{44 + 54}",  # a number that is not given
        r"\boxed{44 + 35}",  # one is left over
        r"\boxed{44 + 19 + 35 + 19 - 19}",  # one is used too often
        r"\boxed{44 - 19 + 35}",
        r"\boxed{44 19 35}",
        r"\boxed{44 + 19 + }",
        r"\boxed{98 = 44 + 19 + 35}",
        r"\boxed{44 + 19 + 35 # 98}",
        r"\boxed{44 + 19 + 35 if True else 0}",
        r"\boxed{__import__('os').getpid() + 44 + 19 + 35}",
        r"\boxed{44 / (19 - 19) + 35}",
        r"\boxed{44 ** 19 ** 35}",
        r"\boxed{" + "(" * 99 + "44 + 19 + 35" + ")" * 99 + "}",
        r"\boxed{" + "-" * 151 + "44 + 19 + 35}",
        r"\boxed{٤٤ + 19 + 35 - 0}",
        "<think>44 + 19 + 35</think>",
    ],
)
def test_a_wrong_or_hostile_expression_earns_nothing(text: str) -> None:
    assert grade(text) == 0


def test_numbers_may_be_left_over_only_when_that_is_allowed() -> None:
    row = {"nums": [44, 19, 35, 7], "target": 98}
    assert grade(r"\boxed{44 + 19 + 35}", row) == 0
    assert grade(r"\boxed{44 + 19 + 35}", row, use_all=False) == 1
    assert grade(r"\boxed{7 * 7 * 2}", row, use_all=False) == 0


@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.lists(st.sampled_from("+-*/"), min_size=3, max_size=3))
def test_its_own_reference_is_right_whenever_there_is_a_solution(numbers: list[int], signs: list[str]) -> None:
    text = str(numbers[0])
    for number, sign in zip(numbers[1:], signs, strict=False):
        text = f"({text} {sign} {number})"
    found = calculated(text)
    assert found is not None
    value, used = found
    assert sorted(used.elements()) == sorted(map(Fraction, numbers))
    row = {"nums": numbers, "target": str(value)}
    answer = Countdown().reference(row)
    assert answer is not None
    assert grade(answer, row) == 1
    assert grade(answer, {**row, "target": str(value + 1)}) == 0


def test_a_row_without_a_solution_has_no_reference() -> None:
    assert Countdown().reference({"nums": [1, 1], "target": 50}) is None
    assert Countdown().reference({"nums": [50, 3], "target": 50}) is None
    assert Countdown(use_all=False).reference({"nums": [50, 3], "target": 50}) == "\\boxed{50}"
