"""The policy term of the objective: ratio levels `u` and surrogates `PHI`.

    L = - SUM w * m * c * PHI(u, A)  +  beta * SUM w * K  -  eta * SUM w * H

Pieces map tokens to tokens and never reduce: one place sums (`Algorithm.loss`).  The weights `w`, `m` and `c` are data
and live in `weights.py`, `K` and `H` in `penalties.py`.  B rollouts, T tokens; every tensor is [B, T] and 0 where
masked.  Everything is pure torch, in the dtype it is given: float64 gives float64 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from groupwise.slots import Slot

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp(): a ratio of 5e8 says all there is to say, and stays finite."""


class LossInputs(NamedTuple):
    """What a piece may look at, all [B, T] and 0 where masked."""

    logprobs: Tensor
    """log pi_theta, the current policy: the only field with a gradient, besides `entropy` and `log_ratio`."""
    old: Tensor
    """log pi_old: the policy at the start of the update phase."""
    rollout: Tensor
    """log mu: the policy that sampled, as the sampler reported it."""
    ref: Tensor | None
    """log pi_ref."""
    advantages: Tensor
    entropy: Tensor
    mask: Tensor
    """1 where the policy sampled the token."""
    log_ratio: Tensor
    """log of pi_theta over the anchor policy, at the level of `Algorithm.ratio`, clamped."""


PerToken = tuple[Tensor, dict[str, Tensor]]
Surrogate = Callable[[LossInputs], PerToken]
"""inputs -> (loss of each token, diagnostics of each token by metric name)."""

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens of each row, [B, 1]."""
    return (values * mask).sum(-1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of each row, [B, 1]."""
    return row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def choose(condition: Tensor, then: float, otherwise: float, like: Tensor) -> Tensor:
    """`then` where the condition holds, in the dtype of `like` (`torch.where` of two numbers is float32)."""
    return torch.full_like(like, otherwise).masked_fill(condition, then)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """The log-ratio within +-MAX_LOG_RATIO; nan (a token one policy gives -inf twice) counts as 0."""
    return log_ratio.nan_to_num(nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


# Ratio levels: (log-ratio per token, mask) -> log-ratio per token ----------------------------------------------------


def token_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Each token its own (PPO, GRPO)."""
    return log_ratio


def sequence_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The geometric mean of the row's ratios, for all its tokens (GSPO, arXiv:2507.18071, eq. 7)."""
    return row_mean(log_ratio, mask).expand_as(log_ratio)


def sequence_token_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """GSPO-token (arXiv:2507.18071, eq. 14): the value of the sequence's ratio, the gradient of the token's."""
    return sequence_level(log_ratio, mask).detach() + log_ratio - log_ratio.detach()


def sequence_product_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The product of the row's ratios: the completion is one action (RLOO)."""
    return row_sum(log_ratio, mask).expand_as(log_ratio)


RatioLevel = Literal["token", "sequence", "sequence_token", "sequence_product"]
RATIO_LEVELS: dict[RatioLevel, Callable[[Tensor, Tensor], Tensor]] = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_token_level,
    "sequence_product": sequence_product_level,
}


# Surrogates ----------------------------------------------------------------------------------------------------------


class Reinforce(Slot):
    """`-A log pi` (Williams 1992)."""

    type: Literal["reinforce"] = "reinforce"
    formula: ClassVar[str] = "A log π"

    def __call__(self, x: LossInputs) -> PerToken:
        return -x.advantages * x.logprobs, {}


class Unclipped(Slot):
    """`-rho A`: the importance-weighted policy gradient, without a trust region."""

    type: Literal["unclipped"] = "unclipped"
    formula: ClassVar[str] = "ρ A"

    def __call__(self, x: LossInputs) -> PerToken:
        return -x.log_ratio.exp() * x.advantages, {}


