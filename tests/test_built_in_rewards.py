"""Multiple choice, JSON of a schema, repetition, scripts, and what length does to a reward: against numbers by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rewards import fails, rollout, scored

from groupwise.rewards import JsonSchema, MathAnswer, MultipleChoice, Repetition, Script, as_rewards
from groupwise.rewards.reward import BuiltIn
from groupwise.shaping import CosineLength, KimiLength, LinearLength, StopProperly

# ------------------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        *((r"\boxed{B}", "B"), (r"\boxed{(b)}", "B"), (r"\boxed{\text{(B)}}", "B"), (r"\boxed{\textbf{(B) } 12}", "B")),
        *(("The answer is (B).", "B"), ("the answer is B", "B"), ("Answer: B", "B"), ("**Answer:** **B**", "B")),
        *(("I choose option C, as it is larger.", "C"), ("The correct choice is D because 4 > 3.", "D")),
        *(("Let us see.\nB. Paris", "B"), ("B", "B"), ("(B)", "B"), ("**B**", "B")),
        ("The answer is A. No: the answer is B.", "B"),
        ("<think>The answer is A.</think> The answer is (B).", "B"),
        (r"The answer is (A), so \boxed{B}", "B"),
    ],
)
def test_a_choice_is_found_in_the_usual_phrasings(text: str, chosen: str) -> None:
    for letter in "ABCD":
        assert MultipleChoice()(rollout(text, answer=letter)) == float(letter == chosen)
        assert MultipleChoice()(rollout(text, answer=f"({letter})")) == float(letter == chosen)


@pytest.mark.parametrize(
    "text",
    [
        "", "The answer is A lot of work.", "A dog barks.", "It is Paris.", r"\boxed{(A) or (B)}", r"\boxed{A, B}",
        r"\boxed{ABCD}", "(A) or (B)", "<think>The answer is (A).</think>", r"\boxed{7}",
    ],
)  # fmt: skip
def test_no_choice_or_more_than_one_earns_nothing(text: str) -> None:
    assert [MultipleChoice()(rollout(text, answer=letter)) for letter in "ABCD"] == [0, 0, 0, 0]


def test_naming_every_choice_does_not_fool_the_math_reward_either() -> None:
    for answer in ("(A) or (B)", "A, B", "(B)(C)", "ABCD"):
        assert MathAnswer()(rollout(rf"\boxed{{{answer}}}", answer="B")) == 0


def test_a_reference_that_is_no_letter_is_a_problem_of_the_row() -> None:
    (bad,) = scored("multiple_choice", [rollout("B", answer="Paris")])
    assert not bad.valid
    assert "the reference 'Paris' is no letter from A to J" in bad.problem


# ---------------------------------------------------------------------------------------------------------------- JSON

PERSON = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "age": {"minimum": 0}}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        ('<think>{"age": 1}</think>\n{"name": "Ada"}', 1),
        ('Here it is:\n```json\n{"name": "Ada"}\n```\nDone.', 1),
        ('```json\n{"name": 1}\n```\nrather\n```json\n{"name": "Ada"}\n```', 1),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"age": 36}', 0),
        ('{"name": "Ada", "age": NaN}', 0),
        ('{"name": "Ada"', 0),
        ("[" * 100_000, 0),
        ("Ada", 0),
        ("", 0),
    ],
)
def test_json_is_checked_against_the_schema(text: str, value: float) -> None:
    assert JsonSchema(expected=PERSON)(rollout(text)) == value
    assert JsonSchema(column="schema")(rollout(text, schema=json.dumps(PERSON))) == value


def test_a_schema_that_is_none_is_refused_before_the_run_and_recorded_in_a_row() -> None:
    with fails(r"expected is not a JSON schema: 'text' is not valid .* at \$\.type"):
        as_rewards({"type": "json_schema", "expected": {"type": "text"}})
    with fails("names no schema, or two; give `expected`"):
        as_rewards("json_schema")
    (bad,) = scored({"type": "json_schema", "column": "schema"}, [rollout("{}", schema={"type": "text"})])
    assert "raised SchemaError" in bad.problem


def test_a_reference_to_elsewhere_is_never_fetched() -> None:
    (bad,) = scored({"type": "json_schema", "expected": {"$ref": "https://example.org/schema"}}, [rollout("{}")])
    assert "Unresolvable" in bad.problem


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with fails(r"needs jsonschema; install it with `pip install 'groupwise\[json\]'`"):
        as_rewards({"type": "json_schema", "expected": {}})


# --------------------------------------------------------------------------------------------------------------- prose


@pytest.mark.parametrize(
    ("text", "ngram", "value"),
    [
        ("one two three four", 2, 0),
        ("a b a b a", 2, 2 / 4 - 1),  # ab ba ab ba
        ("a A a a", 1, 1 / 4 - 1),
        ("so so so so so", 3, 1 / 3 - 1),
        ("我 我我我", 2, 1 / 3 - 1),
        ("a b", 3, 0),
        ("", 1, 0),
    ],
)
def test_repetition_is_the_share_of_ngrams_seen_before(text: str, ngram: int, value: float) -> None:
    assert Repetition(ngram=ngram)(rollout(text)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "script", "value"),
    [
        ("all of it in one", "latin", 1),
        ("so 答案 is four", "latin", 3 / 5),
        ("so 答案 is four", "han", 2 / 5),
        (r"所以答案是 $x + y$, \frac{1}{2}, x", "han", 1),
        ("<think>ответ</think> пять", "cyrillic", 1),
        ("答えは五です", "japanese", 1),
        ("naïve café", "latin", 1),
        ("naive \u0441\u0430f\u0435", "latin", 1 / 2),  # Cyrillic letters that look Latin
        ("$5$", "latin", 0),
        ("", "latin", 0),
    ],
)
def test_script_is_the_share_of_words_in_it(text: str, script: Any, value: float) -> None:
    assert Script(script=script)(rollout(text)) == pytest.approx(value)


# -------------------------------------------------------------------------------------------------------------- length


def shaped(shaping: Any, rewards: list[float], lengths: list[float], truncated: list[bool]) -> list[float]:
    groups = np.zeros(len(rewards), dtype=np.int64)
    return shaping(np.array(rewards), groups, np.array(lengths), np.array(truncated)).tolist()


def test_the_cosine_runs_from_short_to_long_and_a_truncated_answer_gets_neither() -> None:
    added = shaped(CosineLength(limit=100), [1, 1, 1, 0, 0, 0, 1], [0, 50, 100, 0, 50, 25, 100], [False] * 6 + [True])
    quarter = -10 * (1 + math.cos(math.pi / 4)) / 2
    assert added == pytest.approx([2 - 1, 1.5 - 1, 1 - 1, -10, -5, quarter, -10 - 1])


def test_kimis_bonus_is_for_right_answers_and_its_malus_for_all() -> None:
    assert shaped(KimiLength(), [1, 1, 0, 0, 1], [10, 30, 10, 30, 20], [False] * 5) == [0.5, -0.5, 0, -0.5, 0]
    assert shaped(KimiLength(), [1, 0], [10, 10], [False] * 2) == [0, 0]


def test_linear_length_and_stopping_properly() -> None:
    assert shaped(LinearLength(coef=0.5, limit=100), [1, 0], [100, 20], [False] * 2) == [-0.5, -0.1]
    assert shaped(StopProperly(coef=0.25), [1, 1, -2], [9, 9, 9], [True, False, True]) == [-0.75, 0, 1.5]


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_lists_every_built_in_with_its_settings() -> None:
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for name, member in BuiltIn.members.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        missing = [setting for setting in member.model_fields if setting != "type" and f"`{setting}`" not in row]
        assert not missing, f"{name}: {missing}"
