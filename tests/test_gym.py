"""reasoning-gym: its rows are the same everywhere, and its own verifiers grade them."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from groupwise.config import Config
from groupwise.data import Data, load_task
from groupwise.errors import DataError
from groupwise.rewards import as_rewards, made_up, reference_answer, score
from groupwise.rewards.gym import gym_rows
from groupwise.tasks import Task, check_prompts

GYM = as_rewards("gym")


def task_of(path: str, **settings: Any) -> Task:
    return load_task(Data(path=path, limit=5, **settings), GYM)


def earned(task: Task, row: int, text: str) -> float:
    (scored,) = score([made_up(text, task.rows[row])], task.rewards, task.prompt_of)
    return scored.reward


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    if "missing" not in request.node.name:
        pytest.importorskip("reasoning_gym", reason="needs the extra: pip install -c constraints.txt -e '.[gym]'")


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "countdown", "word_sorting", "mini_sudoku", "time_intervals"])
def test_a_dataset_comes_by_name_with_its_own_verifier(name: str) -> None:
    task = task_of(f"gym:{name}")
    check_prompts(task)
    assert len({row["prompt"] for row in task.rows}) == 5
    for index, row in enumerate(task.rows):
        right = reference_answer(GYM[0], row)
        assert right is not None
        assert earned(task, index, right) == 1
        assert earned(task, index, f"<think>hm</think>\\boxed{{{row['answer']}}}") == 1
        assert earned(task, index, "<answer>no idea</answer>") < 0.5
        assert earned(task, index, "") < 0.5


def test_another_right_answer_than_the_reference_is_right() -> None:
    (row,) = gym_rows("countdown", "train", {"min_numbers": 3, "max_numbers": 3}, 1)
    task = Task([row], GYM)
    assert earned(task, 0, f"<answer>(({row['answer']}))</answer>") == 1
    assert earned(task, 0, f"<answer>({row['answer']}) + 1</answer>") < 0.5


def test_the_same_names_give_the_same_puzzles_and_splits_differ() -> None:
    one, same, test = (
        [row["prompt"] for row in gym_rows("chain_sum", split, {}, 20)] for split in ("train", "train", "test")
    )
    assert one == same
    assert not set(one) & set(test)
    assert one[:5] == [row["prompt"] for row in gym_rows("chain_sum", "train", {}, 5)]


def test_options_reach_the_dataset_and_its_verifier() -> None:
    rows = gym_rows("chain_sum", "train", {"min_terms": 5, "max_terms": 5}, 4)
    assert [row["metadata"]["num_terms"] for row in rows] == [5] * 4
    rows = gym_rows("decimal_arithmetic", "train", {"min_num_decimal_places": 2, "max_num_decimal_places": 2}, 2)
    assert earned(Task(rows, GYM), 0, f"<answer>{rows[0]['answer']}</answer>") == 1


def test_rows_can_be_sent_to_another_process() -> None:
    rows = gym_rows("knights_knaves", "train", {}, 3)
    assert earned(Task(pickle.loads(pickle.dumps(rows)), GYM), 1, f"<answer>{rows[1]['answer']}</answer>") == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "chainsum",
            {},
            r"data\.path: gym:chainsum: reasoning-gym has no such dataset \(did you mean chain_sum\?\); ac",
        ),
        (
            "chain_sum",
            {"terms": 3},
            r"data\.options: reasoning-gym's chain_sum refuses \{'terms': 3\}: .*'terms'; change",
        ),
        (
            "chain_sum",
            {"min_terms": 9},
            r"data\.options: reasoning-gym's chain_sum refuses \{'min_terms': 9\}: .*max_terms",
        ),
    ],
)
def test_what_reasoning_gym_does_not_have_is_said(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        gym_rows(name, "train", options, 3)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        DataError, match=r"needs the package reasoning-gym; install it with pip install 'groupwise\[gym\]'"
    ):
        gym_rows("chain_sum", "never made before", {}, 3)


def test_a_run_file_names_it() -> None:
    tree = {"model": "m", "data": {"path": "gym:chain_sum", "options": {"max_terms": 3}}, "rewards": "gym"}
    assert Config.parse(tree).data.options == {"max_terms": 3}
