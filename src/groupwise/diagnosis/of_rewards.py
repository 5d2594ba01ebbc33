"""Rules about rewards: whether they say anything, whether they say what is meant, and which of them decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from groupwise.diagnosis.evidence import Evidence, Sampled
from groupwise.diagnosis.findings import Finding, correlation, trend

LOCKSTEP = 0.9
"""Correlation of reward and length within groups above which the reward is the length."""
OPPOSED = -0.5
"""Correlation of two rewards within groups below which they pull against each other."""
DECIDES = 0.95
"""Share of the variance within groups that one of several rewards has when the others hardly count."""
IDLE_GROUPS = 0.7
"""Share of completions in groups without a spread at which most sampling is wasted."""
FORGOTTEN = 0.03
"""Loss of held-out accuracy that is more than a wobble."""
FEWEST = 16
"""Completions below which correlations say nothing."""


def _always_the_same(run: Evidence) -> float | None:
    """The reward of every completion of the run, if they all got the same."""
    rewards = {one.reward for one in run.completions if one.valid}
    spread = run.series("reward_std")
    if len(rewards) != 1 or np.any(spread > 0) or np.ptp(run.series("reward")) > 0:
        return None
    return rewards.pop()


def _agreement(groups: Sequence[Sequence[Sampled]]) -> float:
    """Share of completions that end like most of their group."""
    alike = [Counter(one.ending for one in group).most_common(1)[0][1] / len(group) for group in groups]
    return float(np.mean(alike)) if alike else 0.0


def never_right(run: Evidence) -> Finding | None:
    """No completion has ever earned anything."""
    reward = _always_the_same(run)
    if reward is None or reward > 0:
        return None
    example = next((one.text for one in run.completions if one.valid), "")
    return Finding(
        "never_right",
        "error",
        f"No completion is ever right: every reward is {reward:g}",
        "The reward compares with the wrong thing (the wrong answer column, another format), or the task is far too "
        "hard for this model. Nothing can be learned from groups that are all wrong.",
        "look at the answer column that the reward reads beside a few completions; an easier data set; a reward for "
        "part of the way",
        f"reward {reward:g} in all {len(run.steps)} steps; a completion: {_short(example)!r}",
    )


def always_right(run: Evidence) -> Finding | None:
    """Every completion earned the same, whatever it answered."""
    reward = _always_the_same(run)
    if reward is None or reward <= 0 or _agreement(run.groups) > 0.5:
        return None
    group = run.groups[0] if run.groups else []
    endings = list(dict.fromkeys(one.ending for one in group))[:4]
    return Finding(
        "always_right",
        "error",
        f"The reward says yes to anything: every completion got {reward:g}",
        "Completions of the same prompt that end differently all got full marks, so the reward does not look at the "
        "answer.",
        "call the reward on a wrong answer and see what it says; check its pattern and its default return value",
        f"reward {reward:g} in all {len(run.steps)} steps; one group ends in {', '.join(map(repr, endings))}",
    )


def already_solved(run: Evidence) -> Finding | None:
    """Every completion is right, and those of a group agree."""
    reward = _always_the_same(run)
    agreement = _agreement(run.groups)
    if reward is None or reward <= 0 or agreement <= 0.5:
        return None
    return Finding(
        "already_solved",
        "error",
        f"The data set is solved already: every completion got {reward:g}",
        "The completions of a group agree and are all right, so no group teaches anything.",
        "harder prompts (`groupwise eval` shows which the model fails), or algorithm.filter: dynamic_sampling",
        f"reward {reward:g} in all {len(run.steps)} steps; {agreement:.0%} of completions end like most of their group",
    )


def groups_teach_nothing(run: Evidence) -> Finding | None:
    """Most groups are all right or all wrong."""
    flat = run.series("frac_reward_zero_std")[-5:]
    if not len(flat) or flat.mean() < IDLE_GROUPS or _always_the_same(run) is not None:
        return None
    best = max((one.reward for one in run.completions if one.valid), default=0.0)
    same = [group[0].reward for group in run.groups if len({one.reward for one in group}) == 1]
    right = sum(reward >= best for reward in same)
    return Finding(
        "groups_teach_nothing",
        "warning",
        f"{flat.mean():.0%} of the completions are in groups that teach nothing",
        "A group whose rewards are all equal has no better and no worse completion: its advantages are 0.",
        "prompts the model sometimes gets right; a larger group_size; algorithm.filter: dynamic_sampling",
        f"frac_reward_zero_std {flat.mean():.2f} in the last {len(flat)} steps; of {len(same)} such groups stored, "
        f"{right} have the best reward and {len(same) - right} a lesser one",
    )


def reward_is_length(run: Evidence) -> Finding | None:
    """Within a group, the reward follows the length and nothing else."""
    lengths, rewards = run.within_groups(lambda one: one.length), run.within_groups(lambda one: one.reward)
    found = correlation(lengths, rewards)
    if len(rewards) < FEWEST or abs(found) <= LOCKSTEP:
        return None
    which = "longer" if found > 0 else "shorter"
    return Finding(
        "reward_is_length",
        "error",
        f"The reward is the length: {which} completions always get more",
        "What the text says hardly matters to its reward, so the policy learns its length alone.",
        "a reward that reads the answer; length as a small algorithm.shaping beside it",
        f"correlation of reward and length within groups {found:+.2f} over {len(rewards)} completions",
    )


def rewards_fight(run: Evidence) -> Finding | None:
    """Two rewards pull in opposite directions."""
    parts = {name: run.within_groups(lambda one, name=name: _known(one, name)) for name in run.reward_names}
    for a, b in combinations(parts, 2):
        found = correlation(parts[a], parts[b])
        if len(parts[a]) >= FEWEST and found < OPPOSED:
            return Finding(
                "rewards_fight",
                "warning",
                f"The rewards {a} and {b} pull against each other",
                "What raises one lowers the other, so a good part of both cancels out in the sum.",
                "smaller weight for the lesser one, or one reward that says what is wanted of both",
                f"correlation within groups {found:+.2f} over {len(parts[a])} completions",
            )
    return None


def one_reward_decides(run: Evidence) -> Finding | None:
    """One of several rewards has nearly all of the spread that advantages are made of."""
    names = run.reward_names
    weights = [float(reward.get("weight", 1.0)) for reward in run.setting("rewards", [])]
    if len(names) < 2 or len(weights) != len(names) or len(run.within_groups(lambda one: one.reward)) < FEWEST:
        return None
    spread = {
        name: weight**2 * float(run.within_groups(lambda one, name=name: _known(one, name)).var())
        for name, weight in zip(names, weights, strict=True)
    }
    first, total = max(spread, key=spread.__getitem__), sum(spread.values())
    if total == 0 or spread[first] <= DECIDES * total:
        return None
    return Finding(
        "one_reward_decides",
        "warning",
        f"The reward {first} decides alone",
        "The others hardly differ within a group, so they have no part in the advantages.",
        "other weights, or algorithm.combine: normalize_then_sum (GDPO), which gives each reward its own scale",
        "share of the variance within groups: " + ", ".join(f"{name} {v / total:.1%}" for name, v in spread.items()),
    )


def held_out_falls(run: Evidence) -> Finding | None:
    """The reward rises while held-out accuracy falls."""
    found = trend(run.series("reward"))
    name = f"eval/{run.reward_names[0]}" if run.reward_names else ""
    held_out = [value for record in run.evaluations if (value := record.get(name)) is not None]
    if found is None or not found.rises or len(held_out) < 2 or held_out[-1] > held_out[0] - FORGOTTEN:
        return None
    return Finding(
        "held_out_falls",
        "warning",
        "The reward rises while held-out accuracy falls: a sign of reward hacking",
        "The policy finds what the reward pays for on the training prompts, and that is not what is meant.",
        "read the best-paid completions of the last step; mend the reward; more prompts; a KL to the reference",
        f"reward {found.text}; {name} {held_out[0]:.3f} at first, {held_out[-1]:.3f} at last",
    )


def invalid_rewards(run: Evidence) -> Finding | None:
    """Some completions have no trustworthy reward."""
    share = run.series("invalid")
    if not len(share) or share.mean() == 0:
        return None
    problem = next((one.problem for one in run.completions if not one.valid), "")
    return Finding(
        "invalid_rewards",
        "error" if share.mean() > 0.1 else "warning",
        f"{share.mean():.1%} of the completions have no trustworthy reward",
        "A reward function failed on them; they are left out of the statistics and of the loss.",
        "call the reward on the completion that failed, and mend it",
        f"invalid {share.mean():.3f} over {len(share)} steps" + (f"; {problem}" if problem else ""),
    )


def _known(one: Sampled, name: str) -> float:
    return float(np.nan_to_num(one.rewards.get(name, 0.0)))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"...{text[-57:]}"
