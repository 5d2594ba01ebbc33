"""LoRA: only the adapter moves, the base is the reference, and the merged model is the adapted one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, tiny_folder, tiny_model
from peft import PeftModel
from test_lean import answers, model_of
from test_packing import gradient, ragged_groups, relative_distance, weighted_sum
from toys import final_bytes, metrics, toy_config, toy_folder, toy_rows
from transformers import PreTrainedModel

from groupwise.adapters import Lora, attach, switched_off, trained
from groupwise.engines import Optimizer
from groupwise.engines.local_learner import LocalLearner
from groupwise.engines.local_sampler import LocalSampler
from groupwise.errors import ConfigError, GroupwiseError, ModelError
from groupwise.folding import is_lean
from groupwise.model import hidden_states, load_model, logits, save_model
from groupwise.train import train

LORA = Lora(rank=4, alpha=8.0)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""`load_model` takes it out; a model made here would have it in training mode, which checkpointing needs."""


def with_adapter(model: PreTrainedModel, lora: Lora = LORA) -> PreTrainedModel:
    """The model with an adapter that is not 0."""
    attach(model, lora, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, tensor in trained(model):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    return model


def learner_of(model: PreTrainedModel, **changes: Any) -> LocalLearner:
    settings = {"temperature": 0.7, "microbatch_tokens": 50, "total_updates": 4, **changes}
    return LocalLearner(model, Optimizer(learning_rate=1e-2), **settings)


def values_of(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(2, 14)[None]
    return logits(model, hidden_states(model, tokens))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_new_adapter_changes_nothing_and_training_moves_nothing_else(architecture: str) -> None:
    model = tiny_model(architecture)
    before = values_of(model)
    attach(model, LORA, seed=0)
    torch.testing.assert_close(values_of(model), before, rtol=0, atol=0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner = learner_of(model)
    for _ in range(2):  # B is 0 at first, so that A only moves at the second step
        learner.update(ragged_groups(), weighted_sum)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])}
    assert moved == {name for name, _ in trained(model)}
    with switched_off(model):
        torch.testing.assert_close(values_of(model), before, rtol=0, atol=0)
    assert len(learner._steps._adamw.state) == len(moved)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_reference_is_the_base_model_and_the_policy_comes_back(architecture: str) -> None:
    base, model = learner_of(tiny_model(architecture)), with_adapter(tiny_model(architecture))
    learner, batch = learner_of(model), ragged_groups()
    policy = learner.logprobs(batch)
    assert torch.equal(learner.logprobs(batch, reference=True), base.logprobs(batch))
    assert torch.equal(learner.logprobs(batch), policy)
    assert not torch.equal(policy, base.logprobs(batch))
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())
    with pytest.raises(GroupwiseError, match="cannot move"):
        learner.refresh_reference()


# peft 0.21 asks transformers 5 for `is_gradient_checkpointing`, the old name of `is_activation_checkpointing`.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_merged_model_and_the_saved_adapter_are_the_adapted_model(architecture: str, tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", architecture)
    model = with_adapter(load_model(base, dtype=torch.float32, device="cpu"))
    save_model(base, learner_of(model).weights(), tmp_path / "merged")
    again = load_model(tmp_path / "merged", dtype=torch.float32, device="cpu")
    torch.testing.assert_close(values_of(again), values_of(model), rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "adapter")
    wrapped = PeftModel.from_pretrained(load_model(base, dtype=torch.float32, device="cpu"), tmp_path / "adapter")
    torch.testing.assert_close(values_of(wrapped.get_base_model()), values_of(model), rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_gradient_is_that_of_padded_rows(architecture: str, recomputed: bool) -> None:
    still = NO_DROPOUT if architecture == "gpt2" else {}
    models = [with_adapter(tiny_model(architecture, torch.float64, **still)) for _ in range(2)]
    if recomputed:
        models[0].activation_checkpointing_enable({"use_reentrant": False})
    packed, padded = (gradient(model, ragged_groups(), padded=i == 1) for i, model in enumerate(models))
    assert all(".lora_" in name for name in packed)
    # transformers takes Gemma 2's eager softmax in float32, whatever the dtype.
    assert relative_distance(packed, padded) < (1e-6 if architecture == "gemma2" else 1e-10)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_an_adapted_model_decodes_the_short_way_as_the_long_way(name: str) -> None:
    model = with_adapter(model_of(name))
    assert is_lean(model)
    base = answers(model_of(name), lean=True)
    short, long = answers(model, lean=True), answers(model, lean=False)
    for one, other in zip(short, long, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert abs(one.logprobs - other.logprobs).max() < 1e-4
    assert any(one.tokens.tolist() != other.tokens.tolist() for one, other in zip(short, base, strict=True))


def test_the_sampler_of_an_adapted_model_asks_for_no_weights() -> None:
    sampler = LocalSampler(with_adapter(tiny_model("qwen3")), [1], max_batch_tokens=100)
    asked = itertools.count()
    sampler.load(((str(next(asked)), torch.zeros(1)) for _ in range(3)), version=7)
    assert next(asked) == 0
    assert sampler._version == 7


def test_a_checkpoint_holds_the_adapter_alone_and_continues_exactly(tmp_path: Path) -> None:
    def fresh() -> LocalLearner:
        model = tiny_model("qwen3")
        attach(model, LORA, seed=0)
        return learner_of(model)

    whole, first, second = fresh(), fresh(), fresh()
    for learner in (whole, whole, first):
        learner.update(ragged_groups(), weighted_sum)
    first.snapshot()(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"adapter.safetensors", "optimizer.pt", "updates.json"}
    second.restore(tmp_path)
    second.update(ragged_groups(), weighted_sum)
    for (name, one), (_, other) in zip(whole.weights(), second.weights(), strict=True):
        assert torch.equal(one, other), name
        assert torch.is_grad_enabled()  # also while tensors are handed out


def test_a_run_learns_resumes_and_leaves_a_model_and_an_adapter(tmp_path: Path) -> None:
    # The head does not train, so that its weights have to be large enough for the states to choose a word with.
    toy_folder(tmp_path / "model", initializer_range=0.2)
    toy_rows(tmp_path / "rows.jsonl")
    settings = {
        "lora": {"rank": 8},
        "algorithm": {"kl": {"coef": 0.001}},
        "steps": 14,
        "prompts_per_step": 8,
        "group_size": 8,
        "optimizer": {"learning_rate": 0.1},
        "checkpoint": {"every": 7},
    }
    run = train(toy_config(tmp_path, **settings, output=str(tmp_path / "run")))
    rewards = [record["reward"] for record in metrics(run.folder)]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.55
    load_model(run.folder / "model", dtype=torch.float32, device="cpu")
    files = {file.name for file in (run.folder / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    end = final_bytes(run.folder)
    for place in (run.folder / "checkpoints").glob("*14"):
        place.rename(tmp_path / "aside")
    assert final_bytes(train(toy_config(tmp_path, **settings), resume=run.folder).folder) == end


@pytest.mark.parametrize("targets", [("q_porj",), ("lm_head",)])
def test_layers_that_cannot_be_adapted_are_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match=r"lora\.target_modules"):
        attach(tiny_model("llama"), Lora(target_modules=targets), seed=0)


def test_a_reference_that_should_move_is_refused_with_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refresh_every"):
        toy_config(tmp_path, lora={}, algorithm={"kl": {"coef": 0.1, "refresh_every": 2}})
