"""The two records that flow through a run: `Rollout` (one trajectory) and `Batch` (one optimizer step).

T is the length of a trajectory: prompt, completion and whatever an environment said, in order.  B is the number
of rollouts in a batch.  Every per-token array is aligned with `tokens`: position t speaks about `tokens[t]`, so a
log-probability at t is that of `tokens[t]` given `tokens[:t]`.  Both are frozen; a stage returns a new record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a worker that grades rollouts starts in a tenth of the time without torch
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False, slots=True)
class Rollout:
    """One trajectory: what the policy saw and said, what it earned, and what that is worth per token."""

    tokens: Ints
    """int32[T]: everything the model saw or said."""
    loss_mask: Bools
    """bool[T]: True where the policy sampled the token, the stop token included."""
    logprobs: Floats
    """float32[T]: the sampler's log-probability (nats, after temperature); 0 where not sampled."""
    group: int
    """Rollouts of the same group answer the same prompt; unique within a step."""
    finish_reason: FinishReason = "stop"
    text: str = ""
    """The completion, without special tokens."""
    example: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The dataset row, untouched."""
    policy_version: int = 0
    """The oldest weights that took part in sampling: the number of training steps they had seen."""
    entropies: Floats | None = None
    """float32[T]: entropy (nats) of the distribution each token was sampled from."""

    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """What each reward function said."""
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    reward: float = 0.0
    """The weighted sum of `rewards`."""
    greedy_reward: float = 0.0
    """The reward of the greedy completion of the same prompt, where the algorithm asks for it."""
    valid: bool = True
    """False when no trustworthy reward exists: excluded from the statistics and from the loss."""
    problem: str = ""
    """Why the rollout is not valid."""
    faults: Mapping[str, str] = field(default_factory=dict[str, str])
    """What went wrong in each reward function that has no verdict: raised, timeout, crashed, or returned."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """Process supervision: (index of the last token of a step, its reward), in order."""

    old_logprobs: Floats | None = None
    """float32[T]: of the policy at the start of the update phase, as the learner computes it."""
    ref_logprobs: Floats | None = None
    """float32[T]: of the reference policy."""
    new_logprobs: Floats | None = None
    """float32[T]: of the policy after the step's updates, for whoever looks at the run."""
    values: Floats | None = None
    """float32[T]: the critic's estimate before each token is chosen."""
    advantages: Floats | None = None
    """float32[T]: how much better than expected each token was."""
    returns: Floats | None = None
    """float32[T]: what the critic should have said."""

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())

    @property
    def truncated(self) -> bool:
        """Whether the completion hit the length limit; never guessed from its tokens."""
        return self.finish_reason == "length"


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The tensors of one optimizer step, right-padded to [B, T]; padding is 0 or False in every field."""

    tokens: Tensor
    """int64[B, T]"""
    lengths: Tensor
    """int64[B]: prompt and completion."""
    groups: Tensor
    """int64[B]"""
    loss_mask: Tensor
    """bool[B, T]"""
    rollout_logprobs: Tensor
    """float[B, T]"""
    advantages: Tensor
    """float[B, T]"""
    weights: Tensor
    """float[B, T]: the share of each token in the loss, fixed over the whole optimizer step before any split."""
    selection: Tensor
    """float[B, T]: 1, or 0 for a token whose policy term is left out without changing any denominator."""
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def rows(self, index: Tensor) -> Batch:
        """Some of the rollouts, cut to the longest of them.  This is the only way to split a batch."""
        width = int(self.lengths[index].max()) if len(index) else 0

        def cut(tensor: Tensor) -> Tensor:
            return tensor[index][:, :width] if tensor.ndim == 2 else tensor[index]

        return self.map(cut)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        return self.map(move)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with `change` applied to every tensor that is present."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Batch(**{name: None if tensor is None else change(tensor) for name, tensor in fields.items()})  # pyright: ignore[reportArgumentType]


def collate(rollouts: Sequence[Rollout], dtype: torch.dtype | None = None) -> Batch:
    """Right-pad rollouts into a batch with zero `weights` and full `selection`; float32 unless `dtype` says otherwise.

    A per-token field is present in the batch when every rollout has it.
    """
    import torch

    dtype = dtype or torch.float32
    lengths = [len(rollout.tokens) for rollout in rollouts]
    shape = (len(rollouts), max(lengths, default=0))

    def stack(name: str, kind: torch.dtype) -> Tensor:
        padded = torch.zeros(shape, dtype=kind)
        for row, rollout in enumerate(rollouts):
            padded[row, : lengths[row]] = torch.from_numpy(np.ascontiguousarray(getattr(rollout, name))).to(kind)
        return padded

    def stack_if_known(name: str) -> Tensor | None:
        known = bool(rollouts) and all(getattr(rollout, name) is not None for rollout in rollouts)
        return stack(name, dtype) if known else None

    advantages = stack_if_known("advantages")
    return Batch(
        tokens=stack("tokens", torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        groups=torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
        loss_mask=stack("loss_mask", torch.bool),
        rollout_logprobs=stack("logprobs", dtype),
        advantages=torch.zeros(shape, dtype=dtype) if advantages is None else advantages,
        weights=torch.zeros(shape, dtype=dtype),
        selection=torch.ones(shape, dtype=dtype),
        old_logprobs=stack_if_known("old_logprobs"),
        ref_logprobs=stack_if_known("ref_logprobs"),
        values=stack_if_known("values"),
        returns=stack_if_known("returns"),
    )
