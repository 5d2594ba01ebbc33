"""The arithmetic of docs/sources.md: where the source documents and the papers disagree, one number each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from golden import PROMPT, credited, golden_files, padded, whole_batch
from numpy.testing import assert_allclose

from groupwise.advantages import (
    BatchStd,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    normalise,
)
from groupwise.foreign.trl import from_trl
from groupwise.losses import LossInputs, sequence_level, sequence_product_level
from groupwise.penalties import (
    KL,
    k1,
    k2,
    k3,
)
from groupwise.presets import DR_GRPO, GRPO, GRPO_TRL_DEFAULT
from groupwise.weights import Importance, SequenceMean, TokenMean

RIGHT_RIGHT_WRONG_WRONG = np.array([1.0, 1.0, 0.0, 0.0])


def advantages(rewards: list[float] | np.ndarray, scale: object, groups: list[int] | None = None) -> np.ndarray:
    values = np.array(rewards, dtype=np.float64)
    member = np.array(groups if groups is not None else [0] * len(values))
    return normalise(values, member, np.ones(len(values)), GroupMean(), scale)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(GroupStd(ddof=0, eps=0.0), 1.0), (GroupStd(), 0.866024), (GroupStd(eps=1e-4), 0.865875)],
    ids=["population", "sample", "TRL"],
)
def test_the_worked_example_needs_the_population_std(scale: GroupStd, expected: float) -> None:
    assert_allclose(advantages(RIGHT_RIGHT_WRONG_WRONG, scale), expected * np.array([1, 1, -1, -1]), atol=1e-6)


def test_dividing_by_the_groups_std_amplifies_answers_that_barely_differ() -> None:
    close, clear = [0.50, 0.51, 0.50, 0.51], [0.0, 1.0, 0.0, 1.0]
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    by_group, by_batch = advantages(close + clear, GroupStd(), groups), advantages(close + clear, BatchStd(), groups)
    assert by_group[1] / by_group[5] == pytest.approx(1.0, rel=1e-3)
    assert by_batch[1] / by_batch[5] == pytest.approx(0.01, rel=1e-9)


def test_dividing_by_the_std_weighs_one_right_of_eight_half_as_much_again_as_four_of_eight() -> None:
    def per_reward(right: int) -> float:
        return 1 / float(np.std([1.0] * right + [0.0] * (8 - right), ddof=1))

    assert per_reward(1) / per_reward(4) == pytest.approx(1.5119, abs=1e-4)
    assert per_reward(7) == pytest.approx(per_reward(1))


def test_leave_one_out_is_the_group_mean_times_g_over_g_minus_one() -> None:
    groups, ones = np.zeros(4, dtype=int), np.ones(4)
    loo = normalise(RIGHT_RIGHT_WRONG_WRONG, groups, ones, LeaveOneOut(), None)
    assert_allclose(loo, 4 / 3 * advantages(RIGHT_RIGHT_WRONG_WRONG, None))
    assert isinstance(DR_GRPO.baseline, GroupMean)


def test_long_answers_dominate_the_token_mean_and_not_the_mean_of_each_answer() -> None:
    mask, groups = (torch.arange(90) < torch.tensor([[10], [90]])).double(), torch.tensor([0, 0])
    assert_allclose(SequenceMean()(mask, groups).sum(-1), [0.5, 0.5])
    assert_allclose(TokenMean()(mask, groups).sum(-1), [0.1, 0.9])


@pytest.mark.parametrize(("aggregation", "expected"), [("seq-mean-token-mean", 0.087498), ("token-mean", 0.104155)])
def test_the_loss_of_the_article_is_another_than_grpos(aggregation: str, expected: float) -> None:
    file = golden_files()[0]
    fixture, axes = file["fixtures"]["F1"], file["axis_defaults"] | {"aggregation": aggregation}
    chosen, rollouts = credited(fixture, axes)
    new = padded(fixture["logp_new"], max(fixture["length"]) + PROMPT)
    loss, _ = chosen.loss(new, new, whole_batch(chosen, rollouts))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_the_length_bias_of_grpo_is_there_without_any_std() -> None:
    """A token of a wrong answer of 90 tokens is pushed down a ninth as hard as one of 10, with and without std."""
    mask, groups = (torch.arange(90) < torch.tensor([[10], [90]])).double(), torch.tensor([0, 0])
    weights = SequenceMean()(mask, groups)
    assert weights[0, 0] / weights[1, 0] == pytest.approx(9.0)
    assert_allclose(TokenMean()(mask, groups)[0, 0], TokenMean()(mask, groups)[1, 0])


def test_the_geometric_mean_of_ratios_stays_where_their_product_explodes() -> None:
    log_ratio, mask = torch.full((1, 100), 0.1, dtype=torch.float64), torch.ones(1, 100, dtype=torch.float64)
    assert sequence_level(log_ratio, mask).exp()[0, 0].item() == pytest.approx(1.105, abs=1e-3)
    assert sequence_product_level(log_ratio, mask).exp()[0, 0].item() == pytest.approx(22026, rel=1e-4)


def expected_gradient(estimator: str) -> torch.Tensor:
    """Of the KL slot in the loss, over all actions of a policy of three, with respect to its logits."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.3, -0.4], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    nothing = torch.zeros(3, 1, dtype=torch.float64)
    x = LossInputs(
        logp[:, None],
        logp.detach()[:, None],
        logp.detach()[:, None],
        ref[:, None],
        nothing,
        nothing,
        nothing + 1,
        nothing,
    )
    per_action = KL(estimator=estimator)(x)[:, 0] if estimator != "k1" else logp - ref  # type: ignore[arg-type]
    (logp.detach().exp() * per_action).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_k3_in_the_loss_has_the_gradient_of_the_forward_kl_and_k3_is_that_of_the_reverse() -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.3, -0.4], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (reverse,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), logits)
    assert_allclose(expected_gradient("k3"), forward, atol=1e-12)
    for estimator in ("k2", "k3_is"):
        assert_allclose(expected_gradient(estimator), reverse, atol=1e-12)
    assert_allclose(expected_gradient("k1"), torch.zeros(3), atol=1e-12)
    assert_allclose(reverse, [0.105758, -0.176650, 0.070892], atol=1e-6)
    assert_allclose(forward, [0.130381, -0.217779, 0.087397], atol=1e-6)
    assert GRPO.kl is not None
    assert GRPO.kl.estimator == "k3"


