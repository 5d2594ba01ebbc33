"""A run learns, leaves what it promises, continues exactly where it was, and says what went wrong with a reward."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from models import ARCHITECTURES, tiny_tokenizer
from rich.console import Console
from toy_reward import starts_low
from toys import (
    final_bytes,
    metrics,
    sampled,
    terminal,
    toy_config,
    toy_folder,
    toy_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.build import Parts, build, fresh_folder, load_sampler
from groupwise.cautions import cautions
from groupwise.chat import Chat
from groupwise.checkpoint import complete
from groupwise.config import Config, Engine
from groupwise.engines import Request, Sampling
from groupwise.engines.fake import RecordingLearner, ScriptedSampler
from groupwise.errors import CheckpointError, ConfigError, DataError, NumericalError, RewardError
from groupwise.groups import zero_variance
from groupwise.log import RunLog
from groupwise.metrics import peak_memory
from groupwise.presets import PRESETS
from groupwise.records import Rollout
from groupwise.rewards import as_rewards
from groupwise.rows import read_rows
from groupwise.seeding import key
from groupwise.slots import replace
from groupwise.tasks import Task
from groupwise.train import Run, experience, train

RECORD = {
    "step",
    "reward",
    "reward/starts_low",
    "reward_std",
    "frac_reward_zero_std",
    "completion_length",
    "truncated",
    "invalid",
    "invalid/starts_low",
    "entropy",
    "age",
    "age/mean",
    "completion_tokens",
    "clip_ratio/low",
    "clip_ratio/high",
    "approx_kl",
    "sampler_mismatch",
    "loss",
    "grad_norm",
    "learning_rate",
    "seconds",
    "seconds/sample",
    "seconds/credit",
    "seconds/update",
    "tokens_per_second",
    "memory/host",
}
COLUMNS = [
    "step",
    "group",
    "prompt",
    "text",
    "length",
    "reward",
    "reward/starts_low",
    "advantage",
    "valid",
    "problem",
    "fault/starts_low",
    "finish_reason",
    "policy_version",
    "tokens",
    "pieces",
    "loss_mask",
    "logprobs",
    "entropies",
    "new_logprobs",
    "advantages",
]


@pytest.fixture(scope="module")
def straight(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of six steps with evaluations and checkpoints, never interrupted."""
    return train(full_config(toys, tmp_path_factory.mktemp("runs") / "straight"), console=Console(quiet=True))


def full_config(toys: Path, output: Path, **changes: Any) -> Config:
    evaluation = {"data": {"path": str(toys / "rows.jsonl"), "limit": 8}, "every": 2}
    checkpoint = {"every": 3, "keep_last": 2}
    return toy_config(toys, **{"output": str(output), "evaluation": evaluation, "checkpoint": checkpoint, **changes})


def quietly(config: Config, task: Task | None = None, **options: Any) -> Run:
    return train(config, task, console=Console(quiet=True), **options)


def task_of(toys: Path, *rewards: Any) -> Task:
    return Task(read_rows(toys / "rows.jsonl"), as_rewards(list(rewards)))


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_toy_task_is_learned_and_sampler_and_learner_agree(architecture: str, tmp_path: Path) -> None:
    toy_folder(tmp_path / "model", architecture)
    toy_rows(tmp_path / "rows.jsonl")
    shape = {"steps": 35, "prompts_per_step": 8, "group_size": 8}
    records = metrics(quietly(toy_config(tmp_path, output=str(tmp_path / "run"), **shape)).folder)
    rewards = [record["reward"] for record in records]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8
    mismatches = [record["sampler_mismatch"] for record in records if record["grad_norm"] > 0]
    assert len(mismatches) >= 10
    assert max(mismatches) <= 1e-5


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].supervision == "outcome"])
@pytest.mark.parametrize("updates", [1, 2])
def test_each_preset_trains(preset: str, updates: int, toys: Path, tmp_path: Path) -> None:
    changes = {"algorithm": preset, "updates_per_step": updates, "steps": 2, "group_size": 8}
    run = quietly(toy_config(toys, output=str(tmp_path / "run"), **changes))
    records = metrics(run.folder)
    assert [record["step"] for record in records] == [1, 2]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)
    assert final_bytes(run.folder) != (toys / "model" / "model.safetensors").read_bytes()
    if preset == "grpo":
        # At the first update policy and reference are one; the k3 estimate is then 0, and positive afterwards.
        assert records[0]["kl"] == pytest.approx(0.0, abs=1e-6) if updates == 1 else records[0]["kl"] > 0
        assert records[1]["kl"] > 0


