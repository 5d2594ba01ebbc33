"""`groupwise compare`: what an algorithm says about stored rollouts is what it would do with them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from toys import metrics, sampled, toy_config, toy_folder, toy_rows
from typer.testing import CliRunner

from groupwise.algorithms import Algorithm
from groupwise.cli import app
from groupwise.compare import compare, policy, save
from groupwise.compare.opinions import cosines, favours, held_back, norms, opinion, tokens_of
from groupwise.compare.stored import Weights, nearest, read_step
from groupwise.compare.tables import stored_tables, tables
from groupwise.config import Config
from groupwise.errors import CheckpointError, ModelError
from groupwise.explain import LENGTHS, MAX_TOKENS, worked_example
from groupwise.penalties import EntropyBonus
from groupwise.presets import CISPO, DAPO, DR_GRPO, GMPO, GRPO, GSPO, ICEPOP, LUSPO, OPO, PRESETS, RLOO, SCALERL
from groupwise.records import Rollout
from groupwise.report import write_report
from groupwise.report.data import RunFolder
from groupwise.slots import replace
from groupwise.train import train

NO_KL = replace(GRPO, kl=None)


def made(length: int, reward: float, group: int = 0, **changes: Any) -> Rollout:
    """A completion of a prompt of two tokens, with everything that an algorithm may ask for."""
    mask = np.arange(2 + length) >= 2
    logprobs = np.where(mask, -0.5, 0.0)
    fields: dict[str, Any] = {
        "tokens": np.arange(2 + length, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": logprobs,
        "old_logprobs": logprobs,
        "ref_logprobs": logprobs,
        "values": np.zeros(2 + length),
        "entropies": np.linspace(2.0, 0.1, 2 + length),
        "group": group,
        "rewards": {"reward": reward},
        "reward": reward,
        "step_rewards": ((1 + length // 2, reward), (1 + length, reward)),
    }
    return Rollout(**{**fields, **changes})


HAND = [made(3, 1.0), made(6, 1.0), made(4, 0.0), made(7, 0.0)]
TWO = [made(2, 1.0), made(6, 0.0), made(4, 1.0, 1), made(4, 1.0, 1)]


def push_of(algorithm: Algorithm, rollouts: list[Rollout] = HAND) -> list[np.ndarray[Any, Any]]:
    """What each completion's loss tokens get."""
    found = opinion(algorithm.resolve(MAX_TOKENS), rollouts).push_of_each()
    return [push[rollout.loss_mask] for push, rollout in zip(found, rollouts, strict=True)]


def favoured(algorithm: Algorithm, rollouts: list[Rollout]) -> dict[str, Any]:
    return favours(opinion(algorithm.resolve(MAX_TOKENS), rollouts), tokens_of(rollouts, "reward"), None)


# What an algorithm says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_push_is_that_of_the_worked_example(name: str) -> None:
    example = [
        made(length, reward, entropies=np.array([0.0, 0.0, *np.linspace(2.0, 0.1, length)]))
        for length, reward in zip(LENGTHS, (1.0, 1.0, 0.0, 0.0), strict=True)
    ]
    for push, worked in zip(push_of(PRESETS[name], example), worked_example(PRESETS[name]), strict=True):
        assert push == pytest.approx(worked.push, abs=1e-12)


def test_grpo_pushes_as_dr_grpo_does_over_length_and_std() -> None:
    std = np.std([1, 1, 0, 0], ddof=1) + 1e-6
    for a, b, rollout in zip(push_of(NO_KL), push_of(DR_GRPO), HAND, strict=True):
        assert a == pytest.approx(b * MAX_TOKENS / (rollout.num_completion_tokens * std), rel=1e-12)
        assert abs(b[0]) == pytest.approx(0.5 / (4 * MAX_TOKENS), rel=1e-12)