class Clip(Slot):
    """`-min(rho A, clip(rho, 1-low, 1+high) A)`: PPO (arXiv:1707.06347, eq. 7).

    `high > low` is DAPO's clip-higher (arXiv:2503.14476).  `dual` bounds the loss of tokens with A < 0 at `-dual A`
    (arXiv:1912.09729), which is also INTELLECT-2's two-sided clip.
    """

    type: Literal["clip"] = "clip"
    low: NonNegative = 0.2
    """How far below 1 the ratio of a token with A < 0 counts."""
    high: NonNegative = 0.2
    """How far above 1 the ratio of a token with A > 0 counts."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts for A < 0; null for none."""

    @property
    def formula(self) -> str:
        clipped = f"min(ρ A, clip(ρ, {1 - self.low:g}, {1 + self.high:g}) A)"
        return clipped if self.dual is None else f"{clipped}, at least {self.dual:g} A if A < 0"

    def __call__(self, x: LossInputs) -> PerToken:
        ratio = x.log_ratio.exp()
        loss = -torch.minimum(ratio * x.advantages, ratio.clamp(1 - self.low, 1 + self.high) * x.advantages)
        if self.dual is not None:
            loss = torch.where(x.advantages < 0, torch.minimum(loss, -self.dual * x.advantages), loss)
        return loss, {
            "clip_ratio/low": (x.advantages < 0) & (ratio < 1 - self.low),
            "clip_ratio/high": (x.advantages > 0) & (ratio > 1 + self.high),
        }


class Cispo(Slot):
    """`-sg[clip(rho, floor, cap)] A log pi`: CISPO (arXiv:2506.13585, eq. 4); no token loses its gradient.

    `cap` and `floor` are absolute ratios, not distances from 1.
    """

    type: Literal["cispo"] = "cispo"
    floor: NonNegative = 0.0
    """Smallest weight, an absolute ratio."""
    cap: Positive = 5.0
    """Largest weight, an absolute ratio."""

    @property
    def formula(self) -> str:
        return f"sg[clip(ρ, {self.floor:g}, {self.cap:g})] A log π"

    def __call__(self, x: LossInputs) -> PerToken:
        ratio = x.log_ratio.exp().detach()
        loss = -ratio.clamp(self.floor, self.cap) * x.advantages * x.logprobs
        return loss, {"clip_ratio/low": ratio < self.floor, "clip_ratio/high": ratio > self.cap}


