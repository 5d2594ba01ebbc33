"""What a plan says is what the engine does: sizes are counted anew here, and the laws of scaling hold."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import ARCHITECTURES, tiny_model
from toys import toy_config, toy_folder, toy_rows
from transformers import PreTrainedModel

from groupwise import cli
from groupwise.adapters import Lora, attach
from groupwise.config import Config
from groupwise.decoding import prefill
from groupwise.engines import Optimizer
from groupwise.engines.local_learner import LocalLearner
from groupwise.errors import ConfigError
from groupwise.folding import Folded
from groupwise.lean import LeanDecoding
from groupwise.packing import packed_parts
from groupwise.plan import calibrate, outlook
from groupwise.plan.cluster import Job, job_of
from groupwise.plan.kernels import Kernel
from groupwise.plan.local import local_step, microbatch
from groupwise.plan.machine import GPUS, Measured, cache_file, read_gpus, recall, remember
from groupwise.plan.outlook import changed, look_ahead, smallest_change, subject_of
from groupwise.plan.rehearsal import Stage, made_up
from groupwise.plan.report import plan, verdict
from groupwise.plan.sampling import Lengths, lean_step, thinning
from groupwise.plan.simulate import best_split, drawn_lengths, makespan, pays_until, sampled, scale_at, scaling
from groupwise.resources import key_value_count

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
LENGTHS = Lengths(12, 12, 8, 8)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    return tmp_path


def sketched(architecture: str = "qwen3", **changes: Any) -> PreTrainedModel:
    real = tiny_model(architecture, **changes)
    with torch.device("meta"):
        return type(real)(real.config)


def settled(toys: Path, **changes: Any) -> Config:
    engine = {"threads": 1, "dtype": "float32", "train_tokens": 4096, "sample_tokens": 4096, "device": "cpu"}
    more = changes.pop("engine", {})
    return toy_config(toys, engine={**engine, **more}, **changes).resolve()


def job(toys: Path, gpus: str = "8xH100-80G", lengths: Lengths = LENGTHS, **changes: Any) -> Job:
    return job_of(settled(toys, **changes), sketched(**SHAPE), lengths, read_gpus(gpus))


# ---------------------------------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_parameters_of_a_rehearsal_are_those_of_the_model(architecture: str) -> None:
    real = tiny_model(architecture)
    found = Stage(sketched(architecture), torch.float32).update(2, 7, 3, 5)
    assert found.parameters == found.trained == sum(p.numel() for p in real.parameters())


def test_the_trained_parameters_of_an_adapter_are_its_own() -> None:
    real = tiny_model("qwen3")
    attach(real, Lora(rank=4), 0)
    found = Stage(sketched(), torch.float32, lora=Lora(rank=4)).update(2, 7, 3, 5)
    assert found.trained == sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert found.parameters == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_what_a_forward_pass_keeps_is_what_autograd_saves(architecture: str, mixed: bool) -> None:
    model, saved = tiny_model(architecture, **SHAPE), dict[int, int]()
    learner = LocalLearner(model, Optimizer(), temperature=1.0, microbatch_tokens=10**6, total_updates=1, mixed=mixed)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    forward = learner._forward
    with (
        forward.microbatches(made_up(2, 40, 4, 30), 10**6) as parts,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        (part,) = [part for _, part in parts]
        assert forward.states(part).requires_grad
    really = sum(size for place, size in saved.items() if place not in weights)
    found = Stage(sketched(architecture, **SHAPE), torch.float32, mixed=mixed).update(2, 40, 4, 30)
    assert found.kept == pytest.approx(really, rel=0.1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_and_values_take_what_the_sampler_allocates(architecture: str) -> None:
    model = tiny_model(architecture)
    with torch.no_grad():
        _, cache = prefill(model, [np.zeros(5, dtype=np.int32)])
    assert key_value_count(model) * 5 == sum(keys.numel() + values.numel() for keys, values in cache)


def test_a_slot_of_the_lean_sampler_takes_as_many() -> None:
    model = tiny_model("qwen3")
    decoding = LeanDecoding(model, Folded(model, 32), most=8, budget=90, group=4)
    assert decoding._own.numel() == key_value_count(model) * 8 * decoding._capacity


def test_the_work_of_an_update_is_that_of_the_formula() -> None:
    """6 M T for the layers, 6 V D n for the head, and attention's pairs; nothing is computed again."""
    groups, prompt, group, response = 2, 40, 4, 30
    found = Stage(sketched(**SHAPE), torch.float32).update(groups, prompt, group, response).update
    model = sketched(**SHAPE)
    body = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    tokens = groups * (prompt + group * (response - 1))
    heads = 6 * 97 * 64 * groups * group * response
    products = sum(k.flops * count for k, count in found.kernels.items() if k.name == "product")
    assert products == pytest.approx(6 * body * tokens + heads, rel=0.01)


