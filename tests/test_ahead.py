"""Sampling ahead is bounded, changes nothing at 0 and learns as well; a learner that is lost costs nothing."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import placements
import pyarrow.parquet as pq
import pytest
from models import tiny_tokenizer
from rich.console import Console
from toys import final_bytes, metrics, sampled, terminal, toy_config

from groupwise.ahead import in_advance
from groupwise.build import Parts
from groupwise.cautions import cautions
from groupwise.chat import Chat
from groupwise.config import Config
from groupwise.engines.fake import RecordingLearner, ScriptedSampler
from groupwise.errors import ConfigError, EngineError
from groupwise.log import RunLog
from groupwise.records import Rollout
from groupwise.rewards import as_rewards
from groupwise.rows import read_rows
from groupwise.tasks import Task
from groupwise.train import annotate, train

ONE, TWO, LOST_TWICE, LOST_OFTEN = (
    {"placement": f"{placements.__file__}:{name}"} for name in ("one", "two", "lost_twice", "lost_often")
)
LEARNS = {"steps": 35, "prompts_per_step": 8, "group_size": 8}


def run(config: Config, **options: Any) -> Path:
    return train(config, console=Console(quiet=True), **options).folder


def versions(folder: Path) -> list[set[int]]:
    """The weights that sampled each step."""
    files = sorted((folder / "rollouts").glob("step-*.parquet"))
    return [set(pq.read_table(file, columns=["policy_version"])[0].to_pylist()) for file in files]


# ----------------------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_nothing_is_begun_more_than_so_far_ahead(ahead: int) -> None:
    now = -1
    begun: list[tuple[int, int]] = []

    def make(number: int) -> int:
        begun.append((number, now))
        return number * number

    made: list[tuple[int, int]] = []
    steps = in_advance(make, 3, 12, ahead)
    for number in range(3, 12):
        now = number
        made.append(next(steps))
    assert made == [(number, number * number) for number in range(3, 12)]
    assert sorted(number for number, _ in begun) == list(range(3, 12)), "each once"
    assert all(number - asked <= ahead for number, asked in begun)
    assert next(steps, None) is None


def test_what_is_ahead_is_made_while_the_caller_is_busy() -> None:
    begun = {number: threading.Event() for number in range(4)}
    waiting: list[int] = []

    def make(number: int) -> int:
        begun[number].set()
        return number

    steps = in_advance(make, 0, 4, 2, waiting.append)
    next(steps)
    assert all(begun[number].wait(10) for number in (1, 2))
    assert not begun[3].is_set()
    list(steps)
    assert waiting[0] == 0
    assert len(waiting) == 4
    assert all(ready <= 2 for ready in waiting)


def test_with_nothing_ahead_the_caller_makes_it() -> None:
    found = [thread for _, thread in in_advance(lambda number: threading.current_thread(), 0, 2, 0)]
    assert set(found) == {threading.current_thread()}


def test_what_goes_wrong_ahead_is_raised_when_it_is_asked_for() -> None:
    steps = in_advance(lambda number: 1 // (2 - number), 0, 4, 3)
    assert [next(steps)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(steps)


def test_in_one_process_it_is_refused(toys: Path) -> None:
    for learner in ("local", "fsdp"):
        with pytest.raises(ConfigError, match=r"ahead: 2; .* share one model.* set engine.sampler: vllm or .* ray, or"):
            toy_config(toys, ahead=2, engine={"learner": learner})
        assert toy_config(toys, ahead=2, engine={"learner": learner, "sampler": "vllm"}).ahead == 2


# ------------------------------------------------------------------------------------------------------------ the runs


def test_a_sampler_with_weights_of_its_own_and_nothing_ahead_is_the_run_in_one_process(
    toys: Path, tmp_path: Path
) -> None:
    shared = run(toy_config(toys, output=str(tmp_path / "shared"), updates_per_step=2))
    own = run(toy_config(toys, output=str(tmp_path / "own"), updates_per_step=2, engine=ONE))
    assert final_bytes(own) == final_bytes(shared)
    assert metrics(own, timings=False) == metrics(shared, timings=False)
    for step in range(1, 7):
        assert sampled(own, step) == sampled(shared, step)


@pytest.mark.parametrize("changes", [{}, {"algorithm": {"correction": {"type": "importance"}}}])
def test_a_run_ahead_never_trains_on_older_rollouts_than_allowed_and_learns_as_well(
    changes: dict[str, Any], toys: Path, tmp_path: Path
) -> None:
    folder = run(toy_config(toys, output=str(tmp_path / "run"), ahead=2, engine=TWO, **LEARNS, **changes))
    ages = [{step - version for version in of} for step, of in enumerate(versions(folder))]
    assert set().union(*ages) <= {0, 1, 2}
    assert any(max(of) > 0 for of in ages), "it did run ahead"
    records = metrics(folder)
    assert [record["age"] for record in records] == [max(of) for of in ages]
    assert all(0 <= record["queue"] <= 2 and 0 <= record["idle/sampler"] <= 1 for record in records)
    rewards = [record["reward"] for record in records]
    # In step with the policy it is above 0.8, see test_train.py.
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8


def test_a_run_ahead_that_was_interrupted_goes_on_within_its_bound(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config(toys, output=str(tmp_path / "run"), ahead=2, engine=TWO, steps=10, checkpoint={"every": 3})
    log, calls = RunLog.step, itertools.count(1)

    def die(*arguments: Any) -> None:
        log(*arguments)
        if next(calls) == 5:
            raise RuntimeError("killed")

    monkeypatch.setattr(RunLog, "step", die)
    with pytest.raises(RuntimeError, match="killed"):
        run(config)
    kept = sampled(tmp_path / "run", 5)
    folder = run(Config.load(tmp_path / "run" / "config.yaml"), resume=tmp_path / "run")
    assert sampled(folder, 5) == kept, "what was sampled before is not sampled again"
    ages = [{step - version for version in of} for step, of in enumerate(versions(folder))]
    assert len(ages) == 10
    assert set().union(*ages) <= {0, 1, 2}
    assert not (folder / "pending").exists()


# ---------------------------------------------------------------------------------------------------- what is corrected


def stale_rollouts(toys: Path, *versions: int) -> tuple[list[Rollout], Parts]:
    rollouts = [
        Rollout(
            tokens=np.arange(2, 6, dtype=np.int32),
            loss_mask=np.array([False, True, True, True]),
            logprobs=np.array([0, -1, -2, -3], dtype=np.float32),
            group=group,
            policy_version=version,
        )
        for group, version in enumerate(versions)
    ]
    task, chat = Task(read_rows(toys / "rows.jsonl"), as_rewards(["math_answer"])), Chat(tiny_tokenizer(), (1,))
    return rollouts, Parts(toy_config(toys), task, ScriptedSampler([[1]]), RecordingLearner(), chat)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_old_policy_of_a_step_that_is_stale_as_a_whole_is_the_one_that_sampled(updates: int, toys: Path) -> None:
    rollouts, parts = stale_rollouts(toys, 3, 3)
    algorithm = toy_config(toys).algorithm
    for rollout in annotate(rollouts, parts, algorithm, updates, step=5):
        np.testing.assert_array_equal(rollout.old_logprobs, rollout.logprobs)
    fresh = annotate(rollouts, parts, algorithm, 1, step=3)
    assert all(rollout.old_logprobs is None for rollout in fresh), "the current policy needs no pass"


@pytest.mark.parametrize("updates", [1, 2])
def test_a_correction_takes_over_what_is_stale_and_the_ratio_begins_at_the_learner(updates: int, toys: Path) -> None:
    rollouts, parts = stale_rollouts(toys, 3, 5)
    algorithm = toy_config(toys, algorithm={"correction": {"type": "importance"}}).algorithm
    learners = None if updates == 1 else np.zeros(4, dtype=np.float32)  # RecordingLearner says 0
    for rollout in annotate(rollouts, parts, algorithm, updates, step=5):
        if learners is None:
            assert rollout.old_logprobs is None
        else:
            np.testing.assert_array_equal(rollout.old_logprobs, learners)


@pytest.mark.parametrize(
    ("algorithm", "warns"),
    [
        ({}, False),
        ({"preset": "rloo"}, True),
        ({"preset": "rloo", "correction": {"type": "importance"}}, False),
        ({"surrogate": "reinforce", "correction": {"type": "opsm"}}, True),
        ({"surrogate": "cispo"}, False),
    ],
)
def test_staleness_that_nothing_corrects_is_warned_of(algorithm: dict[str, Any], warns: bool, toys: Path) -> None:
    changes = {"algorithm": algorithm, "engine": ONE}
    text = "neither a ratio nor a correction"
    assert any(text in caution for caution in cautions(toy_config(toys, ahead=1, **changes))) == warns
    assert not any(text in caution for caution in cautions(toy_config(toys, **changes)))


# --------------------------------------------------------------------------------------------------- a learner is lost


@pytest.mark.parametrize("changes", [{}, {"curriculum": {"visits": 1}}])
def test_a_run_whose_learner_dies_ends_as_if_it_had_not(changes: dict[str, Any], toys: Path, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"checkpoint": {"every": 2}, **changes}
    whole = run(toy_config(toys, output=str(tmp_path / "whole"), engine=ONE, **shared))
    console, screen = terminal()
    config = toy_config(toys, output=str(tmp_path / "lost"), engine=LOST_TWICE, **shared)
    lost = train(config, console=console).folder
    assert final_bytes(lost) == final_bytes(whole)
    assert metrics(lost, timings=False) == metrics(whole, timings=False)
    said = screen.getvalue()
    assert "the learner died; the last step written down is 1; it is started anew, 1 of at most 2 times" in said
    assert "after step 0" in said, "there was no checkpoint yet"
    assert "the last step written down is 3; it is started anew, 2 of at most 2 times" in said


def test_a_learner_that_dies_too_often_ends_the_run(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the learner died"):
        run(toy_config(toys, output=str(tmp_path / "run"), engine=LOST_OFTEN))