def test_in_the_reward_k1_has_the_gradient_of_the_reverse_kl_and_k2_and_k3_point_the_other_way() -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    d = logp - torch.tensor([0.0, 0.3, -0.4], dtype=torch.float64).log_softmax(-1)
    (reverse,) = torch.autograd.grad((logp.exp() * d).sum(), logits, retain_graph=True)
    for estimator in (k1, k2, k3):
        reward = estimator(d).detach()
        (found,) = torch.autograd.grad((logp.exp() * reward).sum(), logits, retain_graph=True)
        if estimator is k1:
            assert_allclose(found, reverse, atol=1e-12)
        else:
            assert (found.sign() == -reverse.sign()).all()


def test_a_reward_clip_of_ten_needs_a_group_of_102() -> None:
    """The largest normalised reward, that of the only right answer, is (G - 1) / sqrt(G)."""
    for size in (8, 101, 102):
        largest = advantages([1.0] + [0.0] * (size - 1), GroupStd(eps=0.0))[0]
        assert largest == pytest.approx((size - 1) / math.sqrt(size))
        assert (largest > 10) == (size >= 102)


def test_trls_default_correction_masks_sequences_and_does_not_truncate() -> None:
    found = from_trl({"use_vllm": True}).tree["algorithm"]["correction"]
    assert Importance.model_validate(found) == Importance(mode="mask", level="sequence", high=3.0)
    assert GRPO_TRL_DEFAULT.correction == Importance(mode="mask", level="sequence", high=3.0)
