"""Numbers that are not finite never reach the weights, and who brought them is named; what is unusual is warned of."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models import tiny_tokenizer
from rich.console import Console
from torch import Tensor
from toys import metrics, sampled, terminal, toy_config

from groupwise import experience
from groupwise.algorithms import Algorithm
from groupwise.build import Parts
from groupwise.chat import Chat
from groupwise.checkpoint import complete
from groupwise.config import Config
from groupwise.errors import NumericalError, RewardError
from groupwise.guards import Guards
from groupwise.log import RunLog
from groupwise.records import Batch
from groupwise.train import Run, train

TRAIN = importlib.import_module("groupwise.train")  # the package has a function of this name
ODD = 6
"""The rollout that is tampered with: of group 1."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """What each run is made of."""
    parts: list[Parts] = []
    build = TRAIN.build
    monkeypatch.setattr(TRAIN, "build", lambda *arguments: parts.append(build(*arguments)) or parts[-1])
    return parts


def run(config: Config) -> Run:
    return train(config, console=Console(quiet=True))


def config_of(toys: Path, folder: Path, **changes: Any) -> Config:
    # A KL keeps every rollout in its batch, whatever its advantage.
    algorithm = {"preset": "grpo"}
    return toy_config(toys, output=str(folder), algorithm=algorithm, checkpoint={"every": 1}, **changes)


def weights_are_those_of_the_last_checkpoint(parts: Parts, folder: Path) -> bool:
    saved = safetensors.torch.load_file(complete(folder)[-1] / "learner" / "model.safetensors")
    return all(torch.equal(saved[name], tensor) for name, tensor in parts.learner.weights())


def let_rewards_be_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    original = experience.play

    def play(*arguments: Any, **named: Any) -> Any:
        rollouts = original(*arguments, **named)
        if named["step"] == 1:
            rollouts[ODD] = dataclasses.replace(rollouts[ODD], reward=math.inf)
        return rollouts

    monkeypatch.setattr(experience, "play", play)


def let_gradients_be_nan(monkeypatch: pytest.MonkeyPatch, step: int = 1) -> None:
    """Of one rollout, on its way back through the model."""
    odd: list[Tensor] = []
    annotate, loss = TRAIN.annotate, Algorithm.loss

    def remember(rollouts: Any, *arguments: Any) -> Any:
        odd[:] = [torch.from_numpy(rollouts[ODD].tokens)] if rollouts[0].policy_version == step else []
        return annotate(rollouts, *arguments)

    def poison(self: Algorithm, logprobs: Tensor, entropies: Tensor, batch: Batch) -> Any:
        if odd and logprobs.requires_grad:
            width = len(odd[0])
            rows = (batch.tokens[:, :width] == odd[0]).all(-1) & (batch.lengths == width)
            logprobs.register_hook(lambda gradient: gradient.masked_fill(rows[:, None], math.nan))
        return loss(self, logprobs, entropies, batch)

    monkeypatch.setattr(TRAIN, "annotate", remember)
    monkeypatch.setattr(Algorithm, "loss", poison)


def let_a_weight_be_nan(monkeypatch: pytest.MonkeyPatch, built: list[Parts]) -> None:
    original: Callable[..., Any] = TRAIN.annotate

    def poison(rollouts: Any, parts: Parts, *arguments: Any) -> Any:
        if rollouts[0].policy_version == 1:
            dict(parts.learner.weights())["model.norm.weight"].data[3] = math.nan
        return original(rollouts, parts, *arguments)

    monkeypatch.setattr(TRAIN, "annotate", poison)


@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_what_is_not_finite_leaves_the_weights_untouched_and_names_the_rollout(
    what: str, toys: Path, tmp_path: Path, built: list[Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "gradient":
        let_gradients_be_nan(monkeypatch)
    else:
        let_a_weight_be_nan(monkeypatch, built)
    folder = tmp_path / "run"
    with pytest.raises(NumericalError) as raised:
        run(config_of(toys, folder))
    text = str(raised.value)
    assert text.startswith("step 2, update 1: the loss is ")
    assert "nothing was changed" in text
    if what == "gradient":
        assert f"rollout {ODD} of the step (group 1, " in text
        assert "): its gradient is not finite; its batch is" in text
    else:
        assert "the weight model.norm.weight is not finite (of 1 such)" in text
        assert "rollout 0 of the step (group 0, " in text
        assert "ref_logprobs" not in text
    assert [path.name for path in complete(folder)] == ["step-00001"]
    if what == "weight":
        dict(built[0].learner.weights())["model.norm.weight"].data[3] = safetensors.torch.load_file(
            complete(folder)[-1] / "learner" / "model.safetensors"
        )["model.norm.weight"][3]
    assert weights_are_those_of_the_last_checkpoint(built[0], folder)
    (kept,) = (folder / "offending").iterdir()
    assert kept.name == "step-00002.1.safetensors"
    assert str(kept) in text
    assert len(safetensors.torch.load_file(kept)["tokens"]) > ODD
    assert text.endswith("or leave such updates out with guards.max_skipped_updates (now 0)")


def test_a_reward_that_is_infinite_leaves_the_weights_untouched_and_names_the_rollout(
    toys: Path, tmp_path: Path, built: list[Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        let_rewards_be_infinite(patch)
        with pytest.raises(RewardError, match=rf"^step 2: rollout {ODD} of the step \(group 1, .*its reward is inf"):
            run(config_of(toys, folder))
    assert [path.name for path in complete(folder)] == ["step-00001"]
    assert weights_are_those_of_the_last_checkpoint(built[0], folder)
    train(Config.load(folder / "config.yaml"), resume=folder, console=Console(quiet=True))  # the reward is mended
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_an_update_may_be_left_out_and_is_counted(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(config_of(toys, tmp_path / "whole", steps=2)).folder
    let_gradients_be_nan(monkeypatch)
    folder = run(config_of(toys, tmp_path / "run", steps=2, guards={"max_skipped_updates": 1})).folder
    first, second = metrics(folder, timings=False)
    assert first == metrics(whole, timings=False)[0]
    assert second["skipped_updates"] == 1
    assert "loss" not in second
    without = [[{**row, "new_logprobs": None} for row in sampled(one, 2)] for one in (folder, whole)]
    assert without[0] == without[1], "all but what the update would have made of them"
    saved = [safetensors.torch.load_file(path / "learner" / "model.safetensors") for path in complete(folder)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0]), "the second update was left out"


def test_updates_left_out_before_a_resume_count(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_gradients_be_nan(monkeypatch)
    config = config_of(toys, tmp_path / "run", steps=2, guards={"max_skipped_updates": 1})
    run(config)
    chat = Chat(tiny_tokenizer(), stop_ids=(1,))
    log = RunLog(tmp_path / "run", steps=4, headline="x", chat=chat, console=Console(quiet=True))
    log.rewind(2)
    assert log.skipped == 1


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({}, None, ""),
        ({"sampler_mismatch": 0.02}, "sampler_mismatch", "disagree on log-probs by 0.02 nats a token"),
        ({"entropy": 0.001}, "entropy", "collapsed to 0.001 nats"),
        ({"kl": 3.0}, "kl", "kl is 3 nats"),
        ({"approx_kl": 3.0}, "approx_kl", "approx_kl is 3 nats"),
        ({"grad_norm": 25.0}, "grad_norm", "the gradient norm is 25, usually 1;"),
    ],
)
def test_what_is_unusual_is_warned_of(changed: dict[str, float], kind: str | None, said: str) -> None:
    usual = {"sampler_mismatch": 1e-4, "entropy": 1.0, "kl": 0.1, "approx_kl": 0.01, "grad_norm": 2.0}
    found = list(Guards().warnings({**usual, **changed}, [1.0] * 12))
    assert [name for name, _ in found] == ([kind] if kind else [])
    assert all(said in text for _, text in found)
    assert not list(Guards().warnings({**usual, "grad_norm": 25.0}, [1.0] * 9)), "too few steps to know what is usual"


def test_thresholds_are_settings(toys: Path, tmp_path: Path) -> None:
    console, screen = terminal()
    train(toy_config(toys, output=str(tmp_path / "run"), steps=2, guards={"entropy": 100.0}), console=console)
    assert screen.getvalue().count("the entropy has collapsed to") == 1
