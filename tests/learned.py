"""Tiny models that judge texts, as folders: what a reward model, a process reward model and their tokenizers leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import CONFIGS, in_float64
from texts import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

BERT = BertConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.3,
    pad_token_id=0,
)
READERS = ("qwen3", "gemma3", "gpt2", "bert")


def judging_folder(
    path: Path,
    architecture: str = "qwen3",
    kind: Any = AutoModelForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> Path:
    """A folder with a tiny model of random weights that reads bytes and says one number, and its tokenizer."""
    tokenizer = tokenizer or byte_tokenizer()
    usual = CONFIGS.get(architecture, BERT)
    length = {"n_positions" if isinstance(usual, GPT2Config) else "max_position_embeddings": 512}
    settings = {name: value for name, value in usual.to_dict().items() if name not in ("id2label", "label2id")}
    config = type(usual)(**{**settings, **length, "vocab_size": len(tokenizer), "num_labels": 1, **changes})
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def exactly(model: PreTrainedModel) -> PreTrainedModel:
    """The model in evaluation mode; in float64 all of it computes in float64."""
    if model.dtype == torch.float64:
        in_float64(model)
    return model.eval()


def merging_tokenizer(text: str, tokens: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE that learned to join whatever is frequent in a text, line ends and words alike."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=tokens, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def piece_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """In the manner of SentencePiece: a space belongs to the word after it, an unknown letter is its bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *words]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=False)
