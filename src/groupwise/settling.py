"""Settings that choose themselves: threads, dtype and how much at once, from the model's shape and the machine.

What was chosen is written to the run's config.yaml, so that continuing a run chooses nothing again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from groupwise.algorithms import Algorithm
from groupwise.checks import Outline
from groupwise.config import Config, Engine
from groupwise.engines.vllm import Vllm
from groupwise.footprint import beside, cached_bytes, footprint
from groupwise.resources import available_memory, parameter_count
from groupwise.slots import replace
from groupwise.weights import Importance

MOST_TRAIN_TOKENS = 16384
"""A larger micro-batch is no faster."""
MOST_SAMPLE_TOKENS = 131072
FEWEST_TOKENS = 1024
FREE_FOR_TRAINING, FREE_FOR_SAMPLING = 0.5, 0.25
"""Shares of the free memory; the rest is for logits, allocators and whoever else is there."""
SMALL, LARGE = 128, 100_000_000
"""A hidden size for which one thread is always faster, and a number of parameters for which all are."""
MIXED_FROM = 10_000_000
"""Parameters from which products in bfloat16 save more than the casts cost."""


def settle(config: Config, known: Outline, device: torch.device) -> tuple[Config, list[str]]:
    """The configuration with nothing left open in `engine` that has an effect, and what of that the user should know.

    Sets the number of CPU threads.  What cannot be known, because the model cannot be read, gets a cautious value.
    """
    engine, algorithm, said = config.engine, config.algorithm, list[str]()
    threads = engine.threads or _threads(known)
    torch.set_num_threads(threads)
    if engine.dtype == "auto":
        engine = replace(
            engine, dtype="mixed" if _mixed_is_faster(known, device) and _correctable(algorithm) else "float32"
        )
    if (rounded := _rounds(engine)) and algorithm.correction is None and _correctable(algorithm):
        algorithm = replace(algorithm, correction=Importance())
        setting, _, value = rounded.partition(": ")
        said.append(
            f"{setting}: {value} samples from weights rounded to bfloat16, so algorithm.correction: importance is on "
            f"(truncated at 2); for the exact numbers set {setting}: float32"
        )
    train, sample = _tokens(config, known, device)
    engine = replace(
        engine,
        threads=threads,
        train_tokens=engine.train_tokens or train,
        # Another sampler has limits of its own.
        sample_tokens=engine.sample_tokens or (sample if engine.sampler is None else 0),
    )
    return replace(config, engine=engine, algorithm=algorithm), said


def _rounds(engine: Engine) -> str:
    """The setting by which completions are drawn from coarser weights than are trained; empty when there is none."""
    if engine.dtype == "mixed":
        return "engine.dtype: mixed"
    coarse = isinstance(engine.sampler, Vllm) and engine.sampler.dtype == "bfloat16"
    return "engine.sampler.dtype: bfloat16" if coarse and engine.weights == torch.float32 else ""


def _correctable(algorithm: Algorithm) -> bool:
    """Whether what rounding does to the sampler can be corrected; those anchored to the sampler do so by themselves."""
    return algorithm.correction is not None or algorithm.anchor == "old"


def _mixed_is_faster(known: Outline, device: torch.device) -> bool:
    has_amx: bool = torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    if known.model is None or device.type != "cpu" or not has_amx:
        return False
    return parameter_count(known.model) >= MIXED_FROM


def _threads(known: Outline) -> int:
    """One thread or all, whichever multiplies matrices of the model's size faster, a few rows and many."""
    everything = torch.get_num_threads()
    if known.model is None or parameter_count(known.model) >= LARGE:
        return everything
    hidden = int(known.model.config.get_text_config().hidden_size)
    if hidden <= SMALL or everything == 1:
        return 1
    weight = torch.randn(hidden, 3 * hidden)
    few, many = torch.randn(8, hidden), torch.randn(512, hidden)
    alone, together = (_seconds(threads, lambda: (few @ weight, many @ weight)) for threads in (1, everything))
    return 1 if alone <= together else everything


def _seconds(threads: int, work: Callable[[], Any]) -> float:
    torch.set_num_threads(threads)
    taken: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken)


def _tokens(config: Config, known: Outline, device: torch.device) -> tuple[int, int]:
    """(of a micro-batch, of the keys and values while sampling), by the memory that is free."""
    available = available_memory(device)
    if known.model is None or available is None or known.lacks(config.lora):
        return MOST_TRAIN_TOKENS, MOST_SAMPLE_TOKENS
    there = beside(config, gpu=device.type == "cuda")
    memory = footprint(config, known.model, tokens=0, adapter=known.adapter, **there)
    free = max(available - memory.fixed, 0)
    held = cached_bytes(config, known.model) * max(there["samplers"], 1)
    return (
        _between(FREE_FOR_TRAINING * free / memory.each_token, MOST_TRAIN_TOKENS),
        _between(FREE_FOR_SAMPLING * free / held, MOST_SAMPLE_TOKENS),
    )


def _between(tokens: float, most: int) -> int:
    return int(min(max(tokens, FEWEST_TOKENS), most))
