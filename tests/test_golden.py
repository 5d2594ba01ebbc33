"""Every case of the golden file, and of any file named in GROUPWISE_GOLDEN_EXTRA, to 1e-9 in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from golden import PROMPT, credited, golden_cases, padded, whole_batch

Case = Mapping[str, Any]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


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
    rows = [i for i, r in enumerate(rollouts) if not (chosen.drop_truncated and r.truncated)]
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
