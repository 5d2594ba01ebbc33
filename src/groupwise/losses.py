"""The differentiated pieces of the objective: ratio levels `u`, surrogates `PHI`, KL penalties `K`, the value loss.

    L = - SUM w * m * c * PHI(u, A)  +  beta * SUM w * K  -  eta * SUM w * H

Pieces map tokens to tokens and never reduce: one place sums (`Algorithm.loss`).  The weights `w`, `m` and `c` are data
and live in `weights.py`.  B rollouts, T tokens; every tensor is [B, T] and 0 where masked.  Everything is pure torch,
in the dtype it is given: float64 gives float64 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from groupwise.slots import Slot, replace

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


# KL ------------------------------------------------------------------------------------------------------------------


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
