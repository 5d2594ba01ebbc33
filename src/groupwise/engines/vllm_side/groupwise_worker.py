"""What Groupwise adds to each worker of a vLLM server: it says what is served, and takes weights from a file.

It runs in vLLM's environment, which has no Groupwise, so it imports nothing of ours.  With this folder on PYTHONPATH,
`--worker-extension-cls groupwise_worker.Worker` mixes it into vLLM's own worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from safetensors import safe_open
from torch import Tensor


class Worker:
    """Methods that `/collective_rpc` calls; what they use of `self` is vLLM's."""

    vllm_config: Any
    device: Any
    reload_weights: Any

    def groupwise_facts(self) -> dict[str, Any]:
        """What the trainer has to know of this server."""
        model, scheduler, cache = (getattr(self.vllm_config, f"{part}_config") for part in PARTS)
        return {
            "device": str(self.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": int(model.max_model_len),
            "logprobs_mode": str(model.logprobs_mode),
            "sequences": int(scheduler.max_num_seqs),
            "chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "block": int(cache.block_size),
        }

    def groupwise_load(self, path: str) -> None:
        """Take over the weights of a safetensors file, in place.

        `load_weights` alone would fail on a CPU, where linear weights are repacked and their originals freed.
        """
        self.reload_weights(weights_iterator=_tensors(path))


PARTS = ("model", "scheduler", "cache")


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            yield name, file.get_tensor(name)
