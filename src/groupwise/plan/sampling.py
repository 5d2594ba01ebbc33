"""What writing the completions of a step takes: prefill and draws rehearsed, decoding counted from the shapes.

`LeanDecoding` looks at what its rows have drawn, which tensors without memory cannot tell, so its products are written
down here once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from groupwise.config import Config
from groupwise.folding import FAMILIES, MOST_PARAMETERS, Matrix, head_size
from groupwise.model import vocabulary
from groupwise.plan.kernels import Heap, Kernel, Work
from groupwise.plan.rehearsal import Stage
from groupwise.resources import key_value_count
from groupwise.settling import MOST_SAMPLE_TOKENS

TEMPORARIES = 16
"""Passes over the states of a decoding layer beside its products: norms, rotation, gate, residuals."""


@dataclass(frozen=True)
class Lengths:
    """Of prompts and completions, in tokens."""

    prompt: int
    longest_prompt: int
    completion: int
    """Mean."""
    longest: int
    """`sampling.max_tokens`."""


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    work: Work
    decoding_steps: float = 0.0
    """Each has its own overhead: of the sampler once and of every layer."""


def decodes_lean(config: Config, model: PreTrainedModel) -> bool:
    """What `folding.is_lean` will find, as far as a model without weights tells."""
    text: Any = model.config
    body = sum(parameter.numel() for parameter in model.model.layers.parameters()) if hasattr(model, "model") else 0
    plain = set(getattr(text, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    fits = type(model).__name__ in FAMILIES and body <= MOST_PARAMETERS and plain
    return fits and config.engine.weights == torch.float32


def sampling_phases(
    stage: Stage, model: PreTrainedModel, config: Config, lengths: Lengths
) -> tuple[list[Phase], Heap, int, dict[str, int]]:
    """Phases, the memory that comes and goes, rows at a time, and bytes by what they are."""
    lean, group, most = decodes_lean(config, model), config.group_size, lengths.longest
    each = lengths.longest_prompt + group * most if lean else group * (lengths.longest_prompt + most)
    tokens = config.engine.sample_tokens or MOST_SAMPLE_TOKENS  # open where another sampler is set
    together = max(1, min(config.prompts_per_step, tokens // each))
    waves, rows = config.prompts_per_step / together, together * group
    width = config.engine.weights.itemsize
    per_token = key_value_count(model) * width
    prompts = together * lengths.longest_prompt * per_token * (1 if lean else group)
    own = rows * most * per_token
    prefilled, entering = stage.prefill(together, lengths.prompt)
    drawn, drawing = stage.draw(rows)
    phases = [Phase("prefill", prefilled.times(waves))]
    fold_sizes: list[int] = []
    if lean:
        fold, fold_sizes = folding(model, config.engine.dtype == "mixed")
        phases.append(Phase("fold", fold))
    step: Callable[[int], Work] = (
        partial(lean_step, model, lengths, group, config.engine.dtype == "mixed") if lean else
        partial(plain_step, stage, model, lengths)
    )  # fmt: skip
    work, steps = Work(), 0.0
    for active, count in thinning(rows, lengths):
        work += (step(active) + drawn.times(active / rows)).times(count * waves)
        steps += count * waves
    phases.append(Phase("decode", Work(work.kernels, 0 if lean else work.calls, work.examples), steps))
    heap = Heap()
    for size in fold_sizes:
        heap.change(size)
    # The cache of the prefill is still there while its keys are put in the order of ours.
    heap.most_small += max(entering.most_small + prompts // 2, prompts + own + drawing.most_small)
    heap.most_large += max(entering.most_large, drawing.most_large)
    return phases, heap, rows, {"KV cache": prompts + own, "decoding weights": sum(fold_sizes)}


def thinning(rows: int, lengths: Lengths) -> list[tuple[int, float]]:
    """(rows being written, steps) of a wave in which rows leave as they end; tokens add up to those of all rows."""
    mean, most = lengths.completion, lengths.longest
    if mean >= most:
        return [(rows, most)]
    late = max(1, rows // 4)
    full = (rows * mean - late * most) / (rows - late) if rows > late else 0.0
    if full <= 0:
        return [(max(1, round(rows * mean / most)), most)]
    return [(rows, full), (late, most - full)]


def matrices(model: PreTrainedModel) -> list[tuple[int, int, int]]:
    """(how many, in, out) of the folded matrices of `folding.Folded`."""
    config: Any = model.config
    size, inner, hidden = head_size(config), config.intermediate_size, config.hidden_size
    heads, keys, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    return [
        (layers, hidden, (heads + 2 * keys) * size),
        (layers, heads * size, hidden),
        (layers, hidden, 2 * inner),
        (layers, inner, hidden),
        (1, hidden, vocabulary(model)),
    ]


def folding(model: PreTrainedModel, mixed: bool) -> tuple[Work, list[int]]:
    """Arranging the weights for decoding, once a step, and the bytes of each copy."""
    work, copies, dtype = Work(), list[int](), torch.bfloat16 if mixed else torch.float32
    for count, rows, columns in matrices(model):
        moved = rows * columns * (4 + dtype.itemsize)
        kernel = Kernel("fold", str(dtype).removeprefix("torch."), (rows, columns), 0.0, moved)
        work.kernels[kernel] += count
        work.examples[kernel] = partial(_fold, rows, columns, dtype)
        copies += [rows * columns * dtype.itemsize] * count
    return work, copies


def _fold(rows: int, columns: int, dtype: torch.dtype) -> Callable[[], Any]:
    weight = torch.randn(columns, rows)
    return lambda: Matrix(weight, dtype)


def lean_step(model: PreTrainedModel, lengths: Lengths, group: int, mixed: bool, rows: int) -> Work:
    """One token of so many rows by `LeanDecoding.step`, half-way through the longest completion."""
    config: Any = model.config
    work, dtype = Work(), torch.bfloat16 if mixed else torch.float32
    for count, left, right in matrices(model):
        _product(work, count, (1, rows, left, right), partial(_folded, rows, left, right, dtype), "folded", dtype)
    layers, size, keys = config.num_hidden_layers, head_size(config), config.num_key_value_heads
    repeats, seen = config.num_attention_heads // keys, max(1, lengths.longest // 2)
    groups = math.ceil(rows / group)
    members = math.ceil(rows / groups)
    for sizes in (
        (groups * keys, members * repeats, size, lengths.prompt),
        (groups * keys, members * repeats, lengths.prompt, size),
        (rows * keys, repeats, size, seen),
        (rows * keys, repeats, seen, size),
    ):
        _product(work, layers, sizes, partial(_batched, sizes), "product", torch.float32)
    attended = rows * config.num_attention_heads * (lengths.prompt + seen) * 4
    _stream(work, 3 * layers, 2 * attended, "softmax")
    _stream(work, TEMPORARIES * layers, 2 * rows * config.hidden_size * 4, "mul")
    _stream(work, 2 * layers, 2 * rows * config.intermediate_size * 4, "mul")
    return work


def plain_step(stage: Stage, model: PreTrainedModel, lengths: Lengths, rows: int) -> Work:
    """One token of so many rows by `Decoding.step`, half-way through the longest completion."""
    config: Any = model.config.get_text_config()
    seen, heads = lengths.prompt + lengths.longest // 2, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    work = stage.token(rows)
    for sizes in ((rows * heads, 1, size, seen), (rows * heads, 1, seen, size)):
        _product(work, config.num_hidden_layers, sizes, partial(_batched, sizes), "product", stage.model.dtype)
    head = (1, rows, config.hidden_size, vocabulary(model))
    _product(work, 1, head, partial(_batched, head), "product", stage.model.dtype)
    return work


def _product(work: Work, count: int, sizes: tuple[int, ...], make: Any, name: str, dtype: torch.dtype) -> None:
    batch, m, k, n = sizes
    moved = batch * (m * k + k * n + m * n) * dtype.itemsize
    kernel = Kernel(name, str(dtype).removeprefix("torch."), sizes, 2.0 * batch * m * k * n, moved)
    work.kernels[kernel] += count
    work.examples[kernel] = make


def _stream(work: Work, count: int, moved: int, name: str) -> None:
    kernel = Kernel(name, "float32", (moved,), 0.0, moved)
    work.kernels[kernel] += count
    work.examples[kernel] = partial(_streamed, moved, name)


def _folded(rows: int, left: int, right: int, dtype: torch.dtype) -> Callable[[], Any]:
    matrix, x = Matrix(torch.randn(right, left), dtype), torch.randn(rows, left)
    return lambda: matrix(x)


def _batched(sizes: tuple[int, int, int, int]) -> Callable[[], Any]:
    batch, m, k, n = sizes
    return partial(torch.bmm, torch.randn(batch, m, k), torch.randn(batch, n, k).transpose(1, 2))


def _streamed(moved: int, name: str) -> Callable[[], Any]:
    x = torch.randn(max(1, moved // (8 * 64)), 64)
    return partial(torch.softmax, x, 1) if name == "softmax" else partial(torch.mul, x, 1.5)
