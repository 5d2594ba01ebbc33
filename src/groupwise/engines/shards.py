"""A model in shards: each rank has a part of every parameter, and the whole of one layer at a time while it is used.

Shapes: B rows, T tokens of the longest; a parameter float[d, ...] is split along its first dimension.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from groupwise.engines.ranks import Ranks
from groupwise.packing import Forward, split
from groupwise.records import Batch, Rollout, collate

T = TypeVar("T")


class Sharded:
    """A model whose parameters are split over the ranks, and how it runs over a batch."""

    def __init__(self, whole: Forward, ranks: Ranks) -> None:
        """
        Args:
            whole: a model that every rank has; it stays as it is, and none of its parameters is copied whole.
            ranks: this one among all.
        """
        self._ranks, self._pair_cost = ranks, pair_cost(whole.model)
        whole.check()  # while a failed forward pass is still harmless
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        placeholders = {id(parameter): _placeholder(parameter) for parameter in whole.model.parameters()}
        self.forward = copy.deepcopy(whole, cast("dict[int, Any]", placeholders))
        """The same way of running, over the shards."""
        model = self.forward.model
        self._root = _Root(model)
        # Layers are cast when they are gathered; the residual stream between them stays what it is, as under autocast.
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        precision = half if whole.mixed else MixedPrecisionPolicy(cast_forward_inputs=False)
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        # Embeddings, last norm and head stay whole after a forward pass: the head works between it and the backward.
        fully_shard(self._root, mesh=mesh, reshard_after_forward=False)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        cast(FSDPModule, self._root).set_reduce_scatter_unused_params(True)
        _fill(model, whole.model, mesh)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """This rank's shards; of tied weights, the first name."""

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function of the model returns; embeddings, last norm and head stay whole, until a backward pass."""
        return self._root(partial(function, *arguments))

    @contextlib.contextmanager
    def passes(self, batch: Batch, budget: int) -> Generator[list[tuple[Tensor, Batch]]]:
        """This rank's share of a batch in parts of at most `budget` tokens: (indices of its rows, rows on the device).

        Every rank has as many parts as any: a forward or backward pass takes all of them.  Those that make up the
        number have no indices, and a row that does not count.
        """
        mine = shares(batch, self._ranks.size, self._pair_cost)[self._ranks.rank]
        with self.forward.microbatches(batch.rows(mine), budget) as found:
            parts = [(mine[rows], part) for rows, part in found]
            more = self._ranks.most(len(parts)) - len(parts)
            yield parts + [(mine[:0], _IDLE.to(self.forward.model.device))] * more

    @torch.no_grad()
    def for_each_token(self, batch: Batch, budget: int, of_part: Callable[[Batch], Tensor]) -> Tensor:
        """`Forward.for_each_token`, by all ranks; each has the whole of it."""
        found = torch.zeros(batch.tokens.shape, dtype=torch.promote_types(self.forward.model.dtype, torch.float32))
        with self.passes(batch, budget) as passes:
            for rows, part in passes:
                values = self.run(of_part, part).cpu()
                found[rows, : values.shape[1]] = values[: len(rows)]
        cast(FSDPModule, self._root).reshard()  # no backward pass will
        return self._ranks.sum(found)

    def trained(self) -> Iterable[tuple[str, Tensor]]:
        """Names and shards of what requires a gradient."""
        return ((name, shard.data) for name, shard in self.parameters.items() if shard.requires_grad)


class _Root(nn.Module):
    """Runs any function of a model between FSDP's hooks: we never call the model's own forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def _layers(model: Any) -> Iterable[nn.Module]:
    """The blocks of a transformers decoder."""
    stacks = [module for module in model.get_decoder().children() if isinstance(module, nn.ModuleList)]
    return (layer for stack in stacks for layer in stack)


def _fill(model: nn.Module, whole: nn.Module, mesh: DeviceMesh) -> None:
    """Put this rank's shards of the whole parameters where the placeholders are; what was tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    state: dict[str, nn.Parameter] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            made[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        state[name] = made[id(parameter)]
    model.load_state_dict(state, strict=False, assign=True)


_IDLE = collate(
    [Rollout(tokens=np.zeros(3, np.int32), loss_mask=np.arange(3) > 0, logprobs=np.zeros(3, np.float32), group=0)]
)
"""A row to keep the others company with."""


# What each rank computes ---------------------------------------------------------------------------------------------


def shares(batch: Batch, ranks: int, pair_cost: float = 0.0) -> list[Tensor]:
    """Row indices int64[b] for each rank: rows with one prompt together, and about equally much to compute.

    Where there are fewer prompts than ranks, their rows are dealt out one by one.  `pair_cost` is that of the model.
    """
    ends, masked = batch.lengths.tolist(), batch.loss_mask.any(-1).tolist() if len(batch) else []
    starts, prompts = split(batch)
    families: dict[bytes, list[int]] = {}
    for row in range(len(batch)):
        if masked[row]:
            families.setdefault(prompts[row], []).append(row)
    units = list(families.values())
    if len(units) < ranks:
        units = [[row] for rows in units for row in rows]
    costs = [_cost(int(starts[rows[0]]), [ends[row] for row in rows], pair_cost) for rows in units]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for unit in sorted(range(len(units)), key=lambda unit: -costs[unit]):
        least = load.index(min(load))
        taken[least] += units[unit]
        load[least] += costs[unit]
    return [torch.tensor(sorted(rows), dtype=torch.int64) for rows in taken]


def _cost(prompt: int, ends: Sequence[int], pair_cost: float) -> float:
    """What rows of these lengths cost that share a prompt, in passes of one token through the layers' matrices."""
    tokens = prompt + sum(end - prompt for end in ends)
    pairs = prompt**2 + sum(end**2 - prompt**2 for end in ends)  # a token sees itself and those before: half a square
    return tokens + pair_cost * pairs / 2


def pair_cost(model: PreTrainedModel) -> float:
    """What attention from one token to one other costs in all layers, where a token's way through the matrices is 1.

    Two products of a head's size in each head, for each weight one of a single number.  Of a model whose tokens do not
    use all weights (a mixture of experts) it is too small.
    """
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    products = 2 * config.num_hidden_layers * config.num_attention_heads * size
    return products / cast(Any, model).get_decoder().num_parameters(exclude_embeddings=True)
