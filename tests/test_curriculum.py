"""Prompts that teach nothing are skipped for a while; which ones depends on seed, step and the past, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from toys import final_bytes, metrics, sampled, toy_config, toy_folder, toy_rows

from groupwise import checkpoint
from groupwise.config import Config
from groupwise.curriculum import Curriculum, History
from groupwise.records import Rollout
from groupwise.rewards import as_rewards, made_up
from groupwise.tasks import Task
from groupwise.train import train

ROWS = [{"prompt": f"q{i}", "answer": "1"} for i in range(10)]
TASK = Task(ROWS, as_rewards("math_answer"))


def answered(row: int, values: Sequence[float], group: int = 0, **changes: Any) -> list[Rollout]:
    rollouts = [made_up("", TASK.rows[row], group) for _ in values]
    given = zip(rollouts, values, strict=True)
    return [dataclasses.replace(r, rewards={"math_answer": value}, **changes) for r, value in given]


def history(visits: int = 2, retry_after: int = 5) -> History:
    return History(Curriculum(visits=visits, retry_after=retry_after), TASK)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_prompt_is_skipped_after_so_many_dull_visits_and_tried_again_later(value: float) -> None:
    h = history(visits=2, retry_after=5)
    h.record(0, answered(3, [value] * 4))
    assert not h.skips(3, 1)
    h.record(4, answered(3, [value] * 4))
    assert [step for step in range(5, 12) if h.skips(3, step)] == [5, 6, 7, 8]
    assert not any(h.skips(row, 5) for row in range(10) if row != 3)
    h.record(9, answered(3, [value] * 4))  # still as dull
    assert h.skips(3, 13)


def test_an_answer_that_differs_starts_the_count_again() -> None:
    h = history(visits=2)
    for step, values in enumerate([[0, 0], [1, 1], [0, 0], [0, 1], [0, 0]]):  # never twice the same in a row
        h.record(step, answered(3, [float(value) for value in values]))
        assert not h.skips(3, step + 1)
    h.record(5, answered(3, [0.0, 0.0]))
    assert h.skips(3, 6)


def test_rollouts_without_a_reward_say_nothing() -> None:
    h = history(visits=1)
    h.record(0, answered(3, [0.0, 0.0], valid=False))
    assert not h.seen
    h.record(1, [*answered(3, [1.0, 1.0]), *answered(3, [0.0], valid=False)])
    assert h.skips(3, 2)


def test_skipped_rows_are_replaced_by_those_asked_least() -> None:
    h = history(visits=1)
    for row in (0, 1, 2):
        h.record(0, answered(row, [0.0, 0.0]))
    for row in (5, 6, 7, 8):
        h.record(0, answered(row, [0.0, 1.0]))
    chosen = h.instead_of([0, 4, 1, 5], step=1, draw=0, seed=3)
    assert (chosen[1], chosen[3]) == (4, 5)
    assert {chosen[0], chosen[2]} == {3, 9}  # never asked, not in the step, not skipped
    assert h.instead_of([3, 4], step=1, draw=0, seed=3) == [3, 4]
    assert chosen == h.instead_of([0, 4, 1, 5], step=1, draw=0, seed=3)
    assert len({tuple(h.instead_of([0, 4, 1, 5], step=1, draw=0, seed=seed)) for seed in range(20)}) == 2


def test_a_step_is_full_even_when_everything_is_skipped() -> None:
    h = history(visits=1)
    for row in range(10):
        h.record(0, answered(row, [1.0, 1.0]))
    assert h.instead_of([4, 2], step=1, draw=0, seed=0) == [4, 2]
    h = history(visits=1)
    for row in range(9):
        h.record(0, answered(row, [1.0, 1.0]))
    assert h.instead_of([4, 2], step=1, draw=0, seed=0) == [9, 2]


def test_the_place_of_a_skipped_row_goes_to_its_own_dataset() -> None:
    rows = [{"prompt": f"q{i}", "answer": "1", "dataset": "ab"[i % 2]} for i in range(10)]
    task = Task(rows, TASK.rewards, mixture={"a": 1.0, "b": 1.0})
    h = History(Curriculum(visits=1), task)
    h.record(0, answered(3, [0.0, 0.0]))
    for seed in range(10):
        (row,) = h.instead_of([3], step=1, draw=0, seed=seed)
        assert row % 2 == 1
        assert row != 3


def test_what_was_measured_survives_saving(tmp_path: Path) -> None:
    one, other = history(), history()
    for step in range(3):
        one.record(step, [*answered(step, [1.0, 0.0, 0.0], group=0), *answered(5, [0.0] * 3, group=1)])
    one.snapshot()(tmp_path)
    other.restore(tmp_path)
    assert other.seen == one.seen
    assert other.skips(5, 3)


def run(folder: Path, name: str, **changes: Any) -> Path:
    config = toy_config(
        folder,
        steps=8,
        curriculum={"visits": 1, "retry_after": 50},
        checkpoint={"every": 2, "keep_last": 9},
        output=str(folder / name),
        **changes,
    )
    return train(config).folder


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_a_resumed_run_skips_the_same_prompts(tmp_path: Path, algorithm: str) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl", [{"prompt": f"w{i}"} for i in range(2, 10)])
    whole = run(tmp_path, "whole", algorithm=algorithm)
    cut = run(tmp_path, "cut", algorithm=algorithm)
    for path in checkpoint.complete(cut)[2:]:
        (path / checkpoint.STATE).unlink()  # as if the run had been stopped after step 4
    train(Config.load(cut / "config.yaml"), resume=cut)
    assert metrics(cut, timings=False) == metrics(whole, timings=False)
    assert final_bytes(cut) == final_bytes(whole)
    assert sampled(cut, 8) == sampled(whole, 8)
    plain = train(toy_config(tmp_path, steps=8, algorithm=algorithm, output=str(tmp_path / "plain"))).folder
    prompts = [[row["prompt"] for row in sampled(folder, step)] for folder in (whole, plain) for step in range(1, 9)]
    assert prompts[:8] != prompts[8:], "the curriculum changed nothing, so this proves nothing"
