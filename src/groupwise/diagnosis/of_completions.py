"""Rules about completions: how long they are, how they end, and whether they differ."""

from __future__ import annotations

import numpy as np

from groupwise.diagnosis.evidence import Evidence
from groupwise.diagnosis.findings import Finding, trend

CUT_SHORT = 0.25
"""Share of truncated completions that spoils a run."""
ALL = 0.98
"""Share that is as good as all."""
COLD = 0.3
"""A temperature below which hardly anything but the most likely token is drawn."""
DIFFERENT = 0.5
"""Share of distinct texts in a group below which it repeats itself."""
LONGER = 1.5
"""Growth of the completions that is worth a word."""


def never_stops(run: Evidence) -> Finding | None:
    """No completion ends by itself."""
    share = run.series("truncated")
    if not len(share) or share.mean() < ALL:
        return None
    return Finding(
        "never_stops",
        "error",
        "No completion ends by itself: the stop token is never drawn",
        "Every completion runs into the length limit: the end-of-sequence token is not one the model has learned to "
        "say, the chat template is not the model's, or sampling.max_tokens is far too small.",
        "compare the model's eos_token_id with how its chat template ends a turn; raise sampling.max_tokens",
        f"truncated {share.mean():.1%} over {len(share)} steps; sampling.max_tokens: "
        f"{run.setting('sampling.max_tokens')}",
    )


def many_truncated(run: Evidence) -> Finding | None:
    """A good part of the completions hits the length limit."""
    share = run.series("truncated")[-5:]
    if not len(share) or share.mean() <= CUT_SHORT or run.series("truncated").mean() >= ALL:
        return None
    return Finding(
        "many_truncated",
        "warning",
        f"{share.mean():.0%} of the completions are cut off at the length limit",
        "An answer that is not reached counts as wrong, so the policy learns to be brief rather than right.",
        "a larger sampling.max_tokens, algorithm.drop_truncated: true, or algorithm.shaping: soft_overlong",
        f"truncated {share.mean():.2f} in the last {len(share)} steps; sampling.max_tokens: "
        f"{run.setting('sampling.max_tokens')}",
    )


def temperature_too_low(run: Evidence) -> Finding | None:
    """So cold that the completions of a group are the same."""
    temperature = float(run.setting("sampling.temperature", 1.0))
    distinct = _distinct(run)
    if temperature >= COLD or distinct is None or distinct > DIFFERENT:
        return None
    return Finding(
        "temperature_too_low",
        "error",
        f"The sampling temperature is near 0: {temperature:g}",
        "Hardly anything but the most likely token is drawn, so the completions of a group are the same and cannot be "
        "compared.",
        "sampling.temperature: 1.0",
        f"{distinct:.0%} of the texts of a group are distinct; sampling.temperature: {temperature:g}",
    )


def repeated_completions(run: Evidence) -> Finding | None:
    """Groups consist of few distinct texts."""
    distinct = _distinct(run)
    if distinct is None or distinct > DIFFERENT or temperature_too_low(run):
        return None
    return Finding(
        "repeated_completions",
        "warning",
        "Completions of a group repeat each other",
        "The same text gets the same reward: what is sampled twice is paid for twice and teaches once.",
        "sampling.temperature: 1.0; a smaller group_size on more prompts; algorithm.entropy",
        f"{distinct:.0%} of the texts of a group are distinct, over {len(run.groups)} groups",
    )


def longer_but_no_better(run: Evidence) -> Finding | None:
    """Completions grow while accuracy is flat."""
    length = trend(run.series("completion_length"))
    right = trend(run.series(f"reward/{run.reward_names[0]}")) if run.reward_names else None
    if length is None or right is None or right.rises or not length.rises or length.last < LONGER * length.first:
        return None
    return Finding(
        "longer_but_no_better",
        "warning",
        "Completions grow while accuracy is flat: a length bias",
        "Where each completion counts alike, a long wrong one is punished less per token than a short wrong one, and "
        "the policy drifts to length.",
        "algorithm: dr_grpo or dapo (every token counts alike), or algorithm.shaping: soft_overlong",
        f"completion_length {length.text}; reward/{run.reward_names[0]} {right.text}",
    )


def _distinct(run: Evidence) -> float | None:
    """Mean share of distinct texts in a group."""
    shares = [len({one.text for one in group}) / len(group) for group in run.groups]
    return float(np.mean(shares)) if shares else None