def test_checkpointing_keeps_less_and_computes_more() -> None:
    plain, less = (
        Stage(sketched(**SHAPE), torch.float32, checkpointing=on).update(2, 40, 4, 30) for on in (False, True)
    )
    assert less.kept < plain.kept / 3
    assert 1.1 < less.update.flops / plain.update.flops < 1.5


@pytest.mark.parametrize(("budget", "prompts"), [(4096, 4), (150, 4), (60, 4), (25, 2)])
def test_micro_batches_are_those_that_packing_makes(budget: int, prompts: int, toys: Path) -> None:
    config = settled(toys, engine={"train_tokens": budget}, prompts_per_step=prompts)
    groups, rows = microbatch(config, 12, 8)
    largest = max(len(part) for part in packed_parts(made_up(prompts, 12, 4, 8), budget))
    assert groups * rows <= largest <= groups * rows + 4


def test_rows_that_leave_take_the_steps_of_their_tokens() -> None:
    for mean in (100, 60, 30):
        waves = thinning(16, Lengths(8, 8, mean, 100))
        assert sum(rows * steps for rows, steps in waves) == pytest.approx(16 * mean, rel=0.1)
        assert sum(steps for _, steps in waves) == pytest.approx(100)


# --------------------------------------------------------------------------------------------------------------- laws


def test_larger_groups_prefill_no_more(toys: Path) -> None:
    small, large = (local_step(settled(toys, group_size=g), sketched(**SHAPE), LENGTHS) for g in (2, 16))
    work = [{phase.name: phase.work.flops for phase in step.phases} for step in (small, large)]
    assert work[0]["prefill"] == work[1]["prefill"] > 0
    assert work[1]["update"] > 4 * work[0]["update"]
    assert large.held["KV cache"] - small.held["KV cache"] == 4 * 14 * 8 * key_value_count(sketched(**SHAPE)) * 4


def test_a_critic_adds_its_weights_gradients_and_averages(toys: Path) -> None:
    plain, judged = (
        local_step(settled(toys, algorithm=name), sketched(**SHAPE), LENGTHS) for name in ("dr_grpo", "ppo")
    )
    more = judged.memory.fixed - plain.memory.fixed - judged.memory.reference * judged.memory.parameters * 4
    assert more == 4 * judged.memory.parameters * 4
    assert {phase.name for phase in judged.phases} >= {"values", "critic", "critic optimizer"}
    sharded = [
        sum(job(toys, algorithm=name).learner_fixed(4)[part] for part in ("critic",)) for name in ("grpo", "ppo")
    ]
    assert sharded == [0, 4 * judged.memory.parameters]


def test_twice_the_learners_hold_half_of_what_is_sharded(toys: Path) -> None:
    found = job(toys, algorithm="ppo")
    for name in ("parameters", "gradients", "optimizer", "reference", "critic"):
        assert found.learner_fixed(8)[name] == found.learner_fixed(4)[name] / 2
    assert found.learner_fixed(8)["gathered"] == found.learner_fixed(4)["gathered"]


