"""The laws of the formula, for every preset, in float64: nothing about how a step is computed changes its result."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from groupwise.advantages import (
    BatchMean,
    BatchStd,
    Gae,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    MovingMean,
    group_is_flat,
    normalise,
    of_group,
)
from groupwise.algorithms import Algorithm
from groupwise.batching import weigh
from groupwise.combinations import cautions
from groupwise.losses import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    LossInputs,
    Reinforce,
    Sapo,
    Topr,
    Unclipped,
    Vespo,
)
from groupwise.penalties import (
    KL,
    EntropyBonus,
    ValueLoss,
)
from groupwise.presets import DAPO, GRPO, GSPO, PRESETS
from groupwise.records import Batch, Rollout, collate
from groupwise.shaping import (
    KimiLength,
    SoftOverlong,
)
from groupwise.slots import replace
from groupwise.weights import Importance, MicrobatchTokenMean, SequenceMean, TokenMean

EXACT = {"rtol": 1e-10, "atol": 1e-12}
PRESET_NAMES = sorted(PRESETS)
SURROGATES = [Clip(), Clip(dual=3.0), Unclipped(), Cispo(), Sapo(), Gmpo(), Topr(), Reinforce(), Dppo(), Vespo()]


def preset(name: str) -> Algorithm:
    return PRESETS[name].resolve(max_tokens=9)


def some_rollouts(seed: int = 0, groups: int = 4, group_size: int = 3, prompt: int = 2) -> list[Rollout]:
    """Ragged rollouts with every field an algorithm may read; the first group is flat, one rollout is not valid."""
    rng = np.random.default_rng(seed)
    made: list[Rollout] = []
    for i in range(groups * group_size):
        length = int(rng.integers(1, 7))
        group = i // group_size

        def column(low: float, high: float, length: int = length) -> np.ndarray:
            return np.concatenate([np.zeros(prompt), rng.uniform(low, high, length)])

        rollout = column(-3, -0.1)
        parts = {"right": float(rng.integers(0, 2)), "form": float(rng.uniform())}
        made.append(
            Rollout(
                tokens=np.concatenate([np.arange(prompt), rng.integers(0, 50, length)]).astype(np.int32),
                loss_mask=np.arange(prompt + length) >= prompt,
                logprobs=rollout,
                group=group,
                finish_reason="length" if i % 5 == 4 else "stop",
                rewards=parts,
                reward=0.3 if group == 0 else sum(parts.values()) / 2,
                valid=i != 4,
                step_rewards=((prompt + length - 1, float(rng.uniform())),) if length < 3 else
                ((prompt + 1, float(rng.uniform())), (prompt + length - 1, float(rng.uniform()))),
                old_logprobs=rollout + np.where(np.arange(prompt + length) >= prompt, rng.normal(0, 0.1), 0.0),
                ref_logprobs=column(-3, -0.1),
                values=column(0, 1),
                entropies=column(0, 2),
            )
        )  # fmt: skip
    return made


def forward(table: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A policy with one parameter per (token, position parity): log-probs and entropies [B, T], differentiable."""
    positions = torch.arange(batch.tokens.shape[1]) - (batch.loss_mask.int().argmax(-1, keepdim=True))
    index = batch.tokens * 2 + positions.abs() % 2
    return -table[index].abs() - 0.05, table[index] ** 2