def test_gspo_pushes_all_tokens_of_a_completion_alike_also_away_from_ratio_one() -> None:
    moved = [dataclasses.replace(r, old_logprobs=r.logprobs - 1e-4 * r.tokens * r.loss_mask) for r in HAND]
    for push, rollout in zip(push_of(GSPO, moved), moved, strict=True):
        assert push == pytest.approx(np.full(rollout.num_completion_tokens, push[0]), rel=1e-12)
        assert push[0] != 0


@pytest.mark.parametrize("algorithm", [GRPO, DR_GRPO, DAPO, GSPO, CISPO, RLOO, OPO, SCALERL], ids=lambda a: a.ratio)
def test_what_is_added_to_all_rewards_changes_nothing(algorithm: Algorithm) -> None:
    raised = [dataclasses.replace(rollout, reward=rollout.reward + 3.0) for rollout in HAND]
    for push, other in zip(push_of(algorithm), push_of(algorithm, raised), strict=True):
        assert push == pytest.approx(other, rel=1e-9, abs=1e-15)


def test_what_is_invalid_gets_no_push_and_is_in_no_share() -> None:
    spoilt = [*HAND, made(50, float("nan"), valid=False)]
    assert not push_of(DR_GRPO, spoilt)[-1].any()
    assert favoured(NO_KL, spoilt)["shares"] == favoured(NO_KL, HAND)["shares"]


# Whom it favours -----------------------------------------------------------------------------------------------------


def test_shares_of_the_push_are_those_of_tokens_or_of_completions() -> None:
    by_token, by_completion = favoured(DAPO, TWO)["shares"], favoured(NO_KL, TWO)["shares"]
    assert (by_token["right"], by_token["wrong"]) == pytest.approx((2 / 8, 6 / 8)), "the solved group gets none"
    assert (by_completion["right"], by_completion["wrong"]) == pytest.approx((1 / 2, 1 / 2))
    assert by_completion["short"] == pytest.approx(1 / 2)
    assert by_completion["middling"] == 0
    assert by_completion["long"] == pytest.approx(1 / 2)
    assert (by_token["early"], by_token["midway"], by_token["late"]) == pytest.approx((3 / 8, 3 / 8, 2 / 8))
    counts = tokens_of(TWO, "reward").shares(np.ones(16))
    assert (counts["short"], counts["long"], counts["right"], counts["hard"]) == pytest.approx(
        (2, 6, 10, 0) / np.array(16)
    )


def test_a_prompt_is_hard_when_less_than_half_is_right() -> None:
    rollouts = [made(2, 1.0), made(2, 0.0), made(2, 0.0), *(made(2, reward, 1) for reward in (1.0, 1.0, 0.0))]
    assert tokens_of(rollouts, "reward").shares(np.ones(12))["hard"] == pytest.approx(1 / 2)
    assert favoured(DR_GRPO, rollouts)["shares"]["hard"] == pytest.approx(1 / 2)


def test_completions_that_are_all_as_long_are_neither_short_nor_long() -> None:
    classes = tokens_of([made(4, 1.0), made(4, 0.0)], "reward").classes
    assert classes["middling"].all()
    assert not classes["short"].any() | classes["long"].any()


@pytest.mark.parametrize(
    ("algorithm", "slope"), [(NO_KL, -1), (GSPO, -1), (GMPO, -1), (DR_GRPO, 0), (DAPO, 0), (LUSPO, 0), (CISPO, 0)]
)
def test_the_length_slope_tells_one_over_length_from_none(algorithm: Algorithm, slope: float) -> None:
    assert favoured(algorithm, HAND)["length_slope"] == pytest.approx(slope, abs=1e-9)


def test_advantages_are_in_numbers() -> None:
    found, tokens = opinion(DR_GRPO.resolve(MAX_TOKENS), TWO), tokens_of(TWO, "reward")
    told = favours(found, tokens, -2 * found.advantages)["advantage"]
    assert told == pytest.approx({"mean": 0, "spread": np.std([0.5, -0.5, 0, 0]), "zero": 0.5, "correlation": -1})


