"""How good a policy is on prompts: the mean of each reward, pass@k and maj@k; sampled and scored as in training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.chat import Chat
from groupwise.engines import Sampler, Sampling
from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards import PASSED, grades, votes
from groupwise.rollout import play
from groupwise.statistics import Floats, confidence_interval, maj_at_k, pass_at_k
from groupwise.tasks import Task


@dataclass(frozen=True)
class Scores:
    """The outcome of one evaluation.

    A prompt counts when the first reward function grades it, a completion without a verdict counts 0, and right is
    one of more than 0.5.
    """

    per_prompt: Mapping[str, Floats]
    """float[prompts] by the name of a figure.  First the mean of the first reward function over n samples, `greedy` or
    `mean@n`; then `pass@k`, and where that reward has an answer to vote on `maj@k`, for each k."""
    rows: Sequence[int]
    """The rows of the task that count, in the order of `per_prompt`."""
    means: Mapping[str, float]
    """Mean of each reward function, where it had a verdict."""
    completion_length: float
    """Mean, in tokens."""
    truncated: float
    """Fraction of completions that hit the length limit."""
    rollouts: Sequence[Rollout]

    @property
    def headline(self) -> float:
        """Mean of the first reward function, over the prompts that it grades and their samples."""
        return float(next(iter(self.per_prompt.values())).mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of `headline`."""
        return confidence_interval(next(iter(self.per_prompt.values())))

    @property
    def at_k(self) -> dict[str, float]:
        """The mean of each `pass@k` and `maj@k`."""
        return {name: float(values.mean()) for name, values in [*self.per_prompt.items()][1:]}

    @property
    def prompts(self) -> int:
        """Those that the first reward function grades."""
        return len(self.rows)


def evaluate(
    task: Task,
    sampler: Sampler,
    chat: Chat,
    *,
    sampling: Sampling,
    samples: int = 1,
    ks: Sequence[int] | None = None,
    seed: int = 0,
) -> Scores:
    """Answer every prompt of the task `samples` times and score the answers.

    The random stream is one of its own: evaluations neither repeat nor disturb the draws of training.

    Args:
        ks: of pass@k and maj@k, none above `samples`; None: 1, 2, 4, ... where there are several samples.

    Raises:
        RewardError: the first reward grades none of the prompts, or see `play`.
    """
    first, rows = task.rewards[0], range(len(task.rows))
    counting = [index for index in rows if grades(first, task.rows[index])]
    if not counting:
        raise RewardError(
            f"rewards.{first.title}: the first reward is the headline of an evaluation, and no row chooses it; put one "
            "first that grades these prompts"
        )
    rollouts = play(
        task, sampler, chat, rows, group_size=samples, sampling=sampling, seed=seed, step=0, stream="evaluation"
    )
    judged = [rollout for index in counting for rollout in rollouts[index * samples : (index + 1) * samples]]
    values = np.nan_to_num([rollout.rewards[first.title] for rollout in judged]).reshape(-1, samples)
    name = "greedy" if samples == 1 and sampling.temperature == 0 else f"mean@{samples}"
    ks = _powers_of_two(samples) if ks is None else ks
    ballots = votes(first, judged) if ks else None
    right = values > PASSED
    per_prompt = {name: values.mean(1), **{f"pass@{k}": pass_at_k(right.sum(1), samples, k) for k in ks}}
    if ballots is not None:
        cast = ballots.reshape(-1, samples)
        per_prompt |= {f"maj@{k}": maj_at_k(cast, right.astype(np.float64), k) for k in ks}
    return Scores(
        per_prompt=per_prompt,
        rows=counting,
        means={reward.title: _mean(rollouts, reward.title) for reward in task.rewards},
        completion_length=float(np.mean([rollout.num_completion_tokens for rollout in rollouts])),
        truncated=float(np.mean([rollout.truncated for rollout in rollouts])),
        rollouts=rollouts,
    )


def _powers_of_two(samples: int) -> list[int]:
    return [2**i for i in range(samples.bit_length())] if samples > 1 else []


def _mean(rollouts: Sequence[Rollout], name: str) -> float:
    said = [rollout.rewards[name] for rollout in rollouts if math.isfinite(rollout.rewards.get(name, math.nan))]
    return float(np.mean(said)) if said else math.nan