def test_an_adapter_needs_no_gradients_of_the_model(toys: Path) -> None:
    whole, adapter = job(toys), job(toys, lora={"rank": 4})
    assert adapter.learner_fixed(2)["optimizer"] < whole.learner_fixed(2)["optimizer"] / 2
    assert adapter.learner_fixed(2)["parameters"] == whole.learner_fixed(2)["parameters"]


# -------------------------------------------------------------------------------------------- does it fit, and if not


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_the_change_that_is_named_makes_the_run_fit(share: float, toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.plan.local.LIBRARIES", 0)
    config = settled(toys, prompts_per_step=16, group_size=8, sampling={"max_tokens": 40}, steps=30)
    subject = dataclasses.replace(subject_of(config), model=sketched(**SHAPE))
    available = int(look_ahead(subject).peak * share)
    monkeypatch.setattr(outlook, "available_memory", lambda _: available)
    assert not look_ahead(subject).fits
    found = smallest_change(subject, available)
    assert found is not None
    settings, _ = found
    again = look_ahead(dataclasses.replace(subject, config=changed(subject.config, settings)))
    assert again.fits
    assert next(iter(settings)).startswith("engine.")
    named = plan(subject).remedy
    assert all(f"{path}={str(value).lower()}" in named for path, value in settings.items())


def test_where_nothing_helps_the_plan_says_so(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, object]] = []
    monkeypatch.setattr(outlook, "_fitting", lambda _, changes, __: tried.append(changes))
    monkeypatch.setattr(outlook, "available_memory", lambda _: 1000)
    assert plan(subject_of(settled(toys))).remedy.startswith("nothing that was tried")
    assert {"engine.gradient_checkpointing": True} in tried
    assert {"lora.rank": 16} in tried


