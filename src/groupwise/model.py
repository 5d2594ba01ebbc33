"""Load a causal language model, check that we can serve it, and run it: tokens -> states -> logits.

Shapes: B rows, T tokens of the longest row, V vocabulary, D hidden size, N scored tokens.  Rows are right-padded.
Under causal attention no token sees what comes after it, so right-padding needs neither an attention mask nor
position ids: both keep their defaults, which also keeps the fast causal attention kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers import logging as transformers_logging

from groupwise.errors import ModelError
from groupwise.hub import asked_once
from groupwise.model_files import (
    UNREADABLE,
    check_weights,
    first_line,
    load_config,
    load_generation_config,
    load_tokenizer,
    where,
)


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    gradient_checkpointing: bool = False,
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A model from a Hugging Face folder or hub id, by default a causal language model, without dropout.

    Args:
        path: a folder that `save_pretrained` wrote, or the id of a model on the Hugging Face hub.
        dtype: of the weights and the activations.
        device: where the weights are put.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        kind: the transformers class that loads it, which decides its head.

    Raises:
        ModelError: there is no such model, a part of it is missing, or it should predict the next token and does not.
    """
    config = load_config(path, causal=kind is AutoModelForCausalLM)
    check_weights(path)
    transformers_logging.disable_progress_bar()  # one bar per weight file says nothing that a user waits for
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report about missing weights: we refuse them in our own words
    # SDPA cannot cap attention logits (Gemma 2); transformers picks it all the same and fails in the forward pass.
    capped = getattr(_text(config), "attn_logit_softcapping", None) is not None
    try:
        with asked_once():
            model, info = kind.from_pretrained(
                where(path),
                config=config,
                dtype=dtype,
                attn_implementation="eager" if capped else None,  # None is SDPA where the architecture has it
                output_loading_info=True,
            )
    except UNREADABLE as error:
        raise ModelError(
            f"{path}: the model cannot be loaded: {first_line(error)}; save it again with save_pretrained"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{path}: the weights lack {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}; "
            "they would start at random; save the model again with save_pretrained"
        )
    _disable_dropout(model)
    if gradient_checkpointing:
        checkpoint_gradients(model)
    return model.to(device)


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """From now on, activations are computed again in the backward pass instead of being kept."""
    # The name that transformers 5.23 deprecates is the only one that its earlier versions know.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def sketch(path: str | Path) -> PreTrainedModel:
    """The model at `path` without its weights: shapes on the meta device, config and generation config.

    Raises:
        ModelError: see `load_model`.
    """
    config = load_config(path)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except UNREADABLE as error:
        raise ModelError(
            f"{path}: config.json describes no model that can be built: {first_line(error)}; write it with "
            "model.save_pretrained"
        ) from error
    model.generation_config = load_generation_config(path) or model.generation_config
    return model


def save_model(base: str | Path, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write a folder that `load_model` reads: these weights with the config and the tokenizer of `base`.

    Raises:
        ModelError: `base` cannot be read.
    """
    tensors = dict(weights)
    config, tokenizer = load_config(base), load_tokenizer(base)
    config.dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (generation := load_generation_config(base)) is not None:
        generation.save_pretrained(folder)
    save_torch_state_dict(tensors, folder)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token id that ends a completion, ascending: those of the generation config, the config and the tokenizer.

    Raises:
        ModelError: nothing names one.
    """
    places = (model.generation_config, model.config, tokenizer)
    found = [getattr(place, "eos_token_id", None) for place in places]
    ids = {int(token) for ids in found if ids is not None for token in (ids if isinstance(ids, list) else [ids])}
    if not ids:
        raise ModelError(
            f"{model.config.name_or_path}: no end-of-sequence token in generation_config.json, config.json or the "
            "tokenizer, so completions would never end; set eos_token_id in one of them"
        )
    return tuple(sorted(ids))


def context_length(model: PreTrainedModel) -> int | None:
    """Most tokens the model can attend to, or None when its config does not say."""
    config = _text(model.config)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that can produce a token for which the model has no embedding.

    Raises:
        ModelError: the tokenizer has more tokens than the model.
    """
    tokens, rows = len(tokenizer), vocabulary(model)
    if tokens > rows:
        raise ModelError(
            f"{model.config.name_or_path}: the tokenizer has {tokens} tokens but the model embeds only {rows}; "
            "call model.resize_token_embeddings(len(tokenizer)) and save it, or use the model's own tokenizer"
        )


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Refuse a model that we would score wrongly: an unknown logit transformation, or attention that is not causal.

    Raises:
        ModelError: `logits` differs from what the model itself computes, or a later token changes an earlier logit.
    """
    name = f"{model.config.name_or_path or 'the model'} ({type(model).__name__})"
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=model.device) % vocabulary(model)
    theirs = model(input_ids=tokens, use_cache=False).logits
    ours = logits(model, hidden_states(model, tokens))
    tolerance = 16 * torch.finfo(theirs.dtype).eps * max(1.0, theirs.abs().max().item())
    if theirs.shape != ours.shape or (ours - theirs).abs().max() > tolerance:
        raise ModelError(f"{name} transforms its logits in a way that is not supported; please report the architecture")
    if (theirs[0, :3] - theirs[1, :3]).abs().max() > tolerance:
        raise ModelError(f"{name} is not a causal language model: a token changes the prediction of those before it")


def hidden_states(model: PreTrainedModel, tokens: Tensor, **inputs: Any) -> Tensor:
    """float[B, T, D]: what the head turns into logits, from int64[B, T] right-padded tokens."""
    with _checkpointing_mode(model):
        return cast(Any, model).get_decoder()(input_ids=tokens, use_cache=False, **inputs).last_hidden_state


def logits(model: PreTrainedModel, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """float[..., V]: logits divided by temperature, from float[..., D]; at least float32.

    The sampler and the scorer share this function, so that they agree about every distribution.
    """
    config = _text(model.config)
    values = cast(nn.Module, model.get_output_embeddings())(hidden)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        values = values * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        values = values / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        values = torch.tanh(values / cap) * cap
    return values if temperature == 1.0 else values / temperature


def states_before(model: PreTrainedModel, tokens: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """float[N, D]: the state from which each masked token is predicted, row by row.

    `tokens` is int64[B, T], right-padded; columns beyond the longest row are not computed.
    """
    assert not mask[:, 0].any(), "the first token has no log-probability"
    width = int(lengths.max())
    return hidden_states(model, tokens[:, :width])[:, :-1][mask[:, 1:width]]


def _disable_dropout(model: PreTrainedModel) -> None:
    """Make dropout impossible, in sampling, scoring and training alike.

    With dropout in training (GPT-2 has it by default, and TRL trains with it) the ratio of the policy to itself is
    not 1.  Evaluation mode would be enough, but transformers checkpoints gradients only in training mode.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    model.eval()


@contextlib.contextmanager
def _checkpointing_mode(model: PreTrainedModel) -> Generator[None]:
    """Training mode for as long as transformers has to see it in order to checkpoint gradients."""
    needed = torch.is_grad_enabled() and getattr(cast(Any, model).get_decoder(), "gradient_checkpointing", False)
    if needed:
        model.train()
    try:
        yield
    finally:
        if needed:
            model.eval()


def vocabulary(model: PreTrainedModel) -> int:
    """How many tokens the model embeds and predicts; may be more than its tokenizer has."""
    return cast(Any, model.get_input_embeddings()).weight.shape[0]


def _text(config: Any) -> Any:
    """The part of a config that speaks about the language model."""
    return config.get_text_config()
