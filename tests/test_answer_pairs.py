"""How often the math reward is right: the page states what the pairs show, and ours is the one that is wrong least."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from groupwise.slots import load_code

ROOT = Path(__file__).parents[1]
TOOL = vars(sys.modules[load_code(str(ROOT / "tools" / "answer_pairs.py") + ":judged").__module__])
pytestmark = pytest.mark.slow
MISSED, FOOLED = TOOL["missed"], TOOL["fooled"]


@pytest.fixture(scope="module")
def pairs() -> list[Any]:
    return TOOL["judged"]()


def test_the_page_is_what_the_pairs_show(pairs: list[Any]) -> None:
    text = TOOL["PAGE"].read_text(encoding="utf-8")
    assert text == TOOL["page"](pairs, text), "docs/rewards.md is stale: run `make docs`"


def test_there_are_enough_pairs_of_either_kind_and_none_twice(pairs: list[Any]) -> None:
    assert len(pairs) >= 200
    assert sum(not pair.equal for pair in pairs) >= 80
    assert sum(pair.held_out for pair in pairs) >= 60
    assert max(Counter((pair.reference, pair.answer) for pair in pairs).values()) == 1


@pytest.mark.parametrize(("held_out", "most_missed"), [(False, 0), (True, 7)])
def test_ours_errs_no_more_often_than_the_page_says(pairs: list[Any], held_out: bool, most_missed: int) -> None:
    asked = [pair for pair in pairs if pair.held_out == held_out]
    assert FOOLED(asked, "ours") == 0
    assert MISSED(asked, "ours") <= most_missed


def test_ours_rewards_fewer_wrong_answers_than_math_verify_and_misses_fewer_right_ones(pairs: list[Any]) -> None:
    assert FOOLED(pairs, "ours") < FOOLED(pairs, "math-verify")
    assert FOOLED(pairs, "ours") <= FOOLED(pairs, "string")
    assert MISSED(pairs, "ours") < MISSED(pairs, "math-verify") < MISSED(pairs, "string")


def test_an_answer_equals_itself_and_equality_has_no_direction(pairs: list[Any]) -> None:
    ours = TOOL["ours"]
    for pair in pairs:
        if pair.answer:
            assert ours(pair.answer, pair.answer)
    kinds = ("numbers", "fractions", "sets", "tuples", "intervals", "units")
    turned = [pair for pair in pairs if pair.kind in kinds and pair.answer]
    assert [pair for pair in turned if ours(pair.answer, pair.reference) != pair.equal] == []
