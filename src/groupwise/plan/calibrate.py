"""`--calibrate`: time this machine on the kernels of a plan, at the sizes that the model gives them.

Each kernel that the rehearsal saw is launched a few times on made-up numbers.  What Python and dispatch add comes from
a model so small that it does little else, updating and decoding for real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from groupwise.engines import Request, Sampling
from groupwise.engines.local_sampler import LocalSampler
from groupwise.head import learn, products
from groupwise.packing import Forward
from groupwise.plan.kernels import Kernel, Work
from groupwise.plan.machine import NEGLIGIBLE_BYTES, NEGLIGIBLE_FLOPS, Measured
from groupwise.plan.rehearsal import Stage, made_up
from groupwise.records import Batch

MOST_FLOPS, MOST_BYTES = 4e10, 1.5e9
"""A larger kernel is not timed: it goes by a smaller one of its kind."""
TIMES = 5
REPEATS = 6
CACHED_BYTES = 2e7
"""What moves more finds nothing in a cache anyway."""
ENOUGH_SECONDS = 0.3
"""A kernel is timed once more only while all its launches took less."""


def calibrate(works: Iterable[Work], measured: Measured, say: Callable[[str], None] = lambda text: None) -> Measured:
    """Time every kernel of some work anew, and the calls around them."""
    wanted = {kernel: make for work in works for kernel, make in work.examples.items() if _counts(kernel)}
    kernels = dict(measured.kernels)
    for number, (kernel, make) in enumerate(wanted.items()):
        if number % 50 == 0:
            say(f"timing kernel {number + 1} of {len(wanted)}")
        if kernel.flops <= MOST_FLOPS and kernel.bytes <= MOST_BYTES:
            kernels[kernel.key] = seconds(kernel, make)
    found = Measured(kernels)
    found.call_seconds = _call_seconds(found)
    found.layer_seconds, found.step_seconds = _decoding_seconds()
    return found


def _counts(kernel: Kernel) -> bool:
    return kernel.bytes >= NEGLIGIBLE_BYTES or kernel.flops >= NEGLIGIBLE_FLOPS


@torch.no_grad()
def seconds(kernel: Kernel, make: Callable[[], Callable[[], Any]]) -> float:
    """Median time of a launch that writes, as in a step, to memory used before, but not by the launch before."""
    launch, taken, kept = make(), list[float](), list[Any]()
    with products(kernel.dtype == "medium"):
        kept += [launch() for _ in range(TIMES if kernel.bytes < CACHED_BYTES else 1)]
        kept.clear()
        while len(taken) < TIMES and sum(taken) < ENOUGH_SECONDS:
            began = _now()
            out = launch()
            taken.append(_now() - began)
            if kernel.bytes < CACHED_BYTES:
                kept.append(out)
    return median(taken)


def _now() -> float:
    """Of this thread alone where it does all the work, so that whoever else is there does not count."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _small(layers: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, head_dim=16)
    config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings = 2, 1, True
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    with torch.random.fork_rng(devices=[]):
        return Qwen3ForCausalLM(config).eval()


def _call_seconds(measured: Measured) -> float:
    """Of an operation of an update, beside the kernel that it launches."""
    model = _small(4)
    forward, batch = Forward(model), made_up(1, 4, 2, 4)

    def update() -> None:
        with forward.microbatches(batch, 10**6) as parts:
            for _, part in parts:
                learn(model, forward.states(part), part, _sum, 1.0)

    update()
    with torch.device("meta"):
        sketched = _small(4)
    work = Stage(sketched, torch.float32).update(1, 4, 2, 4).update
    return max(_fastest(update, REPEATS), 0.0) / work.calls


def _sum(logprobs: Tensor, entropies: Tensor, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.sum(), {}


def _decoding_seconds() -> tuple[float, float]:
    """(of a layer, of all else) in a step of decoding; from models that differ in their layers alone."""
    tokens, counts = 24, (2, 10)
    requests = [Request(torch.zeros(2, dtype=torch.int32).numpy(), (1, 2))]
    taken: list[float] = []
    for layers in counts:
        sampler = LocalSampler(_small(layers), (-1,), max_batch_tokens=10**4)
        sampling = Sampling(max_tokens=tokens)
        sampler.sample(requests, sampling)
        taken.append(_fastest(lambda: sampler.sample(requests, sampling), REPEATS) / tokens)  # noqa: B023
    each = (taken[1] - taken[0]) / (counts[1] - counts[0])
    return max(each, 0.0), max(taken[0] - counts[0] * each, 0.0)


def _fastest(work: Callable[[], Any], times: int) -> float:
    found: list[float] = []
    for _ in range(times):
        began = _now()
        work()
        found.append(_now() - began)
    return min(found)
