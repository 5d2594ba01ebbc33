"""AdamW steps with a schedule, clipping and a guard: what each learner in this process does with its gradients."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from groupwise.adapters import merged
from groupwise.engines import Optimizer, Snapshot
from groupwise.errors import CheckpointError, NumericalError

# What json, safetensors and torch raise about a file that is missing, cut short or not theirs.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError)
AVERAGES = ("exp_avg", "exp_avg_sq")


class Steps:
    """The optimizer of some parameters and how many updates it has done."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: Optimizer, total_updates: int) -> None:
        """
        Args:
            parameters: those that do not require a gradient are left alone.
            settings: AdamW and its schedule.
            total_updates: optimizer steps over which the schedule falls to 0.
        """
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._settings, self._total_updates, self._updates = settings, total_updates, 0
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=self._parameters[0].device.type in ("cpu", "cuda"),
        )

    def take(self, accumulate: Callable[[], float]) -> dict[str, float]:
        """One update: `accumulate` adds up the gradient and returns the loss.

        Without any gradient it is a step all the same: AdamW's averages, and with them the weights, move on.

        Returns:
            `loss`, `grad_norm` (before clipping) and `learning_rate`.

        Raises:
            NumericalError: loss or gradient is not finite; weights and optimizer are as they were.
        """
        self._adamw.zero_grad(set_to_none=True)
        loss = accumulate()
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(whole(nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._adamw.zero_grad(set_to_none=True)
            raise NumericalError(
                f"the loss is {loss} and the norm of its gradient {norm}; nothing was changed", grad_norm=norm
            )
        rate = self._settings.learning_rate * schedule(self._settings, self._updates, self._total_updates)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._updates += 1
        return {"loss": loss, "grad_norm": norm, "learning_rate": rate}

    @property
    def updates(self) -> int:
        """How many were done."""
        return self._updates

    def averages(self) -> list[dict[str, Tensor]]:
        """AdamW's two running averages of each parameter that is trained, not copied; zeros before the first update."""
        return [
            {name: self._adamw.state[parameter].get(name, torch.zeros_like(parameter)) for name in AVERAGES}
            for parameter in self._parameters
        ]

    def resume(self, updates: int, averages: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue after so many updates with these averages."""
        state = {index: {"step": torch.tensor(float(updates)), **of} for index, of in enumerate(averages)}
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": state})
        self._updates = updates

    def snapshot(self) -> Snapshot:
        """AdamW's averages and the number of updates, as they are now: `optimizer.pt` and `updates.json`."""
        state = {index: dict(copied(of.items())) for index, of in self._adamw.state_dict()["state"].items()}
        updates = json.dumps({"updates": self._updates})

        def write(path: Path) -> None:
            torch.save(state, path / "optimizer.pt")
            (path / "updates.json").write_text(updates)

        return write

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote; the settings stay those given here.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        try:
            updates = int(json.loads((path / "updates.json").read_text())["updates"])
            device = self._parameters[0].device
            state = torch.load(path / "optimizer.pt", map_location=device, weights_only=True)
        except UNREADABLE as error:
            raise CheckpointError(f"{path}: not a complete checkpoint of the optimizer: {error!r}") from error
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": state})
        self._updates = updates


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be split over ranks, in one piece; each of them has to ask."""
    return cast(Any, tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of their own on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def weights_file(name: str, tensors: dict[str, Tensor]) -> Snapshot:
    """These tensors as a safetensors file of this name; it refuses to write what nobody should continue from.

    Raises:
        CheckpointError: when written, if a tensor is not finite.
    """

    def write(path: Path) -> None:
        for weight, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{path / name}: the weight {weight} is not finite, so it is not saved")
        safetensors.torch.save_file(tensors, path / name, metadata={"format": "pt"})

    return write


def all_of(*snapshots: Snapshot) -> Snapshot:
    """Several snapshots as one."""

    def write(path: Path) -> None:
        for snapshot in snapshots:
            snapshot(path)

    return write


def restore_weights(weights: Iterable[tuple[str, Tensor]], file: Path) -> None:
    """Copy what `weights_file` wrote into tensors of the same names, in place: others may hold the same tensors.

    Raises:
        CheckpointError: the file is missing, damaged, or that of another model.
    """
    own = dict(weights)
    try:
        stored = safetensors.torch.load_file(file)
    except UNREADABLE as error:
        raise CheckpointError(f"{file}: not a complete checkpoint: {error!r}") from error
    if {name: tensor.shape for name, tensor in stored.items()} != {name: tensor.shape for name, tensor in own.items()}:
        raise CheckpointError(f"{file}: the weights are those of another model; start a new run folder")
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)


def published(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names, as `save_pretrained` writes them, and tensors of a model, not copied; of tied weights, the first name.

    Weights with an adapter are copied, with the adapter added, as they are asked for.
    """
    return merged(model, distinct(model.state_dict()))


def distinct(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state dict; of tied ones, the first name."""
    seen: set[int] = set()
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def schedule(settings: Optimizer, update: int, total: int) -> float:
    """The share of the peak learning rate at the update with this index (from 0).

    Warmup ends, at its last update, on the peak; the fall would reach 0 at the update after the last.
    """
    if update < settings.warmup_updates:
        return (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (update - settings.warmup_updates) / max(1, total - settings.warmup_updates))
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
