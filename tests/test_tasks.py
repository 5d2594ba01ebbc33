"""Whatever is wrong with a dataset is said before anything is sampled; which rows a step uses is a pure function."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from texts import byte_tokenizer

from groupwise.chat import Chat
from groupwise.errors import DataError, RewardError
from groupwise.rewards import as_rewards
from groupwise.tasks import Task, check_prompts, check_task, rows_for_step, split_rows

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(20)]
MATH = as_rewards("math_answer")
TOKENIZER = byte_tokenizer()
CHAT = Chat(TOKENIZER, (TOKENIZER.eos_token_id,))


def fails(pattern: str) -> Any:
    return pytest.raises(DataError, match=pattern)


# ------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, "is null"),
        ("", "is empty"),
        ("  \n", "is empty"),
        ([], "is an empty list"),
        (3, "is the int 3"),
        ({"role": "user", "content": "hi"}, "is the dict"),
        (["hi"], "has, as message 0, the str 'hi'"),
        ([{"content": "hi"}], "has no text as the 'role' of message 0"),
        (
            [{"role": "user", "content": "hi"}, {"role": "user", "contents": "hi"}],
            "has no text as the 'content' of message 1",
        ),
        ([{"role": "user", "content": None}], "has no text as the 'content' of message 0"),
    ],
)
def test_a_bad_prompt_is_located(prompt: object, problem: str) -> None:
    with fails(rf"data: the prompt of rows\[1\] {problem}.*accepted: text, or a list of messages .*leave it out"):
        check_prompts(Task([{"prompt": "fine"}, {"prompt": prompt}], MATH))


def test_a_missing_prompt_column_lists_the_columns() -> None:
    with fails(
        r"data\.prompt_column: rows\[0\] has no column 'prompt' \(did you mean prompts\?\); columns: prompts, answer; "
        r"rename one of them, or set data\.prompt_column"
    ):
        check_prompts(Task([{"prompts": "a", "answer": "b"}], MATH))


def test_no_rows_is_an_error() -> None:
    with fails("data: there are no rows; accepted: at least one"):
        check_task(Task([], MATH), CHAT, max_tokens=8, context=64)


def test_a_prompt_comes_from_another_column_or_a_function() -> None:
    row = {"question": "2+2?", "answer": "4"}
    assert Task([row], MATH, prompt="question").prompt_of(row) == "2+2?"
    assert Task([row], MATH, prompt=lambda row: f"Q: {row['question']}").prompt_of(row) == "Q: 2+2?"


def test_a_system_message_makes_a_conversation() -> None:
    user, system = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "Be long."}, user]
    task = Task(ROWS, MATH, system="Be brief.")
    assert task.prompt_of({"prompt": "2+2?"}) == [system, user]
    assert task.prompt_of({"prompt": [user]}) == [system, user]
    assert task.prompt_of({"prompt": own}) == own
    assert Task(ROWS, MATH, system="").prompt_of({"prompt": "2+2?"}) == [user]
    assert Task(ROWS, MATH).prompt_of({"prompt": "2+2?"}) == "2+2?"


LONG = [*ROWS[:3], {"prompt": "x" * 60, "answer": "1"}]


def test_a_prompt_that_leaves_no_room_is_an_error() -> None:
    with fails(
        r"data\.long_prompts: 1 of 4 prompts are too long: rows\[3\] has 60 tokens, and with sampling\.max_tokens 5 "
        r"passes the model's context of 64; .*lower sampling\.max_tokens.*data\.long_prompts: drop"
    ):
        check_task(Task(LONG, MATH), CHAT, max_tokens=5, context=64)
    assert len(check_task(Task(LONG, MATH), CHAT, max_tokens=4, context=64).rows) == 4
    assert len(check_task(Task(LONG, MATH), CHAT, max_tokens=5, context=None).rows) == 4


def test_prompts_that_leave_no_room_can_be_dropped_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "groupwise"):
        kept = check_task(Task(LONG, MATH), CHAT, max_tokens=5, context=64, long_prompts="drop")
    assert list(kept.rows) == ROWS[:3]
    assert "1 of 4 prompts are too long: rows[3]" in caplog.text
    assert caplog.text.rstrip().endswith("dropped")


def test_dropping_every_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="20 of 20 prompts are too long") as caught:
        check_task(Task(ROWS, MATH), CHAT, max_tokens=64, context=64, long_prompts="drop")
    assert "drop" not in str(caught.value)


def test_a_prompt_without_tokens_is_an_error() -> None:
    silent = byte_tokenizer(template="")
    with fails(r"data: the prompt of rows\[0\] has no tokens; write a prompt"):
        check_task(Task(ROWS, MATH, system=""), Chat(silent, (silent.eos_token_id,)), max_tokens=4, context=None)


def test_a_task_without_the_rewards_column_is_refused() -> None:
    with pytest.raises(RewardError, match=r"rewards\.math_answer: needs the column 'answer'"):
        check_task(Task([{"prompt": "2+2="}], MATH), CHAT, max_tokens=8, context=64)


# --------------------------------------------------------------------------------------------------------------- order


def test_each_epoch_uses_every_row_once_and_steps_straddle_epochs() -> None:
    order = [row for step in range(10) for row in rows_for_step(7, step, 5, seed=3)]
    epochs = [order[start : start + 7] for start in range(0, 49, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_the_order_is_a_pure_function_of_seed_and_step() -> None:
    assert rows_for_step(100, 41, 8, seed=1) == rows_for_step(100, 41, 8, seed=1)
    assert rows_for_step(100, 41, 8, seed=1) != rows_for_step(100, 41, 8, seed=2)


def test_a_step_may_be_a_whole_epoch_but_not_more() -> None:
    assert sorted(rows_for_step(5, 3, 5, seed=0)) == list(range(5))
    with fails("data: 4 rows cannot fill a step of prompts_per_step 5; set prompts_per_step to at most 4, or add rows"):
        rows_for_step(4, 0, 5, seed=0)


# --------------------------------------------------------------------------------------------------------------- split


def test_a_row_keeps_its_side_whatever_is_around_it() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"question {i}"}], "id": i} for i in range(2000)]
    train, test = split_rows(rows, 0.1)
    assert len(train) + len(test) == len(rows)
    assert 150 < len(test) < 250
    assert split_rows(rows[::-1][:500], 0.1)[1] == [row for row in rows[::-1][:500] if row in test]


def test_equal_prompts_are_on_the_same_side() -> None:
    rows = [{"prompt": f"q{i % 50}", "id": i} for i in range(500)]
    train, test = split_rows(rows, 0.5)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert Counter(row["prompt"] for row in train + test) == {f"q{i}": 10 for i in range(50)}
