"""What samples of answers say of a model, and how sure that is: pass@k, maj@k, intervals, and paired tests.

P prompts with n samples each, of which k are imagined to be drawn.  Estimates are exact expectations over all subsets
of k samples, not draws of some; what is drawn at random (resamples, signs) follows from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from groupwise.seeding import generator

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

MOST_SAMPLES = 1024
"""Of a prompt: the number of subsets of more is no longer a float."""
RESAMPLES = 10_000
_AT_ONCE = 2**22
"""Numbers drawn at a time."""


# k of n samples ------------------------------------------------------------------------------------------------------


def pass_at_k(right: Ints, samples: int, k: int) -> Floats:
    """float[P]: the chance that one of k samples is right, `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374, eq. 1).

    Args:
        right: int[P], how many of each prompt's samples are right.
        samples: n >= k.
    """
    chances = [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in range(samples + 1)]
    return np.array(chances)[right]


def maj_at_k(votes: Ints, right: Floats, k: int) -> Floats:
    """float[P]: the chance that the answer that most of k samples give is right (self-consistency, arXiv:2203.11171).

    It is the mean over all C(n, k) subsets of the samples.  Of answers with equally many votes each is taken equally
    often.  Samples without an answer do not vote, and a subset in which none votes is wrong.  An answer is as right as
    the mean of the samples that give it, so that maj@1 is pass@1 where every right sample has an answer.

    Args:
        votes: int[P, n], the number of each sample's answer among those of its prompt; -1: it has none.
        right: float[P, n], 0 or 1.
    """
    return np.array([_majority(*prompt, k) for prompt in zip(votes, right, strict=True)])


def _majority(votes: Ints, right: Floats, k: int) -> float:
    answers = [votes == answer for answer in range(int(votes.max()) + 1)]
    counts = [int(given.sum()) for given in answers]
    silent = len(votes) - sum(counts)
    chance = 0.0
    for answer, given in enumerate(answers):
        worth = float(right[given].mean()) if counts[answer] else 0.0
        if worth:
            others = sorted(count for other, count in enumerate(counts) if other != answer and count)
            chance += worth * _wins(counts[answer], tuple(others), silent, k)
    return chance


@lru_cache(maxsize=65536)
def _wins(own: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """The chance that an answer has most votes of a subset of k, where a tie among t + 1 answers counts 1 / (t + 1).

    The subsets in which it has v votes are counted answer by answer: the number of ways to choose so many samples of
    the others (columns) that t of them have v votes, too (rows), and none has more.
    """
    total = 0.0
    for v in range(1, min(own, k) + 1):
        left = k - v
        ways = np.zeros((left // v + 1, left + 1))
        ways[0, : silent + 1] = [math.comb(silent, u) for u in range(min(silent, left) + 1)]
        for count in others:
            fewer = np.zeros_like(ways)
            for u in range(min(v, count + 1, left + 1)):
                fewer[:, u:] += math.comb(count, u) * ways[:, : left + 1 - u]
            if v <= min(count, left):
                fewer[1:, v:] += math.comb(count, v) * ways[:-1, : left + 1 - v]
            ways = fewer
        total += math.comb(own, v) * float((ways[:, left] / np.arange(1, len(ways) + 1)).sum())
    return total / math.comb(own + sum(others) + silent, k)


# How sure ------------------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A mean over prompts, and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """By how much the mean of one model is above that of another on the same prompts."""

    mean: float
    low: float
    high: float
    p: float
    """How often chance alone would make a difference as large, were the models equally good."""
    test: str


def estimate(values: Floats, seed: int = 0) -> Estimate:
    """The mean of values[P] with `confidence_interval`."""
    return Estimate(float(values.mean()), *confidence_interval(values, seed))


def confidence_interval(values: Floats, seed: int = 0, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of the mean of values[P], one for each prompt.

    Wilson's where each is right or wrong, for there the bootstrap has no width at 0 and at 1; otherwise the bootstrap
    over prompts, whose samples are not independent of each other: the 2.5th and 97.5th percentile of `resampled`.
    """
    n, mean = len(values), float(values.mean())
    if not _right_or_wrong(values):
        return _percentiles(resampled(values, seed)) if n > 1 else (-math.inf, math.inf)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def resampled(values: Floats, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """float[resamples]: means of as many prompts as there are, drawn with replacement."""
    draw, n = generator(seed, "bootstrap"), len(values)
    rows = max(1, _AT_ONCE // n)
    sizes = [min(rows, resamples - first) for first in range(0, resamples, rows)]
    return np.concatenate([values[draw.integers(n, size=(size, n))].mean(1) for size in sizes])


def _percentiles(means: Floats) -> tuple[float, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _right_or_wrong(values: Floats) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


# One model against another -------------------------------------------------------------------------------------------


def difference(values: Floats, others: Floats, seed: int = 0) -> Difference:
    """values[P] against others[P], prompt by prompt; the interval is the bootstrap's over pairs.

    The test is McNemar's exact one where each prompt is right or wrong, else that of flipped signs.
    """
    apart = values - others
    interval = _percentiles(resampled(apart, seed)) if len(apart) > 1 else (-math.inf, math.inf)
    if _right_or_wrong(values) and _right_or_wrong(others):
        p, test = mcnemar(int((apart > 0).sum()), int((apart < 0).sum())), "McNemar's exact"
    else:
        p, test = sign_flips(apart, seed), "sign flips"
    return Difference(float(apart.mean()), *interval, p, test)


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value of so many prompts that only one of two models, or only the other, has right.

    Were they equally good, either would be the one with chance 1/2: twice the tail of a binomial distribution
    (McNemar 1947, doi:10.1007/BF02295996, in its exact form).
    """
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flips(differences: Floats, seed: int = 0, draws: int = RESAMPLES) -> float:
    """The two-sided p-value of the mean of differences[P]: how often random signs make it as large.

    Were the models equally good, either sign would be as likely for each prompt.  The observed signs count as one of
    the draws (Phipson and Smyth 2010, doi:10.2202/1544-6115.1585), so that it is never 0.
    """
    apart = np.abs(differences[differences != 0])
    if not len(apart):
        return 1.0
    observed = abs(float(differences.sum())) * (1 - 1e-9)  # a sum in another order is not quite the same
    draw, n = generator(seed, "sign flips"), len(apart)
    rows = max(1, _AT_ONCE // n)
    sizes = [min(rows, draws - first) for first in range(0, draws, rows)]
    sums = (np.abs((2.0 * draw.integers(2, size=(size, n)) - 1) @ apart) for size in sizes)
    return (1 + sum(int((found >= observed).sum()) for found in sums)) / (1 + draws)


def differences(values: Mapping[str, Floats], others: Mapping[str, Floats], seed: int = 0) -> dict[str, Difference]:
    """`difference` of each figure that both have."""
    return {name: difference(values[name], others[name], seed) for name in values if name in others}