def step_gradient(
    algorithm: Algorithm, batches: list[Batch], splits: list[list[list[int]]] | None = None
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of optimizer steps, each computed in the parts that `splits` names."""
    table = (torch.sin(torch.arange(100, dtype=torch.float64)) * 1.5).requires_grad_()
    total, sums = 0.0, {}
    for number, batch in enumerate(batches):
        parts = splits[number] if splits is not None else [list(range(len(batch)))]
        for rows in filter(None, parts):
            part = batch.rows(torch.tensor(rows, dtype=torch.int64))
            loss, metrics = algorithm.loss(*forward(table, part), part)
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
            for name, value in metrics.items():
                sums[name] = sums.get(name, torch.zeros(2)) + value
    means = {name: (value[0] / value[1].clamp(min=1)).item() for name, value in sums.items()}
    return total, torch.zeros(100) if table.grad is None else table.grad, means


def assert_same(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one[0], other[0], **EXACT)
    np.testing.assert_allclose(one[1], other[1], **EXACT)
    assert one[2].keys() == other[2].keys()
    for name in one[2]:
        np.testing.assert_allclose(one[2][name], other[2][name], **EXACT, err_msg=name)


def batches_of(algorithm: Algorithm, rollouts: list[Rollout], count: int = 1) -> list[Batch]:
    return list(algorithm.batches(algorithm.credit(rollouts), count, torch.float64))


@pytest.mark.parametrize("name", PRESET_NAMES)
@pytest.mark.parametrize("updates", [1, 2])
def test_any_split_into_microbatches_or_ranks_gives_the_same_step(name: str, updates: int) -> None:
    batches = batches_of(preset(name), some_rollouts(), updates)
    whole = step_gradient(preset(name), batches)
    rng = np.random.default_rng(1)
    for _ in range(5):
        splits = []
        for batch in batches:
            order = rng.permutation(len(batch)).tolist()
            places = np.arange(1, max(len(order), 2))
            cuts = sorted(rng.choice(places, size=min(3, max(len(order) - 1, 0)), replace=False))
            splits.append([part.tolist() for part in np.split(np.array(order, dtype=int), cuts) if len(part)])
        assert_same(step_gradient(preset(name), batches, splits), whole)


@pytest.mark.parametrize("name", [n for n in PRESET_NAMES if n != "bnpo_trl"])
def test_the_order_of_rollouts_does_not_matter(name: str) -> None:
    rollouts = some_rollouts()
    shuffled = [rollouts[i] for i in np.random.default_rng(2).permutation(len(rollouts))]
    assert_same(
        step_gradient(preset(name), batches_of(preset(name), shuffled)),
        step_gradient(preset(name), batches_of(preset(name), rollouts)),
    )


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_padding_does_not_matter(name: str) -> None:
    algorithm = preset(name)
    batches = batches_of(algorithm, some_rollouts())

    def wider(tensor: Tensor) -> Tensor:
        # Garbage, not zeros: padding must never be looked at.
        fill = True if tensor.dtype == torch.bool else 7
        junk = torch.full((len(tensor), 3), fill).to(tensor.dtype)
        return torch.cat([tensor, junk], 1) if tensor.ndim == 2 else tensor

    padded = []
    for batch in batches:
        wide = batch.map(wider)
        mask = wide.loss_mask.clone()
        mask[:, batch.tokens.shape[1] :] = False
        weights = wide.weights.where(mask, 0.0)
        padded.append(dataclasses.replace(wide, loss_mask=mask, weights=weights, lengths=batch.lengths + 3))
    assert_same(step_gradient(algorithm, padded), step_gradient(algorithm, batches))


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_the_prompt_is_not_part_of_the_loss(name: str) -> None:
    short, long = (batches_of(preset(name), some_rollouts(prompt=prompt)) for prompt in (1, 6))
    one, other = step_gradient(preset(name), short), step_gradient(preset(name), long)
    np.testing.assert_allclose(one[0], other[0], **EXACT)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_flat_group_has_no_advantage_and_an_invalid_rollout_none_either(name: str) -> None:
    algorithm = replace(preset(name), whiten=None) if PRESETS[name].whiten else preset(name)
    if algorithm.shaping is not None:
        algorithm = replace(algorithm, shaping=None)
    credited = algorithm.credit(some_rollouts())
    # A KL in the reward, process rewards and several reward functions make the flat group not flat any more.
    kl_in_reward = algorithm.kl is not None and algorithm.kl.placement != "loss"
    if of_group(algorithm.baseline) and not kl_in_reward and algorithm.supervision == "outcome" and (
        algorithm.combine == "sum_then_normalize"
    ):  # fmt: skip
        assert all(not r.advantages.any() for r in credited if r.group == 0)
    assert not credited[4].advantages.any()
    assert any(r.advantages.any() for r in credited)


def test_rollouts_without_a_trustworthy_reward_change_nothing_for_the_others() -> None:
    rollouts = some_rollouts()
    broken = [dataclasses.replace(r, reward=math.nan) if not r.valid else r for r in rollouts]
    without = [r for r in rollouts if r.valid]
    for name in ("grpo", "dapo", "rloo", "reinforce_pp", "gdpo", "grpo_process"):
        assert_same(
            step_gradient(preset(name), batches_of(preset(name), broken)),
            step_gradient(preset(name), batches_of(preset(name), without)),
        )


def test_leaving_out_dead_rows_is_exact() -> None:
    algorithm = Algorithm()
    credited = algorithm.credit(some_rollouts())
    pruned = list(algorithm.batches(credited, 1, torch.float64))
    kept = [r for r in credited if r.valid]
    whole = weigh(algorithm, kept, collate(kept, torch.float64))
    assert len(pruned[0]) < len(whole)
    one, other = step_gradient(algorithm, pruned), step_gradient(algorithm, [whole])
    np.testing.assert_allclose(one[0], other[0], **EXACT)
    np.testing.assert_allclose(one[1], other[1], **EXACT)


@pytest.mark.parametrize("algorithm", [GRPO, Algorithm(entropy=EntropyBonus(coef=0.01))], ids=["kl", "entropy"])
def test_rows_that_a_penalty_acts_on_are_not_dead(algorithm: Algorithm) -> None:
    assert sum(len(batch) for batch in batches_of(algorithm, some_rollouts())) == 11


def test_a_step_in_which_nothing_can_be_learned_is_still_a_step() -> None:
    flat = [dataclasses.replace(r, reward=1.0, valid=True) for r in some_rollouts()]
    batches = batches_of(Algorithm(), flat)
    assert [len(batch) for batch in batches] == [0]
    loss, gradient, metrics = step_gradient(Algorithm(), batches)
    assert loss == 0
    assert not gradient.any()
    assert all(math.isfinite(value) for value in metrics.values())
    assert batches_of(replace(Algorithm(), filter="drop_zero_variance"), flat) == []


# One step, on-policy -------------------------------------------------------------------------------------------------


def on_policy(surrogate: Any) -> Tensor:
    mask = torch.tensor([[0.0, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.float64)
    logprobs = (torch.tensor([[0, -0.5, -1, -2], [0, -0.1, -3, 0]], dtype=torch.float64) * mask).requires_grad_()
    advantages = torch.tensor([[1.5], [-0.7]], dtype=torch.float64) * mask
    old = logprobs.detach()
    x = LossInputs(logprobs, old, old, None, advantages, torch.zeros_like(old), mask, logprobs - old)
    (surrogate(x)[0] * SequenceMean()(mask, torch.tensor([0, 0]))).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda s: s.type + ("_dual" if getattr(s, "dual", None) else ""))
def test_on_policy_every_surrogate_has_the_same_gradient(surrogate: Any) -> None:
    torch.testing.assert_close(on_policy(surrogate), on_policy(Reinforce()))


RATIOS = np.exp(np.linspace(math.log(0.05), math.log(20), 41))
WEIGHTS = {  # the gradient weight h(rho, A) of algorithms.md 1.2: d loss / d log pi = -A h
    "reinforce": (Reinforce(), lambda r, a: 1.0),
    "unclipped": (Unclipped(), lambda r, a: r),
    "clip": (Clip(low=0.2, high=0.3), lambda r, a: r * (r <= 1.3 if a > 0 else r >= 0.8)),
    "dual": (Clip(low=0.2, high=0.3, dual=3.0), lambda r, a: r * (r <= 1.3 if a > 0 else 0.8 <= r <= 3.0)),
    "cispo": (Cispo(floor=0.5, cap=4.0), lambda r, a: min(max(r, 0.5), 4.0)),
    "topr": (Topr(), lambda r, a: 1.0 if a > 0 else min(r, 1.0)),
    "sapo": (Sapo(), lambda r, a: 4 * r * _bell((1.0 if a > 0 else 1.05) * (r - 1))),
    "vespo": (Vespo(), lambda r, a: r ** (2 if a > 0 else 3) * math.exp((3 if a > 0 else 2) * (1 - r))),
    "gmpo": (Gmpo(low=0.4, high=0.4), lambda r, a: r * (math.log(r) <= 0.4 if a > 0 else math.log(r) >= -0.4)),
}


def _bell(z: float) -> float:
    s = 1 / (1 + math.exp(-z))
    return s * (1 - s)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("advantage", [1.3, -0.8])
def test_the_gradient_weight_of_each_surrogate(name: str, advantage: float) -> None:
    surrogate, weight = WEIGHTS[name]
    log_ratio = torch.tensor(np.log(RATIOS), dtype=torch.float64)[:, None]
    logprobs = (log_ratio - 1).requires_grad_()
    old = torch.full_like(log_ratio, -1.0)
    ones = torch.ones_like(old)
    x = LossInputs(logprobs, old, old, None, advantage * ones, 0 * ones, ones, logprobs - old)
    surrogate(x)[0].sum().backward()
    assert logprobs.grad is not None
    expected = [-advantage * weight(r, advantage) for r in RATIOS]
    np.testing.assert_allclose(logprobs.grad.squeeze(-1), expected, rtol=1e-9)


# Hostile numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    algorithm = preset(name)
    for batch in batches_of(algorithm, some_rollouts()):
        new = torch.full(batch.tokens.shape, -1000.0, dtype=torch.float64).requires_grad_()
        for shift in (0.0, 999.0):
            loss, metrics = algorithm.loss(new + shift, torch.zeros_like(new), batch)
            loss.backward()
            assert new.grad is not None
            assert torch.isfinite(loss)
            assert torch.isfinite(new.grad).all()
            assert all(torch.isfinite(value).all() for value in metrics.values())


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_garbage_behind_the_mask_reaches_nothing(name: str) -> None:
    algorithm = preset(name)
    for batch in batches_of(algorithm, some_rollouts()):
        clean = torch.full(batch.tokens.shape, -0.7, dtype=torch.float64)
        dirty = clean.masked_fill(~batch.loss_mask, math.nan).requires_grad_()
        loss, _ = algorithm.loss(dirty, dirty, batch)
        loss.backward()
        assert dirty.grad is not None
        torch.testing.assert_close(loss.detach(), algorithm.loss(clean, clean, batch)[0])
        assert torch.isfinite(dirty.grad).all()


@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 12))
@settings(max_examples=50, deadline=None)
def test_equal_rewards_have_advantage_exactly_zero(value: float, size: int) -> None:
    rewards = np.full(size, np.float32(value)).astype(np.float64)
    groups = np.zeros(size, dtype=np.int64)
    for baseline in (GroupMean(), LeaveOneOut()):
        assert not normalise(rewards, groups, np.ones(size), baseline, GroupStd(eps=0.0)).any()


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.floats(0.1, 10), st.floats(-5, 5))
@settings(max_examples=50, deadline=None)
def test_identities_of_the_baselines(values: list[float], a: float, b: float) -> None:
    rewards, groups = np.array(values), np.zeros(len(values), dtype=np.int64)
    lengths, size = np.ones(len(values)), len(values)
    mean = normalise(rewards, groups, lengths, GroupMean(), None)
    np.testing.assert_allclose(mean.sum(), 0, atol=1e-9)
    loo = normalise(rewards, groups, lengths, LeaveOneOut(), None)
    np.testing.assert_allclose(loo, mean * size / (size - 1), rtol=1e-9, atol=1e-9)
    if np.ptp(rewards) > 1e-3:
        scaled = normalise(rewards, groups, lengths, GroupMean(), GroupStd(eps=0.0))
        moved = normalise(a * rewards + b, groups, lengths, GroupMean(), GroupStd(eps=0.0))
        np.testing.assert_allclose(moved, scaled, rtol=1e-6, atol=1e-6)
        population = normalise(rewards, groups, lengths, GroupMean(), GroupStd(ddof=0, eps=0.0))
        np.testing.assert_allclose(population, scaled * math.sqrt(size / (size - 1)), rtol=1e-9)


def test_a_baseline_that_is_not_of_the_group_leaves_flat_groups_their_advantage() -> None:
    rewards, groups = np.array([1.0, 1, 0, 0]), np.array([0, 0, 1, 1])
    for baseline in (BatchMean(), MovingMean(mean=0.5)):
        np.testing.assert_allclose(normalise(rewards, groups, np.ones(4), baseline, None), [0.5, 0.5, -0.5, -0.5])


def test_a_flat_group_is_not_divided_by_its_spread_whatever_the_baseline() -> None:
    rewards, groups = np.array([1.0, 1, 0, 1]), np.array([0, 0, 1, 1])
    for baseline in (None, BatchMean(), MovingMean(mean=0.5)):
        assert not normalise(rewards, groups, np.ones(4), baseline, GroupStd())[:2].any()
        assert np.abs(normalise(rewards, groups, np.ones(4), baseline, GroupStd())).max() < 2
    assert not normalise(np.ones(4), groups, np.ones(4), None, BatchStd()).any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "grpo_v32"])
def test_a_coefficient_of_zero_switches_the_kl_off(name: str) -> None:
    kl = PRESETS[name].kl
    assert kl is not None
    off, none = replace(PRESETS[name], kl=replace(kl, coef=0.0)), replace(PRESETS[name], kl=None)
    assert off.needs(1) == none.needs(1) == set()
    bare = [dataclasses.replace(r, old_logprobs=None, ref_logprobs=None) for r in some_rollouts()]
    assert_same(step_gradient(off, batches_of(off, bare)), step_gradient(none, batches_of(none, bare)))


def test_shaping_judges_the_reward_and_not_its_distance_from_the_greedy_one() -> None:
    algorithm = Algorithm(baseline=None, scale=None, greedy_baseline=True, shaping=KimiLength())
    rollouts = [dataclasses.replace(r, valid=True, reward=1.0, greedy_reward=1.0) for r in some_rollouts()]
    earned = [float(r.advantages[-1]) for r in algorithm.credit(rollouts)]  # type: ignore[index]
    # All are right, so the shortest gains half a point, and none is held to what a wrong answer may get.
    assert max(earned) == 0.5


def test_coefficients_that_follow_the_run_move_from_step_to_step() -> None:
    rollouts = some_rollouts()
    mean = float(np.mean([r.reward for r in rollouts if r.valid]))
    moved = Algorithm(baseline=MovingMean(decay=0.9, mean=1.0), scale=None).adapt(rollouts)
    assert isinstance(moved.baseline, MovingMean)
    assert moved.baseline.mean == pytest.approx(0.9 + 0.1 * mean)
    low, high = (Algorithm(entropy=EntropyBonus(coef=0.1, target=t, delta=0.01)).adapt(rollouts) for t in (0.5, 1.5))
    assert low.entropy is not None
    assert high.entropy is not None
    assert (low.entropy.coef, low.entropy.acting) == (pytest.approx(0.09), False)
    assert (high.entropy.coef, high.entropy.acting) == (pytest.approx(0.11), True)
    assert Algorithm().adapt(rollouts) == Algorithm()


def test_no_rollouts_have_no_flat_groups() -> None:
    assert group_is_flat(np.zeros(0), np.zeros(0, dtype=np.int64)).tolist() == []


def test_soft_overlong_is_the_papers_table() -> None:
    lengths = np.array([0.0, 5, 6, 7, 8, 10, 11, 50])
    shaping = SoftOverlong(limit=10, cache_fraction=0.4)
    penalty = shaping(np.zeros(8), np.zeros(8, dtype=np.int64), lengths, lengths >= 10)
    np.testing.assert_allclose(penalty, [0, 0, 0, -0.25, -0.5, -1, -1, -1])


# Combinations --------------------------------------------------------------------------------------------------------

REFUSED = {
    "k1 in the loss": {"kl": KL(estimator="k1")},
    "k3 in the reward": {"kl": KL(estimator="k3", placement="reward_sequence")},
    "twice corrected": {"anchor": "rollout", "correction": Importance(mode="mask")},
    "gmpo with a token mean": {"surrogate": Gmpo(), "aggregate": TokenMean()},
    "sequence ratio with process rewards": {"ratio": "sequence", "supervision": "process"},
    "gae without a critic": {"credit_over_time": Gae()},
    "a critic and a baseline": {"credit_over_time": Gae(), "critic": ValueLoss()},
    "gdpo with shaping": {"combine": "normalize_then_sum", "shaping": SoftOverlong()},
    "a refreshed reference that nothing uses": {"kl": KL(estimator="k2", to="old", refresh_every=10)},
    "k3 of a whole completion": {"kl": KL(level="sequence")},
    "process rewards with shaping": {"supervision": "process", "shaping": SoftOverlong()},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_right_is_refused_with_the_way_out(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"use |set |remove |needs "):
        Algorithm(**changes)


def test_what_is_rarely_meant_is_said() -> None:
    assert not [text for applies, text in cautions(GSPO) if applies]
    assert [text for applies, text in cautions(replace(GSPO, surrogate=Clip())) if applies]
    assert [text for applies, text in cautions(replace(DAPO, drop_truncated=True)) if applies]


def test_only_what_a_slot_reads_is_computed() -> None:
    assert Algorithm().needs(1) == set()
    assert Algorithm().needs(2) == {"old_logprobs"}
    assert GRPO.needs(1) == {"ref_logprobs"}
    assert PRESETS["rloo"].needs(1) == {"old_logprobs", "ref_logprobs"}


def test_an_algorithm_is_a_value_that_code_can_extend() -> None:
    def soft(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -torch.tanh(x.log_ratio.exp()) * x.advantages, {}

    mine = replace(DAPO, surrogate=soft)
    assert mine != DAPO
    assert replace(mine, surrogate=DAPO.surrogate) == DAPO
    batches = batches_of(mine.resolve(9), some_rollouts())
    assert math.isfinite(step_gradient(mine.resolve(9), batches)[0])
    with pytest.raises(ValidationError, match="clip_hihg"):
        replace(DAPO, clip_hihg=0.3)


def test_microbatch_token_mean_depends_on_order_alone() -> None:
    mask = torch.tensor([[1.0, 1], [1, 0], [1, 1]])
    weights = MicrobatchTokenMean(rows=2)(mask, torch.zeros(3))
    torch.testing.assert_close(weights, torch.tensor([[1 / 6, 1 / 6], [1 / 6, 0], [1 / 4, 1 / 4]]))
