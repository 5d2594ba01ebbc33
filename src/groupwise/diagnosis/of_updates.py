"""Rules about the update: whether it moves the policy, whether it is the policy that sampled, and where time goes."""

from __future__ import annotations

from groupwise.diagnosis.evidence import Evidence
from groupwise.diagnosis.findings import Finding, trend

MISMATCH = 0.01
"""Mean |log-prob difference| between sampler and learner that is more than rounding (nats)."""
ROUNDS_AWAY = {"float32": 1e-10, "bfloat16": 1e-6}
"""By dtype: learning rates (about AdamW's steps) below half a unit in the last place of weights around 0.01."""
SATURATED = 0.3
"""Share of clipped tokens above which most of an update is thrown away."""
COLLAPSED = 0.1
"""Of the first entropy, and in nats: what is left when a policy no longer explores."""
FAR = 1.0
"""KL to the reference, in nats a token, at which little of the reference is left."""
DOMINANT = 0.8
"""Share of a run's time in one phase."""
FEW = 3
"""Steps below which nothing is said about all of them."""


def learning_rate_without_effect(run: Evidence) -> Finding | None:
    """The learning rate is 0, or its steps round away in the weights' dtype."""
    rates = run.series("learning_rate")
    dtype = str(run.setting("engine.dtype"))
    if not len(rates) or rates.max() > ROUNDS_AWAY.get(dtype, 0.0):
        return None
    peak = float(rates.max())
    why = f"steps of this size round away in {dtype} weights" if peak > 0 else "every optimizer step is empty"
    return Finding(
        "learning_rate_without_effect",
        "error",
        f"The learning rate has no effect: {peak:g}",
        f"The weights stay what they are: {why}.",
        "optimizer.learning_rate: 1e-6 for a pretrained model, up to 1e-3 for a tiny one; engine.dtype: float32",
        f"learning_rate was at most {peak:g} in {len(rates)} steps",
    )


def clip_of_zero(run: Evidence) -> Finding | None:
    """The clip range is empty: a token counts only as long as its probability has not moved at all."""
    low, high = (run.setting(f"algorithm.surrogate.{name}") for name in ("low", "high"))
    if run.setting("algorithm.surrogate.type") != "clip" or (low and high):
        return None
    return Finding(
        "clip_of_zero",
        "error",
        f"The clip range is empty: low {low:g}, high {high:g}",
        "A ratio that has moved in the right direction by any amount is clipped, and a clipped token has no gradient.",
        "algorithm.surrogate.low: 0.2 and algorithm.surrogate.high: 0.28 (3e-4 and 4e-4 for ratio: sequence)",
        f"config.yaml: algorithm.surrogate.low: {low:g}, algorithm.surrogate.high: {high:g}",
    )


def stale_policy(run: Evidence) -> Finding | None:
    """The sampler agreed with the learner at first and has drifted away since, or is older than allowed."""
    mismatch, age = run.series("sampler_mismatch"), run.series("age")
    oldest = age.max(initial=0)
    allowed = max(run.setting("ahead", 0), 1)  # 1: what dynamic sampling leaves over
    drifted = len(mismatch) > 1 and mismatch[0] <= MISMATCH < mismatch[1:].mean() and not 0 < oldest <= allowed
    if not drifted and oldest <= allowed:
        return None
    drift = (
        f"sampler_mismatch {mismatch[0]:.2g} at the first step, {mismatch[1:].mean():.2g} nats a token since; "
        if drifted
        else ""
    )
    return Finding(
        "stale_policy",
        "error",
        "The sampler uses a stale policy",
        "It agreed with the learner at the first step and no longer does: the weights it samples from are older than "
        "those that are trained.",
        "see that Sampler.load takes every weight over; sample fewer steps ahead; or algorithm.correction: importance",
        f"{drift}age up to {oldest:g} steps, and {allowed} may be",
    )


def sampler_mismatch(run: Evidence) -> Finding | None:
    """Sampler and learner disagree from the first step on, with the same weights."""
    mismatch = run.series("sampler_mismatch")
    if not len(mismatch) or mismatch[0] <= MISMATCH:
        return None
    return Finding(
        "sampler_mismatch",
        "error",
        "Sampler and learner disagree about the same tokens from the first step on",
        "The weights are the same then, so the models are not computed alike: dropout left on in the sampler, another "
        "dtype, another temperature, or another chat template.",
        "put the sampler's model in evaluation mode (no dropout); one dtype for both; or algorithm.correction: "
        "importance",
        f"sampler_mismatch {mismatch[0]:.2g} nats a token at the first step, {mismatch.mean():.2g} over all",
    )


