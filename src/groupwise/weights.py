"""The weights of the objective, all of them data without a gradient: aggregation `w`, selection `m`, correction `c`.

`w` decides how much each token counts.  It comes from lengths and from counts over the whole optimizer step, before
any split, so loss and gradient do not depend on micro-batches, padding, row order or ranks.  `m` and `c` multiply the
policy term; they may be 0 but never change a denominator.  B rollouts, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from groupwise.losses import (
    LossInputs,
    NonNegative,
    Positive,
    clamp_log_ratio,
    sequence_level,
    sequence_product_level,
    token_level,
)
from groupwise.slots import Slot

Aggregate = Callable[[Tensor, Tensor], Tensor]
"""(mask[B, T], groups[B]) of a whole optimizer step -> the share of each token in the loss [B, T]."""
Selection = Callable[[Tensor, Tensor], Tensor]
"""(entropies[B, T], mask[B, T]) of a whole optimizer step -> factor of each token's policy term [B, T]."""
Correction = Callable[[LossInputs], Tensor]
"""inputs -> factor of each token's policy term [B, T]."""


# w: aggregation ------------------------------------------------------------------------------------------------------


class TokenMean(Slot):
    """`1 / T`: every token counts the same (DAPO, arXiv:2503.14476)."""

    type: Literal["token-mean"] = "token-mean"
    formula: ClassVar[str] = "1 / T"

    def __call__(self, mask: Tensor, groups: Tensor) -> Tensor:
        return mask / mask.sum().clamp(min=1)


class PromptMean(Slot):
    """`1 / (P n_g)`: every prompt counts the same, its tokens share its part (DAPO as written; ScaleRL)."""

    type: Literal["prompt-mean-token-mean"] = "prompt-mean-token-mean"
    formula: ClassVar[str] = "1 / (P n_g)"

    def __call__(self, mask: Tensor, groups: Tensor) -> Tensor:
        _, member = groups.unique(return_inverse=True)
        tokens = torch.zeros(len(groups), dtype=mask.dtype).index_add(0, member, mask.sum(-1))
        return mask / tokens[member, None].clamp(min=1) / max(int(member.max()) + 1 if len(member) else 0, 1)


class SequenceMean(Slot):
    """`1 / (M |o|)`: every completion counts the same, its tokens share its part (GRPO, arXiv:2402.03300)."""

    type: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
    formula: ClassVar[str] = "1 / (M |o|)"

    def __call__(self, mask: Tensor, groups: Tensor) -> Tensor:
        return mask / mask.sum(-1, keepdim=True).clamp(min=1) / max(len(mask), 1)


class SequenceSum(Slot):
    """`1 / M`: a completion counts by its length (RLOO)."""

    type: Literal["seq-mean-token-sum"] = "seq-mean-token-sum"
    formula: ClassVar[str] = "1 / M"

    def __call__(self, mask: Tensor, groups: Tensor) -> Tensor:
        return mask / max(len(mask), 1)


class SequenceSumNorm(Slot):
    """`1 / (M length)` with a constant length: Dr. GRPO (arXiv:2503.20783)."""

    type: Literal["seq-mean-token-sum-norm"] = "seq-mean-token-sum-norm"
    length: int | None = Field(default=None, ge=1)
    """Tokens; null takes `sampling.max_tokens`."""

    @property
    def formula(self) -> str:
        return f"1 / (M · {self.length or 'max_tokens'})"

    def __call__(self, mask: Tensor, groups: Tensor) -> Tensor:
        assert self.length is not None, "Algorithm.resolve fills the length"
        return mask / (max(len(mask), 1) * self.length)


class Decoupled(Slot):
    """DeGRPO (arXiv:2505.13379): the first token, which chooses the mode, apart from the response.

    Control token: `alpha / M`.  Response: `1 / (M (|o| - 1))` as in the paper, or with `response: token` one mean
    over all response tokens as in the authors' code.
    """

    type: Literal["decoupled"] = "decoupled"
    alpha: Positive = 0.001
    """Weight of the control token."""
    response: Literal["sequence", "token"] = "sequence"
    """Mean of the response tokens: within each completion first, or over all at once."""

    @property
    def formula(self) -> str:
        others = {"sequence": "1 / (M (|o| − 1))", "token": "1 / (T − M)"}[self.response]
        return f"{self.alpha:g} / M for the first token, {others} for the others"

    def __call__(self, mask: Tensor, groups: Tensor) -> Tensor:
        control = mask * (mask.cumsum(-1) == 1)
        inner = SequenceMean() if self.response == "sequence" else TokenMean()
        return self.alpha * control / max(len(mask), 1) + inner(mask - control, groups)


