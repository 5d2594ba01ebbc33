"""Tiny models of five architectures, made on the spot, for the tests of everything that runs a model.

* qwen3: grouped-query attention, norms on queries and keys, tied embeddings
* llama: untied embeddings
* gemma2: sliding-window layers beside full ones, softcapping of attention (hence eager) and of the final logits
* gemma3: sliding-window layers beside full ones with SDPA, each type with its own rotary embedding
* gpt2: absolute positions, biases, dropout 0.1 in its config
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCABULARY = 97
STOP = 1
WINDOW = 6
"""Tokens that a sliding-window layer sees: fewer than the tests have in a row."""

_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that a wrong distribution shows
    "eos_token_id": STOP,
    "bos_token_id": None,
    "pad_token_id": None,
}

CONFIGS = {
    "qwen3": Qwen3Config(**_SHARED, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SHARED, tie_word_embeddings=False),
    "gemma2": Gemma2Config(
        **_SHARED,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": Gemma3TextConfig(
        **_SHARED,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        eos_token_id=STOP,
        bos_token_id=STOP,
    ),
}
ARCHITECTURES = tuple(CONFIGS)


def tiny_model(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model with random weights, in evaluation mode.

    In float64 all of it is float64, but for the attention of gemma2: eager attention takes its softmax in float32.
    """
    config = type(CONFIGS[architecture])(**{**CONFIGS[architecture].to_dict(), **changes})
    attention = "eager" if architecture == "gemma2" else "sdpa"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    if dtype == torch.float64:
        in_float64(model)
    return model


def in_float64(model: PreTrainedModel) -> None:
    """Let the norms, which transformers always computes in float32, compute in float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_rms_norm, module, "Gemma" in type(module).__name__)


def _rms_norm(module: Any, from_one: bool, x: Tensor) -> Tensor:
    eps = module.eps if from_one else module.variance_epsilon
    weight = 1 + module.weight if from_one else module.weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def tiny_tokenizer(tokens: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """One word per token: `<pad>`, `<stop>`, `w2`, `w3`, ..."""
    words = {f"w{index}": index for index in range(tokens)}
    words = {"<pad>": 0, "<stop>": STOP, **{word: index for word, index in words.items() if index > STOP}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<stop>"
    )


def tiny_folder(path: Path, architecture: str = "qwen3", **changes: Any) -> Path:
    """A folder with a tiny model and its tokenizer, as `save_pretrained` writes it."""
    tiny_model(architecture, **changes).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def ragged_rows() -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, lengths, mask) of rows longer than the sliding window; padding is token 0, which also occurs inside."""
    lengths = torch.tensor([13, 9, 4, 11])
    tokens = torch.randint(0, VOCABULARY, (4, 13)) * (torch.arange(13) < lengths[:, None])
    mask = (torch.arange(13) >= 3) & (torch.arange(13) < lengths[:, None])
    mask[0, 7] = False  # what an environment said
    return tokens, lengths, mask


TEMPERATURE = 0.7


def by_the_definition(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from all logits of one row at a time, without padding, at `TEMPERATURE`."""
    found = torch.zeros(2, *tokens.shape, dtype=torch.float64)
    for row, column in mask.nonzero().tolist():
        logits = model(input_ids=tokens[row : row + 1, :column]).logits[0, -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1)
        found[0, row, column] = logprobs[tokens[row, column]]
        found[1, row, column] = -(logprobs.exp() * logprobs).sum()
    return found[0], found[1]


def gradient(model: PreTrainedModel, value: Tensor) -> Tensor:
    """Of all parameters that train, joined."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, parameters)])
