"""How good a policy is on prompts: means of the rewards, a confidence interval, pass@k; sampled as in training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from groupwise.chat import Chat
from groupwise.engines import Sampler, Sampling
from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards import PASSED, grades
from groupwise.rollout import play
from groupwise.tasks import Task


@dataclass(frozen=True)
class Scores:
    """The outcome of one evaluation."""

    headline: float
    """Mean of the first reward function, over the prompts that it grades and their samples; a completion without a
    verdict counts 0."""
    interval: tuple[float, float]
    """95 % confidence interval of `headline`."""
    means: Mapping[str, float]
    """Mean of each reward function, where it had a verdict."""
    pass_at: Mapping[int, float]
    """Probability that at least one of k samples is right, for k = 1, 2, 4, ... up to the samples drawn."""
    prompts: int
    """Those that the first reward function grades."""
    completion_length: float
    """Mean, in tokens."""
    truncated: float
    """Fraction of completions that hit the length limit."""
    rollouts: Sequence[Rollout]


def evaluate(
    task: Task, sampler: Sampler, chat: Chat, *, sampling: Sampling, samples: int = 1, seed: int = 0
) -> Scores:
    """Answer every prompt of the task `samples` times and score the answers.

    The random stream is one of its own: evaluations neither repeat nor disturb the draws of training.

    Raises:
        RewardError: the first reward grades none of the prompts, or see `play`.
    """
    first = task.rewards[0].title
    graded = [index for index, row in enumerate(task.rows) if grades(task.rewards[0], row)]
    if not graded:
        raise RewardError(
            f"rewards.{first}: the first reward is the headline of an evaluation, and no row chooses it; put one first "
            "that grades these prompts"
        )
    rows = range(len(task.rows))
    rollouts = play(
        task, sampler, chat, rows, group_size=samples, sampling=sampling, seed=seed, step=0, stream="evaluation"
    )
    values = np.array([rollout.rewards[first] for rollout in rollouts])
    per_prompt = np.nan_to_num(values).reshape(len(rows), samples)[graded]
    return Scores(
        headline=float(per_prompt.mean()),
        interval=confidence_interval(per_prompt),
        means={reward.title: _mean(rollouts, reward.title) for reward in task.rewards},
        pass_at=pass_at_k((per_prompt > PASSED).sum(1), samples),
        prompts=len(graded),
        completion_length=float(np.mean([rollout.num_completion_tokens for rollout in rollouts])),
        truncated=float(np.mean([rollout.truncated for rollout in rollouts])),
        rollouts=rollouts,
    )


def confidence_interval(values: NDArray[np.float64], z: float = 1.96) -> tuple[float, float]:
    """95 % interval of the mean of values[prompts, samples].

    Wilson's for one right-or-wrong answer a prompt; otherwise from the spread between prompts, whose samples are not
    independent of each other.
    """
    n, mean = len(values), float(values.mean())
    if values.shape[1] == 1 and bool(np.isin(values, (0.0, 1.0)).all()):
        centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
        return max(centre - half, 0.0), min(centre + half, 1.0)
    half = z * float(values.mean(1).std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return mean - half, mean + half


def pass_at_k(right: NDArray[np.integer], samples: int) -> dict[int, float]:
    """The unbiased estimate `1 - C(n - c, k) / C(n, k)`, averaged over prompts (arXiv:2107.03374, eq. 1).

    `right` is int[prompts]: how many of a prompt's `samples` are right.
    """
    ks = [2**i for i in range(int(math.log2(samples)) + 1)]
    return {k: float(np.mean([1 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in right])) for k in ks}


def _mean(rollouts: Sequence[Rollout], name: str) -> float:
    said = [rollout.rewards[name] for rollout in rollouts if math.isfinite(rollout.rewards.get(name, math.nan))]
    return float(np.mean(said)) if said else math.nan
