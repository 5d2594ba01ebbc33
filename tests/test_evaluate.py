"""An evaluation says the same of its samples as a look at each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from texts import byte_tokenizer

from groupwise.chat import Chat
from groupwise.engines import Sampling
from groupwise.engines.fake import ScriptedSampler
from groupwise.errors import RewardError
from groupwise.evaluate import Scores, evaluate
from groupwise.rewards import as_rewards
from groupwise.statistics import confidence_interval
from groupwise.tasks import Task

TOKENIZER = byte_tokenizer()
CHAT = Chat(TOKENIZER, (TOKENIZER.eos_token_id,))
SAID = ["3", "4", "3", "I do not know"]
"""What every prompt is answered with, in turn."""


def scores(rows: list[dict[str, Any]], rewards: Any = "math_answer", **options: Any) -> Scores:
    texts = [f"\\boxed{{{text}}}<|im_end|>" if text.isdecimal() else f"{text}<|im_end|>" for text in SAID]
    said = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows = [{"prompt": [{"role": "user", "content": "?"}], **row} for row in rows]
    sampling = Sampling(max_tokens=64, temperature=options.pop("temperature", 1.0))
    return evaluate(Task(rows, as_rewards(rewards)), ScriptedSampler(said), CHAT, sampling=sampling, **options)


def test_each_figure_has_a_value_for_each_prompt() -> None:
    found = scores([{"answer": "3"}, {"answer": "4"}, {"answer": "5"}], samples=4)
    assert list(found.per_prompt) == ["mean@4", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    figures = {name: values.tolist() for name, values in found.per_prompt.items()}
    assert figures["mean@4"] == figures["pass@1"] == [0.5, 0.25, 0]
    assert figures["pass@2"] == pytest.approx([5 / 6, 1 / 2, 0])
    assert figures["pass@4"] == [1, 1, 0]
    # Of the six pairs of (3, 4, 3, none), 3 wins three and ties in two, 4 wins one and ties in two.
    assert figures["maj@2"] == pytest.approx([4 / 6, 2 / 6, 0])
    assert figures["maj@4"] == [1, 0, 0]


def test_the_headline_is_the_mean_of_the_first_reward() -> None:
    found = scores([{"answer": "3"}, {"answer": "4"}], ["math_answer", "format"], samples=4)
    assert found.headline == found.means["math_answer"] == 0.375
    assert found.interval == confidence_interval(np.array([0.5, 0.25]))
    assert found.at_k["maj@4"] == 0.5
    assert found.means["format"] == 3 / 4 / 2  # a box, and no thinking
    assert len(found.rollouts) == 8


def test_one_greedy_answer_has_no_k() -> None:
    found = scores([{"answer": "3"}, {"answer": "4"}], temperature=0.0)
    assert {name: values.tolist() for name, values in found.per_prompt.items()} == {"greedy": [1, 0]}
    assert list(scores([{"answer": "3"}]).per_prompt) == ["mean@1"], "one that is drawn is not greedy"


def test_the_ks_are_chosen_of_one_draw() -> None:
    found = scores([{"answer": "4"}], samples=4, ks=[1, 3])
    assert list(found.per_prompt) == ["mean@4", "pass@1", "pass@3", "maj@1", "maj@3"]
    assert found.at_k["pass@3"] == pytest.approx(3 / 4)


def test_without_an_answer_to_vote_on_there_is_no_majority() -> None:
    assert list(scores([{"answer": "3"}], "format", samples=2).per_prompt) == ["mean@2", "pass@1", "pass@2"]


def test_prompts_that_the_first_reward_does_not_grade_do_not_count() -> None:
    rows = [{"answer": "3", "reward": "format"}, {"answer": "4", "reward": "math_answer"}, {"answer": "3"}]
    found = scores(rows, ["math_answer", "format"], samples=2)
    assert found.rows == [1, 2]
    assert found.prompts == 2
    assert found.per_prompt["mean@2"].tolist() == [0.5, 0.5]
    assert len(found.rollouts) == 6
    with pytest.raises(RewardError, match="no row chooses it"):
        scores([{"answer": "3", "reward": "format"}], ["math_answer", "format"])
