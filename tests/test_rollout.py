"""Playing a task gives aligned records, the same ones for the same arguments, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from texts import byte_tokenizer
from torch import Tensor

from groupwise.chat import Chat
from groupwise.engines import Completion, Learner, Request, Sampler, Sampling
from groupwise.engines.fake import RecordingLearner, ScriptedSampler
from groupwise.records import Batch, Ints, Rollout, collate
from groupwise.rewards import as_rewards
from groupwise.rollout import play
from groupwise.seeding import key
from groupwise.tasks import Task

TOKENIZER = byte_tokenizer()
CHAT = Chat(TOKENIZER, (TOKENIZER.eos_token_id,))
ROWS = [{"prompt": [{"role": "user", "content": f"{a}+1?"}], "answer": a + 1} for a in range(5)]
TASK = Task(ROWS, as_rewards("math_answer"))


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


ANSWERS = [tokens(r"\boxed{3}<|im_end|>"), tokens(r"\boxed{33}<|im_end|>")]


def played(
    sampler: Sampler, stream: str = "train", *, seed: int = 0, step: int = 0, max_tokens: int = 64
) -> list[Rollout]:
    sampling = Sampling(max_tokens=max_tokens)
    return play(TASK, sampler, CHAT, [2, 4], group_size=2, sampling=sampling, seed=seed, step=step, stream=stream)


def test_groups_are_whole_in_order_and_scored() -> None:
    rollouts = played(ScriptedSampler(ANSWERS))
    assert [r.group for r in rollouts] == [0, 0, 1, 1]
    assert [r.example for r in rollouts] == [ROWS[2], ROWS[2], ROWS[4], ROWS[4]]
    assert [r.text for r in rollouts] == [r"\boxed{3}", r"\boxed{33}"] * 2
    assert [r.reward for r in rollouts] == [1, 0, 0, 0]


def test_every_array_is_aligned_with_the_tokens() -> None:
    class Measured(ScriptedSampler):
        def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
            return [[self.measure(completion) for completion in group] for group in super().sample(requests, sampling)]

        def measure(self, said: Completion) -> Completion:
            ramp = np.arange(1, len(said.tokens) + 1, dtype=np.float64)
            return Completion(said.tokens, -ramp, 2 * ramp, said.finish_reason, said.policy_version)

    first = played(Measured(ANSWERS))[0]
    prompt = CHAT.prompt(ROWS[2]["prompt"])  # type: ignore[arg-type]
    assert first.tokens.tolist() == [*prompt.tolist(), *ANSWERS[0]]
    assert first.tokens.dtype == np.int32
    assert first.loss_mask.tolist() == [False] * len(prompt) + [True] * len(ANSWERS[0])
    assert first.entropies is not None
    for values, sign in ((first.logprobs, -1), (first.entropies, 2)):
        assert values.dtype == np.float32
        assert values.tolist() == [0.0] * len(prompt) + [sign * t for t in range(1, len(ANSWERS[0]) + 1)]


def test_each_sample_has_a_key_of_its_own_in_a_stream_of_its_own() -> None:
    train, test = ScriptedSampler(ANSWERS), ScriptedSampler(ANSWERS)
    played(train, seed=7, step=3)
    played(test, "eval", seed=7, step=3)
    assert train.requests[1].keys == (key(7, "train", 3, 1, 0), key(7, "train", 3, 1, 1))
    keys = [k for sampler in (train, test) for request in sampler.requests for k in request.keys]
    assert len(set(keys)) == len(keys)


def test_the_same_arguments_give_the_same_rollouts() -> None:
    def echo(prompt: Ints, sample_key: int) -> list[int]:
        return tokens(f"{sample_key % 1000}<|im_end|>")

    assert [r.text for r in played(ScriptedSampler(echo))] == [r.text for r in played(ScriptedSampler(echo))]
    assert [r.text for r in played(ScriptedSampler(echo))] != [r.text for r in played(ScriptedSampler(echo), seed=1)]


def test_truncation_comes_from_the_sampler() -> None:
    rollouts = played(ScriptedSampler(ANSWERS), max_tokens=len(ANSWERS[0]))
    assert [r.truncated for r in rollouts] == [False, True, False, True]
    assert rollouts[1].text == r"\boxed{33}"
    assert rollouts[1].num_completion_tokens == len(ANSWERS[0])


def test_an_empty_completion_is_a_rollout() -> None:
    rollouts = played(ScriptedSampler([[]]))
    assert [(r.num_completion_tokens, r.text, r.reward, r.valid) for r in rollouts] == [(0, "", 0.0, True)] * 4


def test_a_sample_that_cannot_be_scored_stays_in_its_group() -> None:
    task = Task(ROWS, as_rewards(lambda rollout: 1 / (len(rollout.text) - 9)))
    rollouts = play(task, ScriptedSampler(ANSWERS), CHAT, [0], group_size=2, sampling=Sampling(), seed=0, step=0)
    assert [r.valid for r in rollouts] == [False, True]
    assert "ZeroDivisionError" in rollouts[0].problem


def test_a_sampler_that_leaves_out_completions_breaks_an_invariant() -> None:
    class Lazy(ScriptedSampler):
        def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
            return [group[:1] for group in super().sample(requests, sampling)]

    with pytest.raises(AssertionError):
        played(Lazy(ANSWERS))


def test_the_policy_version_is_the_one_last_loaded() -> None:
    sampler: Sampler = ScriptedSampler(ANSWERS)
    sampler.load([], version=5)
    assert {r.policy_version for r in played(sampler)} == {5}


def test_the_recording_learner_keeps_batches_and_counts(tmp_path: Path) -> None:
    def loss(logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return (logprobs + 1).sum(), {"clip_ratio": torch.tensor([3.0, 4.0]), "empty": torch.tensor([0.0, 0.0])}

    recording = RecordingLearner()
    learner: Learner = recording
    batch = collate(played(ScriptedSampler(ANSWERS)))
    assert learner.logprobs(batch).tolist() == torch.zeros(batch.tokens.shape).tolist()
    assert learner.update(batch, loss) == {"loss": float(batch.tokens.numel()), "clip_ratio": 0.75, "empty": 0.0}
    assert recording.batches == [batch]
    assert list(learner.weights()) == []
    (tmp_path / "checkpoint").mkdir()
    learner.snapshot()(tmp_path / "checkpoint")
    again = RecordingLearner()
    again.restore(tmp_path / "checkpoint")
    assert again.updates == 1
