"""The diagnosis of a run: each rule has a run that triggers it and one that must not, and planted faults are named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import STOP
from rich.console import Console
from safetensors.torch import load_file
from toy_reward import always, length_of, starts_low
from toys import terminal, toy_config, toy_folder, toy_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from groupwise.build import Parts, build, load_sampler
from groupwise.cli import app
from groupwise.config import Config, Engine
from groupwise.diagnosis import RULES, Evidence, diagnose, read_run
from groupwise.diagnosis.evidence import Sampled
from groupwise.engines import Request, Sampler, Sampling
from groupwise.engines.local import load_policy
from groupwise.engines.local_sampler import LocalSampler
from groupwise.errors import CheckpointError, ConfigError, ModelError
from groupwise.rewards import as_rewards
from groupwise.rows import read_rows
from groupwise.tasks import Task
from groupwise.train import train

# -------------------------------------------------------------------------------------------------- runs that are built

HEALTHY = {
    "reward": 0.5, "reward/answer": 0.5, "reward/format": 0.4, "reward_std": 0.5, "frac_reward_zero_std": 0.2,
    "completion_length": 100.0, "truncated": 0.05, "invalid": 0.0, "entropy": 1.5, "age": 0.0, "grad_norm": 0.3,
    "learning_rate": 1e-5, "clip_ratio/low": 0.01, "clip_ratio/high": 0.02, "approx_kl": 1e-3, "kl": 0.01,
    "sampler_mismatch": 1e-6, "seconds/sample": 3.0, "seconds/update": 3.0,
}  # fmt: skip
TREE = {
    "algorithm": {"surrogate": {"type": "clip", "low": 0.2, "high": 0.28}},
    "sampling": {"temperature": 1.0, "max_tokens": 256},
    "engine": {"dtype": "float32"},
    "rewards": [{"weight": 1.0}, {"weight": 1.0}],
    "updates_per_step": 2,
}
STEPS = 16


def completions(**changes: Callable[[int, int], Any]) -> list[Sampled]:
    """Six groups of four, whose rewards follow neither length nor each other; `changes` are of (group, place)."""
    base: dict[str, Callable[[int, int], Any]] = {
        "text": lambda g, i: f"so it is {10 * g + i}",
        "answer": lambda g, i: float((i + g) % 2),
        "format": lambda g, i: float((i // 2 + g) % 2),
        "length": lambda g, i: 100 + (i * 7 + g * 5) % 11,
        "valid": lambda g, i: True,
        **changes,
    }
    made: list[Sampled] = []
    for g in range(6):
        for i in range(4):
            value = {name: f(g, i) for name, f in base.items()}
            rewards = {"answer": value["answer"], "format": value["format"]}
            made.append(
                Sampled(
                    1, g, value["text"], sum(rewards.values()), rewards, value["valid"], "", "stop", value["length"]
                )
            )
    return made


def built(
    sampled: Sequence[Sampled] | None = None,
    *,
    tree: dict[str, Any] | None = None,
    evaluations: Sequence[float] = (0.5, 0.6),
    **series: float | Callable[[int], float],
) -> Evidence:
    """A healthy run but for what is given; a metric is a number or a function of the step."""
    records = [
        {**HEALTHY, **{name.replace("__", "/"): v(step) if callable(v) else v for name, v in series.items()}}
        for step in range(STEPS)
    ]
    return Evidence(
        config={**TREE, **(tree or {})},
        steps=records,
        evaluations=[{"step": i, "eval/answer": value} for i, value in enumerate(evaluations)],
        completions=completions() if sampled is None else sampled,
    )


def flat(value: float, text: Callable[[int, int], str], **series: float) -> Evidence:
    """A run in which every completion gets the same."""
    same = completions(answer=lambda g, i: value, format=lambda g, i: 0.0, text=text)
    return built(same, reward=value, reward__answer=value, reward_std=0.0, frac_reward_zero_std=1.0, **series)


def clip(low: float, high: float) -> dict[str, Any]:
    return {"algorithm": {"surrogate": {"type": "clip", "low": low, "high": high}}}


def wobbling(level: float) -> Callable[[int], float]:
    return lambda step: level + 0.02 * (-1) ** step


TRIGGERS: dict[str, tuple[Evidence, Evidence]] = {  # a run that triggers the rule, a near miss that must not
    "learning_rate_without_effect": (built(learning_rate=0.0), built(learning_rate=lambda s: 1e-6 * (s > 0))),
    "clip_of_zero": (built(tree=clip(0.0, 0.0)), built(tree=clip(3e-4, 4e-4))),
    "stale_policy": (built(sampler_mismatch=lambda s: 0.02 * s, age=lambda s: float(s)), built(age=1.0)),
    "sampler_mismatch": (built(sampler_mismatch=0.05), built(sampler_mismatch=lambda s: 0.02 * s)),
    "never_stops": (built(truncated=1.0), built(truncated=0.9)),
    "temperature_too_low": (
        built(completions(text=lambda g, i: f"{g}"), tree={"sampling": {"temperature": 0.05}}),
        built(tree={"sampling": {"temperature": 0.2}}),
    ),
    "never_right": (flat(0.0, lambda g, i: f"it is {i}"), built(reward=0.0)),
    "always_right": (flat(1.0, lambda g, i: f"it is {i}"), flat(1.0, lambda g, i: f"say {'so' * i}: {g}")),
    "already_solved": (flat(1.0, lambda g, i: f"say {'so' * i}: {g}"), flat(0.0, lambda g, i: f"it is {g}")),
    "groups_teach_nothing": (
        built(completions(answer=lambda g, i: float(g % 2), format=lambda g, i: 0.0), frac_reward_zero_std=0.9),
        built(frac_reward_zero_std=0.5),
    ),
    "reward_is_length": (
        built(completions(answer=lambda g, i: float(i), format=lambda g, i: 0.0, length=lambda g, i: 20 * i + 1)),
        built(completions(length=lambda g, i: 20 * i + 1)),
    ),
    "rewards_fight": (built(completions(format=lambda g, i: 1.0 - (i + g) % 2)), built()),
    "one_reward_decides": (built(completions(format=lambda g, i: 1.0)), built()),
    "held_out_falls": (
        built(reward=lambda s: 0.1 * s, evaluations=(0.6, 0.4)),
        built(reward=lambda s: 0.1 * s, evaluations=(0.6, 0.59)),
    ),
    "invalid_rewards": (built(completions(valid=lambda g, i: i > 0), invalid=0.25), built()),
    "many_truncated": (built(truncated=0.5), built(truncated=0.2)),
    "longer_but_no_better": (
        built(completion_length=lambda s: 100.0 + 20 * s, reward__answer=wobbling(0.5)),
        built(completion_length=lambda s: 100.0 + 20 * s, reward__answer=lambda s: 0.05 * s),
    ),
    "entropy_collapse": (built(entropy=lambda s: 1.5 * 0.6**s), built(entropy=0.05)),
    "kl_far": (built(kl=3.0), built(kl=0.2)),
    "clip_saturated": (built(clip_ratio__low=0.3, clip_ratio__high=0.3), built(clip_ratio__low=0.1)),
    "repeated_completions": (built(completions(text=lambda g, i: f"{g}")), built()),
    "clip_idle": (built(clip_ratio__low=0.0, clip_ratio__high=0.0), built()),
    "one_phase_takes_the_time": (built(seconds__sample=97.0), built(seconds__sample=9.0)),
}


def named(run: Evidence) -> list[str]:
    return [finding.rule for finding in diagnose(run)]


def test_every_rule_is_tried() -> None:
    assert set(TRIGGERS) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("rule", TRIGGERS)
def test_a_rule_finds_its_fault_and_lets_a_near_miss_pass(rule: str) -> None:
    faulty, near_miss = TRIGGERS[rule]
    assert rule in named(faulty)
    assert rule not in named(near_miss)


def test_a_healthy_run_has_no_findings_and_neither_has_one_that_has_only_begun() -> None:
    assert named(built()) == []
    assert diagnose(Evidence(TREE, [], [], [])) == []


def test_the_worst_comes_first_and_says_why_and_what_to_try() -> None:
    found = diagnose(built(learning_rate=0.0, truncated=0.5, clip_ratio__low=0.0, clip_ratio__high=0.0))
    assert [finding.severity for finding in found] == ["error", "warning", "warning"]
    assert all(finding.why and finding.advice and finding.evidence for finding in found)


def test_that_nothing_is_clipped_is_expected_on_policy() -> None:
    (found,) = diagnose(built(tree={"updates_per_step": 1}, clip_ratio__low=0.0, clip_ratio__high=0.0))
    assert (found.severity, found.title) == ("note", "Nothing is ever clipped, as it has to be on-policy")


# ------------------------------------------------------------------------------------------------------ planted faults


def first_two(config: Config, reward: Any = starts_low, rows: Path | None = None) -> list[str]:
    """Train with the fault, and what `groupwise doctor` says first."""
    assert config.output is not None
    task = Task(read_rows(rows or config.data.path), as_rewards(reward))
    train(config, task, console=Console(quiet=True))
    result = CliRunner().invoke(app, ["doctor", config.output, "--json"], catch_exceptions=False)
    return [finding["rule"] for finding in json.loads(result.stdout)][:2]


def test_a_healthy_toy_run_has_no_error(toys: Path, tmp_path: Path) -> None:
    train(toy_config(toys, output=str(tmp_path / "run"), steps=10), console=Console(quiet=True))
    assert [finding for finding in diagnose(read_run(tmp_path / "run")) if finding.severity == "error"] == []


def test_planted_wrong_answer_column(toys: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "answer": f"w{i}", "id": f"row {i}"} for i in range(2, 34)]
    config = toy_config(toys, output=str(tmp_path / "run"))
    assert "never_right" in first_two(
        config, {"type": "exact_match", "column": "id"}, toy_rows(tmp_path / "rows.jsonl", rows)
    )


def test_planted_reward_that_is_always_true(toys: Path, tmp_path: Path) -> None:
    assert "always_right" in first_two(toy_config(toys, output=str(tmp_path / "run")), always)


def test_planted_learning_rate_of_0(toys: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate: 0; the weights would end as they began"):
        train(toy_config(toys, output=output, optimizer={"learning_rate": 0.0}), console=Console(quiet=True))
    config = toy_config(toys, output=output, optimizer={"learning_rate": 1e-12})
    assert "learning_rate_without_effect" in first_two(config), "one that is as good as 0 is not refused"
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (toys, tmp_path / "run"))
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-10) for name in before)


def test_planted_clip_of_0(toys: Path, tmp_path: Path) -> None:
    algorithm = {"preset": "grpo", "surrogate": {"type": "clip", "low": 0.0, "high": 0.0}}
    config = toy_config(toys, output=str(tmp_path / "run"), algorithm=algorithm, updates_per_step=2)
    assert "clip_of_zero" in first_two(config)


def test_planted_stop_token_that_never_comes(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path / "model", "gpt2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # one entry of every last state is large, and the stop token's logit falls with it
        model.transformer.ln_f.bias[0] = 10.0
        model.transformer.wte.weight[:, 0] = 0.0
        model.transformer.wte.weight[STOP, 0] = -100.0
    model.save_pretrained(folder)
    toy_rows(tmp_path / "rows.jsonl")
    assert "never_stops" in first_two(toy_config(tmp_path, output=str(tmp_path / "run"), steps=3))


def test_a_stop_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(folder)
    toy_rows(tmp_path / "rows.jsonl")
    with pytest.raises(ModelError, match="the tokenizer has 98 tokens but the model embeds only 97"):
        train(toy_config(tmp_path, output=str(tmp_path / "run")))


def test_planted_temperature_near_0(toys: Path, tmp_path: Path) -> None:
    config = toy_config(toys, output=str(tmp_path / "run"), sampling={"max_tokens": 4, "temperature": 0.001})
    assert "temperature_too_low" in first_two(config)
    with pytest.raises(ConfigError, match=r"sampling\.temperature: 0; all completions of a group would be the same"):
        toy_config(toys, sampling={"temperature": 0.0})


def test_planted_reward_of_length_alone(toys: Path, tmp_path: Path) -> None:
    sampling = {"max_tokens": 32}
    config = toy_config(toys, output=str(tmp_path / "run"), steps=3, sampling=sampling, group_size=16)
    assert "reward_is_length" in first_two(config, length_of)


def test_planted_data_that_is_solved_already(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path / "model", initializer_range=6.0)
    sampler, chat = load_sampler(str(folder), Engine())
    rows: list[dict[str, str]] = []
    for prompt in (f"w{index}" for index in range(2, 97)):
        request = Request(chat.prompt(prompt), keys=tuple(range(64)))
        (drawn,) = sampler.sample([request], Sampling(max_tokens=4))
        said = {chat.text(completion.tokens) for completion in drawn}
        if len(said) == 1:
            rows.append({"prompt": prompt, "answer": said.pop()})
    assert len(rows) >= 4, "prompts of which the model is sure"
    easy = toy_rows(tmp_path / "rows.jsonl", rows)
    config = toy_config(tmp_path, output=str(tmp_path / "run"), steps=3)
    assert "already_solved" in first_two(config, lambda rollout: float(rollout.text == rollout.example["answer"]), easy)


def with_sampler(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Sampler]) -> None:
    """Let runs sample with another sampler than the one that shares the learner's weights."""

    def build_with_it(*arguments: Any) -> Parts:
        return replace(build(*arguments), sampler=make())

    monkeypatch.setattr(sys.modules["groupwise.train"], "build", build_with_it)


