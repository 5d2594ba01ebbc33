"""What is scored is what was sampled: nothing in a model's folder changes one of the two without the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import STOP, VOCABULARY, tiny_tokenizer
from toys import toy_folder, toy_rows
from transformers import PreTrainedModel

from groupwise import cli
from groupwise.build import load_sampler
from groupwise.config import Config, Engine
from groupwise.engines import Completion, Request, Sampling
from groupwise.engines.local import load_policy
from groupwise.engines.local_sampler import LocalSampler
from groupwise.errors import ConfigError
from groupwise.head import score
from groupwise.model import hidden_states, load_model, save_model
from groupwise.seeding import key

SAMPLING = Sampling(max_tokens=12)
LENGTHS = (1, 7, 3)
LEAST: dict[str, Any] = {"model": "some/model", "data": {"path": "rows.jsonl"}, "rewards": ["math_answer"]}


def requests(size: int = 16) -> list[Request]:
    generator = np.random.default_rng(0)
    return [
        Request(generator.integers(2, VOCABULARY, length, dtype=np.int32), tuple(key(g, i) for i in range(size)))
        for g, length in enumerate(LENGTHS)
    ]


def sampled(folder: Path) -> list[tuple[Request, Completion]]:
    sampler, _ = load_sampler(str(folder), Engine())
    asked = requests()
    return [(r, c) for r, group in zip(asked, sampler.sample(asked, SAMPLING), strict=True) for c in group]


def said(folder: Path) -> list[list[int]]:
    return [completion.tokens.tolist() for _, completion in sampled(folder)]


def alone(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    """Log-probs of a completion, scored in a forward pass of its own."""
    tokens = torch.from_numpy(np.concatenate([request.prompt, completion.tokens])).long()
    with torch.no_grad():
        states = hidden_states(model, tokens[None])[0, len(request.prompt) - 1 : -1]
        return score(model, states, tokens[len(request.prompt) :], SAMPLING.temperature, False)[0]


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_prompts_of_several_lengths_are_scored_as_they_were_sampled(architecture: str, tmp_path: Path) -> None:
    folder = toy_folder(tmp_path, architecture)
    model = load_model(folder, dtype=torch.float32, device="cpu")
    for request, completion in sampled(folder):
        found = torch.from_numpy(completion.logprobs)
        torch.testing.assert_close(found, alone(model, request, completion), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "leak",
    [
        {"do_sample": True, "temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.2},
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(2, 60)), "bad_words_ids": [[70]], "forced_eos_token_id": STOP},
        {"do_sample": False, "num_beams": 4, "max_new_tokens": 2, "stop_strings": ["w5"]},
    ],
)
def test_the_generation_config_of_a_model_does_not_reach_sampling(leak: dict[str, Any], tmp_path: Path) -> None:
    plain = said(toy_folder(tmp_path / "plain"))
    folder = toy_folder(tmp_path / "leaking")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP, **leak}))
    assert said(folder) == plain


def test_every_stop_token_of_the_generation_config_ends_a_completion(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path)
    stops = [STOP, *range(5, 40)]  # many, so that random weights draw some
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    answers = [completion for _, completion in sampled(folder)]
    ended = [completion for completion in answers if completion.finish_reason == "stop"]
    assert len({int(completion.tokens[-1]) for completion in ended}) > 5
    for completion in answers:
        assert not set(completion.tokens[:-1].tolist()) & set(stops)
        assert (completion.tokens[-1] in stops) == (completion.finish_reason == "stop")


def test_a_trained_model_keeps_its_stop_tokens(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path / "base")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [STOP, 5], "temperature": 0.6}))
    model, _, stops = load_policy(folder, torch.float32, "cpu")
    save_model(folder, model.state_dict().items(), tmp_path / "trained")
    assert load_policy(tmp_path / "trained", torch.float32, "cpu")[2] == stops == (STOP, 5)


@pytest.mark.parametrize("changes", [{"pad_token": "<stop>"}, {"padding_side": "left"}, {"padding_side": "right"}])
def test_neither_the_padding_token_nor_its_side_matters(changes: dict[str, str], tmp_path: Path) -> None:
    plain = said(toy_folder(tmp_path / "plain"))
    folder = toy_folder(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    assert said(folder) == plain


@pytest.mark.parametrize(
    ("architecture", "dropout"),
    [
        ("qwen3", {"attention_dropout": 0.5}),
        ("gemma2", {"attention_dropout": 0.5}),
        ("gpt2", {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}),
    ],
)
def test_dropout_is_off_wherever_a_model_asks_for_it(
    architecture: str, dropout: dict[str, float], tmp_path: Path
) -> None:
    folder = toy_folder(tmp_path, architecture, **dropout)
    assert all(json.loads((folder / "config.json").read_text())[name] == value for name, value in dropout.items())
    model = load_model(folder, dtype=torch.float32, device="cpu")
    model.train()  # transformers' own sampling and scoring would drop now
    sampler = LocalSampler(model, [STOP], max_batch_tokens=10**6)
    asked = requests(4)
    for request, group in zip(asked, sampler.sample(asked, SAMPLING), strict=True):
        for completion in group:
            found = torch.from_numpy(completion.logprobs)
            torch.testing.assert_close(found, alone(model, request, completion), atol=1e-5, rtol=0)


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", [*Sampling.refused])
def test_what_training_could_not_score_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sampling\.{name}: 1\.1; (completions would be|a completion has to)"):
        Config.parse({**LEAST, "sampling": {name: 1.1}})


def test_evaluations_may_cut_the_distribution() -> None:
    evaluation = {"data": {"path": "x"}, "temperature": 0.7, "top_p": 0.9, "top_k": 5}
    sampling = Config.parse({**LEAST, "evaluation": evaluation}).evaluation.sampling(Sampling(max_tokens=33))
    assert sampling == Sampling(max_tokens=33, temperature=0.7, top_p=0.9, top_k=5)


def test_a_cut_distribution_is_what_eval_draws_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    question = ["eval", "model", "--data", "rows.jsonl", "--reward", "exact_match", "sampling.max_tokens=4", "--json"]

    def scores(*settings: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["groupwise", *question, *settings])
        with pytest.raises(SystemExit):
            cli.main()
        captured = capsys.readouterr()
        return json.loads(captured.out) if captured.out else {"refused": captured.err}

    likeliest = scores("-k", "4", "evaluation.top_k=1")
    assert likeliest["models"]
    assert scores("-k", "4", "evaluation.top_p=1e-6") == likeliest
    assert scores("-k", "4") != likeliest
    for name in ("top_p", "top_k", "temperature"):
        assert f"sampling.{name}: is that of training; use evaluation.{name}" in scores(f"sampling.{name}=1")["refused"]
