from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    ARCHITECTURES,
    STOP,
    TEMPERATURE,
    by_the_definition,
    gradient,
    ragged_rows,
    tiny_folder,
    tiny_model,
    tiny_tokenizer,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    Gemma3TextConfig,
    GraniteConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from groupwise.errors import ModelError
from groupwise.head import token_logprobs
from groupwise.model import (
    check_head,
    check_tokenizer,
    context_length,
    load_model,
    save_model,
    stop_token_ids,
)
from groupwise.model_files import load_tokenizer


@pytest.mark.parametrize(
    "config", [GraniteConfig, CohereConfig, *ARCHITECTURES], ids=lambda c: c if isinstance(c, str) else c.__name__
)
def test_the_head_of_a_supported_architecture_passes_its_check(config: Any) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    scale = {GraniteConfig: {"logits_scaling": 4.0}, CohereConfig: {"logit_scale": 0.25}}
    if isinstance(config, str):
        check_head(tiny_model(config))
    else:
        settings = config(**small, **scale[config], vocab_size=32, num_key_value_heads=1, pad_token_id=0)
        check_head(AutoModelForCausalLM.from_config(settings))


def test_a_model_with_an_unknown_logit_transformation_is_refused() -> None:
    model = tiny_model("llama")
    model.config.logits_scaling = 2.0  # which Llama does not know, so that we differ from it
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*transforms its logits"):
        check_head(model)


def test_a_model_that_sees_the_future_is_refused() -> None:
    config = Gemma3TextConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
        use_bidirectional_attention=True,
    )
    with pytest.raises(ModelError, match="not a causal language model"):
        check_head(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_loaded_model_has_no_dropout_even_when_it_trains(checkpointing: bool, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "gpt2")
    model = load_model(folder, dtype=torch.float64, device="cpu", gradient_checkpointing=checkpointing)
    assert model.config.attn_pdrop == 0.1
    tokens, lengths, mask = ragged_rows()
    expected, _ = by_the_definition(model, tokens, mask)
    model.train()
    found, _ = token_logprobs(model, tokens, lengths, mask, TEMPERATURE, entropy=False)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_checkpointing_changes_no_gradient_and_no_later_sampling(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, architecture)
    tokens, lengths, mask = ragged_rows()
    calls = {False: 0, True: 0}
    gradients = {}
    for checkpointing in calls:
        model = load_model(folder, dtype=torch.float64, device="cpu", gradient_checkpointing=checkpointing)
        layer = next(part for name, part in model.named_modules() if name.endswith((".mlp", ".h.0.mlp")))

        def count(*_: Any, checkpointing: bool = checkpointing) -> None:
            calls[checkpointing] += 1

        layer.register_forward_pre_hook(count)
        logprobs, _ = token_logprobs(model, tokens, lengths, mask, 1.0, entropy=False)
        gradients[checkpointing] = gradient(model, logprobs.sum())
        assert not model.training
    assert calls == {False: 1, True: 2}
    torch.testing.assert_close(gradients[True], gradients[False], atol=1e-12, rtol=1e-12)


def test_stop_tokens_are_those_of_every_place_that_names_one() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 5]
    model.config.eos_token_id = 9
    assert stop_token_ids(model, tokenizer) == (STOP, 5, 7, 9)


def test_a_model_that_nothing_stops_is_refused() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ModelError, match="set eos_token_id"):
        stop_token_ids(model, tokenizer)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_context_length_is_read_from_the_config(architecture: str) -> None:
    assert context_length(tiny_model(architecture)) == 64


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_with_both_numbers() -> None:
    check_tokenizer(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(ModelError, match="100 tokens but the model embeds only 97"):
        check_tokenizer(tiny_model("llama"), tiny_tokenizer(100))


def test_a_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(ModelError, match=r"nowhere.*no such folder"):
            load_model(path, dtype=torch.float32, device="cpu")
        with pytest.raises(ModelError, match=r"nowhere.*no such folder"):
            load_tokenizer(path)


def test_a_name_is_looked_for_as_a_folder_and_on_the_hub() -> None:
    with pytest.raises(ModelError, match=r"(?s)looked for a folder /.*no/such-model, no such folder; as a hub id"):
        load_model("no/such-model", dtype=torch.float32, device="cpu")


def test_a_folder_without_config_weights_or_tokenizer_says_which(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path, dtype=torch.float32, device="cpu")
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no weights"):
        load_model(tmp_path, dtype=torch.float32, device="cpu")
    tiny_model("qwen3").save_pretrained(tmp_path / "qwen3")
    with pytest.raises(ModelError, match="it has no tokens"):
        load_tokenizer(tmp_path / "qwen3")


def test_weights_that_lack_a_tensor_are_refused_instead_of_started_at_random(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack lm_head\.weight"):
        load_model(folder, dtype=torch.float32, device="cpu")


def test_only_causal_language_models_are_loaded(tmp_path: Path) -> None:
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**small, intermediate_size=16)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="BertForMaskedLM is no causal language model"):
        load_model(tmp_path / "bert", dtype=torch.float32, device="cpu")
    T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        load_model(tmp_path / "t5", dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_is_the_one_that_is_loaded_again(architecture: str, tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", architecture)
    trained = tiny_model(architecture, torch.bfloat16, seed=1)
    save_model(base, trained.state_dict().items(), tmp_path / "trained")
    loaded = load_model(tmp_path / "trained", dtype=torch.bfloat16, device="cpu")
    assert loaded.config.dtype == torch.bfloat16
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert stop_token_ids(loaded, load_tokenizer(tmp_path / "trained")) == (STOP,)


def test_gemma_2_is_loaded_with_attention_that_can_cap_its_logits(tmp_path: Path) -> None:
    model = load_model(tiny_folder(tmp_path, "gemma2"), dtype=torch.float32, device="cpu")
    torch.testing.assert_close(
        model(torch.tensor([[3, 4]])).logits, tiny_model("gemma2")(torch.tensor([[3, 4]])).logits
    )
