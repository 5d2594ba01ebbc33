"""The loss: one sum over the tokens of any part of an optimizer step.

L = - SUM w * m * c * PHI(u, A)  +  beta * SUM w * K  -  eta * SUM w * H
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise import losses
from groupwise.formula import Formula
from groupwise.losses import LossInputs, clamp_log_ratio
from groupwise.penalties import k3
from groupwise.records import Batch


def loss(a: Formula, logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The formula at the top, summed over the rows of `batch`, which may be any part of an optimizer step.

    `logprobs` and `entropies` are [B, T].  Metrics are (sum, count) over loss tokens and add up like the loss.
    """
    x = inputs(a, logprobs, entropies, batch)
    terms, diagnostics = a.surrogate(x)
    terms = terms * batch.selection
    if a.correction is not None:
        diagnostics["correction"] = a.correction(x).detach()
        terms = terms * diagnostics["correction"]
    if a.loss_kl is not None:
        diagnostics["kl"] = a.loss_kl(x)
        terms = terms + a.loss_kl.coef * diagnostics["kl"]
    if a.entropy is not None and a.entropy.acting:
        terms = terms - a.entropy.coef * x.entropy
    diagnostics["approx_kl"] = k3(clamp_log_ratio(x.old - x.logprobs))
    diagnostics["sampler_mismatch"] = (x.old - x.rollout).abs()
    tokens = x.mask.sum()
    metrics = {name: torch.stack([(d.detach() * x.mask).sum(), tokens]) for name, d in diagnostics.items()}
    return (terms * batch.weights).sum(), metrics


def inputs(a: Formula, logprobs: Tensor, entropies: Tensor, batch: Batch) -> LossInputs:
    """Zero whatever is masked, so that no garbage reaches an exp(), and take the log-ratio at its level."""
    keep = batch.loss_mask
    new, rollout = logprobs.where(keep, 0.0), batch.rollout_logprobs.where(keep, 0.0)
    old = new.detach() if batch.old_logprobs is None else batch.old_logprobs.where(keep, 0.0)
    mask = keep.to(new.dtype)
    log_ratio = clamp_log_ratio(new - (old if a.anchor == "old" else rollout))
    return LossInputs(
        logprobs=new,
        old=old,
        rollout=rollout,
        ref=None if batch.ref_logprobs is None else batch.ref_logprobs.where(keep, 0.0),
        advantages=batch.advantages.where(keep, 0.0),
        entropy=entropies.where(keep, 0.0),
        mask=mask,
        log_ratio=clamp_log_ratio(losses.RATIO_LEVELS[a.ratio](log_ratio, mask)),
    )


def value_loss(a: Formula, values: Tensor, batch: Batch) -> Tensor:
    """The critic's loss, with the same weights as the policy's; `values` is [B, T]."""
    assert a.critic is not None and batch.values is not None and batch.returns is not None
    per_token = a.critic(values.where(batch.loss_mask, 0.0), batch.values, batch.returns)
    return (per_token * batch.weights).sum()