def test_a_model_that_is_too_large_for_a_gpu_gets_more_of_them(toys: Path) -> None:
    tiny = "1xMINE:memory=3,tflops=100,bandwidth=1000"
    large = sketched(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, head_dim=64, vocab_size=20000, layer_types=None
    )
    found = job_of(settled(toys, algorithm="ppo"), large, LENGTHS, read_gpus(tiny))
    assert not found.fits(1)
    assert found.fewest > 1
    assert found.fits(found.fewest)
    assert not found.fits(found.fewest // 2)


# ----------------------------------------------------------------------------------------------------------- machines


def test_a_gpu_is_known_by_name_and_by_numbers() -> None:
    assert read_gpus("8xH100-80G").gpu.flops == 989e12
    assert str(read_gpus("h200")) == "1xH200-141G"
    mine = read_gpus("4xMINE:memory=48,tflops=200,bandwidth=900")
    assert (mine.count, mine.gpu.memory, mine.gpu.flops) == (4, 48e9, 200e12)
    assert all(gpu.source for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("8xH10", ["H10: no such GPU (did you mean H100", "accepted: H100-80G, H200-141G", "by its numbers"]),
        ("0xH100", ["write a count and a GPU"]),
        ("2xMINE:memory=48", ["missing: bandwidth, tflops", "as in 8xMINE:memory"]),
        ("2xMINE:memory=48,speed=3,tflops=1,bandwidth=2", ["no such number: speed"]),
        ("2xMINE:memory=much", ["not numbers"]),
        ("2xMINE:memory=-1,tflops=1,bandwidth=2", ["above 0"]),
    ],
)
def test_a_gpu_that_is_not_known_is_explained(text: str, pieces: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_gpus(text)
    assert all(piece in str(error.value) for piece in pieces), str(error.value)


def test_a_kernel_takes_what_was_measured_and_another_its_share() -> None:
    known = Kernel("product", "float32", (1, 64, 64, 64), 2 * 64**3, 49152)
    far = Kernel("product", "float32", (1, 4096, 64, 64), 2 * 4096 * 64**2, 2113536)
    machine = Measured({known.key: 1e-4, far.key: 1e-2})
    assert machine.seconds(known) == 1e-4
    near = Kernel("product", "float32", (1, 128, 64, 64), 4 * 64**3, 81920)
    assert machine.seconds(near) == pytest.approx(2e-4)
    assert Measured().seconds(near) > 0


def test_what_was_measured_is_there_the_next_time(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(np.arange(1, 10**6) * 1e-3)
    monkeypatch.setattr(calibrate, "_now", lambda: float(next(times)))
    subject = subject_of(settled(toys))
    first = look_ahead(subject, measure=True)
    assert first.calibrated
    assert cache_file() == toys / "cache" / "groupwise" / "machine.json"
    assert look_ahead(subject).seconds == first.seconds
    assert not recall(threads=99).calibrated
    cache_file().write_text("{")
    assert not recall(threads=1).calibrated
    remember(Measured({"a": 1.0}), 1)
    assert recall(threads=1).kernels == {"a": 1.0}


def test_every_kernel_of_a_step_can_be_timed(toys: Path) -> None:
    """The plain way of decoding, an adapter, a critic and products in bfloat16 included."""
    for model, changes in (
        (sketched("gemma3"), {"algorithm": "ppo"}),
        (sketched(**SHAPE), {"lora": {"rank": 4}, "engine": {"dtype": "mixed"}}),
    ):
        step = local_step(settled(toys, **changes), model, LENGTHS)
        for phase in step.phases:
            for kernel, make in phase.work.examples.items():
                assert calibrate.seconds(kernel, make) >= 0
                assert kernel in phase.work.kernels


# --------------------------------------------------------------------------------------------------------- simulation


def large_job(toys: Path, **changes: Any) -> Job:
    """A model of 8 billion parameters, and a step of 2,048 long completions."""
    lengths = Lengths(200, 200, 2000, 8000)
    found = job(toys, lengths=Lengths(20, 20, 8, 8), prompts_per_step=128, group_size=16, **changes)
    return dataclasses.replace(
        found,
        lengths=lengths,
        parameters=8 * 10**9,
        trained=8 * 10**9,
        layers=32,
        cached=131072,
        update=found.update.times(2 * 10**5),
        step=found.step.times(10**5),
    )


def test_completions_wait_only_where_there_are_more_than_slots(toys: Path) -> None:
    found = large_job(toys)
    lengths = drawn_lengths(found, 0, 0)
    assert sampled(dataclasses.replace(found, cached=1), lengths, 1)[1] == 0.0
    crowded = dataclasses.replace(found, cached=131072 * 50)
    assert sampled(crowded, lengths, 1)[1] > sampled(crowded, lengths, 4)[1] > 0.0
    assert sampled(found, lengths, 1)[2] == 1.0, "a single sampler waits for no other"


def test_completions_in_slots_end_when_a_schedule_by_hand_says() -> None:
    assert makespan([5, 3, 2], 3) == 5
    assert makespan([5, 3, 2], 2) == 5
    assert makespan([5, 3, 4], 2) == 7
    assert makespan([1, 1, 1, 1], 1) == 4


def test_lengths_have_their_mean_and_a_long_tail(toys: Path) -> None:
    lengths = drawn_lengths(large_job(toys), 0, 0)
    assert lengths.shape == (128, 16)
    assert lengths.mean() == pytest.approx(2000, rel=0.01)
    assert lengths.max() > 3 * np.median(lengths)
    assert (drawn_lengths(large_job(toys), 0, 0, tail=0.0) == 2000).all()


def test_throughput_is_never_superlinear_and_ends_to_pay(toys: Path) -> None:
    scales = scaling(large_job(toys))
    assert [scale.gpus for scale in scales] == [2**power for power in range(3, 13)]
    for before, scale in itertools.pairwise(scales):
        assert before.step / scale.step <= 2.05
    last = pays_until(scales)
    assert last is not None
    assert 8 < last < 4096
    assert f"stops paying at {last} GPUs" in verdict(scales)
    assert scales[0].failing < scales[-1].failing
    assert all(0 <= share <= 1 for scale in scales for share in scale.idle)


def test_a_simulation_is_its_seeds(toys: Path) -> None:
    found = large_job(toys)
    assert scale_at(found, 64, 32, seed=1) == scale_at(found, 64, 32, seed=1) != scale_at(found, 64, 32, seed=2)


def test_a_longer_tail_makes_the_last_completion_later(toys: Path) -> None:
    short, long = (scale_at(large_job(toys), 64, 32, seed=0, tail=tail) for tail in (0.2, 1.0))
    assert short.sample < long.sample


def test_the_best_split_is_the_fastest_that_fits(toys: Path) -> None:
    ways = best_split(large_job(toys), 64)
    assert len(ways) > 3
    assert all(way.samplers + way.learners == 64 or way.shared for way in ways)
    assert [way.step for way in ways] == sorted(way.step for way in ways)


def test_more_links_make_publishing_slower_across_nodes(toys: Path) -> None:
    found = large_job(toys)
    assert found.publish_seconds(4, 8) < found.publish_seconds(4, 16)
    assert dataclasses.replace(found, trained=10**7, config=settled(toys, lora={"rank": 4})).publish_seconds(4, 16) < (
        found.publish_seconds(4, 16) / 100
    )


# ------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def groupwise(toys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    (toys / "run.yaml").write_text(settled(toys).to_yaml())
    monkeypatch.chdir(toys)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["groupwise", "plan", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return int(exit.value.code or 0), captured.out, captured.err

    return run


def test_a_plan_is_printed_and_reads_no_weights(groupwise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetensors.torch.load_file", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("groupwise.model.load_model", lambda *_: pytest.fail("a model was loaded"))
    code, out, _ = groupwise("run.yaml", "--gpus", "8xH100")
    assert code == 0
    for piece in (
        "18,656 parameters, 18,656 trained; 4 prompts of 1 tokens (at most 1), 4 completions each of 4 (at most 4)",
        "peak of update", "KV cache", "a step, without rewards", "measure this machine with --calibrate",
        "with PPO's critic (ppo)", "ways to divide 8xH100-80G", "memory of each H100-80G", "GPU-hours",
    ):  # fmt: skip
        assert piece in out, piece


def test_a_plan_is_values(groupwise: Callable[..., Any]) -> None:
    code, out, _ = groupwise("run.yaml", "--json", "--completion-tokens", "3", "--gpus", "8xH100", "algorithm=ppo")
    assert code == 0
    values = json.loads(out)
    assert values["parameters"] == 18_656
    assert values["lengths"] == {"prompt": 1, "longest_prompt": 1, "completion": 3, "longest": 4}
    assert values["here"]["fits"] is True
    assert values["here"]["step_seconds"] == pytest.approx(sum(values["here"]["seconds"].values()))
    assert values["without_critic"]["step_seconds"] < values["here"]["step_seconds"]
    (cluster,) = values["clusters"]
    assert cluster["fits"] is True
    assert cluster["splits"][0]["step"] <= cluster["splits"][-1]["step"]


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["run.yaml", "--simulate"], "--simulate: which GPUs?"),
        (["run.yaml", "--gpus", "8xH999"], "--gpus: H999: no such GPU"),
        (["run.yaml", "--completion-tokens", "5"], "--completion-tokens: 5; completions have 1 to"),
        (["run.yaml", "model=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: list[str], piece: str, groupwise: Callable[..., Any]) -> None:
    code, _, err = groupwise(*arguments)
    assert code == 2
    assert piece in err


def test_rehearsing_leaves_the_sketch_as_it_is(toys: Path) -> None:
    model = sketched(**SHAPE)
    before = copy.deepcopy(model.config.to_dict())
    local_step(settled(toys, lora={"rank": 2}), model, LENGTHS)
    assert model.config.to_dict() == before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert lean_step(model, LENGTHS, 4, False, 8).flops > 0
