"""The short way through a decoding step equals the long one, is taken where it can be, and given up where not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from models import STOP, VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from groupwise.engines import Request, Sampling
from groupwise.engines.local_sampler import LocalSampler
from groupwise.folding import Folded, is_lean
from groupwise.lean import LeanDecoding
from groupwise.seeding import key

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SERVED = {
    "llama": LlamaConfig(**COMMON, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SERVED[name], attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norm weights of 1 and biases of 0 would hide what is done with them.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in parameter_name:
                parameter.mul_(4)
    return model


def answers(
    model: PreTrainedModel,
    lean: bool,
    budget: int = 10**6,
    stop: range = range(STOP, STOP + 1),
    counts: Sequence[int] = (3, 3, 3, 3, 3),
    falls_back: bool = False,
) -> list[Any]:
    sampler = LocalSampler(model, stop, max_batch_tokens=budget)
    sampler._lean = lean
    rng = np.random.default_rng(0)
    lengths = (4, 9, 9, 1, 5) * (len(counts) // 5)
    asked = [
        Request(rng.integers(0, VOCABULARY, length).astype(np.int32), tuple(key(number, i) for i in range(count)))
        for number, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    found = [answer for group in sampler.sample(asked, Sampling(max_tokens=24)) for answer in group]
    assert falls_back or sampler._lean == lean, "the short way was given up"
    return found


@pytest.mark.parametrize("name", SERVED)
def test_the_short_way_draws_the_same_tokens_with_the_same_log_probs(name: str) -> None:
    model = model_of(name)
    assert is_lean(model)
    for short, long in zip(answers(model, lean=True), answers(model, lean=False), strict=True):
        np.testing.assert_array_equal(short.tokens, long.tokens)
        np.testing.assert_allclose(short.logprobs, long.logprobs, atol=1e-5)
        np.testing.assert_allclose(short.entropies, long.entropies, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 200])
def test_groups_that_enter_when_others_have_left_draw_the_same_tokens(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen3")
    rows: list[int] = []
    step = LeanDecoding.step

    def watched(self: LeanDecoding, tokens: Any) -> None:
        rows.append(len(tokens))
        step(self, tokens)

    monkeypatch.setattr(LeanDecoding, "step", watched)
    found = answers(model, lean=True, budget=budget, stop=range(12))
    assert max(rows) <= max(3, budget // 25)
    if budget == 200:
        assert any(later > earlier > 0 for earlier, later in pairwise(rows)), "a group entered while others were there"
    for short, long in zip(found, answers(model, lean=False, stop=range(12)), strict=True):
        np.testing.assert_array_equal(short.tokens, long.tokens)
        np.testing.assert_allclose(short.logprobs, long.logprobs, atol=1e-5)


@pytest.mark.parametrize("budget", [10**6, 300])
@pytest.mark.parametrize("counts", [(1,) * 20, (2, 1) * 10, (1, 4, 2, 1, 3) * 4], ids=["alone", "two", "mixed"])
def test_rows_that_take_the_places_of_others_stay_with_their_own_prompt(counts: tuple[int, ...], budget: int) -> None:
    model = model_of("qwen3")
    short, long = (answers(model, lean, budget, range(12), counts) for lean in (True, False))
    for one, other in zip(short, long, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_what_lay_in_the_memory_before_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3")
    expected = answers(model, False, 200, range(12))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))
    for one, other in zip(answers(model, True, 200, range(12)), expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_prompt_runs_once_and_its_keys_are_held_once_for_its_group() -> None:
    model = model_of("llama")
    decoding = LeanDecoding(model, Folded(model, 20), most=4, budget=1000, group=3)
    with torch.no_grad():
        decoding.enter([np.arange(7, dtype=np.int32), np.arange(5, dtype=np.int32)], [3, 2])
        assert [tuple(keys.shape) for keys, _ in decoding._prompts] == [(2, 2, 7, 8)] * 2
        left = decoding.drop(torch.tensor([True, True, False, True, True]))
        assert left.tolist() == [2]
        assert [tuple(keys.shape) for keys, _ in decoding._prompts] == [(1, 2, 7, 8)] * 2


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny_model("gpt2"),
        lambda: tiny_model("gemma2"),
        lambda: tiny_model("qwen3", torch.float64),
        lambda: AutoModelForCausalLM.from_config(MistralConfig(**COMMON, sliding_window=8)),
        lambda: AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, mlp_bias=True)),
        lambda: AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, hidden_act="gelu")),
    ],
    ids=["gpt2", "gemma2", "float64", "sliding window", "mlp bias", "gelu"],
)
def test_other_models_take_the_long_way(model: Any) -> None:
    assert not is_lean(model())


def test_a_replaced_projection_is_not_bypassed() -> None:
    model: Any = model_of("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)  # as adapters do
    assert not is_lean(model)


def test_new_weights_are_taken_up_without_being_told() -> None:
    model = model_of("qwen3")
    answers(model, lean=True)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    for short, long in zip(answers(model, lean=True), answers(model, lean=False), strict=True):
        np.testing.assert_array_equal(short.tokens, long.tokens)


def test_a_difference_is_noticed_in_the_first_completions_and_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama")
    expected = answers(model, lean=False)
    right = LeanDecoding._attend
    monkeypatch.setattr(LeanDecoding, "_attend", lambda *arguments: right(*arguments) * 1.01)
    with caplog.at_level(logging.WARNING):
        found = answers(model, lean=True, falls_back=True)
    assert "the long way is taken" in caplog.text
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)
