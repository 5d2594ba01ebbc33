from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, STOP, VOCABULARY, tiny_folder, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    Gemma3TextConfig,
    GraniteConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from groupwise import model as module
from groupwise.errors import ModelError
from groupwise.model import (
    check_head,
    check_tokenizer,
    context_length,
    load_model,
    load_tokenizer,
    save_model,
    stop_token_ids,
    token_logprobs,
)

TEMPERATURE = 0.7


def ragged_rows() -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, lengths, mask) of rows longer than the sliding window; padding is token 0, which also occurs inside."""
    lengths = torch.tensor([13, 9, 4, 11])
    tokens = torch.randint(0, VOCABULARY, (4, 13)) * (torch.arange(13) < lengths[:, None])
    mask = (torch.arange(13) >= 3) & (torch.arange(13) < lengths[:, None])
    mask[0, 7] = False  # what an environment said
    return tokens, lengths, mask


def by_the_definition(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from all logits of one row at a time, without padding."""
    found = torch.zeros(2, *tokens.shape, dtype=torch.float64)
    for row, column in mask.nonzero().tolist():
        logits = model(input_ids=tokens[row : row + 1, :column]).logits[0, -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1)
        found[0, row, column] = logprobs[tokens[row, column]]
        found[1, row, column] = -(logprobs.exp() * logprobs).sum()
    return found[0], found[1]


def gradient(model: PreTrainedModel, value: Tensor) -> Tensor:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, parameters)])


@pytest.mark.parametrize("rows_per_chunk", [5, 1000])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_and_their_gradient_are_those_of_the_definition(
    architecture: str, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", rows_per_chunk * VOCABULARY)
    model = tiny_model(architecture, torch.float64)
    tokens, lengths, mask = ragged_rows()
    weights = torch.randn(2, *tokens.shape, dtype=torch.float64)

    logprobs, entropies = token_logprobs(model, tokens, lengths, mask, TEMPERATURE, entropy=True)
    found = gradient(model, (weights[0] * logprobs + weights[1] * entropies).sum())
    expected = by_the_definition(model, tokens, mask)
    wanted = gradient(model, (weights[0] * expected[0] + weights[1] * expected[1]).sum())

    torch.testing.assert_close(logprobs, expected[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(entropies, expected[1], atol=1e-10, rtol=0)
    tolerance = 1e-5 if architecture == "gemma2" else 1e-10  # its attention is partly in float32
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_what_stands_in_the_padding_changes_nothing() -> None:
    model = tiny_model("gemma2", torch.float64)
    tokens, lengths, mask = ragged_rows()
    garbage = torch.where(torch.arange(13) < lengths[:, None], tokens, 5)
    wider = torch.nn.functional.pad(garbage, (0, 4), value=7), lengths, torch.nn.functional.pad(mask, (0, 4))
    logprobs, _ = token_logprobs(model, tokens, lengths, mask, 1.0, entropy=False)
    others, _ = token_logprobs(model, *wider, 1.0, entropy=False)
    torch.testing.assert_close(others[:, :13], logprobs, atol=1e-12, rtol=0)
    assert not others[:, 13:].any()


def test_only_masked_positions_reach_the_head_and_never_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", 8 * VOCABULARY + 3)
    model = tiny_model("qwen3")
    tokens, lengths, mask = ragged_rows()
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: rows.append(logits.shape[:-1].numel()))

    logprobs, _ = token_logprobs(model, tokens, lengths, mask, 1.0, entropy=True)
    scored = int(mask.sum())
    assert sum(rows) == scored
    assert max(rows) == 8
    logprobs.sum().backward()
    assert sum(rows) == 2 * scored  # each chunk once more, instead of being kept
    assert max(rows) == 8


def test_entropies_are_computed_only_when_asked_for() -> None:
    model = tiny_model("llama", torch.float64)
    tokens, lengths, mask = ragged_rows()
    assert token_logprobs(model, tokens, lengths, mask, 1.0, entropy=True)[1].requires_grad
    assert not token_logprobs(model, tokens, lengths, mask, 1.0, entropy=False)[1].any()


def test_half_precision_weights_give_float32_scores() -> None:
    model = tiny_model("llama", torch.bfloat16)
    tokens, lengths, mask = ragged_rows()
    found, _ = token_logprobs(model, tokens, lengths, mask, 1.0, entropy=False)
    exact, _ = token_logprobs(model.double(), tokens, lengths, mask, 1.0, entropy=False)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=0.3, rtol=0)


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
