"""A run's own code on tensors that have shapes but no memory: which kernels it launches, and what it holds at most.

torch's fake tensors run the engine itself, packed rows, chunked head, adapters, checkpointing and autocast included.
So nothing is modelled twice: what the engine changes, the plan sees.  A rehearsal takes a second where the real thing
would take a machine.

Shapes: N prompts of P tokens, G completions of R tokens each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from groupwise.adapters import Lora, attach
from groupwise.attention import NAME, Bucket, Layout
from groupwise.decoding import prefill
from groupwise.drawing import draw
from groupwise.head import LOGITS_PER_CHUNK, products, score
from groupwise.model import checkpoint_gradients, hidden_states, vocabulary
from groupwise.packing import lay_out
from groupwise.plan.kernels import Heap, Recorder, Work
from groupwise.records import Rollout, collate


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