def test_cosines_and_norms_are_those_of_the_vectors() -> None:
    vectors = np.array([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]])
    assert norms(vectors @ vectors.T) == pytest.approx([5, 10, 5, 0])
    found = cosines(vectors @ vectors.T)
    assert found[0][:3] == pytest.approx([1, 1, 0])
    assert [row[3] for row in found] == [None] * 4


def test_clipped_tokens_are_counted_where_the_policy_has_moved() -> None:
    ratios = [[1.3, 1.0, 0.5], [1.5, 0.9, 0.9, 0.9], [0.5, 1.0]]
    rollouts = [made(3, 1.0), made(4, 0.0), made(2, 0.0)]
    moved = [r.logprobs + np.log([1, 1, *ratio]) for r, ratio in zip(rollouts, ratios, strict=True)]
    for algorithm, clipped, silenced in (
        (NO_KL, 2 / 9, 2 / 9),
        (GRPO, 2 / 9, 2 / 9),
        (CISPO, 0, 0),
        (ICEPOP, 2 / 9, 2 / 9),
    ):
        credited = opinion(algorithm.resolve(MAX_TOKENS), rollouts).credited
        told = held_back(algorithm.resolve(MAX_TOKENS), credited, moved)
        assert told == pytest.approx({"clipped": clipped, "silenced": silenced}), algorithm
        only = held_back(algorithm.resolve(MAX_TOKENS), credited, [None, None, moved[2]])
        assert only["clipped"] in (0, 1 / 2), "of what is not known nothing is counted"


def test_the_nearest_weights_are_found_and_of_two_the_later() -> None:
    kept = [Weights(steps, "", "") for steps in (0, 4, 8)]
    assert [nearest(kept, steps).steps_done for steps in (0, 1, 2, 5, 6, 90)] == [0, 0, 4, 4, 8, 8]


# A real run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps with checkpoints after 10 and 12 of them; the first step and the eleventh were read again."""
    folder = tmp_path_factory.mktemp("compared")
    toy_folder(folder / "model")
    toy_rows(folder / "rows.jsonl")
    changes: dict[str, Any] = {"steps": 12, "sampling": {"max_tokens": 8}, "checkpoint": {"every": 5}}
    return train(toy_config(folder, output=str(folder / "run"), **changes), console=Console(quiet=True)).folder


def lab(run: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["compare", str(run), *arguments], catch_exceptions=False)


@pytest.mark.parametrize("step", [1, 11])
def test_the_run_s_own_gradient_is_the_one_that_it_logged(run: Path, step: int) -> None:
    result = compare(run, {"same": Algorithm(), "grpo": GRPO}, step)
    assert result["weights"]["steps_done"] == step - 1
    logged = metrics(run)[step - 1]["grad_norm"]
    assert result["norm"]["weights"][:2] == pytest.approx([logged, logged], rel=1e-4)
    own, same, grpo = result["algorithms"]
    assert own["advantage"]["correlation"] == pytest.approx(1)
    assert {**own, "name": "same"} == same
    for kind in ("logprobs", "weights"):
        cosine = np.array(result["cosine"][kind])
        assert cosine == pytest.approx(cosine.T)
        assert np.diag(cosine) == pytest.approx(np.ones(3))
        assert cosine[0, 1] == pytest.approx(1)
        assert 0 < cosine[0, 2] < 0.9999
    assert grpo["clipped"] is not None
    assert result["notes"] == result["left_out"] == []


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "gmpo", "cispo", "vespo", "rloo_trl", "kimi_k15"])
def test_gradients_of_the_weights_are_those_of_the_update(run: Path, name: str) -> None:
    config = Config.load(run / "config.yaml").resolve()
    stored = read_step(run, config, 1)
    learner, algorithm = policy.load(config, stored.kept[0]), PRESETS[name].resolve(8)
    own, reference = (policy.logprobs_of(learner, stored.rollouts, reference=which) for which in (False, True))
    rollouts = [
        dataclasses.replace(rollout, old_logprobs=old, ref_logprobs=ref)
        for rollout, old, ref in zip(stored.rollouts, own, reference, strict=True)
    ]
    found = opinion(algorithm, rollouts)
    (batch,) = algorithm.batches(found.credited)
    expected = learner.gradient(batch, algorithm.loss, per_token=algorithm.per_token)
    product = policy.products([expected])
    assert policy.gradients(learner, rollouts, [found.push_of_each()]) == pytest.approx(product, rel=1e-3)


