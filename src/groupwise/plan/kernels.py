"""Kernels, and the memory of the tensors that they make, as a program runs on torch's tensors."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products, and which argument is the first factor."""
MAPPED_BYTES = 2**25
"""glibc maps what is larger for itself, and gives it back to the system at once (its largest M_MMAP_THRESHOLD)."""
LOOKS_UP = frozenset({"index", "gather", "embedding", "index_put", "index_put_"})
"""What touches a few places of a large table."""


@dataclass(frozen=True)
class Kernel:
    """One launch of one kernel: what, on numbers of which kind, how large."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    """What decides its speed: (batch, m, k, n) of a product, (queries, keys, heads, size) of attention, else bytes."""
    flops: float
    bytes: float
    """Read and written, once each."""

    @property
    def key(self) -> str:
        return f"{self.name} {self.dtype} {'x'.join(map(str, self.sizes))}"


@dataclass
class Work:
    """The launches of a part of a step."""

    kernels: Counter[Kernel] = field(default_factory=Counter[Kernel])
    calls: int = 0
    """Operations that Python and the dispatcher went through, those that move nothing included."""
    examples: dict[Kernel, Callable[[], Callable[[], Any]]] = field(default_factory=dict[Kernel, Any])
    """For each kernel, what makes its arguments and then a function that launches it, to be timed."""

    def times(self, count: float) -> Work:
        """The same work so many times over."""
        scaled = Counter({kernel: cast(int, launches * count) for kernel, launches in self.kernels.items()})
        return Work(scaled, round(self.calls * count), self.examples)

    def __add__(self, other: Work) -> Work:
        return Work(self.kernels + other.kernels, self.calls + other.calls, {**self.examples, **other.examples})

    @property
    def flops(self) -> float:
        return sum(kernel.flops * count for kernel, count in self.kernels.items())


@dataclass
class Heap:
    """Memory as the C library hands it out on a CPU: what is small it keeps for itself once it is free."""

    small: int = 0
    large: int = 0
    most_small: int = 0
    most_large: int = 0

    def change(self, size: int) -> None:
        """So many bytes are taken at once, or given back."""
        if abs(size) < MAPPED_BYTES:
            self.small += size
            self.most_small = max(self.most_small, self.small)
        else:
            self.large += size
            self.most_large = max(self.most_large, self.large)

    @property
    def most(self) -> int:
        """No less than the two at one time."""
        return self.most_small + self.most_large


class Recorder(TorchDispatchMode):
    """Counts the operations that run inside it, and the memory of the tensors that they make."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        """`there` has its memory already."""
        super().__init__()
        self.work, self.now, self.peak = Work(), 0, 0
        self.heap = Heap()
        self._alive = {_place(tensor): 0 for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not outputs:
            return out
        self.work.calls += 1
        fresh = [self._count(output) for output in outputs]
        name = func.overloadpacket.__name__
        if name.endswith("_") or (any(fresh) and not name.startswith("empty")):
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            kernel = kernel_of(name, inputs, outputs)
            self.work.kernels[kernel] += 1
            if kernel not in self.work.examples:
                self.work.examples[kernel] = partial(_example, func, *_shapes_only(args, kwargs or {}))
        return out

    def _count(self, tensor: Tensor) -> bool:
        """Whether the tensor has memory of its own that was not there before."""
        storage = tensor.untyped_storage()
        place = _place(tensor)
        if place in self._alive:
            return False
        self._alive[place] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        self.heap.change(storage.nbytes())
        weakref.finalize(storage, self._gone, place)
        return True

    def _gone(self, place: int) -> None:
        size = self._alive.pop(place)
        self.now -= size
        self.heap.change(-size)


def _place(tensor: Tensor) -> int:
    """What tells the memory of a fake tensor, which has no address, from others."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def kernel_of(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Kernel:
    """What an operation on tensors of these shapes amounts to."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)]
    moved = sum(sizes)
    if name in LOOKS_UP:
        moved = 3 * (sizes[len(inputs) - 1] if "put" in name else sizes[-1])
    dtype = str(max(inputs or outputs, key=lambda t: t.numel()).dtype).removeprefix("torch.")
    if name in PRODUCTS:
        left, right = inputs[PRODUCTS[name] :][:2]
        batch, (m, k), n = math.prod(left.shape[:-2]), left.shape[-2:], right.shape[-1]
        if dtype == "float32" and torch.get_float32_matmul_precision() == "medium":
            dtype = "medium"
        return Kernel("product", dtype, (batch, m, k, n), 2.0 * batch * m * k * n, moved)
    if "flash_attention" in name:
        back = "backward" in name
        q, k = inputs[back : back + 2]  # the gradient of the output comes first
        rows, heads, t, e = q.shape
        causal = t == k.shape[2]
        pairs = rows * heads * t * k.shape[2] * (0.5 if causal else 1.0)
        sizes = (rows * heads, t, k.shape[2], e)
        return Kernel("attention_back" if back else "attention", dtype, sizes, (10 if back else 4) * pairs * e, moved)
    return Kernel(name, dtype, (moved,), 0.0, moved)


@dataclass(frozen=True)
class _Like:
    """A tensor as far as its kernel cares."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, places: int) -> Tensor:
        """With memory; integers are places in a table with so many rows, one after the other."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(max(extent, 0), dtype=self.dtype)
        if self.dtype.is_floating_point:
            flat.uniform_(-0.1, 0.1)
        else:
            flat.copy_(torch.arange(len(flat)) % places if self.dtype == torch.int64 else torch.ones(()))
        return flat.as_strided(self.shape, self.stride)


def _shapes_only(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tree_map_only(Tensor, lambda t: _Like(tuple(t.shape), t.stride(), t.dtype), (args, kwargs))


def _example(func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """The operation, ready to be launched on made-up numbers."""
    tables = [t.shape[0] for t in tree_leaves(args) if isinstance(t, _Like) and t.dtype.is_floating_point and t.shape]
    spread = partial(func, *_made(args, min(tables, default=1)), **_made(kwargs, 1))
    try:
        spread()
    except (IndexError, RuntimeError):  # it looks up another dimension than the first
        return partial(func, *_made(args, 1), **_made(kwargs, 1))
    return spread


def _made(arguments: Any, places: int) -> Any:
    return tree_map_only(_Like, lambda like: like.made(places), arguments)