def test_planted_stale_policy(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(LocalSampler):
        def load(self, weights: Any, version: int) -> None:
            """Takes nothing over."""

    model, _, stop_ids = load_policy(toys / "model", torch.float32, "cpu")
    with_sampler(monkeypatch, lambda: Stale(model, stop_ids, max_batch_tokens=1024))
    assert "stale_policy" in first_two(toy_config(toys, output=str(tmp_path / "run")))


def test_planted_dropout_in_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_folder(tmp_path / "model", "gpt2", initializer_range=0.3)
    toy_rows(tmp_path / "rows.jsonl")
    model, _, stop_ids = load_policy(tmp_path / "model", torch.float32, "cpu")
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1  # loading a model turns it off
    with_sampler(monkeypatch, lambda: LocalSampler(model, stop_ids, max_batch_tokens=1024))
    assert "sampler_mismatch" in first_two(toy_config(tmp_path, output=str(tmp_path / "run")))


# ---------------------------------------------------------------------------------------------- command and terminal


def test_the_doctor_says_the_worst_first_in_plain_words(toys: Path, tmp_path: Path) -> None:
    console, screen = terminal()
    config = toy_config(toys, output=str(tmp_path / "run"), optimizer={"learning_rate": 1e-12})
    train(config, console=console)
    said = "doctor: The learning rate has no effect: 1e-12"
    assert screen.getvalue().count(said) == 1, "the run says so, once"
    printed = CliRunner().invoke(app, ["doctor", str(tmp_path / "run")], catch_exceptions=False).stdout
    assert printed.startswith("error  The learning rate has no effect: 1e-12")
    assert "try optimizer.learning_rate: 1e-6" in printed


def test_a_finding_is_said_when_it_appears_and_not_again(toys: Path, tmp_path: Path) -> None:
    console, screen = terminal()
    train(toy_config(toys, output=str(tmp_path / "run"), optimizer={"learning_rate": 1e-12}, steps=20), console=console)
    lines = [line for line in screen.getvalue().splitlines() if line.startswith(("step", "doctor"))]
    assert lines[10].startswith("doctor: The learning rate has no effect"), "after step 10"
    assert sum(line.startswith("doctor: The learning rate") for line in lines) == 1


def test_a_run_that_has_lost_its_last_line_or_has_none_is_read(toys: Path, tmp_path: Path) -> None:
    train(toy_config(toys, output=str(tmp_path / "run"), steps=3), console=Console(quiet=True))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert len(read_run(tmp_path / "run").steps) == 3
    (tmp_path / "run" / "metrics.jsonl").unlink()
    for file in tmp_path.glob("run/rollouts/*.parquet"):
        file.unlink()
    printed = CliRunner().invoke(app, ["doctor", str(tmp_path / "run")], catch_exceptions=False).stdout
    assert printed == "nothing to report after 0 steps\n"


def test_only_a_run_can_be_diagnosed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run; name the folder that `groupwise train` printed"):
        read_run(tmp_path)