class MicrobatchTokenMean(Slot):
    """The mean over micro-batches of `rows` completions of their token means: what TRL calls `bnpo`.

    It depends on the order of the completions; for comparison only.
    """

    type: Literal["microbatch-token-mean"] = "microbatch-token-mean"
    rows: int = Field(default=8, ge=1)
    """Completions in a micro-batch."""

    @property
    def formula(self) -> str:
        return f"1 / (n · tokens), in each of n micro-batches of {self.rows} completions"

    def __call__(self, mask: Tensor, groups: Tensor) -> Tensor:
        parts = mask.split(self.rows)
        return torch.cat([TokenMean()(part, groups) / len(parts) for part in parts])


# m: token selection --------------------------------------------------------------------------------------------------


class TopEntropy(Slot):
    """1 for the `fraction` of the step's tokens with the largest entropy, else 0 (arXiv:2506.01939).

    `renormalise` divides by the number of tokens kept instead of all tokens.
    """

    type: Literal["top_entropy"] = "top_entropy"
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the tokens that is kept."""
    renormalise: bool = False
    """Divide by the number of kept tokens."""

    @property
    def formula(self) -> str:
        kept = f"1 / {self.fraction:g}" if self.renormalise else "1"
        return f"{kept} for the {self.fraction:.0%} of tokens with the largest entropy, else 0"

    def __call__(self, entropies: Tensor, mask: Tensor) -> Tensor:
        total = int(mask.sum())
        kept = math.ceil(self.fraction * total)
        if kept == 0:
            return torch.zeros_like(entropies)
        ranked = entropies.masked_fill(mask == 0, -math.inf).flatten()
        selection = torch.zeros_like(ranked)
        selection[ranked.topk(kept).indices] = total / kept if self.renormalise else 1.0
        return selection.view_as(entropies)


# c: off-policy correction --------------------------------------------------------------------------------------------


class Importance(Slot):
    """Weights from `r = pi_old / mu`, for rollouts that the learner's policy did not exactly sample.

    `truncate` caps r (TIS), `mask` keeps r inside the bounds and 0 outside (IcePop arXiv:2510.18855, MIS), `reject`
    keeps 1 inside and 0 outside.  The level is each token, the sequence's product, or its geometric mean.
    """

    type: Literal["importance"] = "importance"
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    """What happens outside the bounds."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: the token's, the product over the completion, or its geometric mean."""
    low: NonNegative = 0.0
    """Lower bound of r."""
    high: Positive | None = 2.0
    """Upper bound of r; null for none."""

    @property
    def formula(self) -> str:
        level = {"token": "q", "sequence": "Π_t q", "geometric": "(Π_t q)^(1/|o|)"}[self.level]
        low, high = f"{self.low:g}", "∞" if self.high is None else f"{self.high:g}"
        inside = f"if {low} ≤ {level} ≤ {high} else 0"
        modes = {"truncate": f"clip({level}, {low}, {high})", "mask": f"{level} {inside}", "reject": f"1 {inside}"}
        return f"{modes[self.mode]},  q = π_old / μ"

    def __call__(self, x: LossInputs) -> Tensor:
        levels = {"token": token_level, "sequence": sequence_product_level, "geometric": sequence_level}
        log_r = levels[self.level](clamp_log_ratio(x.old - x.rollout), x.mask)
        r = clamp_log_ratio(log_r).exp()
        high = math.inf if self.high is None else self.high
        inside = ((r >= self.low) & (r <= high)).to(r)
        return {"truncate": r.clamp(self.low, high), "mask": r * inside, "reject": inside}[self.mode]


class OffPolicyMask(Slot):
    """0 for a completion with A < 0 that the policy has moved away from: `mean(log mu - log pi) > delta`
    (DeepSeek-V3.2, arXiv:2512.02556).  Stale negative samples are the destructive ones."""

    type: Literal["opsm"] = "opsm"
    delta: NonNegative = 0.5
    """Largest mean log-ratio, in nats a token."""

    @property
    def formula(self) -> str:
        return f"0 if A < 0 and mean_t log(μ / π) > {self.delta:g}, else 1"

    def __call__(self, x: LossInputs) -> Tensor:
        drift = sequence_level(x.rollout - x.logprobs.detach(), x.mask)
        return 1.0 - ((x.advantages < 0) & (drift > self.delta)).to(drift)