def test_process_supervision_without_step_rewards_is_said(toys: Path, tmp_path: Path) -> None:
    console, screen = terminal()
    train(toy_config(toys, output=str(tmp_path / "run"), algorithm="grpo_process", steps=1), console=console)
    assert "warning: algorithm.supervision: process learns from the rewards of steps" in screen.getvalue()


def test_a_second_update_is_off_policy_and_knows_it(toys: Path, tmp_path: Path) -> None:
    once = metrics(quietly(toy_config(toys, output=str(tmp_path / "1"), steps=1)).folder)[0]
    twice = metrics(quietly(toy_config(toys, output=str(tmp_path / "2"), steps=1, updates_per_step=2)).folder)[0]
    assert once["approx_kl"] == 0
    assert twice["approx_kl"] > 0
    # Old log-probs are those of the sampling policy however many updates follow.
    assert max(once["sampler_mismatch"], twice["sampler_mismatch"]) <= 1e-5


def test_the_seed_decides_everything(toys: Path, tmp_path: Path) -> None:
    first, again, other = (
        quietly(toy_config(toys, output=str(tmp_path / name), steps=3, seed=seed)).folder
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert final_bytes(first) == final_bytes(again)
    assert metrics(first, timings=False) == metrics(again, timings=False)
    assert sampled(first, 3) == sampled(again, 3)
    assert final_bytes(first) != final_bytes(other)
    assert [r["text"] for r in sampled(first, 1)] != [r["text"] for r in sampled(other, 1)]


# ---------------------------------------------------------------------------------------------------------- run folder


def test_the_written_config_is_the_resolved_one(straight: Run, toys: Path) -> None:
    asked = full_config(toys, straight.folder)
    written = Config.load(straight.folder / "config.yaml")
    assert replace(written, engine=asked.engine) == asked.resolve()
    assert written.engine.dtype == "float32", "a model so small is not faster in bfloat16"
    left_open = [name for name, value in written.engine.model_dump().items() if value is None]
    assert left_open == ["sampler"], "the learner's own model samples"
    length = toy_config(toys, algorithm="dr_grpo").resolve().algorithm.aggregate.length  # type: ignore[attr-defined]
    assert length == 4


def test_there_is_one_record_a_step(straight: Run) -> None:
    records = [record for record in metrics(straight.folder) if "reward" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert set(record) - {"seconds/log", "seconds/checkpoint"} == RECORD
        phases = sum(value for name, value in record.items() if name.startswith("seconds/"))
        assert record["seconds"] == pytest.approx(phases)
        assert record["completion_tokens"] == record["completion_length"] * 16
    assert [("seconds/checkpoint" in record) for record in records] == [False, False, False, True, False, False]
    assert all(("seconds/log" in record) == (record["step"] > 1) for record in records)


def test_memory_is_measured_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    held = np.ones(2**24)  # 1/8 GiB
    peak = peak_memory()
    assert held.nbytes / 2**30 < peak["memory/host"] < 64  # no bytes, no KiB
    assert "memory/gpu" not in peak
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    assert peak_memory()["memory/gpu"] == 3.0


def test_one_group_of_the_first_step_is_read_again_after_the_update(toys: Path, tmp_path: Path) -> None:
    folder = quietly(toy_config(toys, steps=1, output=str(tmp_path / "run"))).folder
    rows = sampled(folder, 1)
    again = [row for row in rows if row["new_logprobs"] is not None]
    assert len({row["group"] for row in again}) == 1
    assert len(again) == 4
    spreads = {g: np.ptp([row["reward"] for row in rows if row["group"] == g]) for g in range(4)}
    assert spreads[again[0]["group"]] == max(spreads.values())
    trained = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    for row in again:
        with torch.no_grad():
            logits = trained(torch.tensor([row["tokens"]])).logits[0].log_softmax(-1)
        expected = [float(logits[t - 1, token]) for t, token in enumerate(row["tokens"]) if row["loss_mask"][t]]
        found = [p for p, ours in zip(row["new_logprobs"], row["loss_mask"], strict=True) if ours]
        assert found == pytest.approx(expected, abs=1e-4)


def test_held_out_completions_are_kept_too(straight: Run) -> None:
    assert straight.after is not None
    rows = pq.read_table(straight.folder / "evaluations" / "step-00006.parquet").to_pylist()
    assert [row["text"] for row in rows] == [rollout.text for rollout in straight.after.rollouts]
    assert [row["length"] for row in rows] == [rollout.num_completion_tokens for rollout in straight.after.rollouts]


def test_evaluations_are_records_before_during_and_after(straight: Run) -> None:
    records = [record for record in metrics(straight.folder) if "reward" not in record]
    assert [record["step"] for record in records] == [0, 2, 4, 6]
    assert set(records[0]) == {"step", "eval/starts_low", "eval/completion_length"}
    assert straight.before is not None
    assert straight.after is not None
    assert records[0]["eval/starts_low"] == straight.before.headline
    assert records[-1]["eval/starts_low"] == straight.after.headline


def test_a_scheduled_evaluation_has_sampling_settings_of_its_own(toys: Path, tmp_path: Path) -> None:
    held_out = {"data": {"path": str(toys / "rows.jsonl"), "limit": 8}, "every": 1}
    drawn = {"samples": 3, "temperature": 0.7, "max_tokens": 2}
    console, screen = terminal()
    config = toy_config(
        toys, output=str(tmp_path / "run"), steps=2, evaluation={**held_out, **drawn}, rewards=["exact_match"]
    )
    run = train(config, console=console)
    records = metrics(run.folder)
    evaluations = [record for record in records if "reward" not in record]
    at_k = {f"eval/{kind}@{k}" for kind in ("pass", "maj") for k in (1, 2)}
    assert [set(record) for record in evaluations] == [
        {"step", "eval/exact_match", "eval/completion_length", *at_k}
    ] * 3
    assert all(record["eval/completion_length"] <= 2 < records[1]["completion_length"] for record in evaluations)
    assert run.after is not None
    assert len(run.after.rollouts) == 24
    assert "pass@2" in screen.getvalue()


def test_the_mean_of_the_samples_is_the_score_of_a_checkpoint(toys: Path, tmp_path: Path) -> None:
    held_out = {"data": {"path": str(toys / "rows.jsonl")}, "every": 1, "samples": 4, "temperature": 1.0}
    keep = {"every": 1, "keep_last": 1, "keep_best": 1}
    run = quietly(toy_config(toys, output=str(tmp_path / "run"), steps=6, evaluation=held_out, checkpoint=keep))
    means = {r["step"]: r["eval/starts_low"] for r in metrics(run.folder) if "reward" not in r and 0 < r["step"] < 6}
    kept = {int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").iterdir()}
    best = max(means, key=lambda step: (means[step], step))  # of equals the later
    assert kept == {best, 6}
    state = json.loads((run.folder / "checkpoints" / f"step-{best:05d}" / "state.json").read_text())
    assert state["score"] == means[best]


def test_every_completion_is_kept(straight: Run) -> None:
    files = sorted(path.name for path in (straight.folder / "rollouts").iterdir())
    assert files == [f"step-{step:05d}.parquet" for step in range(1, 7)]
    records = {record["step"]: record for record in metrics(straight.folder) if "reward" in record}
    for step in range(1, 7):
        rows = sampled(straight.folder, step)
        assert list(rows[0]) == [name for name in COLUMNS if step == 1 or name != "new_logprobs"]
        assert [row["group"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        assert {row["step"] for row in rows} == {step}
        assert {row["policy_version"] for row in rows} == {step - 1}
        assert sum(row["reward"] for row in rows) / 16 == pytest.approx(records[step]["reward"])
        for row in rows:
            assert len(row["tokens"]) == len(row["loss_mask"]) == len(row["logprobs"])
            said = [f"w{token}" for token, ours in zip(row["tokens"], row["loss_mask"], strict=True) if ours]
            assert row["text"].split() == [word for word in said if word not in ("w0", "w1")]
            assert row["prompt"] == f"w{row['tokens'][0]}"
            assert row["valid"]
            assert row["problem"] == ""
            assert (row["reward"] > 0.5) == (row["advantage"] > 0) or row["advantage"] == 0


def test_only_the_last_checkpoints_are_kept(toys: Path, tmp_path: Path) -> None:
    config = toy_config(toys, output=str(tmp_path / "run"), checkpoint={"every": 2, "keep_last": 2}, steps=7)
    folder = quietly(config).folder
    assert [path.name for path in complete(folder)] == ["step-00006", "step-00007"]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00006", "step-00007"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_trained_model_is_an_ordinary_folder(architecture: str, tmp_path: Path) -> None:
    toy_folder(tmp_path / "model", architecture)
    toy_rows(tmp_path / "rows.jsonl")
    run = quietly(toy_config(tmp_path, output=str(tmp_path / "run"), steps=2))
    trained = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    (last,) = complete(run.folder)
    (saved,) = last.rglob("model.safetensors")
    learned = safetensors.torch.load_file(saved)
    loaded = trained.state_dict()
    assert learned.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in learned.items())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert base.keys() == loaded.keys()
    assert not all(torch.equal(base[name], tensor) for name, tensor in loaded.items())
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]
    sampler, chat = load_sampler(str(run.folder / "model"), Engine())
    request = Request(prompt=chat.prompt("w5"), keys=(key(0),))
    (completion,) = sampler.sample([request], Sampling(max_tokens=3, temperature=0))[0]
    tokens = torch.tensor([[5, *completion.tokens.tolist()]])
    with torch.no_grad():
        assert trained(tokens).logits[0, :-1].argmax(-1).tolist() == completion.tokens.tolist()


def test_a_folder_with_a_run_is_not_written_over(straight: Run, toys: Path) -> None:
    before = {path: path.read_bytes() for path in straight.folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as raised:
        quietly(full_config(toys, straight.folder))
    folder = straight.folder
    assert str(raised.value) == (
        f"{folder}: holds a run already; continue it with `groupwise train --resume {folder}`, "
        "or choose another folder with output=DIR"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_folder_that_cannot_be_made_is_said(toys: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"output: .*/file is not a folder; accepted: .*output=DIR"):
        quietly(toy_config(toys, output=str(tmp_path / "file" / "run")))


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = []
    for _ in range(3):
        folders.append(fresh_folder(tmp_path, "toy"))
        folders[-1].mkdir()
    assert len(set(folders)) == 3
    assert all("-toy" in folder.name for folder in folders)


def test_progress_is_one_line_a_step(toys: Path, tmp_path: Path) -> None:
    console, screen = terminal()
    train(full_config(toys, tmp_path / "run", steps=2, checkpoint={"every": 1}), console=console)
    lines = screen.getvalue().splitlines()
    assert lines[0] == f"run folder: {tmp_path / 'run'}"
    assert lines[1].startswith("held-out starts_low after 0 steps: ")
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 1/2", "step 2/2"]
    assert all(word in lines[2] for word in ("reward", "starts_low", "length", "zero-std", "tok/s", "left"))
    assert lines[-1].startswith("held-out starts_low after 2 steps: ")


def test_a_terminal_gets_a_bar_that_goes_away(toys: Path, tmp_path: Path) -> None:
    screen = StringIO()
    train(toy_config(toys, output=str(tmp_path / "run"), steps=2), console=Console(file=screen, force_terminal=True))
    assert "time left" in screen.getvalue()
    assert "step 2/2" in screen.getvalue()


# -------------------------------------------------------------------------------------------------------------- resume


class KilledError(Exception):
    """What stops a run in the middle."""


def kill_at(monkeypatch: pytest.MonkeyPatch, method: str, call: int) -> None:
    """Let a method of the log raise at its n-th call (from 1)."""
    calls = itertools.count(1)
    original: Callable[..., Any] = getattr(RunLog, method)

    def killing(self: RunLog, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise KilledError
        return original(self, *args, **kwargs)

    monkeypatch.setattr(RunLog, method, killing)


# Where the run dies: after sampling a step, after updating the policy, while evaluating.
DEATHS = [("check", 4), ("check", 5), ("step", 6), ("evaluation", 3), ("evaluation", 4)]


@pytest.mark.parametrize(("method", "call"), DEATHS)
def test_a_run_that_died_continues_as_if_it_had_not(
    method: str, call: int, straight: Run, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, method, call)
        with pytest.raises(KilledError):
            quietly(full_config(toys, folder))
    assert not (folder / "model" / "config.json").exists() or method == "evaluation"
    run = quietly(Config.load(folder / "config.yaml"), resume=folder)
    assert run.folder == folder
    assert run.before is None
    assert final_bytes(folder) == final_bytes(straight.folder)
    assert metrics(folder, timings=False) == metrics(straight.folder, timings=False)
    assert [sampled(folder, step) for step in range(1, 7)] == [sampled(straight.folder, s) for s in range(1, 7)]
    assert [path.name for path in complete(folder)] == ["step-00003", "step-00006"]


def test_resuming_a_finished_run_changes_nothing_and_says_so(straight: Run, toys: Path, tmp_path: Path) -> None:
    folder = quietly(full_config(toys, tmp_path / "run")).folder
    console, screen = terminal()
    run = train(Config.load(folder / "config.yaml"), resume=folder, console=console)
    assert "warning: all 6 steps are done already, so nothing is trained" in screen.getvalue()
    assert straight.after is not None
    assert run.after is not None
    assert run.after.headline == straight.after.headline
    assert final_bytes(folder) == final_bytes(straight.folder)
    assert metrics(folder, timings=False) == metrics(straight.folder, timings=False)


@pytest.mark.parametrize("preset", ["grpo", "dapo"])
def test_resuming_is_exact_with_a_reference_and_with_several_updates(
    preset: str, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str) -> Config:
        changes = {"algorithm": preset, "updates_per_step": 2, "steps": 3, "checkpoint": {"every": 1}}
        optimizer = {"learning_rate": 1e-2, "schedule": "cosine", "warmup_updates": 2}
        return toy_config(toys, output=str(tmp_path / name), optimizer=optimizer, **changes)

    whole = quietly(config("whole")).folder
    with monkeypatch.context() as patch:
        kill_at(patch, "step", 3)
        with pytest.raises(KilledError):
            quietly(config("torn"))
    torn = quietly(config("torn"), resume=tmp_path / "torn").folder
    assert final_bytes(torn) == final_bytes(whole)
    assert metrics(torn, timings=False) == metrics(whole, timings=False)


def test_a_line_that_was_cut_short_is_forgotten(tmp_path: Path) -> None:
    chat = Chat(tiny_tokenizer(), stop_ids=(1,))
    log = RunLog(tmp_path, steps=9, headline="x", chat=chat, console=Console(quiet=True))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    log.rewind(2)
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2]


def test_only_a_run_can_be_continued(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: not a run folder .*pass the folder that a run printed"):
        quietly(toy_config(toys), resume=tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"other: not a run folder"):
        quietly(toy_config(toys), resume=tmp_path / "other")


def test_a_resumed_run_does_not_warn_of_settings_that_it_wrote_itself(toys: Path, tmp_path: Path) -> None:
    folder = quietly(toy_config(toys, output=str(tmp_path / "run"), steps=1)).folder
    assert cautions(Config.load(folder / "config.yaml")) == []


# ---------------------------------------------------------------------------------------------------- dynamic sampling


def scripted(toys: Path, reward: Callable[[Rollout], float], script: Any) -> Parts:
    tokenizer = tiny_tokenizer()
    task = task_of(toys, reward)
    return Parts(
        toy_config(toys),
        task,
        ScriptedSampler(script),
        RecordingLearner(),
        Chat(tokenizer, (1,)),
    )


def informative(rollouts: Sequence[Rollout]) -> list[int]:
    flat = zero_variance(rollouts)
    return sorted({rollout.group for rollout, dull in zip(rollouts, flat, strict=True) if not dull})


def played(config: Config, parts: Parts) -> list[list[Rollout]]:
    return [rollouts for _, rollouts in experience(config, parts)]


@pytest.mark.parametrize("lively", [8, 24])
def test_flat_groups_are_replaced_up_to_the_prompts_of_a_step(lively: int, toys: Path) -> None:
    prompts = {f"w{index}" for index in range(2, 2 + lively)}  # of 32

    def reward(rollout: Rollout) -> float:
        return float(rollout.text == "w2" and rollout.example["prompt"] in prompts)

    parts = scripted(toys, reward, [[2, 1], [3, 1]])
    config = toy_config(toys, algorithm="dapo", sampling_rounds=12, steps=8).resolve()
    steps = played(config, parts)
    for rollouts in steps:
        assert len(informative(rollouts)) == 4
        groups = [rollout.group for rollout in rollouts]
        assert all(groups.count(group) == 4 for group in groups), "only whole groups"
        (batch,) = config.algorithm.batches(config.algorithm.credit(rollouts))
        assert set(batch.groups.tolist()) == set(informative(rollouts))
    assert isinstance(parts.sampler, ScriptedSampler)
    drawn = len(parts.sampler.requests)
    assert drawn > 8 * 4, "more were drawn"
    if lively == 24:
        assert drawn > sum(len(rollouts) for rollouts in steps) / 4, "some came too many and were left out"
    texts = [[(r.group, r.example["prompt"], r.text) for r in rollouts] for rollouts in steps]
    assert texts == [[(r.group, r.example["prompt"], r.text) for r in rollouts] for rollouts in played(config, parts)]


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_rounds_of_sampling_are_bounded(rounds: int, toys: Path) -> None:
    parts = scripted(toys, lambda rollout: 1.0, [[2, 1], [3, 1]])
    (rollouts,) = played(toy_config(toys, algorithm="dapo", sampling_rounds=rounds, steps=1), parts)
    assert isinstance(parts.sampler, ScriptedSampler)
    assert len(parts.sampler.requests) == 4 * rounds
    assert len(rollouts) == 16 * rounds
    assert informative(rollouts) == []
    keys = [k for request in parts.sampler.requests for k in request.keys]
    assert len(set(keys)) == len(keys), "no draw repeats another"


def test_more_is_drawn_only_as_long_as_something_is_missing(toys: Path) -> None:
    parts = scripted(toys, lambda rollout: float(rollout.text == "w2"), [[2, 1], [3, 1]])
    (rollouts,) = played(toy_config(toys, algorithm="dapo", steps=1), parts)
    assert len(rollouts) == 16
    (rollouts,) = played(toy_config(toys, algorithm="grpo", steps=1), scripted(toys, lambda r: 1.0, [[2, 1]]))
    assert len(rollouts) == 16, "without dynamic sampling flat groups stay"


def test_a_step_without_a_lesson_updates_nothing_and_says_so(toys: Path, tmp_path: Path) -> None:
    console, screen = terminal()
    task = task_of(toys, lambda rollout: 1.0)
    config = toy_config(toys, output=str(tmp_path / "run"), algorithm="dapo", steps=2)
    # Soft overlong punishment tells completions apart even here; the filter looks at rewards before shaping.
    train(config, task, console=console)
    assert final_bytes(tmp_path / "run") == (toys / "model" / "model.safetensors").read_bytes()
    assert screen.getvalue().count("left nothing to learn from") == 1
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2]
    assert len(sampled(tmp_path / "run", 1)) == 64


# ---------------------------------------------------------------------------------------------------- rewards that fail


def sometimes(failure: Callable[[], float], every: int, start: int = 0) -> Callable[[Rollout], float]:
    """`starts_low`, but from its call number `start` on each `every`-th one fails."""
    calls = itertools.count()

    def reward(rollout: Rollout) -> float:
        call = next(calls)
        return failure() if call > start and call % every == 0 else starts_low(rollout)

    return reward


def not_a_number() -> float:
    return math.nan


def raises() -> float:
    # The words differ each time, as those of a parser do; it is one problem all the same.
    raise ZeroDivisionError(f"no number in {next(TICKETS)}")


TICKETS = itertools.count()


@pytest.mark.parametrize(
    ("failure", "cause"), [(not_a_number, "returned nan"), (raises, "raised ZeroDivisionError: no number in")]
)
def test_a_reward_that_fails_sometimes_is_left_out_and_said_once(
    failure: Callable[[], float], cause: str, toys: Path, tmp_path: Path
) -> None:
    console, screen = terminal()
    task = task_of(toys, sometimes(failure, 8))
    train(toy_config(toys, output=str(tmp_path / "run"), steps=4), task, console=console)
    warnings = [line for line in screen.getvalue().splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert f"rewards.reward: {cause}" in warnings[0]
    assert warnings[0].endswith("such completions are left out of the statistics and of the loss")
    for record in metrics(tmp_path / "run"):
        rows = sampled(tmp_path / "run", record["step"])
        failed = [row for row in rows if not row["valid"]]
        assert len(failed) == 2
        assert record["invalid"] == 2 / 16
        assert all(row["advantage"] == 0 and math.isnan(row["reward"]) and cause in row["problem"] for row in failed)
        scored = [row["reward"] for row in rows if row["valid"]]
        assert record["reward"] == pytest.approx(sum(scored) / 14)


def test_too_many_failures_stop_the_run_and_leave_what_was_done(toys: Path, tmp_path: Path) -> None:
    task = task_of(toys, sometimes(raises, 2, start=2 * 16))
    with pytest.raises(RewardError) as raised:
        quietly(toy_config(toys, output=str(tmp_path / "run"), checkpoint={"every": 1}), task)
    text = str(raised.value)
    assert text.startswith("8 of 16 completions have no trustworthy reward, more than max_invalid_fraction: 0.25; ")
    assert "the first problem: rewards.reward: raised ZeroDivisionError: no number in" in text
    assert "(test_train.py:" in text
    assert text.endswith("mend the reward function, or raise max_invalid_fraction to train on the rest")
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2]
    assert len(sampled(tmp_path / "run", 2)) == 16
    assert [path.name for path in complete(tmp_path / "run")] == ["step-00001", "step-00002"]


def test_more_failures_can_be_allowed(toys: Path, tmp_path: Path) -> None:
    task = task_of(toys, sometimes(not_a_number, 1))
    config = toy_config(toys, output=str(tmp_path / "run"), steps=1, max_invalid_fraction=1.0)
    quietly(config, task)
    (record,) = metrics(tmp_path / "run")
    assert record["invalid"] == 1.0
    assert record["reward"] is None, "nothing was scored, and JSON has no nan"
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert final_bytes(tmp_path / "run") == (toys / "model" / "model.safetensors").read_bytes()


def test_a_reward_that_breaks_its_contract_stops_the_run(toys: Path, tmp_path: Path) -> None:
    def reward(rollout: Rollout) -> Any:
        return starts_low(rollout) if rollout.text == "" else {"score": 1}

    with pytest.raises(RewardError, match=r"rewards\.reward: returned the dict {'score': 1} \(accepted: one number"):
        quietly(toy_config(toys, output=str(tmp_path / "run")), task_of(toys, reward))


def test_held_out_completions_without_a_reward_are_said(toys: Path, tmp_path: Path) -> None:
    console, screen = terminal()
    held_out = task_of(toys, sometimes(not_a_number, 4))
    config = toy_config(toys, output=str(tmp_path / "run"), steps=1)
    train(config, task_of(toys, starts_low), held_out=held_out, console=console)
    assert screen.getvalue().count("rewards.reward: returned nan; such held-out completions count as 0") == 1


# -------------------------------------------------------------------------------------------------- before any sampling


def test_long_prompts_can_be_dropped_but_not_below_a_step(toys: Path, tmp_path: Path) -> None:
    long = {"prompt": " ".join(["w5"] * 70)}
    toy_rows(tmp_path / "rows.jsonl", [{"prompt": "w3"}] * 3 + [long] * 5)
    data = {"path": str(tmp_path / "rows.jsonl"), "long_prompts": "drop"}
    with pytest.raises(DataError, match="3 rows cannot fill a step of prompts_per_step 4"):
        build(toy_config(toys, data=data))
    assert len(build(toy_config(toys, data=data, prompts_per_step=3)).task.rows) == 3


def test_held_out_data_has_its_own_settings_and_its_own_name_in_errors(toys: Path, tmp_path: Path) -> None:
    held_out = {"path": str(toy_rows(tmp_path / "held.jsonl", [{"prompt": "w3"}, {"prompt": "w5 " * 70}]))}
    with pytest.raises(DataError, match=r"^evaluation\.data\.long_prompts: 1 of 2 prompts are too long"):
        build(toy_config(toys, evaluation={"data": held_out}))
    parts = build(toy_config(toys, evaluation={"data": {**held_out, "long_prompts": "drop"}}))
    assert parts.held_out is not None
    assert len(parts.held_out.rows) == 1
    with pytest.raises(DataError, match=r"^evaluation\.data\.path: .*nowhere\.jsonl: no such file"):
        build(toy_config(toys, evaluation={"data": {"path": str(tmp_path / "nowhere.jsonl")}}))
    with pytest.raises(RewardError, match=r"^evaluation\.data: rewards\.exact_match: needs the column 'answer'"):
        build(toy_config(toys, rewards=["exact_match"], evaluation={"data": {**held_out, "long_prompts": "drop"}}))


def test_a_device_that_is_not_there_is_refused(toys: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.device: potato; no such device; accepted: auto, cpu, cuda"):
        build(toy_config(toys, engine={"device": "potato"}))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"engine\.device: cuda; torch sees 0 CUDA devices here; use auto or cpu"):
            build(toy_config(toys, engine={"device": "cuda"}))


def test_a_gradient_that_is_not_finite_stops_the_run_with_its_way_out(toys: Path, tmp_path: Path) -> None:
    config = toy_config(toys, output=str(tmp_path / "run"), steps=1)
    algorithm = replace(config.algorithm, surrogate=lambda x: (x.logprobs * math.inf, {}))
    with pytest.raises(NumericalError, match=r"nothing was changed; .*lower optimizer\.learning_rate"):
        quietly(replace(config, algorithm=algorithm))


def prompts_of(run: Path, step: int) -> list[str]:
    return list(dict.fromkeys(row["prompt"] for row in sampled(run, step)))


def test_each_epoch_uses_every_prompt(toys: Path, tmp_path: Path) -> None:
    folder = quietly(toy_config(toys, output=str(tmp_path / "run"), steps=8)).folder
    seen = [prompt for step in range(1, 9) for prompt in prompts_of(folder, step)]
    assert sorted(seen) == sorted(row["prompt"] for row in read_rows(toys / "rows.jsonl"))


def test_records_are_replaced_never_changed(toys: Path) -> None:
    config = toy_config(toys, steps=1).resolve()
    parts = build(config)
    ((_, rollouts),) = experience(config, parts)
    kept = [dataclasses.replace(rollout) for rollout in rollouts]
    config.algorithm.credit(rollouts)
    assert all(r.advantages is None and r.reward == k.reward for r, k in zip(rollouts, kept, strict=True))
