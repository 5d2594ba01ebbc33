"""What rewards say, how they are spelled, and what happens when one fails: it is recorded, and never scored 0."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl.rewards
import trl_functions
from pydantic import TypeAdapter, ValidationError

from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards import (
    ExactMatch,
    Format,
    MathAnswer,
    RegexMatch,
    Reward,
    Rewards,
    as_rewards,
    check_rewards,
    score,
)


def rollout(text: str = "", tokens: int = 3, **example: Any) -> Rollout:
    """A completion of `tokens` tokens (10, 11, ...) after a prompt of two."""
    return Rollout(
        tokens=np.array([1, 2, *range(10, 10 + tokens)], dtype=np.int32),
        loss_mask=np.arange(2 + tokens) >= 2,
        logprobs=np.zeros(2 + tokens, dtype=np.float32),
        group=0,
        text=text,
        example={"prompt": "2+2=", **example},
    )


def prompt_of(row: Any) -> Any:
    return row["prompt"]


def scored(function: Any, rollouts: Sequence[Rollout]) -> list[Rollout]:
    return score(rollouts, as_rewards(function), prompt_of)


def check(function: Any, *rows: dict[str, Any]) -> None:
    check_rewards(as_rewards(function), [{"prompt": "2+2=", **row} for row in rows or ({"answer": "4"},)], prompt_of)


def fails(pattern: str) -> Any:
    return pytest.raises(RewardError, match=pattern)


# -------------------------------------------------------------------------------------------------------- math answers

EQUAL = [
    ("7", "7.0"), ("07", "7"), ("1,234", "1234"), ("1{,}234", "1234"), ("$12$", "12"), ("12", "12."), ("-5", "- 5"),
    ("1/2", r"\frac{1}{2}"), ("0.5", "1/2"), (r"-\frac12", "-0.5"), (r"50\%", "0.5"), ("0.001", "1e-3"),
    (r"10^{-3}", "0.001"), (r"3\frac12", "7/2"), (r"\sqrt{8}", r"2\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), ("a+b", "b+a"),
    ("x=5", "5"), ("5", "x=5"), (r"\{1,2\}", r"\{2,1\}"), (r"5\text{ cm}", "5"), (r"90^\circ", "90"), (r"\$5", "5"),
    ("2^{10}", "1024"), (r"\log_2 8", "3"), ("A", "a"), (r"\text{Paris}", "paris"), (r"\boxed{3}", "3"), ("5!", "120"),
]  # fmt: skip
UNEQUAL = [
    ("2", "3"), ("5", "-5"), ("12", "1.2"), ("1234", "1,235"), ("1/3", "0.333"), (r"\pi", "3.14159"), ("A", "B"),
    ("(1,2)", "[1,2]"), ("(3,4)", "(4,3)"), (r"\{1,2\}", r"\{1,3\}"), ("x+1", "x-1"), ("listen", "silent"),
    ("5", ""), ("", ""), ("5", "5" * 300), ("no", "yes"), (r"\sqrt{2}", "2"), ("2", "2x"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_equal_mathematics_is_equal(reference: str, answer: str) -> None:
    assert MathAnswer()(rollout(rf"<think>hm</think>\boxed{{{answer}}}", answer=reference)) == 1


@pytest.mark.parametrize(("reference", "answer"), UNEQUAL)
def test_unequal_mathematics_is_not(reference: str, answer: str) -> None:
    assert MathAnswer()(rollout(rf"\boxed{{{answer}}}", answer=reference)) == 0


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (r"first \boxed{3}, no: \boxed{4}", "4", 1),
        (r"first \boxed{4}, no: \boxed{3}", "4", 0),
        (r"<think>\boxed{4}</think>", "4", 0),
        (r"<think>\boxed{3}</think> \boxed{4}", "4", 1),
        (r"\boxed{\frac{1}{2}}", "1/2", 1),
        (r"\boxed{4} and \boxed{5", "4", 1),
        ("It is 834.", "834", 1),
        ("It is 834!", "834", 1),
        ("**Answer:** **834**", "834", 1),
        ("It is 835.", "834", 0),
        ("the answer is 3/4", "4", 0),
        (r"so we get $\frac{1}{2}$.", "1/2", 1),
        (r"\frac{1}{2}", "0.5", 1),
        ("Paris.", "Paris", 1),
        ("no idea", "834", 0),
        ("", "834", 0),
    ],
)
def test_the_final_answer_is_the_one_that_counts(text: str, reference: str, expected: float) -> None:
    assert MathAnswer()(rollout(text, answer=reference)) == expected


def test_an_answer_may_have_to_be_boxed_and_the_reference_may_be_a_number() -> None:
    assert MathAnswer(only_boxed=True)(rollout("It is 4.", answer="4")) == 0
    assert MathAnswer(only_boxed=True, column="solution")(rollout(r"\boxed{4}", solution=4)) == 1


@pytest.mark.parametrize(
    "endless",
    [
        *("9^{9^{9}}", "9^9^9", "99999999!", "(9^9)!", "9!!", "2^{100000000}", "9**9**9**9", "(x+y)^{9999}"),
        *(r"\binom{10000000}{500000}", r"\sum_{k=1}^{10000000} k^k", r"\int_0^1 x^x dx"),
    ],
)
def test_an_answer_that_would_take_for_ever_is_recorded_rather_than_evaluated(endless: str) -> None:
    (bad,) = scored("math_answer", [rollout(rf"\boxed{{{endless}}}", answer="7")])
    assert not bad.valid
    assert "could take for ever to evaluate" in bad.problem


def test_a_factorial_of_a_variable_can_be_evaluated() -> None:
    assert MathAnswer()(rollout(r"\boxed{n \cdot (n-1)!}", answer="n!")) == 1


def test_a_very_long_answer_is_wrong_before_it_is_read() -> None:
    assert MathAnswer()(rollout(rf"\boxed{{{'(1+' * 100_000}}}", answer="5")) == 0


def test_math_answers_need_no_signals() -> None:
    async def in_a_thread() -> float:
        return await asyncio.to_thread(MathAnswer(), rollout(r"\boxed{\frac{3}{7}}", answer="6/14"))

    assert asyncio.run(in_a_thread()) == 1


# ----------------------------------------------------------------------------------------------------- other built-ins


@pytest.mark.parametrize(
    ("text", "graded"),
    [
        (r"<think>2 and 2</think>\boxed{4}", 1),
        ("\n<think>\n2 and 2\n</think>\nSo: \\boxed{4}.", 1),
        (r"<think>2 and 2</think>4", 0.5),
        (r"\boxed{4}", 0.5),
        (r"<think> </think>\boxed{4}", 0.5),
        (r"Well, <think>2 and 2</think>\boxed{4}", 0.5),
        (r"<think>2</think><think>2</think>\boxed{4}", 0.5),
        (r"<think>2 and 2</think>\boxed{4}\boxed{5}", 0.5),
        (r"<think>2 and 2</think>\boxed{ }", 0.5),
        (r"<think>so \boxed{4}</think>", 0.5),
        (r"<think>so \boxed{4}", 0.5),
        ("It is 4.", 0),
        ("", 0),
    ],
)
def test_format_is_graded_or_strict(text: str, graded: float) -> None:
    assert Format()(rollout(text)) == graded
    assert Format(strict=True)(rollout(text)) == float(graded == 1)


def test_exact_match_compares_the_answer_letter_for_letter() -> None:
    assert ExactMatch()(rollout("<think>hm</think> Paris\n", answer="Paris")) == 1
    assert ExactMatch()(rollout(r"It is \boxed{Paris}.", answer="Paris")) == 1
    assert ExactMatch()(rollout("paris", answer="Paris")) == 0
    assert ExactMatch(ignore_case=True, column="city")(rollout("paris", city="Paris")) == 1


def test_regex_match_finds_or_compares_the_last_group() -> None:
    assert RegexMatch(pattern=r"\d+")(rollout("no number")) == 0
    assert RegexMatch(pattern=r"a.*b")(rollout("a\nb")) == 1
    choice = RegexMatch(pattern=r"answer is ([A-D])", column="answer")
    assert choice(rollout("the answer is A; no, the answer is B", answer="B")) == 1
    assert choice(rollout("the answer is B; no, the answer is A", answer="B")) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "regex_match", "pattern": "("}, r"pattern '\(' is not a regular expression: missing \)"),
        ({"type": "regex_match", "pattern": "a", "column": "b"}, "pattern 'a' has no group to compare with column 'b'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with fails(message):
        as_rewards(settings)


# ------------------------------------------------------------------------------------------------------------ spelling


def brevity(rollout: Rollout) -> float:
    return -float(len(rollout.text))


def test_rewards_are_spelled_as_names_mappings_code_or_values(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def warmth(completions, **columns):\n    return [0.5 for _ in completions]\n")
    code = f"{tmp_path / 'mine.py'}:warmth"
    settings = {"type": "format", "strict": True, "weight": 0.5, "name": "tags"}
    rewards = as_rewards(["math_answer", settings, {"use": code, "weight": 2}, brevity])
    assert [(r.title, r.weight) for r in rewards] == [("math_answer", 1), ("tags", 0.5), ("warmth", 2), ("brevity", 1)]
    assert rewards[1] == Reward(use=Format(strict=True), weight=0.5, name="tags")
    assert as_rewards("format") == as_rewards(["format"]) == as_rewards(Reward(use=Format())) == as_rewards(Format())
    (good,) = scored(code, [rollout("hi")])
    assert good.rewards == {"warmth": 0.5}


def test_a_reward_can_be_written_back_and_read_again() -> None:
    adapter: TypeAdapter[tuple[Reward, ...]] = TypeAdapter(Rewards)
    rewards = as_rewards(["math_answer", {"type": "regex_match", "pattern": "a", "weight": 0.1}, brevity])
    assert adapter.validate_python(adapter.dump_python(rewards, mode="json")) == rewards


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        (
            "math_anser",
            r"rewards\.0\.use: no such choice \(did you mean math_answer\?\); accepted: math_answer, exact_match",
        ),
        ({"type": "format", "strct": True}, r"rewards\.0\.use\.format\.strct"),
        ({"use": "format", "wieght": 1.0}, r"rewards\.0\.wieght"),
        ({"use": "format", "weight": math.nan}, r"rewards\.0\.weight"),
        (
            "nowhere.py:f",
            r"rewards\.0\.use: nowhere\.py cannot be imported|rewards\.0\.use: nowhere\.py:f cannot be imported",
        ),
        ("json:lods", r"rewards\.0\.use: json has no function lods \(did you mean loads\?\)"),
        ([], "rewards: .*there is none; name at least one, such as math_answer"),
        (
            ["format", {"type": "format", "strict": True}],
            "two rewards are called format; give one of them another `name`",
        ),
    ],
)
def test_a_misspelled_reward_is_located(spelled: Any, message: str) -> None:
    with fails(message):
        as_rewards(spelled)


def test_a_setting_of_rewards_refuses_what_as_rewards_refuses() -> None:
    with pytest.raises(ValidationError, match="two rewards are called brevity"):
        TypeAdapter(Rewards).validate_python([brevity, brevity])


# ------------------------------------------------------------------------------------------------------------- scoring


def test_the_reward_is_the_weighted_sum() -> None:
    rewards = as_rewards([{"use": "math_answer", "weight": 2.0}, {"use": "format", "weight": 0.1}])
    (r,) = score([rollout(r"<think>.</think>\boxed{4}", answer=4)], rewards, prompt_of)
    assert r.rewards == {"math_answer": 1.0, "format": 1.0}
    assert r.reward_weights == {"math_answer": 2.0, "format": 0.1}
    assert r.reward == 2.1
    assert r.valid
    assert r.problem == ""


def test_nothing_is_mutated_and_nothing_else_changes() -> None:
    before = rollout("hi")
    (after,) = scored(brevity, [before])
    assert before.rewards == {}
    assert after.example is before.example
    assert after.tokens is before.tokens


def one_over_length(rollout: Rollout) -> float:
    return 1 / len(rollout.text)


def test_a_reward_that_raises_is_recorded_and_never_zero() -> None:
    good, bad = score([rollout("hi"), rollout("")], as_rewards([one_over_length, brevity]), prompt_of)
    assert (good.reward, good.valid) == (-1.5, True)
    assert not bad.valid
    assert bad.problem.startswith("rewards.one_over_length: raised ZeroDivisionError: ")
    assert "(test_rewards.py:" in bad.problem
    assert math.isnan(bad.rewards["one_over_length"])
    assert bad.rewards["brevity"] == 0
    assert math.isnan(bad.reward)


def test_the_line_named_is_that_of_the_reward_rather_than_of_a_library() -> None:
    def reads(rollout: Rollout) -> float:
        return float(json.loads(rollout.text))

    (bad,) = scored(reads, [rollout("")])
    assert bad.problem.startswith("rewards.reads: raised JSONDecodeError: Expecting value")
    assert "(test_rewards.py:" in bad.problem


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
def test_nan_and_infinity_are_recorded_in_both_signatures(value: Any) -> None:
    def ours(rollout: Rollout) -> float:
        return value

    def theirs(completions: list[str]) -> list[float]:
        return [value for _ in completions]

    for function in (ours, theirs):
        (bad,) = scored(function, [rollout("hi")])
        assert not bad.valid
        assert bad.problem == f"rewards.{function.__name__}: returned {float(value)}"
        assert math.isnan(bad.reward)


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.bool_(True), np.array(1.0), torch.tensor(1.0)])
def test_any_kind_of_number_is_one(value: Any) -> None:
    def ours(rollout: Rollout) -> Any:
        return value

    def theirs(completions: list[str]) -> Any:
        return [value]

    for function in (ours, theirs):
        assert scored(function, [rollout("hi")])[0].reward == 1.0


def test_whole_arrays_are_lists() -> None:
    def array(completions: list[str]) -> Any:
        return np.array([0.5, 1.0])

    def tensor(completions: list[str]) -> Any:
        return torch.tensor([0.5, 1.0], dtype=torch.bfloat16, requires_grad=True)

    for function in (array, tensor):
        assert [r.reward for r in scored(function, [rollout("a"), rollout("b")])] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        (None, "returned None"),
        (1.0, "returned the float 1.0"),
        ({"a": 1.0}, "returned the dict {'a': 1.0}"),
        ("1.0", "returned the str '1.0'"),
        ([1.0, 1.0, 1.0], "returned 3 values for 1 completions"),
        ([[1.0], [1.0]], "returned the list [1.0] at ["),
        (np.ones((2, 1)), "returned the list [1.0] at ["),
    ],
)
def test_a_list_of_the_wrong_kind_is_recorded(returned: Any, described: str) -> None:
    def theirs(completions: list[str]) -> Any:
        return returned

    for bad in scored(theirs, [rollout("a"), rollout("b")]):
        assert bad.problem.startswith(f"rewards.theirs: {described}")
        assert "(accepted: a list of " in bad.problem
        assert bad.faults == {"theirs": "returned"}
        assert math.isnan(bad.reward)


def test_one_entry_of_the_wrong_kind_costs_its_own_sample() -> None:
    def theirs(completions: list[str]) -> Any:
        return [1.0, "1.0"]

    good, bad = scored(theirs, [rollout("a"), rollout("b")])
    assert good.reward == 1.0
    assert bad.problem.startswith("rewards.theirs: returned the str '1.0' at [1] of its list (accepted")


@pytest.mark.parametrize(
    ("returned", "described"),
    [(None, "None"), ({"a": 1.0}, "the dict"), ("1", "the str '1'"), ([1.0], "the list"), (1j, "the complex")],
)
def test_a_value_of_the_wrong_kind_is_recorded(returned: Any, described: str) -> None:
    def ours(rollout: Rollout) -> Any:
        return returned

    (bad,) = scored(ours, [rollout("a")])
    assert bad.problem.startswith(f"rewards.ours: returned {described}")
    assert "(accepted: one number for f(rollout))" in bad.problem
    assert (bad.valid, bad.faults) == (False, {"ours": "returned"})


# --------------------------------------------------------------------------------------------------------- composition


def test_a_reward_after_another_counts_and_is_called_only_where_that_one_is_more_than_half() -> None:
    asked: list[str] = []

    def answer(rollout: Rollout) -> float:
        asked.append(rollout.text)
        return 1.0

    rewards = as_rewards([Reward(use=answer, after="tags"), {"type": "format", "name": "tags", "weight": 0.5}])
    whole, half, none = "<think>.</think>\\boxed{4}", "\\boxed{4}", "4"
    rollouts = score([rollout(whole), rollout(half), rollout(none)], rewards, prompt_of)
    assert asked == [whole]
    assert [r.rewards for r in rollouts] == [
        {"answer": 1.0, "tags": 1.0},
        {"answer": 0.0, "tags": 0.5},
        {"answer": 0.0, "tags": 0.0},
    ]
    assert [r.reward for r in rollouts] == [1.5, 0.25, 0.0]


def test_a_gate_that_fails_makes_no_second_problem_and_one_without_an_opinion_is_open() -> None:
    def gate(completions: list[str]) -> list[float | None]:
        return [None if text == "none" else float(text) for text in completions]

    rewards = as_rewards([gate, Reward(use=brevity, after="gate")])
    passed, silent, bad = score([rollout("1"), rollout("none"), rollout("x")], rewards, prompt_of)
    assert (passed.reward, silent.reward) == (0.0, -4.0)
    assert bad.faults == {"gate": "raised"}
    assert "; " not in bad.problem


def test_gates_may_follow_each_other_but_not_in_a_circle() -> None:
    def one(rollout: Rollout) -> float:
        return 1.0

    def two(rollout: Rollout) -> float:
        return 1.0

    chain = [Reward(use=brevity, after="one"), Reward(use=one, after="two"), Reward(use=two)]
    assert scored(chain, [rollout("abc")])[0].reward == -1.0
    with fails(r"one\.after: two: they wait for each other; take one of the `after`s away"):
        as_rewards([Reward(use=one, after="two"), Reward(use=two, after="one")])
    with fails(r"brevity\.after: ones: no such reward \(did you mean one\?\); accepted: one"):
        as_rewards([Reward(use=brevity, after="ones"), Reward(use=one)])


def test_a_row_may_choose_its_rewards() -> None:
    rewards = as_rewards([{"use": "exact_match", "weight": 2.0}, "format", brevity])
    rows: list[dict[str, Any]] = [
        {"answer": "4"},
        {"answer": "4", "reward": "exact_match"},
        {"answer": None, "reward": ["format", "brevity"]},
        {"answer": "4", "reward": 1.0},  # a column that means something else
    ]
    check_rewards(rewards, [{"prompt": "2+2=", **row} for row in rows], prompt_of)
    rollouts = score([rollout("4", **row) for row in rows], rewards, prompt_of)
    assert [r.reward for r in rollouts] == [1.0, 2.0, -1.0, 1.0]
    assert all(r.valid for r in rollouts)
    assert [name for name, value in rollouts[1].rewards.items() if not math.isnan(value)] == ["exact_match"]
    with fails(
        r"rewards: rows\[1\]\.reward names 'exact_mtch', .*\(did you mean exact_match\?\); accepted: exact_match, f"
    ):
        check_rewards(rewards, [{"prompt": "", "answer": ""}, {"prompt": "", "reward": "exact_mtch"}], prompt_of)


def test_a_setting_of_a_reward_may_stand_beside_those_of_its_function() -> None:
    (reward,) = as_rewards({"type": "format", "strict": True, "after": "", "timeout_seconds": 3.0, "retries": 2})
    assert (reward.limit, reward.retries, reward.use) == (3.0, 2, Format(strict=True))
    assert as_rewards("math_answer")[0].limit == 10.0


# ----------------------------------------------------------------------------------------------- TRL's reward functions


def test_trls_functions_get_prompts_completions_ids_and_columns() -> None:
    seen: dict[str, Any] = {}

    def everything(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0, 1.0]

    first, second = scored(everything, [rollout("3", answer="4"), rollout("4", answer="4", level=2)])
    assert (first.reward, second.reward) == (0.0, 1.0)
    assert seen == {
        "prompts": ["2+2=", "2+2="],
        "completions": ["3", "4"],
        "completion_ids": [[10, 11, 12], [10, 11, 12]],
        "answer": ["4", "4"],
        "level": [None, 2],
    }


def test_messages_give_completions_as_messages() -> None:
    def words(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float(len(completion[0]["content"].split())) for completion in completions]

    asked = [{"role": "user", "content": "hi"}]
    (r,) = score([rollout("well hello there")], as_rewards(words), lambda row: asked)
    assert r.reward == 3


def test_only_named_columns_are_passed_without_kwargs() -> None:
    def right(completions: list[str], answer: list[str], bonus: float = 0.5) -> list[float]:
        return [float(c == a) + bonus for c, a in zip(completions, answer, strict=True)]

    assert scored(right, [rollout("4", answer="4", level=2)])[0].reward == 1.5


def test_async_functions_of_both_signatures_are_awaited_even_inside_a_running_loop() -> None:
    async def theirs(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def ours(rollout: Rollout) -> float:
        await asyncio.sleep(0)
        return 1 / len(rollout.text)

    async def notebook() -> list[Rollout]:
        return score([rollout("ab"), rollout("")], as_rewards([theirs, ours]), prompt_of)

    good, bad = asyncio.run(notebook())
    assert good.reward == 1.5
    assert bad.problem.startswith("rewards.ours: raised ZeroDivisionError: ")
    assert "(test_rewards.py:" in bad.problem


def test_none_is_no_opinion_and_leaves_the_sum() -> None:
    def only_long(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None if len(c) < 3 else 1.0 for c in completions]

    short, long = score([rollout("a"), rollout("abc")], as_rewards([only_long, brevity]), prompt_of)
    assert (short.reward, short.valid, long.reward) == (-1.0, True, -2.0)
    assert math.isnan(short.rewards["only_long"])
    (alone,) = scored(only_long, [rollout("a")])
    assert not alone.valid
    assert alone.problem == "rewards: none has an opinion on this sample (all returned None)"
    assert math.isnan(alone.reward)


def test_one_bad_sample_does_not_cost_the_others_theirs() -> None:
    def parses(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(c) for c in completions]

    first, bad, last = scored(parses, [rollout("1"), rollout("x"), rollout("3")])
    assert (first.reward, last.reward) == (1.0, 3.0)
    assert bad.problem.startswith(
        "rewards.parses: raised ValueError: could not convert string to float: 'x' (test_rewards"
    )


def test_the_functions_of_trls_documentation_run_unchanged() -> None:
    first = rollout(r"\boxed{4}", ground_truth="4", task="math")
    second = rollout("def f(): 3", tokens=5, ground_truth="def f(): 3", task="coding")

    def values(*functions: Any) -> list[dict[str, float]]:
        check_rewards(as_rewards(list(functions)), [first.example, second.example], prompt_of)
        said = score([first, second], as_rewards(list(functions)), prompt_of)
        assert all(r.valid for r in said)
        return [{name: value for name, value in r.rewards.items() if not math.isnan(value)} for r in said]

    assert values(trl_functions.longer_in_tokens) == [{"longer_in_tokens": 3.0}, {"longer_in_tokens": 5.0}]
    assert values(trl_functions.longer_in_characters)[1] == {"longer_in_characters": 10.0}
    assert [*values(trl_functions.equals_the_reference)] == [{"equals_the_reference": v} for v in (1.0, 0.0)]
    assert values(trl_functions.of_mathematics, trl_functions.of_code) == [{"of_mathematics": 1.0}, {"of_code": 1.0}]
    assert values(trl_functions.asks_a_server) == [{"asks_a_server": 1.0}] * 2
    assert values(trl_functions.logs_more) == [{"logs_more": 0.0}, {"logs_more": 1.0}]

    def asked(row: Any) -> Any:
        return [{"role": "user", "content": row["prompt"]}]

    formatted = [rollout("<think>.</think><answer>4</answer>"), rollout("4")]
    assert [r.reward for r in score(formatted, as_rewards(trl_functions.has_the_format), asked)] == [1.0, 0.0]


def test_trls_own_reward_functions_run_unchanged() -> None:
    rewards = as_rewards([trl.rewards.think_format_reward, trl.rewards.get_soft_overlong_punishment(5, 4)])

    def asked(row: Any) -> Any:
        return [{"role": "user", "content": row["prompt"]}]

    rollouts = score([rollout("<think>.</think>4", tokens=3), rollout("4", tokens=6)], rewards, asked)
    assert [r.valid for r in rollouts] == [True, True]
    assert [list(r.rewards.values()) for r in rollouts] == [[1.0, -0.5], [0.0, -1.0]]


# ------------------------------------------------------------------------------------------------ before any sampling


def test_good_rewards_pass_the_check() -> None:
    def theirs(prompts: list[str], completions: list[str], answer: list[str]) -> list[float | None]:
        assert completions == [r"\boxed{4}"]
        return [None]

    check(["math_answer", "format", "exact_match", theirs, brevity])


def missing(completions: list[str], anwser: list[str]) -> list[float]:
    return [0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            missing,
            r"rewards\.missing: needs the column 'anwser', which no row has \(did you mean answer\?\); columns: prompt",
        ),
        (
            {"type": "exact_match", "column": "anser"},
            r"rewards\.exact_match: needs the column 'anser'.*name another in the",
        ),
    ],
)
def test_a_missing_column_is_found_before_any_sampling(function: Any, message: str) -> None:
    with fails(message):
        check(function)


def test_a_null_reference_is_located() -> None:
    with fails(
        r"rewards\.math_answer: needs a value in the column 'answer', but rows\[1\]\.answer is null; fill it in"
    ):
        check("math_answer", {"answer": "4"}, {"answer": None})


def test_a_signature_of_neither_kind_is_refused() -> None:
    def strange(x: int, y: int) -> float:
        return 0.0

    with fails(
        r"rewards\.strange: its signature is \(x: 'int', y: 'int'\).*accepted: f\(rollout\) -> float, or f\(prompts"
    ):
        check(strange)
    with fails(r"rewards\.Nameless: its signature is \(\).*accepted"):

        class Nameless:
            def __call__(self) -> float:
                return 0.0

        check(Nameless())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (math.nan, "returned nan when tried on rows"),
        (math.inf, "returned inf when tried on rows"),
        (None, r"returned None \(accepted"),
        ({"a": 1}, "returned the dict"),
        ([1.0, 2.0], "returned the list"),
    ],
)
def test_the_trial_finds_what_a_reward_returns(returned: Any, message: str) -> None:
    def ours(rollout: Rollout) -> Any:
        return returned

    with fails(rf"rewards\.ours: {message}"):
        check(ours)


def test_the_trial_finds_a_wrong_length() -> None:
    def theirs(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * 8

    with fails(r"rewards\.theirs: returned 8 values for 1 completions \(accepted: a list of 1 numbers"):
        check(theirs)


def test_a_trial_that_raises_names_the_line_and_the_way_out() -> None:
    with fails(
        r"rewards\.one_over_length: raised ZeroDivisionError: .* \(test_rewards\.py:\d+\) when tried on rows\[0\] with "
        r"the completion '', before any sampling; accepted: a finite number for any text\..*`trial: false` on rewards"
    ):
        check(one_over_length, {"level": 1})


def test_an_unfair_trial_can_be_left_out() -> None:
    check(Reward(use=one_over_length, trial=False), {"level": 1})


def test_interrupts_are_not_a_problem_of_a_sample() -> None:
    def interrupted(rollout: Rollout) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(interrupted, [rollout("a")])


def test_a_reward_may_stop_the_run_on_purpose() -> None:
    def strict(rollout: Rollout) -> float:
        raise RewardError("rewards.strict: no judge is running; start it")

    with fails("no judge is running"):
        scored(strict, [rollout("a")])


def test_a_callable_that_hides_its_signature_is_refused() -> None:
    with fails(r"rewards\.max: has no readable signature; wrap it in a function f\(rollout\) -> float, or f\(prompts"):
        check(max)
