"""What is wrong with a run, why, and what to try: rules over the files in its folder.

A rule is a function `Evidence -> Finding | None`; `RULES` is the table.  Causes stand before what follows from them,
and findings come by severity first, so the first one is the one to begin with.
"""

from __future__ import annotations

from groupwise.diagnosis.evidence import Evidence, read_run
from groupwise.diagnosis.findings import SEVERITIES, Finding, Rule
from groupwise.diagnosis.of_completions import (
    longer_but_no_better,
    many_truncated,
    never_stops,
    repeated_completions,
    temperature_too_low,
)
from groupwise.diagnosis.of_rewards import (
    already_solved,
    always_right,
    groups_teach_nothing,
    held_out_falls,
    invalid_rewards,
    never_right,
    one_reward_decides,
    reward_is_length,
    rewards_fight,
)
from groupwise.diagnosis.of_updates import (
    clip_idle,
    clip_of_zero,
    clip_saturated,
    entropy_collapse,
    kl_far,
    learning_rate_without_effect,
    one_phase_takes_the_time,
    sampler_mismatch,
    stale_policy,
)

__all__ = ["RULES", "Evidence", "Finding", "Rule", "diagnose", "read_run"]

RULES: tuple[Rule, ...] = (
    learning_rate_without_effect,
    clip_of_zero,
    stale_policy,
    sampler_mismatch,
    never_stops,
    temperature_too_low,
    never_right,
    always_right,
    already_solved,
    reward_is_length,
    invalid_rewards,
    held_out_falls,
    groups_teach_nothing,
    many_truncated,
    longer_but_no_better,
    entropy_collapse,
    kl_far,
    clip_saturated,
    repeated_completions,
    rewards_fight,
    one_reward_decides,
    clip_idle,
    one_phase_takes_the_time,
)


def diagnose(run: Evidence) -> list[Finding]:
    """What the rules find, the worst first."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
