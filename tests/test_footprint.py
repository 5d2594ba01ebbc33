"""The memory that a run takes: of what is trained, and of what samples beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import toy_config, toy_folder, toy_rows

from groupwise import settling
from groupwise.adapters import Lora
from groupwise.build import prepare
from groupwise.checks import Outline, outline
from groupwise.errors import Findings, GroupwiseError
from groupwise.footprint import beside, cached_bytes, footprint
from groupwise.resources import Memory, checkpoint_bytes
from groupwise.settling import settle

PARAMETERS = 18_656
RANK = 4
ADAPTER = 2 * RANK * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
"""A[rank, in] and B[out, rank] of q and o, of k and v, and of gate, up and down, in both of the toy's layers."""
EACH_TOKEN = 2 * 2 * 2 * 8 * 4
"""Keys and values of two layers with two heads of eight float32 values."""
RAY: dict[str, Any] = {"type": "ray", "samplers": 3}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    toy_folder(folder / "model")
    toy_rows(folder / "rows.jsonl")
    return folder


def known(toys: Path, lora: Lora | None = None) -> Outline:
    findings = Findings()
    found = outline(str(toys / "model"), findings, lora)
    findings.settle()
    return found


def memory(toys: Path, samplers: int = 0, **changes: Any) -> Memory:
    config = toy_config(toys, **changes)
    subject = known(toys, config.lora)
    assert subject.model is not None
    return footprint(config, subject.model, tokens=0, adapter=subject.adapter, samplers=samplers)


def test_only_what_is_trained_has_gradients_and_averages(toys: Path) -> None:
    lora = {"lora": {"rank": RANK}}
    assert memory(toys).fixed == 4 * 4 * PARAMETERS
    assert memory(toys, **lora).fixed == 4 * (PARAMETERS + 4 * ADAPTER)
    # The reference of an adapter is the model below it; the critic is trained whole.
    assert memory(toys, **lora, algorithm={"kl": {"coef": 0.1}}).fixed == 4 * (PARAMETERS + 4 * ADAPTER)
    assert memory(toys, algorithm={"kl": {"coef": 0.1}}).fixed == 4 * 5 * PARAMETERS
    assert memory(toys, **lora, algorithm="ppo").fixed == 4 * (5 * PARAMETERS + 4 * ADAPTER)


def test_a_checkpoint_of_an_adapter_has_the_size_of_the_adapter(toys: Path) -> None:
    subject = known(toys, Lora(rank=RANK))
    assert subject.adapter == ADAPTER
    assert subject.model is not None
    size = checkpoint_bytes(subject.model, torch.float32, critic=False, reference=False, adapter=ADAPTER)
    assert size == 12 * ADAPTER


def test_where_the_adapter_is_wrong_nothing_is_said_of_its_size(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("checks", "settling"):
        monkeypatch.setattr(f"groupwise.{module}.available_memory", lambda device: 1)
    monkeypatch.setattr("groupwise.checks.free_disk", lambda folder: 1)
    with pytest.raises(GroupwiseError) as refused:
        prepare(toy_config(toys, lora={"rank": 1, "target_modules": ["nope"]}))
    (problem,) = refused.value.args
    assert problem.startswith("lora.target_modules")


def test_a_run_that_fits_because_of_its_adapter_is_not_refused(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.checks.available_memory", lambda device: 4 * 3 * PARAMETERS)
    monkeypatch.setattr("groupwise.checks.free_disk", lambda folder: 4 * 3 * PARAMETERS)
    few: dict[str, Any] = {"engine": {"train_tokens": 1}, "steps": 1, "prompts_per_step": 1, "group_size": 2}
    assert not any("engine" in text for text in prepare(toy_config(toys, lora={"rank": 1}, **few)).cautions)


def test_a_rank_holds_its_share_and_a_whole_copy_that_samples(toys: Path) -> None:
    split = {"engine": {"learner": {"type": "fsdp", "ranks": 2}}}
    assert memory(toys, **split).fixed == 4 * (4 * PARAMETERS // 2 + PARAMETERS)
    adapted = memory(toys, **split, lora={"rank": RANK})
    assert adapted.fixed == 4 * ((PARAMETERS + 4 * ADAPTER) // 2 + PARAMETERS + ADAPTER)


def test_each_sampler_on_one_machine_holds_weights_and_caches(toys: Path) -> None:
    config = toy_config(toys, engine={"placement": RAY, "sample_tokens": 100})
    subject = known(toys).model
    assert subject is not None
    assert cached_bytes(config, subject) == EACH_TOKEN
    assert memory(toys).fixed == 4 * 4 * PARAMETERS
    several = memory(toys, 3, engine={"placement": RAY, "sample_tokens": 100})
    assert several.fixed == 4 * 4 * PARAMETERS + 3 * (4 * PARAMETERS + 100 * EACH_TOKEN)
    assert "engine.placement.samplers: 1" in several.remedies(several.needed - 1)


@pytest.mark.parametrize(
    ("changes", "gpu", "count"),
    [
        ({}, False, 3),
        ({"address": "127.0.0.1:1"}, False, 0),
        ({}, True, 0),
        ({"gpus": 0.5}, True, 1),
        ({"gpus": 0.1}, True, 3),
        ({"gpus": 2.0}, True, 0),
    ],
)
def test_samplers_are_counted_where_the_learner_is(toys: Path, changes: dict[str, Any], gpu: bool, count: int) -> None:
    there = beside(toy_config(toys, engine={"placement": {**RAY, **changes}}), gpu=gpu)
    assert there == {"samplers": count, "together": 1}
    assert beside(toy_config(toys), gpu=gpu) == {"samplers": 0, "together": 1}


def test_ranks_that_are_actors_of_one_machine_take_their_memory_together(toys: Path) -> None:
    subject = known(toys).model
    assert subject is not None

    def found(gpu: bool = False, **placement: Any) -> Memory:
        engine = {"placement": {**RAY, **placement}, "learner": {"type": "fsdp", "ranks": 4}}
        config = toy_config(toys, engine=engine)
        return footprint(config, subject, tokens=1, adapter=None, **beside(config, gpu=gpu))

    each = 4 * (4 * PARAMETERS // 4 + PARAMETERS)
    assert found().fixed == 4 * each + 3 * 4 * PARAMETERS
    assert found().each_token == 4 * memory(toys).each_token
    assert found(gpu=True).fixed == each
    assert found(address="127.0.0.1:1").fixed == each


def test_samplers_share_the_memory_for_keys_and_values(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"threads": 1, "dtype": "float32"}
    available = 4 * 10**6
    monkeypatch.setattr(settling, "available_memory", lambda device: available)
    found: list[int] = []
    for placement in ("local", RAY):
        config = toy_config(toys, engine={**engine, "placement": placement})
        found.append(settle(config, known(toys), torch.device("cpu"))[0].engine.sample_tokens)
    free = available - 16 * PARAMETERS
    assert found == [free // 4 // EACH_TOKEN, (free - 12 * PARAMETERS) // 4 // 3 // EACH_TOKEN]
