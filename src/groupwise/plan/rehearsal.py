"""A run's own code on tensors that have shapes but no memory: which kernels it launches, and what it holds at most.

torch's fake tensors run the engine itself, packed rows, chunked head, adapters, checkpointing and autocast included.
So nothing is modelled twice: what the engine changes, the plan sees.  A rehearsal takes a second where the real thing
would take a machine.

Shapes: N prompts of P tokens, G completions of R tokens each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from groupwise.adapters import Lora, attach
from groupwise.attention import NAME, Bucket, Layout
from groupwise.decoding import prefill
from groupwise.drawing import draw
from groupwise.head import LOGITS_PER_CHUNK, products, score
from groupwise.model import checkpoint_gradients, hidden_states, vocabulary
from groupwise.packing import lay_out
from groupwise.records import Rollout, collate

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


@dataclass(frozen=True)
class Rehearsed:
    """A micro-batch's update, as far as it can be known without doing it; sizes in bytes."""

    forward: Work
    """Body and head of the forward pass, without a gradient: what scoring takes, where that was asked for."""
    update: Work
    """Forward and backward pass of body and head."""
    kept: int
    """What the forward pass of the body keeps for the backward pass."""
    head: int
    """What the head adds to that at its highest."""
    peak: int
    """The most that there is at one time beside the weights, gradients included."""
    heap: Heap
    """The same as a CPU's allocator sees it."""
    parameters: int
    """How many weights the model has, tied ones counted once."""
    trained: int
    """How many of them get a gradient."""


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


# The parts of a step -------------------------------------------------------------------------------------------------


class Stage:
    """A model made of fake tensors, to rehearse with."""

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        *,
        lora: Lora | None = None,
        checkpointing: bool = False,
        mixed: bool = False,
    ) -> None:
        """
        Args:
            model: on the meta device; it is changed, and the stage's own from now on.
            dtype: of its weights.
            lora: put such an adapter into it.
            checkpointing: activations are computed again in the backward pass.
            mixed: products in bfloat16, as in `Forward` and `head.products`.
        """
        self._mode, self._mixed = FakeTensorMode(allow_non_fake_inputs=True), mixed
        self.model = model.eval()
        if lora is not None:
            attach(self.model, lora, 0)
        if checkpointing:
            checkpoint_gradients(self.model)
        self._stage_weights(dtype)

    def _stage_weights(self, dtype: torch.dtype) -> None:
        """Put fake tensors on the CPU in the place of those on the meta device; tied ones stay tied."""
        fakes: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            return FakeTensor(self._mode, tensor.detach().to(kind), torch.device("cpu"))

        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                made = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                setattr(module, name, fakes.setdefault(id(parameter), made))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, fake(buffer))

    def update(
        self, groups: int, prompt: int, group: int, response: int, *, head: bool = True, scoring: bool = False
    ) -> Rehearsed:
        """Forward and backward pass of a packed micro-batch; without `head`, those of a critic.

        `scoring` rehearses its forward pass alone, too.
        """
        flat, forward = lay_out(made_up(groups, prompt, group, response)), Work()
        if scoring:
            with self._stage(NAME) as recorder, torch.no_grad():
                self._head(self._states(flat), head)
            forward = recorder.work
        with self._stage(NAME) as recorder:
            states = self._states(flat)
            kept = recorder.now
            gradient = self._head(states.detach().requires_grad_(), head, learn=True)
            before = recorder.peak
            states.backward(gradient)
            for parameter in self.model.parameters():
                parameter.grad = None
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return Rehearsed(
            forward=forward,
            update=recorder.work,
            kept=kept,
            head=max(before - kept, 0),
            peak=recorder.peak,
            heap=recorder.heap,
            parameters=sum(size for size, _ in sizes),
            trained=sum(size for size, trains in sizes if trains),
        )

    def prefill(self, prompts: int, length: int) -> tuple[Work, Heap]:
        """Prompts that run before their completions are written, and the most memory that takes."""
        with self._stage(None) as recorder, torch.no_grad(), self._autocast():
            prefill(self.model, [np.zeros(length, dtype=np.int32)] * prompts)
        return recorder.work, recorder.heap

    def token(self, rows: int) -> Work:
        """One more token of so many rows, but for what they attend to."""
        with self._stage(None) as recorder, torch.no_grad():
            hidden_states(self.model, torch.zeros(rows, 1, dtype=torch.int64))
        return recorder.work

    def draw(self, rows: int) -> tuple[Work, Heap]:
        """Logits become tokens, and the most memory that takes, the logits included."""
        with self._stage(None) as recorder, torch.no_grad():
            draw(torch.zeros(rows, vocabulary(self.model)), torch.zeros(rows, dtype=torch.float64))
        return recorder.work, recorder.heap

    def _states(self, layout: Layout) -> Tensor:
        layout = self._fake(layout)
        with self._autocast():
            found = hidden_states(self.model, layout.tokens, position_ids=layout.positions, layout=layout)
            states = found[0, layout.before]
        return states.to(self.model.dtype)

    def _head(self, states: Tensor, head: bool, learn: bool = False) -> Tensor:
        """As `head.learn` does it, a chunk of the loss tokens at a time: the gradient of the states."""
        if not head:
            return torch.zeros_like(states)
        gradients: list[Tensor] = []
        rows = max(1, LOGITS_PER_CHUNK // vocabulary(self.model))
        for chunk in states.split(rows):
            hidden = chunk.detach().requires_grad_(learn)
            with products(self._mixed):
                logprobs, _ = score(self.model, hidden, torch.zeros(len(chunk), dtype=torch.int64), 1.0, False)
                if learn:
                    logprobs.sum().backward()
                    gradients.append(cast(Tensor, hidden.grad))
        return torch.cat(gradients) if learn else states

    def _fake(self, layout: Layout) -> Layout:
        put = self._mode.from_tensor
        buckets = (Bucket(put(b.prompts), put(b.responses), put(b.inside), b.ragged) for b in layout.buckets)
        names = ("tokens", "positions", "order", "before")
        changed = {name: put(getattr(layout, name)) for name in names}
        return dataclasses.replace(layout, buckets=tuple(buckets), **changed)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._mixed)

    @contextlib.contextmanager
    def _stage(self, attention: str | None) -> Generator[Recorder]:
        config: Any = self.model.config.get_text_config()
        usual, config._attn_implementation = config._attn_implementation, attention or config._attn_implementation
        try:
            with self._mode, Recorder([*self.model.parameters(), *self.model.buffers()]) as recorder:
                yield recorder
        finally:
            config._attn_implementation = usual


def made_up(groups: int, prompt: int, group: int, response: int) -> Any:
    """A batch of N different prompts with G completions each, without signal."""
    rows: list[Rollout] = []
    for number in range(groups):
        tokens = np.r_[np.full(prompt, number), np.zeros(response)].astype(np.int32)
        said = np.arange(len(tokens)) >= prompt
        rows += [Rollout(tokens, said, np.zeros(len(tokens), np.float32), number)] * group
    return collate(rows)
