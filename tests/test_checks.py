"""What is looked at before a run: memory, disk, the folder, the prompts, and settings that change nothing."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from models import tiny_folder
from rich.console import Console
from texts import byte_tokenizer
from toys import terminal, toy_config, toy_rows

from groupwise import hub, resources
from groupwise.build import build, prepare
from groupwise.cautions import cautions
from groupwise.chat import Chat
from groupwise.checks import check_it_learns, data_cautions
from groupwise.config import Config
from groupwise.errors import ConfigError, DataError
from groupwise.model import load_model, sketch
from groupwise.resources import (
    Memory,
    available_memory,
    checkpoint_bytes,
    checkpoints_at_once,
    free_disk,
    in_words,
    memory_of,
    parameter_count,
)
from groupwise.rewards import as_rewards
from groupwise.tasks import Task, check_task
from groupwise.train import train

LEAST: dict[str, Any] = {"model": "some/model", "data": {"path": "rows.jsonl"}, "rewards": ["math_answer"]}
MATH = as_rewards({"type": "math_answer", "trial": False})
GIB = 2**30


# -------------------------------------------------------------------------------------------------- memory and disk


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_a_sketch_has_the_weights_of_the_model_and_none_of_their_values(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, architecture)
    model = load_model(folder, dtype=torch.float32, device="cpu")
    drawn = sketch(folder)
    assert parameter_count(drawn) == parameter_count(model) == sum(p.numel() for p in model.parameters())
    assert all(parameter.is_meta for parameter in drawn.parameters())


def test_a_checkpoint_is_as_large_as_it_was_estimated(toys: Path, tmp_path: Path) -> None:
    run = train(toy_config(toys, steps=1, output=str(tmp_path / "run")), console=Console(quiet=True)).folder
    (saved,) = (run / "checkpoints").iterdir()
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    estimate = checkpoint_bytes(sketch(toys / "model"), torch.float32, critic=False, reference=False)
    assert estimate == pytest.approx(size, rel=0.2)  # names and headers weigh something in so small a model


def test_the_memory_of_an_update_is_weights_gradients_and_averages_of_each_model(toys: Path) -> None:
    drawn, parameters = sketch(toys / "model"), 18_656
    plain = memory_of(drawn, torch.float32, tokens=100, reference=False, critic=False, checkpointing=False)
    assert plain.parameters == parameters
    assert plain.fixed == parameters * 4 * 4
    assert dataclasses.replace(plain, reference=True).fixed == parameters * 4 * 5
    assert dataclasses.replace(plain, reference=True, critic=True).fixed == parameters * 4 * 9
    assert memory_of(drawn, torch.bfloat16, tokens=100, reference=False, critic=False, checkpointing=False).fixed == (
        plain.fixed // 2
    )
    checkpointed = dataclasses.replace(plain, checkpointing=True)
    assert plain.fixed < checkpointed.needed < plain.needed


def test_activations_are_estimated_to_within_a_factor_of_two(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    folder = tiny_folder(tmp_path, "qwen3", **shape)
    model = load_model(folder, dtype=torch.float32, device="cpu")
    tokens, kept = 64, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.get_decoder()(input_ids=torch.arange(tokens)[None] % 90, use_cache=False)
    assert states.last_hidden_state.requires_grad
    measured = sum(size for place, size in kept.items() if place not in weights)
    memory = memory_of(model, torch.float32, tokens=tokens, reference=False, critic=False, checkpointing=False)
    assert 0.5 < (memory.needed - memory.fixed) / measured < 2


HALF_A_BILLION = Memory(
    parameters=600_000_000, width=4, layers=28, token_values=17_000, token_values_checkpointed=1_024, tokens=16_384
)


@pytest.mark.parametrize(
    ("available", "changes", "helps"),
    [
        (20, {}, ["engine.train_tokens: ", "engine.gradient_checkpointing: true"]),
        (13, {"reference": True}, ["engine.train_tokens: ", "engine.gradient_checkpointing: true"]),
        (11, {"reference": True}, ["engine.train_tokens: 256 with ", " with algorithm.kl: none with engine.dtype"]),
        (10, {}, ["engine.train_tokens: "]),
        (6, {}, ["engine.dtype: bfloat16"]),
        (1, {}, []),
    ],
)
def test_what_helps_makes_the_run_fit(available: int, changes: dict[str, Any], helps: list[str]) -> None:
    memory = dataclasses.replace(HALF_A_BILLION, **changes)
    assert memory.needed > available * GIB
    found = " | ".join(memory.remedies(available * GIB))
    assert all(piece in found for piece in helps), found
    assert bool(found) == bool(helps)


def test_the_tokens_that_are_proposed_fit() -> None:
    available = 20 * GIB
    (proposed,) = [way for way in HALF_A_BILLION.remedies(available) if "train_tokens" in way]
    tokens = int(proposed.removeprefix("engine.train_tokens: "))
    assert dataclasses.replace(HALF_A_BILLION, tokens=tokens).needed <= available
    assert dataclasses.replace(HALF_A_BILLION, tokens=tokens + 1).needed > available


def test_a_micro_batch_that_may_not_fit_is_a_caution(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(toys)
    drawn = sketch(toys / "model")
    fixed = parameter_count(drawn) * 16
    monkeypatch.setattr("groupwise.checks.available_memory", lambda device: fixed + 150_000)
    (caution,) = prepare(config).cautions
    assert caution.startswith("engine: training ")
    assert "what helps: engine.gradient_checkpointing: true" in caution
    monkeypatch.setattr("groupwise.checks.available_memory", lambda device: fixed - 1)
    with pytest.raises(ConfigError, match="is free on cpu; what helps: "):
        prepare(config)
    assert prepare(config, training=False).cautions == (), "an evaluation has no gradients"


def test_the_memory_of_this_machine_is_known() -> None:
    free = available_memory(torch.device("cpu"))
    assert free is not None
    assert 2**20 < free < 2**50


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"max": "1000", "current": "700", "stat": "anon 1\ninactive_file 50\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(resources, "CONTAINER", tmp_path)
    assert available_memory(torch.device("cpu")) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(torch.device("cpu")) != 350


@pytest.mark.parametrize(
    ("steps", "every", "keep", "count"),
    [
        (10, 0, (2,), 1),
        (10, 1, (2,), 3),
        (10, 5, (4,), 2),
        (10, 10, (2,), 1),
        (3, 2, (9,), 2),
        (100, 2, (2, 30), 6),
        (100, 4, (2, 10), 7),
        (100, 2, (2, 0, 3), 6),
        (6, 2, (2, 2, 3), 3),
    ],
)
def test_how_many_checkpoints_there_are_at_a_time(steps: int, every: int, keep: tuple[int, ...], count: int) -> None:
    assert checkpoints_at_once(steps, every, *keep) == count


def test_rollouts_that_may_fill_the_disk_are_a_caution(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(toys, steps=1000, output="run")
    monkeypatch.setattr("groupwise.checks.free_disk", lambda folder: 10**6)
    (caution,) = prepare(config).cautions
    assert "make 750 KiB of rollouts in the whole run" in caution


def test_sizes_are_said_in_the_nearest_unit() -> None:
    assert [in_words(size) for size in (3, 2048, 3 * 2**20, 1.5 * 2**30, 2**41)] == [
        "3 bytes", "2 KiB", "3 MiB", "1.5 GiB", "2 TiB",
    ]  # fmt: skip


def test_a_folder_that_is_to_be_made_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b") == pytest.approx(free_disk(tmp_path), rel=0.1)


# ------------------------------------------------------------------------------------------------------- the prompts


def test_prompts_that_come_twice_are_counted(toys: Path, tmp_path: Path) -> None:
    rows = toy_rows(tmp_path / "twice.jsonl", [{"prompt": f"w{2 + i % 5}"} for i in range(12)])
    config = toy_config(toys, data={"path": str(rows), "split": "test"}, steps=1, output=str(tmp_path / "run"))
    assert prepare(config).cautions == (
        "data: 7 of 12 prompts are there more than once, and count as often",
        f"data.split: test has no effect: {rows} is a file, which has no splits",
    )
    console, screen = terminal()
    train(config, console=console)
    assert "warning: data: 7 of 12 prompts are there more than once" in screen.getvalue()


def test_a_long_prompt_keeps_its_end_behind_the_beginning_of_the_tokenizer() -> None:
    plain, marked = (Chat(byte_tokenizer(bos=bos), (9,)) for bos in (False, True))
    assert plain.text(plain.prompt("abcdef", 3)) == "def"
    assert plain.text(plain.prompt("abc", 3)) == "abc"
    tokens = marked.prompt("abcdef", 3)
    assert tokens.tolist() == [marked.tokenizer.bos_token_id, *marked.prompt("ef")[1:].tolist()]
    assert len(marked.prompt("abcdef", 1)) == 1
    messages = [{"role": "user", "content": "abcdef"}]
    assert plain.prompt(messages, 5).tolist() == plain.prompt(messages)[-5:].tolist()


def test_prompts_cut_to_their_end_are_counted_and_trained(
    toys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [f"w{2 + i}" for i in range(70)]
    rows = toy_rows(tmp_path / "long.jsonl", [{"prompt": f"w{i}"} for i in range(2, 5)] + [{"prompt": " ".join(words)}])
    data = {"path": str(rows), "long_prompts": "truncate-left"}
    config = toy_config(toys, data=data, steps=1, output=str(tmp_path / "run"))
    parts = build(config)
    assert "1 of 4 prompts are too long: rows[3] has 70 tokens" in caplog.text
    assert "cut to their last 60 tokens" in caplog.text
    assert parts.chat.prompt(parts.task.prompt_of(parts.task.rows[3]), parts.task.longest_prompt).tolist() == list(
        range(12, 72)
    )
    run = train(config, console=Console(quiet=True))
    assert (run.folder / "model").is_dir()


def test_what_cannot_be_cut_is_still_an_error() -> None:
    chat = Chat(byte_tokenizer(), (9,))
    long = Task([{"prompt": "abcdef", "answer": "1"}], MATH)
    with pytest.raises(DataError, match=r"passes the model's context of 4; .* longer context$"):
        check_task(long, chat, max_tokens=4, context=4, long_prompts="truncate-left")


def test_prompts_are_looked_at_even_when_the_model_cannot_be(tmp_path: Path) -> None:
    rows = [{"prompt": "w3", "answer": "1"}, {"prompt": None, "answer": None}]
    with pytest.raises(ValueError, match=r"(?s)2 problems.*rows\[1\] is null.*rows\[1\]\.answer is null"):
        check_task(Task(rows, MATH), None, max_tokens=4, context=None)


def test_a_task_made_in_python_is_looked_at_as_well() -> None:
    task = Task([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}], MATH, prompt=lambda row: row["prompt"])
    assert list(data_cautions(Config.parse(LEAST), task, None)) == [
        "data: 1 of 3 prompts are there more than once, and count as often"
    ]


# -------------------------------------------------------------------------------- settings that change nothing


def test_a_run_that_could_not_change_the_weights_is_refused() -> None:
    still = Config.parse({**LEAST, "optimizer": {"learning_rate": 0}})
    with pytest.raises(ConfigError, match=r"^optimizer\.learning_rate: 0; the weights would end as they began"):
        check_it_learns(still, still.rewards)
    check_it_learns(Config.parse({**LEAST, "algorithm": "ppo", "optimizer": {"learning_rate": 0}}), still.rewards)


@pytest.mark.parametrize(
    ("algorithm", "learns"),
    [
        ("grpo", False),
        ({"kl": {"coef": 0.1}}, False),  # a policy that nothing moves stays its own reference
        ({"entropy": {"coef": 0.1}}, True),
        ({"shaping": "linear"}, True),
    ],
)
def test_rewards_that_all_weigh_nothing_are_refused_unless_something_else_teaches(algorithm: Any, learns: bool) -> None:
    config = Config.parse({**LEAST, "algorithm": algorithm, "rewards": [{"use": "math_answer", "weight": 0}]})
    if learns:
        check_it_learns(config, config.rewards)
        return
    with pytest.raises(ConfigError, match=r"^rewards: the weight of math_answer is 0"):
        check_it_learns(config, config.rewards)


EFFECTLESS: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"kl": {"coef": 0}}}, "algorithm.kl has no effect with coef: 0"),
    ({"algorithm": {"shaping": {"type": "soft_overlong", "limit": 999}}}, "algorithm.shaping has no effect"),
    ({"sampling": {"temperature": 0.01}}, "sampling.temperature: 0.01 makes the completions"),
    ({"evaluation": {"samples": 4, "temperature": 1.0}}, "evaluation.samples has no effect without evaluation.data"),
    ({"evaluation": {"data": {"path": "x"}, "top_p": 0.5}}, "evaluation.top_p and evaluation.top_k have no effect"),
    ({"evaluation": {"data": {"path": "x"}, "every": 999}}, "evaluation.every: 999 is never reached in steps: 100"),
    ({"checkpoint": {"every": 999}}, "checkpoint.every: 999 is never reached in steps: 100"),
    ({"checkpoint": {"every": 0, "keep_last": 9}}, "checkpoint.keep_last has no effect with checkpoint.every: 0"),
    ({"checkpoint": {"every": 0, "keep_every": 9}}, "checkpoint.keep_every has no effect with checkpoint.every: 0"),
    ({"checkpoint": {"every": 5, "keep_best": 1}}, "checkpoint.keep_best has no effect: no checkpoint has a score"),
    (
        {"checkpoint": {"every": 30, "keep_best": 1}, "evaluation": {"data": {"path": "x"}, "every": 40}},
        "checkpoint.keep_best has no effect: no checkpoint has a score",
    ),
    ({"optimizer": {"warmup_updates": 999}}, "optimizer.warmup_updates: 999 is more than the run's 100 updates"),
    ({"critic_optimizer": {"learning_rate": 1e-4}}, "critic_optimizer has no effect without algorithm.critic"),
]


@pytest.mark.parametrize(("changes", "caution"), EFFECTLESS)
def test_a_setting_without_effect_is_said(changes: dict[str, Any], caution: str) -> None:
    assert any(text.startswith(caution) for text in cautions(Config.parse({**LEAST, **changes}).resolve()))


def test_the_defaults_have_no_caution() -> None:
    assert cautions(Config.parse(LEAST).resolve()) == []


# ------------------------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had said that there is no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hub.reachable.cache_clear()


@pytest.mark.usefixtures("online")
def test_a_hub_that_cannot_be_reached_is_asked_once_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(address: Any, *_: Any, **__: Any) -> Any:
        asked.append(address)
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for _ in range(2):
        with hub.asked_once():
            assert constants.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE
    assert asked == [("huggingface.co", 443)]
    hub.reachable.cache_clear()


@pytest.mark.usefixtures("online")
def test_a_hub_that_answers_is_asked_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with hub.asked_once():
            assert not constants.HF_HUB_OFFLINE
    hub.reachable.cache_clear()
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.reachable(), "whether a proxy reaches the hub is for the proxy to say"
    hub.reachable.cache_clear()
