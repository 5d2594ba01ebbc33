"""Weights handed to a server as a safetensors file, tied ones under each of their names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from groupwise.errors import GroupwiseError


def write(
    path: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, others: Mapping[str, Iterable[str]]
) -> None:
    """All weights in one file, which a reader finds as it was or as it is now.

    Args:
        dtype: of those that are floating-point numbers.
        others: further names of tied weights, by the first; see `tied`.

    Raises:
        GroupwiseError: it cannot be written.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in with_tied(weights, others)
    }
    beside = path.with_suffix(".partial")
    try:
        save_file(tensors, beside)
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise GroupwiseError(
            f"{path}: weights for the sampler cannot be written: {error}; make room, or name another place in "
            "engine.sampler.folder"
        ) from error


def tied(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Of tied weights: the other names, by the first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def with_tied(
    weights: Iterable[tuple[str, Tensor]], others: Mapping[str, Iterable[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Tied weights under each of their names.

    vLLM's CPU workers pack the head into a copy; without a weight of its own name it stays as it was, silently.
    """
    for name, tensor in weights:
        yield name, tensor
        for other in others.get(name, ()):
            yield other, tensor.clone()