class Sapo(Slot):
    """`-(4/tau) sigmoid(tau (rho - 1)) A`, tau by the sign of A: SAPO's smooth trust region (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_pos: Positive = 1.0
    """How fast the weight of tokens with A > 0 falls away from ratio 1."""
    tau_neg: Positive = 1.05
    """The same for A < 0."""

    @property
    def formula(self) -> str:
        return f"4/τ sigmoid(τ (ρ − 1)) A,  τ = {self.tau_pos:g} if A > 0 else {self.tau_neg:g}"

    def __call__(self, x: LossInputs) -> PerToken:
        tau = choose(x.advantages > 0, self.tau_pos, self.tau_neg, x.log_ratio)
        return -(4 / tau) * torch.sigmoid(tau * (x.log_ratio.exp() - 1)) * x.advantages, {}


class Gmpo(Slot):
    """`-A exp(mean of the clipped log-ratios)`: the geometric mean, each token clipped before it (arXiv:2507.20673).

    Widths are distances of the log-ratio from 0; only the side that would enlarge the objective binds.
    """

    type: Literal["gmpo"] = "gmpo"
    low: Positive = 0.4
    """How far below 0 the log-ratio of a token with A < 0 counts."""
    high: Positive = 0.4
    """How far above 0 the log-ratio of a token with A > 0 counts."""

    @property
    def formula(self) -> str:
        return f"A exp(mean_t log ρ), log ρ at most {self.high:g} if A > 0, at least −{self.low:g} if A < 0"

    def __call__(self, x: LossInputs) -> PerToken:
        sign = x.advantages.sign()
        clipped = sign * torch.minimum(sign * x.log_ratio, sign * x.log_ratio.clamp(-self.low, self.high))
        return -x.advantages * row_mean(clipped, x.mask).exp(), {
            "clip_ratio/low": (x.advantages < 0) & (x.log_ratio < -self.low),
            "clip_ratio/high": (x.advantages > 0) & (x.log_ratio > self.high),
        }


class Topr(Slot):
    """`-sg[1 if A > 0 else clip(rho, 0, 1)] A log pi`: TOPR, tapered off-policy REINFORCE (arXiv:2503.14286)."""

    type: Literal["topr"] = "topr"
    formula: ClassVar[str] = "sg[1 if A > 0 else min(ρ, 1)] A log π"

    def __call__(self, x: LossInputs) -> PerToken:
        taper = torch.where(x.advantages > 0, 1.0, x.log_ratio.exp().clamp(max=1.0)).detach()
        return -taper * x.advantages * x.logprobs, {}


class Vespo(Slot):
    """`-sg[W^k exp(lam (1 - W))] A log pi`, W the ratio, (k, lam) by the sign of A: VESPO (arXiv:2602.10693)."""

    type: Literal["vespo"] = "vespo"
    k_pos: NonNegative = 2.0
    """Power of W for A >= 0."""
    lambda_pos: NonNegative = 3.0
    """Decay with W for A >= 0."""
    k_neg: NonNegative = 3.0
    """Power of W for A < 0."""
    lambda_neg: NonNegative = 2.0
    """Decay with W for A < 0."""

    @property
    def formula(self) -> str:
        positive, negative = (self.k_pos, self.lambda_pos), (self.k_neg, self.lambda_neg)
        powers = "(k, λ) = ({:g}, {:g}) if A ≥ 0 else ({:g}, {:g})".format(*positive, *negative)
        return f"sg[ρ^k exp(λ (1 − ρ))] A log π,  {powers}"

    def __call__(self, x: LossInputs) -> PerToken:
        log_w = x.log_ratio.detach()
        positive = x.advantages >= 0
        k = choose(positive, self.k_pos, self.k_neg, log_w)
        lam = choose(positive, self.lambda_pos, self.lambda_neg, log_w)
        return -(k * log_w + lam * (1 - log_w.exp())).exp() * x.advantages * x.logprobs, {}


class Dppo(Slot):
    """`-rho A`, without the tokens whose probability already moved the wanted way by more than `low` / `high`: DPPO
    (arXiv:2602.04879).

    The move is measured from the policy that sampled, as total variation or KL of the token against all others.
    """

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Total variation `|p - mu|`, or the KL from mu to p."""
    low: Positive = 0.2
    """Largest allowed move of a token with A < 0, whose probability falls."""
    high: Positive = 0.2
    """Largest allowed move of a token with A > 0, whose probability rises."""

    @property
    def formula(self) -> str:
        move = {"tv": "|π − μ|", "kl": "KL(μ, π)"}[self.divergence]
        return f"ρ A, 0 where {move} > {self.high:g} if A > 0 and π > μ, > {self.low:g} if A < 0 and π < μ"

    def __call__(self, x: LossInputs) -> PerToken:
        p, mu = x.logprobs.detach().exp(), x.rollout.exp()
        move = (p - mu).abs() if self.divergence == "tv" else binary_kl(mu, p)
        too_low = (x.advantages < 0) & (p < mu) & (move > self.low)
        too_high = (x.advantages > 0) & (p > mu) & (move > self.high)
        loss = -torch.where(too_low | too_high, 0.0, x.log_ratio.exp()) * x.advantages
        return loss, {"clip_ratio/low": too_low, "clip_ratio/high": too_high}


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL between Bernoulli(p) and Bernoulli(q)."""
    tiny = torch.finfo(p.dtype).tiny
    return (
        p * (p.clamp(min=tiny) / q.clamp(min=tiny)).log()
        + (1 - p) * ((1 - p).clamp(min=tiny) / (1 - q).clamp(min=tiny)).log()
    )
