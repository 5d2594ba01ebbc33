"""The base model and the task of ``groupwise quickstart``: made on the spot, nothing to download.

The task is three-digit addition. The base model is a tiny Qwen3, warmed up on worked solutions that are all *correct*,
most of them *hasty* (the answer at once, which a model this size cannot get right in its head) and the rest *careful*
(column addition, one local step after the other, which it can). Greedy decoding of the base model is hasty and mostly
wrong; the careful way is latent, sampled about one time in three, and nearly always right. So reinforcement learning
has something true to find: thinking pays. Accuracy and completion length rise together, as they do at full size.

Everything is a pure function of the seed, and the result is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from groupwise.errors import ModelError

Split = Literal["warmup", "train", "test"]
Progress = Callable[[int, int, float], None]

RECORD = "quickstart.json"  # in the model folder: what it was built from
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the base model is made. Folders built by another recipe are stale."""

    layers: int = 4
    hidden: int = 128
    intermediate: int = 384
    heads: int = 4
    init_std: float = 0.04
    steps: int = 280
    batch: int = 64  # worked solutions per optimizer step
    matrix_lr: float = 4e-3  # Muon, the matrices of the layers
    other_lr: float = 3e-3  # AdamW, embeddings and norms
    careful_large: float = 0.65  # share of careful solutions where both numbers are large ...
    careful_small: float = 0.25  # ... and elsewhere
    blunt: float = 0.10  # share of solutions in bare words: neither tags nor box


RECIPE = Recipe()


class Row(NamedTuple):
    """One tokenized training example."""

    tokens: list[int]
    prompt: int  # how many of the tokens are the prompt's


# ---------------------------------------------------------------------------------------------------------------- task


