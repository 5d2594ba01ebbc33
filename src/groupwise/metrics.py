"""The numbers of a step: of its rollouts, of its updates, of the time and the memory it took."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from groupwise.groups import by_group, zero_variance
from groupwise.records import Rollout

Metrics = dict[str, float]
Faults = Counter[tuple[str, str]]
"""How often each (reward function, cause) was met."""


def describe(rollouts: Sequence[Rollout], step: int) -> Metrics:
    """The metrics of a step's rollouts; `reward_std` is the mean spread within a group.  `docs/metrics.md` has each."""
    valid = [rollout for rollout in rollouts if rollout.valid]
    rewards = [rollout.reward for rollout in valid]
    groups = [[rollout.reward for rollout in group] for group in by_group(valid).values()]
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    sampled = [r.entropies[r.loss_mask] for r in rollouts if r.entropies is not None]
    lengths = [rollout.num_completion_tokens for rollout in rollouts]
    ages = [step - rollout.policy_version for rollout in rollouts]
    return {
        "reward": _mean(rewards),
        **{f"reward/{name}": _mean([r.rewards[name] for r in rollouts if name in r.rewards]) for name in names},
        "reward_std": _mean([float(np.std(group, ddof=1)) for group in groups if len(group) > 1]),
        "frac_reward_zero_std": _mean(zero_variance(valid)),
        "completion_length": _mean(lengths),
        "truncated": _mean([rollout.truncated for rollout in rollouts]),
        "invalid": _mean([not rollout.valid for rollout in rollouts]),
        **{f"invalid/{name}": 0.0 for name in names},
        **_invalid(faults_of(rollouts), len(rollouts)),
        "entropy": _mean(np.concatenate(sampled)) if sampled else math.nan,
        "age": float(max(ages)),
        "age/mean": _mean(ages),
        "completion_tokens": float(sum(lengths)),
    }


def faults_of(rollouts: Sequence[Rollout]) -> Faults:
    """What kept the reward functions from a verdict."""
    return Counter(fault for rollout in rollouts for fault in rollout.faults.items())


def _invalid(faults: Faults, completions: int) -> Metrics:
    """The share of completions on which a reward function has no verdict, in all and for each cause."""
    rates: Metrics = {}
    for (name, cause), count in sorted(faults.items()):
        rates[f"invalid/{name}"] = rates.get(f"invalid/{name}", 0.0) + count / completions
        rates[f"invalid/{name}/{cause}"] = count / completions
    return rates


def in_words(faults: Faults, completions: int) -> str:
    """`math_answer 17.0% (raised 10.0%, timeout 7.0%)` for each reward function that had faults."""
    rates = _invalid(faults, completions)
    words: list[str] = []
    for name in dict.fromkeys(name for name, _ in sorted(faults)):
        whole = f"invalid/{name}"
        causes = [f"{cause} {rates[f'{whole}/{cause}']:.1%}" for by, cause in sorted(faults) if by == name]
        words.append(f"{name} {rates[whole]:.1%} ({', '.join(causes)})")
    return ", ".join(words)


def of_updates(updates: Sequence[Mapping[str, float]]) -> Metrics:
    """The mean of each metric of a step's optimizer steps, and how many of them were left out: those without any."""
    left_out = sum(not update for update in updates)
    names = dict.fromkeys(name for update in updates for name in update)
    means = {name: _mean([update[name] for update in updates if name in update]) for name in names}
    return ({"skipped_updates": float(left_out)} if left_out else {}) | means


def _mean(values: Sequence[float] | np.ndarray) -> float:
    said = [float(value) for value in values if math.isfinite(value)]
    return sum(said) / len(said) if said else math.nan


class Laps:
    """Where the time goes: what passed since the end of one phase was spent on the next."""

    def __init__(self) -> None:
        self._taken: Metrics = {}
        self.begin()

    def begin(self) -> None:
        """What took the time until now belongs to no phase."""
        self._began = time.perf_counter()

    def end(self, phase: str) -> None:
        """The time since the last call was spent on this phase."""
        now = time.perf_counter()
        self._taken[phase] = self._taken.get(phase, 0.0) + now - self._began
        self._began = now

    def take(self) -> Metrics:
        """The seconds of all phases and of each, counted anew from here."""
        taken, self._taken = self._taken, {}
        return {"seconds": sum(taken.values())} | {f"seconds/{phase}": seconds for phase, seconds in taken.items()}


def peak_memory() -> Metrics:
    """The most memory held so far, in GiB: by this process, and on its GPU where it has one."""
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in, in bytes
    peak = {"memory/host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    return peak | ({"memory/gpu": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_initialized() else {})