def test_inner_products_do_not_depend_on_how_many_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = [[torch.randn(3, 5), torch.randn(7)] for _ in range(3)]
    flat = torch.stack([torch.cat([piece.flatten() for piece in vector]) for vector in vectors]).double()
    monkeypatch.setattr(policy, "AT_ONCE", 4)
    assert policy.products(vectors) == pytest.approx((flat @ flat.T).numpy(), rel=1e-12)


def test_without_the_model_clipping_is_that_of_the_group_that_was_read_again(run: Path) -> None:
    result = compare(run, {"dapo": replace(DAPO, shaping=None, filter="none")}, 1, gradients=False)
    rows = [row for row in sampled(run, 1) if row["new_logprobs"] is not None]
    assert result["moved"] == {"steps_done": 1, "name": None, "completions": len(rows)}
    assert result["weights"] is result["norm"]["weights"] is result["cosine"]["weights"] is None
    beyond: list[bool] = []
    for row in rows:
        ratio = np.exp(np.subtract(row["new_logprobs"], row["logprobs"]))[np.array(row["loss_mask"])]
        beyond += list(ratio > 1.28 if row["advantage"] > 0 else ratio < 0.8)
    assert 0 < np.mean(beyond) < 1
    assert [one["clipped"] for one in result["algorithms"]] == pytest.approx([np.mean(beyond)] * 2)


def test_the_last_step_is_compared_at_the_nearest_weights_which_is_said(run: Path) -> None:
    result = compare(run, {})
    assert (result["step"], result["weights"]) == (12, {"steps_done": 12, "name": "checkpoints/step-00012"})
    assert (
        "after 12 steps (checkpoints/step-00012): those that sampled this step, after 11, were not kept."
        in (tables(result)[0]["note"])
    )
    assert result["moved"]["steps_done"] == 12


def test_the_trained_model_and_its_checkpoint_give_the_same(run: Path, tmp_path: Path) -> None:
    with_checkpoints = compare(run, {"gspo": GSPO}, 12)
    alone = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(alone / "checkpoints")
    result = compare(alone, {"gspo": GSPO}, 12)
    assert result["weights"] == {"steps_done": 12, "name": "model"}
    assert result["norm"]["weights"] == pytest.approx(with_checkpoints["norm"]["weights"])
    assert result["algorithms"] == with_checkpoints["algorithms"]


def test_weights_taken_over_in_place_are_those_loaded_anew(run: Path) -> None:
    config = Config.load(run / "config.yaml").resolve()
    stored = read_step(run, config, 11)
    first, target = stored.kept[0], nearest(stored.kept, 11)
    in_place = policy.moved(config, policy.load(config, first), first, target)
    found, expected = (policy.logprobs_of(one, stored.rollouts[:2]) for one in (in_place, policy.load(config, target)))
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


def test_what_an_algorithm_needs_and_nobody_has_is_said(run: Path) -> None:
    names = ("ppo", "remax", "grpo_process", "rloo", "eighty_twenty")
    out = lab(run, "--no-gradients", "--json", "--algorithms", ",".join(names)).stdout
    told = {one["name"]: one["reason"] for one in json.loads(out)["left_out"]}
    assert "it needs the values of a critic" in told["ppo"]
    assert "greedy completion" in told["remax"]
    assert "it needs rewards of steps" in told["grpo_process"]
    assert "only a model can compute" in told["rloo"]
    assert "eighty_twenty" not in told
    assert "rloo" in lab(run, "--algorithms", "rloo").stdout.split("left out")[0], "with the model it is there"


