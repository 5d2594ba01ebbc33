"""`Algorithm`: how rewards become gradients, as one formula with a few orthogonal slots.

An algorithm is a value.  The named ones are in `presets.py`; a variant is `replace(DAPO, surrogate=Cispo(cap=5.0))`.
`formula.py` has the slots, and each stage of a step that the value decides is a module of its own: `credit` computes
advantages from rewards over complete groups (`crediting.py`), `batches` fixes the weights of each optimizer step
(`batching.py`), and `loss` is the sum for any part of such a step (`objective.py`).  Combinations that cannot be right
are refused when the value is made, with the reason (`combinations.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import model_validator

from groupwise import batching, crediting, objective
from groupwise.advantages import MovingMean
from groupwise.combinations import refusals
from groupwise.crediting import loss_tokens
from groupwise.formula import Formula
from groupwise.records import Rollout
from groupwise.shaping import CosineLength, LinearLength, SoftOverlong
from groupwise.slots import Slot, replace
from groupwise.weights import SequenceSumNorm


class Algorithm(Formula):
    """One point of the GRPO family; the defaults are group-normalised rewards, clip-higher, a token mean and no KL."""

    @model_validator(mode="after")
    def _refuse_what_cannot_be_right(self) -> Algorithm:
        reasons = [reason for refused, reason in refusals(self) if refused]
        if reasons:
            raise ValueError("\n".join(reasons))
        return self

    def needs(self, updates_per_step: int) -> set[str]:
        """Which fields of a rollout have to be computed before the updates of a step."""
        # With a single update per step the old policy is the current one, and costs no pass of its own.
        old = updates_per_step > 1 or self.kl_in_reward
        ref = self.kl_in_reward or (self.loss_kl is not None and self.loss_kl.to == "ref")
        wanted = {"old_logprobs": old, "ref_logprobs": ref, "values": self.critic is not None}
        return {name for name, needed in wanted.items() if needed}

    def resolve(self, max_tokens: int) -> Algorithm:
        """The same algorithm with every length that was left open set to `max_tokens`."""
        changes: dict[str, Slot] = {}
        if isinstance(self.aggregate, SequenceSumNorm) and self.aggregate.length is None:
            changes["aggregate"] = replace(self.aggregate, length=max_tokens)
        if isinstance(self.shaping, SoftOverlong | LinearLength | CosineLength) and self.shaping.limit is None:
            changes["shaping"] = replace(self.shaping, limit=max_tokens)
        return replace(self, **changes) if changes else self

    def adapt(self, rollouts: Sequence[Rollout]) -> Algorithm:
        """The algorithm for a step with these rollouts: coefficients that follow the run have moved."""
        changes: dict[str, Slot] = {}
        rewards = [rollout.reward for rollout in rollouts if rollout.valid]
        if isinstance(self.baseline, MovingMean) and rewards:
            changes["baseline"] = self.baseline.after_seeing(float(np.mean(rewards)))
        entropies = [loss_tokens(r, r.entropies) for r in rollouts if r.entropies is not None]
        if self.entropy is not None and self.entropy.target is not None and entropies:
            changes["entropy"] = self.entropy.after_seeing(float(np.concatenate(entropies).mean()))
        return replace(self, **changes) if changes else self

    # The stages of a step, each a function of the value and of records
    credit = crediting.credit
    batches = batching.batches
    loss = objective.loss
    inputs = objective.inputs
    value_loss = objective.value_loss