def clip_saturated(run: Evidence) -> Finding | None:
    """A large share of the tokens is clipped."""
    share = run.series("clip_ratio/low") + run.series("clip_ratio/high")
    if not len(share) or share.mean() <= SATURATED or clip_of_zero(run):
        return None
    return Finding(
        "clip_saturated",
        "warning",
        f"{share.mean():.0%} of the tokens are clipped",
        "Clipped tokens have no gradient: the policy has moved further in one step than the clip range lets count.",
        "a smaller optimizer.learning_rate, fewer updates_per_step, or a wider algorithm.surrogate.high",
        f"clip_ratio/low + clip_ratio/high {share.mean():.3f} over {len(share)} steps",
    )


def clip_idle(run: Evidence) -> Finding | None:
    """Nothing is ever clipped: as it must be on-policy, and a sign of tiny steps with several updates."""
    share = run.series("clip_ratio/low") + run.series("clip_ratio/high")
    if len(share) < FEW or share.max() > 0:
        return None
    updates = int(run.setting("updates_per_step", 1))
    on_policy = updates == 1
    return Finding(
        "clip_idle",
        "note" if on_policy else "warning",
        "Nothing is ever clipped" + (", as it has to be on-policy" if on_policy else ""),
        "With one update a step the policy that is trained is the one that sampled, so every ratio is 1."
        if on_policy
        else f"The policy hardly moves in the {updates} updates of a step, or the clip range is too wide to matter.",
        "nothing; updates_per_step: 2 or more uses each completion again"
        if on_policy
        else "a larger optimizer.learning_rate, or the clip range of the algorithm's paper",
        f"clip_ratio/low and clip_ratio/high are 0 in all {len(share)} steps; updates_per_step: {updates}",
    )


def entropy_collapse(run: Evidence) -> Finding | None:
    """The policy has become certain of every token."""
    found = trend(run.series("entropy"))
    if found is None or found.last > COLLAPSED or found.last > COLLAPSED * found.first:
        return None
    return Finding(
        "entropy_collapse",
        "warning",
        "The policy's entropy has collapsed",
        "Completions of a group become the same, so there is nothing left to compare and to learn from.",
        "a higher algorithm.surrogate.high (clip-higher), algorithm.entropy, or a smaller optimizer.learning_rate",
        f"entropy {found.text}",
    )


def kl_far(run: Evidence) -> Finding | None:
    """The policy has left its reference, or moved far within a step."""
    for name, whom in (("kl", "its reference"), ("approx_kl", "the policy that the step began with")):
        values = run.series(name)
        last = float(values[-3:].mean()) if len(values) else 0.0
        if last > FAR:
            return Finding(
                "kl_far",
                "warning",
                f"The policy is far from {whom}",
                "So large a KL means texts that the other would hardly write: often nonsense that the reward likes.",
                "a smaller optimizer.learning_rate, a larger algorithm.kl.coef, or fewer updates_per_step",
                f"{name} {last:.3g} nats a token in the last {min(len(values), 3)} steps",
            )
    return None


def one_phase_takes_the_time(run: Evidence) -> Finding | None:
    """Most of the time goes to one phase."""
    names = dict.fromkeys(name for record in run.steps for name in record if name.startswith("seconds/"))
    taken = {name.removeprefix("seconds/"): float(run.series(name).sum()) for name in names}
    total = sum(taken.values())
    phase = max(taken, key=taken.__getitem__, default="")
    if len(run.steps) < FEW or total == 0 or taken[phase] <= DOMINANT * total:
        return None
    return Finding(
        "one_phase_takes_the_time",
        "note",
        f"{taken[phase] / total:.0%} of the time goes to one phase: {phase}",
        "Nothing else is worth making faster.",
        FASTER.get(phase, "write less: fewer checkpoints, fewer evaluations"),
        ", ".join(f"{name} {seconds:.3g} s" for name, seconds in taken.items()),
    )


FASTER = {
    "sample": "a larger engine.sample_tokens, a smaller sampling.max_tokens, a faster sampler, or slow rewards mended",
    "update": "a larger engine.train_tokens, engine.gradient_checkpointing: false, or fewer updates_per_step",
    "credit": "an algorithm without a reference or critic, or updates_per_step: 1",
    "checkpoint": "a larger checkpoint.every",
}
