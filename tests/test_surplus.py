"""Groups that a step drew too much serve the next one, once, and are trained on as what they are: one step old."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import tiny_tokenizer
from toys import toy_config, toy_folder, toy_rows

from groupwise.build import Parts
from groupwise.chat import Chat
from groupwise.engines.fake import RecordingLearner, ScriptedSampler
from groupwise.errors import CheckpointError
from groupwise.experience import experience
from groupwise.groups import by_group, zero_variance
from groupwise.groups import informative as can_teach
from groupwise.records import Rollout
from groupwise.rewards import as_rewards
from groupwise.rows import read_rows
from groupwise.slots import replace
from groupwise.surplus import Surplus
from groupwise.tasks import Task
from groupwise.train import annotate


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    return tmp_path


def one_in_three(rollout: Rollout) -> float:
    """Only every third prompt has an answer that is better than the others."""
    return float(rollout.text == "w2" and int(rollout.example["prompt"][1:]) % 3 == 0)


def never(rollout: Rollout) -> float:
    return 0.0


def parts_of(toys: Path) -> Parts:
    task = Task(read_rows(toys / "rows.jsonl"), as_rewards(one_in_three))
    sampler = ScriptedSampler([[2, 1], [3, 1]])
    chat = Chat(tiny_tokenizer(), (1,))
    return Parts(toy_config(toys), task, sampler, RecordingLearner(), chat, surplus=Surplus())


def informative(rollouts: Sequence[Rollout]) -> list[int]:
    flat = zero_variance(rollouts)
    return list(dict.fromkeys(rollout.group for rollout, dull in zip(rollouts, flat, strict=True) if not dull))


def test_what_a_step_leaves_over_is_trained_on_in_the_next_one(toys: Path) -> None:
    parts, config = parts_of(toys), toy_config(toys, algorithm="dapo", steps=12, sampling_rounds=20).resolve()
    assert parts.surplus is not None
    left: list[list[Rollout]] = []
    used = 0
    for step, rollouts in experience(config, parts):
        assert len(informative(rollouts)) == config.prompts_per_step
        groups = [rollout.group for rollout in rollouts]
        assert {groups.count(group) for group in groups} == {config.group_size}, "only whole groups"
        old = [rollout for rollout in rollouts if rollout.policy_version < step]
        assert {rollout.policy_version for rollout in old} <= {step - 1}
        texts = [dataclasses.replace(rollout, group=0) for group in left for rollout in group][: len(old)]
        assert [r.example for r in old] == [r.example for r in texts]
        used += len(old)
        parts.remember(step, rollouts)
        left = parts.surplus.groups
        parts.sampler.load((), version=step + 1)
    assert used > 0


def test_what_was_left_over_says_nothing_of_how_many_of_those_drawn_can_teach(toys: Path) -> None:
    config = toy_config(toys, algorithm="dapo", steps=1, prompts_per_step=4, sampling_rounds=20).resolve()
    parts = parts_of(toys)
    ((_, rollouts),) = experience(config, parts)
    teaching = [group for group in by_group(rollouts).values() if can_teach(group)]
    dull = dataclasses.replace(parts, task=Task(parts.task.rows, as_rewards(never)), surplus=Surplus())
    assert dull.surplus is not None
    dull.surplus.groups = teaching[:3]
    ((_, rollouts),) = experience(replace(config, sampling_rounds=2), dull)
    assert len(by_group(rollouts)) == 3 + 4 + 4, "none of four could teach, so four more are drawn for the one missing"


def test_each_group_is_looked_at_once_for_whether_it_can_teach(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, config = parts_of(toys), toy_config(toys, algorithm="dapo", steps=1, sampling_rounds=20).resolve()
    seen: list[int] = []

    def look(group: Sequence[Rollout]) -> bool:
        seen.append(group[0].group)
        return can_teach(group)

    monkeypatch.setattr("groupwise.experience.informative", look)
    ((_, rollouts),) = experience(config, parts)
    assert seen == list(range(len(seen))), "numbered on from each other"
    assert set(seen) >= {rollout.group for rollout in rollouts}
    assert len(seen) > config.prompts_per_step, "more were drawn"


def test_a_step_that_is_interrupted_uses_the_same_groups_again(toys: Path) -> None:
    surplus = Surplus()
    surplus.groups = [[]]
    surplus.leave([[], []])
    assert surplus.groups == [[]]
    surplus.advance()
    assert surplus.groups == [[], []]


def test_it_survives_saving(toys: Path) -> None:
    parts, config = parts_of(toys), toy_config(toys, algorithm="dapo", steps=1, sampling_rounds=20).resolve()
    ((_, rollouts),) = experience(config, parts)
    one, other = Surplus(), Surplus()
    one.leave([rollouts[:4]])
    one.advance()
    one.snapshot()(toys)
    other.restore(toys)
    np.testing.assert_array_equal(other.groups[0][3].tokens, rollouts[3].tokens)
    assert other.groups[0][3].example == rollouts[3].example
    with pytest.raises(CheckpointError, match="no such file"):
        other.restore(toys / "nowhere")


def test_the_old_policy_of_an_older_group_is_the_one_that_sampled_it(toys: Path) -> None:
    parts, config = parts_of(toys), toy_config(toys, algorithm="grpo", steps=1).resolve()
    ((_, rollouts),) = experience(config, parts)
    mixed: list[Any] = [
        dataclasses.replace(r, policy_version=int(r.group > 0), logprobs=r.logprobs - 0.5) for r in rollouts
    ]
    assert all(r.old_logprobs is None for r in annotate(rollouts, parts, config.algorithm, 1, 0))
    for rollout in annotate(mixed, parts, config.algorithm, 1, 1):
        assert rollout.old_logprobs is not None
        expected = rollout.logprobs if rollout.group == 0 else np.zeros(len(rollout.tokens))  # the learner says 0
        np.testing.assert_array_equal(rollout.old_logprobs, expected)
