"""Every case of the golden file, and of any file named in GROUPWISE_GOLDEN_EXTRA, to 1e-9 in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from golden import PROMPT, algorithm, credited, golden_cases, golden_files, padded, whole_batch

from groupwise.batching import structurally_kept
from groupwise.presets import PRESETS
from groupwise.shaping import (
    KimiLength,
    SoftOverlong,
)

Case = Mapping[str, Any]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
HYPERPARAMETERS = {  # any numbers: the presets of the file name the choices, its table the numbers
    "dual_clip_c": 3.0, "ratio_floor": 0.0, "ratio_cap": 5.0, "tau_pos": 1.0, "tau_neg": 1.05, "k_pos": 2.0,
    "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0, "opsm_delta": 0.5, "correction_high": 2.0, "kl_coef": 0.01,
    "gamma": 1.0, "lam": 0.95, "top_fraction": 0.2, "micro_batches": [[0]],
}  # fmt: skip


def ragged(values: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    return [row[PROMPT : PROMPT + n].tolist() for row, n in zip(values, lengths, strict=True)]


def assert_ragged(actual: list[list[float]], expected: list[list[float]]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


@pytest.mark.parametrize(("expected", "fixture", "axes"), golden_cases())
def test_golden(expected: Case, fixture: Case, axes: Case) -> None:
    chosen, rollouts = credited(fixture, axes)
    lengths = fixture["length"]
    if "advantage_per_token" in expected and not axes.get("use_token_scale"):
        assert_ragged([r.advantages[PROMPT:].tolist() for r in rollouts], expected["advantage_per_token"])

    batch = whole_batch(chosen, rollouts)
    kept = structurally_kept(chosen, rollouts)
    rows = [i for i, rollout in enumerate(rollouts) if any(rollout is other for other in kept)]
    new = padded(fixture["logp_new"], max(lengths) + PROMPT).requires_grad_()
    entropy = padded(fixture.get("entropy", fixture["logp_new"]), max(lengths) + PROMPT)
    width = batch.tokens.shape[1]
    loss, metrics = chosen.loss(new[rows, :width], entropy[rows, :width], batch)
    loss.backward()

    np.testing.assert_allclose(loss.item(), expected["loss"], **CLOSE)
    assert new.grad is not None
    assert_ragged(ragged(new.grad, lengths), expected["grad_logp_new"])
    if "kl_loss_unscaled" in expected:
        assert chosen.kl is not None
        penalty = chosen.kl(chosen.inputs(new, entropy, batch))
        np.testing.assert_allclose((penalty * batch.weights).sum().item(), expected["kl_loss_unscaled"], **CLOSE)
    if "metrics" in expected:
        for ours, theirs in {"clip_ratio/low": "clip_fraction_low", "clip_ratio/high": "clip_fraction_high"}.items():
            total, count = metrics[ours].tolist()
            np.testing.assert_allclose(total / count, expected["metrics"][theirs], **CLOSE)
        total, count = metrics["approx_kl"].tolist()
        np.testing.assert_allclose(total / count, expected["metrics"]["approx_kl_old_k3"], **CLOSE)
    if "value_loss" in expected:
        values = padded(fixture["values_new"], width).requires_grad_()
        value_loss = chosen.value_loss(values, batch)
        value_loss.backward()
        np.testing.assert_allclose(value_loss.item(), expected["value_loss"], **CLOSE)
        assert values.grad is not None
        assert_ragged(ragged(values.grad, lengths), expected["grad_values_new"])
        assert_ragged([r.returns[PROMPT:].tolist() for r in rollouts], expected["returns"])


def test_every_preset_of_the_file_is_the_point_of_the_product_space_that_it_names() -> None:
    (file, *_) = golden_files()
    for name, wanted in file["presets"].items():
        mine = PRESETS["grpo_roll" if name == "grpo_roll_seed003" else name]
        axes = file["axis_defaults"] | wanted["axes"] | HYPERPARAMETERS
        theirs = algorithm(axes, {"L_max": None})
        for slot in ("combine", "supervision", "ratio", "anchor"):
            assert getattr(mine, slot) == getattr(theirs, slot), (name, slot)
        for slot in ("baseline", "scale", "whiten", "surrogate", "correction", "kl", "aggregate", "credit_over_time"):
            assert type(getattr(mine, slot)) is type(getattr(theirs, slot)), (name, slot)
        if mine.kl is not None:
            assert theirs.kl is not None
            assert (mine.kl.estimator, mine.kl.placement, mine.kl.to) == (
                theirs.kl.estimator, theirs.kl.placement, theirs.kl.to), name  # fmt: skip
        assert mine.greedy_baseline == (wanted["axes"]["baseline"] == "greedy"), name
        shaping = {"none": None, "soft_overlong": SoftOverlong, "kimi": KimiLength}[wanted["axes"]["length_shaping"]]
        assert (mine.shaping if shaping is None else type(mine.shaping)) is shaping, name
        assert mine.filter == wanted["axes"]["sample_filter"], name
        assert (mine.selection is not None) == (wanted["axes"]["token_selection"] == "top_entropy"), name


def test_there_are_forty_presets_and_one_more_as_dapo_is_written() -> None:
    (file, *_) = golden_files()
    names = {"grpo_roll" if name == "grpo_roll_seed003" else name for name in file["presets"]}
    assert len(names) == 40
    assert set(PRESETS) - names == {"dapo_as_written"}