@pytest.mark.parametrize("name", ["ppo", "remax", "gdpo"])
def test_a_run_can_be_compared_with_itself_whatever_its_algorithm_needs(name: str, tmp_path: Path) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    rewards = [{"use": "format", "weight": 0.3}, *toy_config(tmp_path).model_dump(mode="json")["rewards"]]
    done = train(
        toy_config(tmp_path, algorithm=name, steps=3, rewards=rewards, output=str(tmp_path / "run")),
        console=Console(quiet=True),
    )
    result = compare(done.folder, {"dr_grpo": DR_GRPO}, 3, gradients=False)
    assert result["left_out"] == result["notes"] == []
    assert result["algorithms"][0]["advantage"]["correlation"] == pytest.approx(1)
    greedy = [row["greedy_reward"] for row in sampled(done.folder, 3) if "greedy_reward" in row]
    assert any(greedy) == (name == "remax")


def test_a_model_that_is_gone_is_said_or_an_error_where_it_was_asked_for(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "run")
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(text.replace(str(run.parent / "model"), str(tmp_path / "gone")))
    shutil.rmtree(moved / "model")
    result = compare(moved, {"grpo": GRPO}, 11)
    assert [one["name"] for one in result["left_out"]] == ["grpo"]
    assert result["notes"][0].startswith(f"no model to compare with: {tmp_path / 'gone'}")
    with pytest.raises(ModelError, match="there is no such folder"):
        compare(moved, {}, 11, gradients=True)


def test_gradients_that_memory_does_not_hold_are_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "available_memory", lambda device: 1000)
    result = compare(run, {"dapo": DAPO}, 11)
    assert result["notes"][0].startswith(
        "no gradients of the weights: --algorithms: the gradients of 2 algorithms need "
    )
    assert result["algorithms"][0]["clipped"] is not None


def test_what_makes_numbers_doubtful_is_said(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "rollouts", tmp_path / "rollouts")
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    file = tmp_path / "rollouts/step-00011.parquet"
    table = pq.read_table(file)
    rewards = [1.0 - reward for reward in table["reward"].to_pylist()]
    pq.write_table(table.set_column(table.column_names.index("reward"), "reward", [rewards]), file)
    notes = compare(tmp_path, {"b": replace(DAPO, entropy=EntropyBonus())}, 11, gradients=False)["notes"]
    assert "the run's own advantages come out up to" in notes[0]
    assert notes[1].startswith("b: its entropy bonus")


# What is shown -------------------------------------------------------------------------------------------------------


def test_the_command_prints_what_the_report_shows(run: Path, tmp_path: Path) -> None:
    state = RunFolder(run).state()
    shown = lab(run, "--step", "11", "--algorithms", "dr_grpo,gspo").stdout
    assert RunFolder(run).state() != state, "so the live page shows it, too"
    for text in ("Step 11: the update", "whom it favours", "cosines of the gradients", "cosines of the pushes"):
        assert text in shown
    assert shown.splitlines()[-1].endswith("compare/step-00011.json")
    page = write_report([run], tmp_path / "page.html").read_text()
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    (first, *_), stored = data["runs"][0]["tables"], stored_tables(run)
    assert first == stored[0]
    for row in first["rows"]:
        assert " ".join(row) in " ".join(shown.split())
    assert [row[0] for row in first["rows"]] == ["run", "dr_grpo", "gspo"]


def test_json_is_one_object_and_the_same_as_what_is_kept(run: Path) -> None:
    out = lab(run, "--step", "1", "--json", "--no-gradients", "-a", "dr_grpo").stdout
    assert out.count("\n") == 1
    assert json.loads(out) == json.loads((run / "compare/step-00001.json").read_text())


def test_a_comparison_that_cannot_be_read_is_named_by_the_report(run: Path, tmp_path: Path) -> None:
    result = compare(run, {}, 1, gradients=False)
    path = save(tmp_path, {**result, "step": 7})
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-00007.json: is no comparison .*delete it, or make it again with"):
        stored_tables(tmp_path)
