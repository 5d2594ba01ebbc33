"""Settings that choose themselves choose within reason, are written down, and are not chosen again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toys import toy_config, toy_folder, toy_rows
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from groupwise import settling
from groupwise.checks import Outline
from groupwise.config import Config
from groupwise.settling import settle
from groupwise.train import build
from groupwise.weights import Importance

CPU = torch.device("cpu")


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    return tmp_path


def sketched(hidden: int, layers: int = 4) -> PreTrainedModel:
    with torch.device("meta"):
        return Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=hidden,
                intermediate_size=2 * hidden,
                num_hidden_layers=layers,
                vocab_size=1000,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=16,
            )
        )


def settled(toys: Path, model: PreTrainedModel | None, **changes: object) -> tuple[Config, list[str]]:
    before = torch.get_num_threads()
    try:
        return settle(toy_config(toys, **changes), Outline(model), CPU)
    finally:
        torch.set_num_threads(before)


def test_nothing_is_left_open_and_settling_again_changes_nothing(toys: Path) -> None:
    config, said = settled(toys, sketched(64))
    assert (config.engine.dtype, config.engine.threads, said) == ("float32", 1, [])
    assert config.engine.train_tokens > 0 < config.engine.sample_tokens
    assert settle(config, Outline(sketched(64)), CPU) == (config, [])
    assert Config.parse(config.model_dump(mode="json")) == config
    assert build(toy_config(toys)).config.engine == config.engine


def test_what_is_set_stays(toys: Path) -> None:
    engine = {"dtype": "float64", "threads": 1, "train_tokens": 7, "sample_tokens": 9}
    config, _ = settled(toys, sketched(64), engine=engine)
    assert config.engine.model_dump(include=set(engine)) == engine


@pytest.mark.parametrize(
    ("amx", "hidden", "algorithm", "dtype"),
    [
        (True, 1024, "grpo", "mixed"),
        (True, 64, "grpo", "float32"),
        (False, 1024, "grpo", "float32"),
        (True, 1024, {"anchor": "rollout"}, "float32"),
    ],
)
def test_products_in_bfloat16_where_they_are_faster_and_can_be_corrected(
    amx: bool, hidden: int, algorithm: object, dtype: str, toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    config, said = settled(toys, sketched(hidden), algorithm=algorithm)
    assert config.engine.dtype == dtype
    assert (config.algorithm.correction == Importance()) == bool(said) == (dtype == "mixed")


def test_less_memory_means_less_at_once(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    for available in (10**6, 4 * 10**9, 10**12):
        monkeypatch.setattr(settling, "available_memory", lambda _, available=available: available)
        engine = settled(toys, sketched(1024))[0].engine
        found.append((engine.train_tokens, engine.sample_tokens))
    assert found[0] == (settling.FEWEST_TOKENS, settling.FEWEST_TOKENS)
    assert found[0] < found[1] < found[2] == (settling.MOST_TRAIN_TOKENS, settling.MOST_SAMPLE_TOKENS)


def test_threads_are_measured_only_where_it_is_not_clear(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for faster, expected in ((1, 1), (2, 2)):
        monkeypatch.setattr(settling, "_seconds", lambda threads, _, faster=faster: float(threads != faster))
        assert settled(toys, sketched(256))[0].engine.threads == expected
    monkeypatch.setattr(settling, "_seconds", lambda *_: pytest.fail("measured"))
    assert settled(toys, sketched(64))[0].engine.threads == 1
    assert settled(toys, sketched(4096))[0].engine.threads == 2