def _draw(*key: object) -> int:
    """64 random bits that are a pure function of ``key``: hashed, so that no two purposes or seeds share a stream."""
    text = json.dumps(["groupwise quickstart", *key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _split_of(a: int, b: int) -> Split:
    """The split a problem belongs to, whatever the seed. ``a + b`` and ``b + a`` are one problem."""
    bucket = _draw("split", min(a, b), max(a, b)) % 10
    return "test" if bucket == 0 else "train" if bucket < 4 else "warmup"


def _pairs(seed: int, split: Split) -> Iterator[tuple[int, int]]:
    """Distinct problems of ``split``, endlessly enough: the split holds at least 40,000."""
    seen: set[tuple[int, int]] = set()
    index = 0
    while True:
        bits = _draw(seed, split, index)
        index += 1
        pair = 100 + bits % 900, 100 + bits // 900 % 900
        if pair not in seen and _split_of(*pair) == split:
            seen.add(pair)
            yield pair


def question(a: int, b: int) -> str:
    """The user's message."""
    return f"What is {a} + {b}?"


def problems(seed: int, split: Split, count: int) -> list[dict[str, Any]]:
    """``count`` distinct dataset rows. The splits share no problem; fewer rows are a prefix of more."""
    pairs = _pairs(seed, split)
    return [
        {"prompt": [{"role": "user", "content": question(a, b)}], "answer": str(a + b)}
        for a, b in (next(pairs) for _ in range(count))
    ]


def careful_solution(a: int, b: int) -> str:
    """Column addition from the right; each step reads two digits and a carry, and copies the answer so far."""
    steps: list[str] = []
    carry, done = 0, ""
    for place, x, y in zip(("ones", "tens", "hundreds"), reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        carried = f"+{carry}" if steps else ""
        carry = total // 10
        done = f"{total if place == 'hundreds' else total % 10}{done}"
        steps.append(f"{place}: {x}+{y}{carried}={total} so {done}")
    return "<think>" + "\n".join(steps) + f"</think>\\boxed{{{done}}}"


def hasty_solution(a: int, b: int) -> str:
    """The right answer, without a step that leads to it."""
    return f"<think>That is easy.</think>\\boxed{{{a + b}}}"


def blunt_solution(a: int, b: int) -> str:
    """The right answer in bare words: no thinking, no box."""
    return f"It is {a + b}."


def _worked(seed: int, recipe: Recipe, count: int) -> list[tuple[str, str]]:
    """The warm-up corpus: ``(question, solution)``, the style of each drawn by the recipe's shares.

    Large numbers look hard and are worked through more often, so that the greedy base model takes care there: it
    starts out with a quarter to a third of its answers right on every seed, not with none.
    """
    corpus: list[tuple[str, str]] = []
    pairs = _pairs(seed, "warmup")
    for index in range(count):
        a, b = next(pairs)
        careful = recipe.careful_large if min(a, b) >= 500 else recipe.careful_small
        dice = _draw(seed, "style", index) / 2**64
        if dice < careful:
            solution = careful_solution(a, b)
        else:
            solution = blunt_solution(a, b) if dice < careful + recipe.blunt else hasty_solution(a, b)
        corpus.append((question(a, b), solution))
    return corpus


# ----------------------------------------------------------------------------------------------------------- tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML tokens: any text round-trips; a digit is one token, a word of the task too."""
    tokenizer = Tokenizer(models.BPE())
    # A word or sign in front of a number takes the space between them along, which keeps sequences short.
    words = Regex(r"\\boxed\{|[ \n]?\p{L}+(?::? (?=\p{N}))?|\p{N}| ?[^\s\p{L}\p{N}](?: (?=\p{N}))?|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    chat = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        show_progress=False,
        special_tokens=list(chat),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    corpus = [question(478, 356), *(solve(478, 356) for solve in (careful_solution, hasty_solution, blunt_solution))]
    tokenizer.train_from_iterator([*corpus, "system", "user", "assistant"] * 2, trainer)
    # Not special: the thinking is part of the text, it stays when special tokens are skipped.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


# --------------------------------------------------------------------------------------------------------------- model


def _new_model(tokenizer: PreTrainedTokenizerFast, seed: int, recipe: Recipe) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights; the caller's random state is left as it was."""
    stop, pad = cast("int", tokenizer.eos_token_id), cast("int", tokenizer.pad_token_id)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=recipe.init_std,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_draw(seed, "weights"))
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, max_new_tokens=64, eos_token_id=stop, pad_token_id=pad)
    return model


def _encode(tokenizer: PreTrainedTokenizerFast, corpus: Sequence[tuple[str, str]]) -> list[Row]:
    """The corpus in the chat format, the stop token at the end of every solution."""
    questions = [[{"role": "user", "content": asked}] for asked, _ in corpus]
    prompts = cast("list[str]", tokenizer.apply_chat_template(questions, tokenize=False, add_generation_prompt=True))
    solutions = [solution + str(tokenizer.eos_token) for _, solution in corpus]
    prompt_ids = cast("list[list[int]]", tokenizer(prompts, add_special_tokens=False)["input_ids"])
    solution_ids = cast("list[list[int]]", tokenizer(solutions, add_special_tokens=False)["input_ids"])
    return [Row(p + s, len(p)) for p, s in zip(prompt_ids, solution_ids, strict=True)]


def _nll(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> Tensor:
    """Summed negative log-likelihood [nats] of the rows' solution tokens, stop token included."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    trained = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        trained[index, row.prompt : len(row.tokens)] = True
    # Under a causal mask padding on the right reaches no trained token: no attention mask, the fast attention path.
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    logits = cast("Tensor", model.lm_head(hidden[trained[:, 1:]]))
    return torch.nn.functional.cross_entropy(logits, tokens[trained], reduction="sum")


def _optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: it learns the columns in about half the steps AdamW needs. AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def _warm_up(model: Qwen3ForCausalLM, rows: Sequence[Row], recipe: Recipe, progress: Progress | None) -> None:
    """One pass over ``rows``; the learning rate climbs for 20 steps and falls to zero over the last two thirds."""
    optimizers = _optimizers(model, recipe)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 20, 1.5 * (recipe.steps - step) / recipe.steps)
        )
        for optimizer in optimizers
    ]
    model.train()
    for step in range(recipe.steps):
        batch = rows[step * recipe.batch : (step + 1) * recipe.batch]
        trained = sum(len(row.tokens) - row.prompt for row in batch)
        loss = 0.0
        # Short and long solutions apart: next to no padding is computed.
        for part in ([row for row in batch if len(row.tokens) < 40], [row for row in batch if len(row.tokens) >= 40]):
            if part:
                part_loss = _nll(model, part) / trained
                part_loss.backward()
                loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if progress is not None:
            progress(step + 1, recipe.steps, loss)
    model.eval()


def _identity(tokenizer: PreTrainedTokenizerFast, seed: int, recipe: Recipe) -> dict[str, Any]:
    """What a finished folder says about itself: two builds with equal identities would make the same model."""
    # A sample of the corpus and the tokenizer stand for the code that makes them, so that editing it is noticed.
    made = json.dumps([_worked(seed, recipe, 64), tokenizer.backend_tokenizer.to_str(), CHAT_TEMPLATE])
    code = hashlib.sha256(made.encode()).hexdigest()
    return {"seed": seed, "recipe": dataclasses.asdict(recipe), "task": code}


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary Hugging Face model folder, without the progress bar transformers draws for its one file."""
    drawn = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if drawn:
            transformers_logging.enable_progress_bar()


def build_base_model(folder: Path, seed: int, progress: Progress | None = None, recipe: Recipe = RECIPE) -> Path:
    """Make the base model in ``folder``, or return at once if it is there already; ``progress(step, steps, loss)``.

    The folder appears whole or not at all. One built from another seed or recipe is replaced; one that is no quickstart
    model is left alone.
    """
    folder = Path(folder).absolute()
    tokenizer = build_tokenizer()
    identity = _identity(tokenizer, seed, recipe)
    record = folder / RECORD
    if record.is_file() and json.loads(record.read_text(encoding="utf-8")) == identity:
        return folder
    if folder.exists() and not record.is_file() and any(folder.iterdir()):
        raise ModelError(f"{folder}: holds files, but no quickstart model; name another folder or empty this one")
    model = _new_model(tokenizer, seed, recipe)
    _warm_up(model, _encode(tokenizer, _worked(seed, recipe, recipe.steps * recipe.batch)), recipe, progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        _save(model, tokenizer, made)
        (made / RECORD).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, Path(scratch) / "stale")  # a folder cannot be renamed onto a full one
        os.replace(made, folder)
    return folder
