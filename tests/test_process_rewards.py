"""Steps are rewarded at the tokens where they end, by models that say of each step what they would say of it alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from learned import exactly, judging_folder, merging_tokenizer, piece_tokenizer
from models import tiny_tokenizer
from texts import byte_tokenizer
from tokenizers import pre_tokenizers
from toys import metrics, sampled, terminal, toy_config, toy_folder, toy_rows
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, PreTrainedTokenizerFast

from groupwise.cautions import cautions
from groupwise.chat import Chat
from groupwise.errors import ModelError, RewardError
from groupwise.presets import PRESETS
from groupwise.records import Rollout
from groupwise.rewards import ProcessRewardModel, StepRewards, as_rewards, check_rewards, score
from groupwise.rewards.steps import split_steps
from groupwise.train import train

SOLUTION = "First add 2 and 2.\n\nThat is 4.\n\nSo the answer is 四."
SOLUTIONS = (SOLUTION, "4", "", "\n\n\n\nNo.\n\nWell: yes.\n\n", "First.\n\n" * 12)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a word, and white space is lost."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "merges": merging_tokenizer(SOLUTION + "\n\nThat" * 30, 264),
    "pieces": piece_tokenizer("First", "▁add", "▁is", ".\n\nThat", "\n\n"),
    "words": words_tokenizer(),
}


def rollout_of(tokenizer: PreTrainedTokenizerFast, tokens: Any, **example: Any) -> Rollout:
    """A completion of these tokens after a prompt of two."""
    said = np.asarray(tokens, dtype=np.int32)
    return Rollout(
        tokens=np.concatenate([np.array([1, 2], dtype=np.int32), said]),
        loss_mask=np.arange(2 + len(said)) >= 2,
        logprobs=np.zeros(2 + len(said), dtype=np.float32),
        group=0,
        text=Chat(tokenizer, ()).text(said),
        example={"prompt": "2+2?", **example},
    )


def written(text: str, tokenizer: PreTrainedTokenizerFast = TOKENIZERS["merges"], **example: Any) -> Rollout:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] or [0]  # a stop token, which says nothing
    return dataclasses.replace(rollout_of(tokenizer, tokens, **example), text=text)


def scored(rewards: Any, *rollouts: Rollout, tokenizer: str = "merges") -> list[Rollout]:
    chat = Chat(TOKENIZERS[tokenizer], ())
    return score(rollouts, as_rewards(rewards), lambda row: row["prompt"], chat.token_at)


# -------------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a\n\nb\n\nc", [(1, "a"), (4, "b"), (7, "c")]),
        ("a\n\nb\n\n", [(1, "a"), (6, "b")]),
        ("\n\na \n\n\n\n b", [(3, "a"), (10, "b")]),
        ("a\nb", [(3, "a\nb")]),
        ("", [(0, "")]),
        ("\n\n \n\n", [(5, "")]),
    ],
)
def test_a_text_falls_into_the_steps_that_say_something(text: str, steps: list[tuple[int, str]]) -> None:
    assert split_steps(text, "\n\n") == steps


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(data=st.data())
def test_the_end_of_a_step_is_found_among_the_tokens_whatever_they_join_or_split(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    chat = Chat(tokenizer, ())
    drawn = st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=12)
    written = st.text(alphabet="a .\n四😀é", max_size=8).map(lambda text: tokenizer(f"{SOLUTION}{text}.")["input_ids"])
    rollout = rollout_of(tokenizer, data.draw(drawn | written))
    assume("\ufffd" not in rollout.text)  # bytes that are no text have no place in one
    said = [chat.text(rollout.tokens[2:stop]) for stop in range(2, len(rollout.tokens) + 1)]
    for end in range(1, len(rollout.text)):
        enough = [count for count, part in enumerate(said) if part[:end] == rollout.text[:end]]
        assert chat.token_at(rollout, end) == 2 + enough[0] - 1
    assert chat.token_at(rollout, len(rollout.text)) == len(rollout.tokens) - 1


def test_a_token_that_joins_two_steps_ends_the_first_only_where_it_says_something_of_it() -> None:
    tokenizer = TOKENIZERS["merges"]
    pieces = [tokenizer.decode([token]) for token in tokenizer(SOLUTION)["input_ids"]]
    assert "\n\nThat" in pieces, "it joins the separator with the next step"
    rollout = written(SOLUTION)
    for end, _ in split_steps(rollout.text, "\n\n")[:-1]:
        index = Chat(tokenizer, ()).token_at(rollout, end)
        before, with_it = (Chat(tokenizer, ()).text(rollout.tokens[2:stop]) for stop in (index, index + 1))
        assert len(before) < end <= len(with_it)


def test_what_the_environment_said_is_no_place_for_a_reward() -> None:
    rollout = Rollout(
        tokens=np.array([2, 3, 9, 9, 4, 5], dtype=np.int32),
        loss_mask=np.array([False, True, False, False, True, True]),
        logprobs=np.zeros(6, dtype=np.float32),
        group=0,
        text="w3 w4 w5",
    )
    chat = Chat(TOKENIZERS["words"], ())
    assert [chat.token_at(rollout, end) for end in (2, 3, 5, 8)] == [1, 4, 4, 5]


# -------------------------------------------------------------------------------------------------------------- models


def classifier(path: Path, **changes: Any) -> Path:
    settings = {"num_labels": 2, **changes}
    return judging_folder(path, kind=AutoModelForTokenClassification, **settings)


def shepherd(path: Path, **changes: Any) -> Path:
    return judging_folder(path, kind=AutoModelForCausalLM, **changes)


def classified(folder: Path, dtype: torch.dtype, text: str) -> list[float]:
    """The probability of label 1 at the mark after each step, one conversation alone."""
    model = exactly(AutoModelForTokenClassification.from_pretrained(folder, dtype=dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    user = [{"role": "user", "content": "2+2?"}]
    tokens = tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=True)["input_ids"]
    ends = []
    for _, step in split_steps(text, "\n\n"):
        tokens = tokens + tokenizer(step)["input_ids"] + tokenizer("<extra_0>")["input_ids"]
        ends.append(len(tokens) - 1)
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0, ends].softmax(-1)[:, 1].tolist()


def shepherded(folder: Path, dtype: torch.dtype, text: str) -> list[float]:
    """The probability of + against - after the tag at the end of each line, one text alone."""
    model = exactly(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = "2+2?" + "\n".join(f"{step} ки" for _, step in split_steps(text, "\n\n"))
    tokens = tokenizer(lines)["input_ids"]
    tag = tokenizer(" ки")["input_ids"]
    ends = [i + len(tag) - 1 for i in range(len(tokens)) if tokens[i : i + len(tag)] == tag]
    words = [tokenizer(word)["input_ids"][0] for word in "+-"]
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0, ends][:, words].softmax(-1)[:, 0].tolist()


EXTRA = {"type": "token_classifier", "mark": "<extra_0>"}
MODELS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "token_classifier": (classifier, {"tokenizer": byte_tokenizer(special=["<extra_0>"])}, classified, EXTRA),
    "next_token": (shepherd, {"tokenizer": byte_tokenizer(None)}, shepherded, {"type": "next_token"}),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_says_of_a_step_does_not_depend_on_what_it_reads_beside(
    name: str, architecture: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    make, settings, by_the_definition, head = MODELS[name]
    folder = make(tmp_path, architecture=architecture, **settings)
    expected = [by_the_definition(folder, getattr(torch, dtype), text) for text in SOLUTIONS]
    for batch_tokens in (1, 300, 16384):
        settings = {"model": str(folder), "dtype": dtype, "device": "cpu", "batch_tokens": batch_tokens, "head": head}
        rewards = as_rewards([{"type": "process_reward_model", **settings}])
        exactly(rewards[0].use._reader.model)  # type: ignore[attr-defined]
        for text, probabilities, rollout in zip(
            SOLUTIONS, expected, scored(rewards, *map(written, SOLUTIONS)), strict=True
        ):
            assert rollout.valid
            assert [reward for _, reward in rollout.step_rewards] == pytest.approx(probabilities, abs=tolerance, rel=0)
            chat = Chat(TOKENIZERS["merges"], ())
            ends = [end for end, _ in split_steps(text, "\n\n")]
            assert [place for place, _ in rollout.step_rewards] == [chat.token_at(rollout, end) for end in ends]
            assert rollout.reward == pytest.approx(min(probabilities), abs=tolerance)


@pytest.mark.parametrize(
    ("reduction", "reduce"), [("min", min), ("mean", np.mean), ("last", lambda p: p[-1]), ("product", math.prod)]
)
def test_the_reward_of_the_completion_is_made_of_those_of_its_steps(
    reduction: Any, reduce: Any, tmp_path: Path
) -> None:
    reward = ProcessRewardModel(model=str(classifier(tmp_path)), device="cpu", reduction=reduction)
    (rollout,) = scored([reward], written(SOLUTION))
    steps = [probability for _, probability in rollout.step_rewards]
    assert len(set(steps)) == 3
    assert rollout.reward == pytest.approx(float(reduce(steps)))


@pytest.mark.parametrize(
    ("make", "settings", "head", "message"),
    [
        (classifier, {"num_labels": 1}, "token_classifier", r"has 1 labels; accepted: at least two"),
        (classifier, {}, {"type": "token_classifier", "good": 2}, r"number 2 \(head.good\) is that of a good step"),
        (shepherd, {}, "token_classifier", r"the weights lack score.bias, score.weight"),
        (shepherd, {}, {"type": "next_token", "good": "good"}, r"head.good 'good' is 4 tokens; accepted: one token"),
        (classifier, {"tokenizer": words_tokenizer()}, "token_classifier", r"head.mark '\\n' has no token"),
        (classifier, {"max_position_embeddings": 16}, "token_classifier", r"reads 16 tokens, and the prompt of rows"),
    ],
)
def test_a_model_that_cannot_judge_steps_is_refused_before_sampling(
    make: Any, settings: Any, head: Any, message: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, **settings)
    rewards = as_rewards([{"type": "process_reward_model", "model": str(folder), "device": "cpu", "head": head}])
    with pytest.raises((ModelError, RewardError), match=message):
        check_rewards(rewards, [{"prompt": "2+2?"}], lambda row: row["prompt"])


def test_a_completion_that_spells_the_mark_of_a_step_is_not_valid(tmp_path: Path) -> None:
    folder = classifier(tmp_path, tokenizer=byte_tokenizer(special=["<extra_0>"]))
    rewards = [{"type": "process_reward_model", "model": str(folder), "device": "cpu", "head": EXTRA}]
    (rollout,) = scored(rewards, written("Right.<extra_0>"))
    assert "spells <extra_0>, a control token" in rollout.problem
    assert rollout.step_rewards == ()


# ------------------------------------------------------------------------------------------- functions that judge steps


def test_a_function_may_reward_steps_and_their_rewards_are_at_the_tokens_where_they_end() -> None:
    def steady(rollout: Rollout) -> StepRewards:
        ends = [end for end, _ in split_steps(rollout.text, "\n\n")]
        return StepRewards(0.5, tuple((end, float(number)) for number, end in enumerate(ends)))

    (rollout,) = scored([{"use": steady, "weight": 2.0}], written(SOLUTION))
    chat = Chat(TOKENIZERS["merges"], ())
    ends = [chat.token_at(rollout, end) for end, _ in split_steps(SOLUTION, "\n\n")]
    assert rollout.step_rewards == tuple(zip(ends, (0.0, 2.0, 4.0), strict=True))
    assert rollout.reward == 1.0


def test_a_reward_of_the_whole_completion_beside_one_of_steps_counts_at_its_last_token() -> None:
    def steady(rollout: Rollout) -> StepRewards:
        return StepRewards(0.5, ((1, 0.25), (len(rollout.text), 0.5)))

    rewards = [steady, {"type": "exact_match", "weight": 2.0}]
    right, wrong = scored(rewards, written("4 or so", answer="4 or so"), written("5 or so", answer="4"))
    assert [reward for _, reward in right.step_rewards] == [0.25, 2.5]
    assert [reward for _, reward in wrong.step_rewards] == [0.25, 0.5]
    assert scored(["exact_match"], written("4", answer="4"))[0].step_rewards == ()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "there are no steps"),
        (((3, 1.0), (1, 1.0)), "the steps end after [3, 1] of 7 characters"),
        (((8, 1.0),), "the steps end after [8] of 7 characters"),
        (((-1, 1.0),), "the steps end after [-1]"),
        (((2, math.nan), (7, 1.0)), "there is nan"),
    ],
)
def test_steps_that_are_not_in_the_text_make_the_rollout_not_valid(steps: Any, message: str) -> None:
    (rollout,) = scored([lambda rollout: StepRewards(1.0, steps)], written("4 or so"))
    assert not rollout.valid
    assert f"returned StepRewards in which {message}" in rollout.problem
    assert rollout.step_rewards == ()


def test_the_function_of_the_page_judges_lines(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "StepRewards" in block)
    (tmp_path / "lines.py").write_text(code)
    (rollout,) = scored(f"{tmp_path / 'lines.py'}:lines", written("2 + 2 = 4\nso it is\n4 = 4"))
    assert [reward for _, reward in rollout.step_rewards] == [1.0, 0.0, 1.0]
    assert rollout.reward == pytest.approx(2 / 3)
    assert scored(f"{tmp_path / 'lines.py'}:lines", written(""))[0].reward == 0.0


# ---------------------------------------------------------------------------------------------------------- in training


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    classifier(tmp_path / "judge")
    return tmp_path


def process(folder: Path) -> dict[str, Any]:
    """A step is a word of the toy policy."""
    return {
        "type": "process_reward_model",
        "model": str(folder / "judge"),
        "device": "cpu",
        "head": {"type": "token_classifier", "mark": "."},
        "separator": " ",
    }


def test_a_policy_is_trained_on_the_steps_of_its_completions(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Rollout] = []
    credit = PRESETS["grpo_process"].credit
    monkeypatch.setattr(
        "groupwise.algorithms.Algorithm.credit", lambda self, rollouts: seen.extend(credit(rollouts)) or seen[-16:]
    )
    console, screen = terminal()
    settings = {"algorithm": "grpo_process", "rewards": [process(toys)], "steps": 2, "output": str(toys / "run")}
    run = train(toy_config(toys, **settings), console=console)
    assert "warning" not in screen.getvalue()
    assert [record["grad_norm"] > 0 for record in metrics(run.folder)] == [True, True]
    several = [rollout for rollout in seen if len(rollout.step_rewards) > 1]
    assert len(several) > 16
    for rollout in several:
        assert rollout.advantages is not None
        ends = [place for place, _ in rollout.step_rewards]
        assert ends == sorted(set(ends))
        advantages = rollout.advantages[rollout.loss_mask]
        assert len(set(advantages.tolist())) > 1, "they differ between the steps of one completion"
        # Between the ends of two steps the advantage is one, and it changes by the normalised reward of the step.
        for here, there in itertools.pairwise(ends):
            assert len(set(rollout.advantages[here + 1 : there + 1].tolist())) == 1
            assert rollout.advantages[here] != rollout.advantages[here + 1]


def test_the_step_rewards_are_kept_with_the_completions(toys: Path) -> None:
    settings = {"rewards": [process(toys)], "steps": 1, "algorithm": "grpo_process", "output": str(toys / "run")}
    run = train(toy_config(toys, **settings))
    for row in sampled(run.folder, 1):
        rewards = [step["reward"] for step in row["step_rewards"]]
        assert row["reward"] == min(rewards)
        assert row["step_rewards"][-1]["token"] == len(row["tokens"]) - 1
        assert len(rewards) == max(len(row["text"].split()), 1)
        assert json.dumps(row["step_rewards"])


def test_process_supervision_by_functions_that_do_not_judge_steps_is_said(toys: Path) -> None:
    said = "algorithm.supervision: process learns from the rewards of steps"
    for rewards, expected in (
        (["exact_match"], True),
        ([process(toys)], False),
        (["exact_match", process(toys)], False),
    ):
        found = cautions(toy_config(toys, algorithm="grpo_process", rewards=rewards))
        assert any(said in caution for caution in found) == expected
