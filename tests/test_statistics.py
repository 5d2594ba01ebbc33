"""Estimates equal what all subsets say, intervals cover as often as they promise, p-values are those of the books."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest

from groupwise.statistics import (
    MOST_SAMPLES,
    confidence_interval,
    difference,
    estimate,
    maj_at_k,
    mcnemar,
    pass_at_k,
    resampled,
    sign_flips,
)

NUMBERS = np.random.default_rng(0)


def majority_of(votes: np.ndarray, right: np.ndarray) -> float:
    """How right the answer is that most of these samples give, a tie being decided by lot; `right` is by answer."""
    counts = {answer: (votes == answer).sum() for answer in set(votes.tolist()) - {-1}}
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return float(np.mean([right[answer] for answer in winners])) if winners else 0.0


# k of n samples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(samples: int) -> None:
    for k in range(1, samples + 1):
        found = pass_at_k(np.arange(samples + 1), samples, k)
        for right in range(samples + 1):
            marks = np.arange(samples) < right
            subsets = [marks[list(subset)].any() for subset in combinations(range(samples), k)]
            assert found[right] == pytest.approx(np.mean(subsets), abs=1e-15)


@pytest.mark.parametrize("trial", range(12))
def test_maj_at_k_is_the_mean_over_all_subsets(trial: int) -> None:
    samples = 3 + trial % 6
    votes = NUMBERS.integers(-1, 1 + trial % 4, size=(3, samples))
    right = (NUMBERS.random((3, samples)) < 0.5).astype(float)
    for k in range(1, samples + 1):
        found = maj_at_k(votes, right, k)
        for prompt in range(3):
            worth = {a: right[prompt][votes[prompt] == a].mean() for a in set(votes[prompt].tolist())}
            subsets = [majority_of(votes[prompt][list(subset)], worth) for subset in combinations(range(samples), k)]
            assert found[prompt] == pytest.approx(np.mean(subsets), abs=1e-12)


def test_maj_at_all_samples_is_the_vote_itself_and_a_tie_is_shared() -> None:
    votes = np.array([[0, 0, 1, 2], [0, 0, 1, 1], [0, 1, 2, 3], [-1, -1, -1, 0], [-1, -1, -1, -1]])
    right = (votes == 0).astype(float)
    assert maj_at_k(votes, right, 4) == pytest.approx([1, 1 / 2, 1 / 4, 1, 0])


def test_maj_at_1_is_pass_at_1_where_right_samples_have_answers() -> None:
    votes = NUMBERS.integers(0, 4, size=(50, 9))
    right = (NUMBERS.random((50, 9)) < 0.3).astype(float)
    right_counts = right.sum(1).astype(int)
    assert maj_at_k(votes, right, 1) == pytest.approx(pass_at_k(right_counts, 9, 1))
    assert maj_at_k(votes, right, 1) == pytest.approx(right.mean(1))


def test_more_samples_help_a_right_plurality_and_hurt_a_wrong_one() -> None:
    votes = np.array([[0] * 5 + [1] * 3 + [2] * 2] * 2)
    right = np.stack([votes[0] == 0, votes[0] == 1]).astype(float)
    found = np.array([maj_at_k(votes, right, k) for k in (1, 3, 5, 7, 10)])
    assert (np.diff(found[:, 0]) > 0).all()
    assert (np.diff(found[1:, 1]) < 0).all()
    assert found[-1].tolist() == [1.0, 0.0]


def test_the_largest_number_of_samples_is_still_a_number() -> None:
    votes = np.array([[0] * (MOST_SAMPLES // 2) + [1] * (MOST_SAMPLES // 2)])
    right = (votes == 0).astype(float)
    half = MOST_SAMPLES // 2
    assert pass_at_k(np.array([half]), MOST_SAMPLES, 3)[0] == pytest.approx(1 - math.comb(half, 3) / math.comb(1024, 3))
    assert maj_at_k(votes, right, 64)[0] == pytest.approx(0.5, abs=1e-9)


# How sure ------------------------------------------------------------------------------------------------------------


def test_right_or_wrong_has_the_interval_of_wilson() -> None:
    low, high = confidence_interval(np.array([1.0] * 45 + [0.0] * 5))  # worked in Wilson 1927's formula by hand
    assert (low, high) == pytest.approx((0.7864, 0.9565), abs=1e-4)
    low, high = confidence_interval(np.ones(20))
    assert low == pytest.approx(20 / (20 + 1.96**2))
    assert high == 1


def test_an_interval_covers_the_truth_about_as_often_as_it_promises() -> None:
    draws = NUMBERS.beta(0.5, 0.8, size=(300, 60))
    intervals = [confidence_interval(values, seed) for seed, values in enumerate(draws)]
    covered = np.mean([low <= 0.5 / 1.3 <= high for low, high in intervals])
    assert 0.90 <= covered <= 0.98


def test_the_bootstrap_has_the_spread_of_the_mean_and_follows_from_its_seed() -> None:
    values = NUMBERS.random(400)
    means = resampled(values, 3)
    assert means.std() == pytest.approx(values.std() / math.sqrt(400), rel=0.05)
    assert means.mean() == pytest.approx(values.mean(), abs=1e-3)
    assert (means == resampled(values, 3)).all()
    assert (means != resampled(values, 4)).any()


def test_one_prompt_says_nothing_of_others() -> None:
    assert estimate(np.array([0.3])) == (0.3, -math.inf, math.inf)


# One model against another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (10, 2, 2 * (1 + 12 + 66) / 4096), (2, 10, 158 / 4096)],
)
def test_mcnemar_is_twice_the_tail_of_a_fair_coin(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == pytest.approx(p)


def test_flipped_signs_come_close_to_all_of_them() -> None:
    apart = NUMBERS.normal(0.4, 1, 12)
    sums = [abs(np.dot(signs, apart)) for signs in product((-1, 1), repeat=12)]
    exact = np.mean([value >= abs(apart.sum()) - 1e-9 for value in sums])
    assert sign_flips(apart) == pytest.approx(exact, abs=0.015)
    right_or_wrong = np.array([1.0] * 10 + [-1.0] * 2 + [0.0] * 30)
    assert sign_flips(right_or_wrong) == pytest.approx(mcnemar(10, 2), abs=0.01)


def test_equal_models_differ_significantly_one_time_in_twenty() -> None:
    pairs = NUMBERS.beta(0.5, 0.8, size=(300, 2, 40))
    assert np.mean([sign_flips(a - b, seed, 1000) <= 0.05 for seed, (a, b) in enumerate(pairs)]) == pytest.approx(
        0.05, abs=0.035
    )


def test_a_pair_is_compared_prompt_by_prompt() -> None:
    base = NUMBERS.random(200)
    better = base + 0.05 + NUMBERS.normal(0, 0.01, 200)
    found = difference(better, base)
    assert found.test == "sign flips"
    assert found.mean == pytest.approx(0.05, abs=0.003)
    assert 0.045 < found.low < found.mean < found.high < 0.055
    assert found.p < 0.001
    unpaired = [confidence_interval(values) for values in (better, base)]
    assert unpaired[0][0] < unpaired[1][1], "the two intervals overlap, and say nothing"


def test_right_or_wrong_is_compared_by_mcnemar() -> None:
    ours, theirs = np.array([1.0] * 12 + [0.0] * 8), np.array([1.0] * 2 + [0.0] * 18)
    found = difference(ours, theirs)
    assert (found.mean, found.p, found.test) == (0.5, 2 / 2**10, "McNemar's exact")
    same = difference(ours, ours)
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
