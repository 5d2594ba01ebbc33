"""LoRA (arXiv:2106.09685): the weights of a model stay as they are, and a product of two thin matrices beside each
linear layer is trained.

An adapted layer computes x W' + (alpha / rank) x A' B'.  B starts at 0, so that the adapted model starts as the base
model, and with the adapter off it is the base model at any time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field, Strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.demands import Demands, Remarks
from groupwise.errors import ModelError
from groupwise.slots import Slot

BASE = ".base_layer."
"""What peft puts into the name of a weight that it adapts."""


class Lora(Slot):
    """An adapter that is trained instead of the model."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B: how much the adapter can change, and how much memory its optimizer takes."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is multiplied by alpha / rank."""
    target_modules: str | Annotated[tuple[str, ...], Strict(False)] = "all-linear"
    """The linear layers that are adapted: `all-linear` (but the head), names of layers, or a regular expression."""

    def refusals(self, demands: Demands) -> Remarks:
        """A reference that moves; see `Refuses.refusals`."""
        yield (
            demands.refresh_every > 0,
            f"algorithm.kl.refresh_every: {demands.refresh_every}; with lora the reference is the base model, which "
            "cannot move: use refresh_every: 0, or lora: null",
        )


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Put a new adapter into the model, in place; from now on only the adapter requires gradients.

    Args:
        model: nothing but the layers that are adapted is changed.
        lora: what the adapter is like.
        seed: decides the first values of A.

    Raises:
        ModelError: peft is not installed, or the model has no such layers, or they are its embeddings or its head.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ModelError(
            'lora: needs peft, which is not installed; install it with: pip install "groupwise[lora]"'
        ) from error
    targets = lora.target_modules
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 keeps W transposed
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(config)
        except ValueError as error:
            raise ModelError(f"lora.target_modules: {targets}; {error}") from error
    if any(_is_adapted(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())):
        raise ModelError(
            f"lora.target_modules: {targets}; the embeddings and the head cannot be adapted: use all-linear, or names "
            "of layers inside the blocks such as [q_proj, v_proj]"
        )
    model.eval()


def adapter_count(model: PreTrainedModel, lora: Lora) -> int:
    """How many weights such an adapter has; the model, which may be on the meta device, stays as it is.

    Raises:
        ModelError: as `attach`.
    """
    tried = copy.deepcopy(model)
    attach(tried, lora, 0)
    return sum(tensor.numel() for _, tensor in trained(tried))


def adapted(model: nn.Module) -> bool:
    """Whether a part of the model carries an adapter."""
    return any(_is_adapted(module) for module in model.modules())


def weight_of(linear: nn.Module) -> Tensor:
    """The weight of a linear layer, with that of its adapter added if it has one; the layer stays as it is."""
    layer: Any = linear
    return layer.base_layer.weight + _delta(layer) if _is_adapted(layer) else layer.weight


def merged(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the adapted model as those of a model without adapters; what is not adapted is not copied."""
    for name, tensor in tensors:
        module, inside, kind = name.rpartition(BASE)
        if inside:
            # No `yield` under no_grad: whoever asks for the next tensor would have it switched off, too.
            whole = weight_of(model.get_submodule(module)).detach() if kind == "weight" else tensor
            yield f"{module}.{kind}", whole
        elif ".lora_" not in name:
            yield name, tensor


def trained(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the adapter, not copied."""
    return ((name, parameter.data) for name, parameter in model.named_parameters() if ".lora_" in name)


@contextlib.contextmanager
def switched_off(model: PreTrainedModel) -> Generator[None]:
    """For as long as it lasts, the adapted model computes what its base computes."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter alone, as peft reads it: `adapter_config.json` and `adapter_model.safetensors`."""
    model.save_pretrained(folder)


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer")


def _delta(layer: Any) -> Tensor:
    """The same shape as the weight of the layer: (alpha / rank) B A."""
    (name,) = layer.active_adapters
    return layer.get_delta_weight(name)
