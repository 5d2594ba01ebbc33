"""What stands beside the policy term: KL penalties `K`, the entropy bonus `H`, and the critic's loss.

B rollouts, T tokens; every tensor is [B, T] and 0 where masked.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from groupwise.losses import LossInputs, NonNegative, Positive, clamp_log_ratio, row_sum
from groupwise.slots import Slot, replace


def k1(d: Tensor) -> Tensor:
    """`d`, d = log pi - log ref: unbiased, may be negative."""
    return d


def k2(d: Tensor) -> Tensor:
    """`d^2 / 2`: as a loss, the gradient of the reverse KL on-policy."""
    return d**2 / 2


def k3(d: Tensor) -> Tensor:
    """`e^-d - 1 + d`: unbiased value, never negative; as a loss, the gradient of the forward KL."""
    return torch.expm1(-d) + d


class KL(Slot):
    """A penalty for leaving another policy (Schulman 2020; `docs/algorithms.md` on which gradient each gives).

    In the loss: k2, k3 or k3_is (k3 times the differentiated ratio pi / pi_old: the reverse KL, on- and off-policy,
    DeepSeek-V3.2).  In the reward: k1, from the policy that sampled.
    """

    type: Literal["kl"] = "kl"
    coef: NonNegative = 0.04
    """beta."""
    estimator: Literal["k1", "k2", "k3", "k3_is"] = "k3"
    """What is measured from the log-ratio of a token."""
    placement: Literal["loss", "reward_token", "reward_sequence"] = "loss"
    """Add to the loss of a token, or subtract from its reward, or from the completion's reward."""
    to: Literal["ref", "old", "rollout"] = "ref"
    """The other policy: the reference model, the one before this step's updates, or the one that sampled."""
    refresh_every: int = Field(default=0, ge=0)
    """Steps after which the reference becomes the current policy (GRPO's iterations, DeepSeek-R1); 0: never."""
    level: Literal["token", "sequence"] = "token"
    """Apply the estimator to each token's log-ratio, or to the completion's (Kimi k1.5), shared out over its tokens."""

    @property
    def formula(self) -> str:
        estimate = {"k1": "d", "k2": "d² / 2", "k3": "e^−d − 1 + d", "k3_is": "(π / π_old) (e^−d − 1 + d)"}
        other = {"ref": "π_ref", "old": "π_old", "rollout": "μ"}[self.to]
        summed, shared = ("Σ_t ", " / |o|") if self.level == "sequence" else ("", "")
        return f"{estimate[self.estimator]}{shared},  d = {summed}log(π / {other})"

    def __call__(self, x: LossInputs) -> Tensor:
        """The penalty of each token in the loss, without `coef`."""
        other = {"ref": x.ref, "old": x.old, "rollout": x.rollout}[self.to]
        assert other is not None, "Algorithm.needs asked for the reference log-probs"
        d = clamp_log_ratio(x.logprobs - other)
        if self.level == "sequence":
            length = x.mask.sum(-1, keepdim=True).clamp(min=1)
            return self._estimate(row_sum(d, x.mask), x).expand_as(d) / length
        return self._estimate(d, x)

    def _estimate(self, d: Tensor, x: LossInputs) -> Tensor:
        if self.estimator == "k3_is":
            return clamp_log_ratio(x.logprobs - x.old).exp() * k3(d)
        return {"k1": k1, "k2": k2, "k3": k3}[self.estimator](d)


# Entropy -------------------------------------------------------------------------------------------------------------


class EntropyBonus(Slot):
    """`-eta H`: the entropy of the whole distribution, not of the sampled token, whose gradient is zero on average.

    With a `target`, eta moves by `delta` a step towards it and acts only while the entropy is not above it
    (Skywork-OR1, arXiv:2505.22312).
    """

    type: Literal["entropy"] = "entropy"
    coef: NonNegative = 0.001
    """eta; with a target, where it stands now."""
    target: NonNegative | None = None
    """Entropy to keep, in nats a token; null keeps eta constant."""
    delta: NonNegative = 0.005
    """How far eta moves in a step."""
    acting: bool = True
    """Whether it applies in this step; with a target, set anew in every step."""

    @property
    def formula(self) -> str:
        moving = f", the coefficient moving by {self.delta:g} a step to keep it at {self.target:g}"
        return "entropy of π" + ("" if self.target is None else moving)

    def after_seeing(self, entropy: float) -> EntropyBonus:
        """The bonus for a step whose rollouts have this mean entropy."""
        if self.target is None:
            return self
        coef = max(self.coef + (self.delta if entropy < self.target else -self.delta), 0.0)
        return replace(self, coef=coef, acting=entropy <= self.target)


# The critic ----------------------------------------------------------------------------------------------------------


class ValueLoss(Slot):
    """PPO's clipped value loss: `1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)`."""

    type: Literal["value_loss"] = "value_loss"
    clip: Positive | None = 0.2
    """How far a value may move from the old one; null for any distance."""

    @property
    def formula(self) -> str:
        error = "½ (V − R)²"
        return error if self.clip is None else f"{error}, V within ±{self.clip:g} of V_old if that is worse"

    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        error = (values - returns) ** 2
        if self.clip is None:
            return error / 2
        clipped = old_values + (values - old_values).clamp(-self.clip, self.clip)
        return torch.maximum(error, (clipped - returns) ** 2) / 2
