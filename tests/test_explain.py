"""`groupwise explain`: the formula, the slots and the example say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from groupwise.algorithms import Algorithm
from groupwise.cli import app
from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.explain import choices, differences, equations, first_sentence, with_std, worked_example
from groupwise.losses import LossInputs, PerToken
from groupwise.penalties import (
    KL,
)
from groupwise.presets import DAPO, DR_GRPO, GRPO, GSPO, PRESETS, RLOO
from groupwise.schema import members_of
from groupwise.slots import Readable, replace


def my_surrogate(x: LossInputs) -> PerToken:
    """Minus the advantage times the log-probability.  Plain."""
    return -x.advantages * x.logprobs, {}


def page(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    return result.stdout


def row(text: str, letter: str) -> list[str]:
    """The cells of a completion in the first worked example."""
    line = next(line for line in text.splitlines() if re.match(rf"{letter}\s+\d", line))
    return line.split()


def test_grpo_with_the_population_std_gives_plus_and_minus_one() -> None:
    text = page("grpo", "--std", "population")
    assert [row(text, letter)[2:6] for letter in "ABCD"] == [
        ["1", "0.5000", "0.5000", "+1.0000"],
        ["1", "0.5000", "0.5000", "+1.0000"],
        ["0", "0.5000", "0.5000", "-1.0000"],
        ["0", "0.5000", "0.5000", "-1.0000"],
    ]


@pytest.mark.parametrize("std", [[], ["--std", "sample"]])
def test_grpo_with_the_sample_std_gives_0_8660(std: list[str]) -> None:
    text = page("grpo", *std)
    assert [row(text, letter)[5] for letter in "ABCD"] == ["+0.8660", "+0.8660", "-0.8660", "-0.8660"]


def test_the_formula_has_its_numbers_filled_in() -> None:
    assert equations(GRPO) == [
        ("L", "− Σ w Φ + 0.04 Σ w K"),
        ("Φ", "min(ρ A, clip(ρ, 0.8, 1.2) A)"),
        ("ρ", "π / π_old, of each token"),
        ("A", "(r − mean_group) / (std_group + 1e-06)"),
        ("w", "1 / (M |o|)"),
        ("K", "e^−d − 1 + d,  d = log(π / π_ref)"),
    ]
    assert dict(equations(DAPO))["Φ"] == "min(ρ A, clip(ρ, 0.8, 1.28) A)"
    assert dict(equations(GSPO))["Φ"] == "min(ρ A, clip(ρ, 0.9997, 1.0004) A)"
    assert dict(equations(RLOO))["A"] == "r − mean_others"
    assert dict(equations(RLOO))["r ←"] == "r − 0.05 Σ_t log(π_old / π_ref)"
    assert dict(equations(DR_GRPO.resolve(3000)))["w"] == "1 / (M · 3000)"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_explained_without_code_paths_or_empty_slots(name: str) -> None:
    text = page(name, "--against", "grpo")
    assert "groupwise." not in text  # a member without a formula would be shown by its path
    assert all(choice.does for choice in choices(PRESETS[name]))
    assert [worked.reward for worked in worked_example(replace(PRESETS[name], shaping=None))] == [1, 1, 0, 0]


@pytest.mark.parametrize("slot", Algorithm.model_fields)
def test_every_member_of_every_slot_says_its_formula(slot: str) -> None:
    for member in members_of(Algorithm.model_fields[slot].metadata).values():
        made = member()
        assert isinstance(made, Readable), member
        assert isinstance(made.formula, str) and made.formula  # noqa: PT018


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "ppo", "topr", "kimi_k15", "eighty_twenty"]
)
def test_the_push_of_a_token_is_weight_times_selection_times_advantage_at_ratio_one(name: str) -> None:
    algorithm = PRESETS[name]
    for worked in worked_example(algorithm):
        expected = worked.weights * worked.advantages
        if algorithm.selection is not None:
            expected = np.where(worked.push == 0, 0.0, expected)
        np.testing.assert_allclose(worked.push, expected, rtol=1e-12, atol=1e-15)


def test_one_over_the_length_is_visible_in_the_example() -> None:
    grpo, dr_grpo = worked_example(GRPO), worked_example(DR_GRPO)
    assert grpo[0].push[0] == pytest.approx(2 * grpo[1].push[0])  # 3 and 6 tokens: GRPO prefers the short right answer
    assert dr_grpo[0].push[0] == dr_grpo[1].push[0]


def test_a_comparison_lists_the_slots_that_differ_and_no_other() -> None:
    assert [slot for slot, _, _ in differences(GRPO, DR_GRPO)] == ["scale", "kl", "aggregate"]
    text = page("grpo", "--against", "dr_grpo")
    assert re.search(r"scale +group_std \(ddof 1, eps 1e-06\) +none", text)
    assert re.search(r"^w +1 / \(M \|o\|\) +1 / \(M · max_tokens\)", text, re.MULTILINE)
    assert "are the same algorithm" in page("grpo", "--against", "grpo")


def test_a_run_file_is_explained_with_its_lengths_and_code_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: some/model\ndata: {path: rows.jsonl}\nrewards: [math_answer]\nsampling: {max_tokens: 77}\n"
        f"algorithm: {{preset: dr_grpo, surrogate: '{__file__}:my_surrogate'}}\n"
    )
    text = page(str(file))
    assert "1 / (M · 77)" in text
    assert "test_explain.py:my_surrogate" in text.replace("\n", "")
    surrogate = {choice.slot: choice for choice in choices(Config.load(file).algorithm)}["surrogate"]
    assert surrogate.does == "Minus the advantage times the log-probability"


def test_cautions_are_part_of_the_explanation(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\ndata: {path: r.jsonl}\nrewards: [math_answer]\n"
        "algorithm: {preset: gspo, aggregate: token-mean}\n"
    )  # fmt: skip
    assert "note: ratio: sequence with aggregate: token-mean" in page(str(file))


def test_what_cannot_be_explained_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"drgrpo: no such algorithm or run file \(did you mean dr_grpo\?\)"):
        page("drgrpo")
    with pytest.raises(ConfigError, match="--std: there is none to choose"):
        page("dr_grpo", "--std", "population")


def test_the_page_is_plain_text_when_it_is_not_for_a_terminal() -> None:
    text = page("grpo")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_kl_in_the_loss_has_no_push_while_the_reference_is_the_policy() -> None:
    free, held = worked_example(replace(GRPO, kl=None)), worked_example(replace(GRPO, kl=KL(coef=5.0)))
    for one, other in zip(free, held, strict=True):
        np.testing.assert_array_equal(one.push, other.push)


def test_the_std_is_changed_in_the_scale_only() -> None:
    assert differences(with_std(GRPO, "population"), GRPO) == [
        ("scale", "group_std (ddof 0, eps 1e-06)", "group_std (ddof 1, eps 1e-06)")
    ]


def test_a_sentence_ends_at_its_full_stop_and_not_at_an_abbreviation() -> None:
    assert first_sentence("With a length: Dr. GRPO (eq. 7).  More.") == "With a length: Dr. GRPO (eq. 7)"
