"""A model that is split over processes trains as one that is not, and says which process died.

`ranked.py` is what the processes run; they are started once for all that they compute.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranked
import torch
from models import tiny_model
from toys import REWARD, as_file, command, metrics, sampled, terminal, toy_config, toy_folder, toy_rows

from groupwise.config import Config
from groupwise.engines.ranks import join
from groupwise.engines.shards import pair_cost, shares
from groupwise.errors import CheckpointError, ConfigError
from groupwise.records import Rollout, collate
from groupwise.resources import memory_of
from groupwise.train import train

HERE = Path(__file__).parent
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
EXACT = [name for name in ranked.CASES if name != "mixed"]


def alone(make: Any, case: dict[str, Any], do: Any) -> Any:
    """What one process does with a learner, or a critic, of the engine of several."""
    with join(60.0, "cpu") as ranks:
        return do(make(ranks, case))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they found, and a checkpoint; the one that they continued from is of one."""
    folder = tmp_path_factory.mktemp("ranks")
    alone(ranked.split_learner, ranked.RESUMED, partial(ranked.saves, folder=folder / "of one"))
    alone(ranked.split_critic, ranked.JUDGED, partial(ranked.critic_saves, folder=folder / "critic of one"))
    command = [sys.executable, "-W", "error::UserWarning", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(HERE / "ranked.py"), str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_have_the_metrics_logprobs_and_weights_of_one_process(name: str, found: dict[str, Any]) -> None:
    assert ranked.largest(found[name].values()) < TOLERANCE[ranked.CASES[name]["dtype"]]


@pytest.mark.slow
def test_layers_gathered_in_bfloat16_compute_what_autocast_does(found: dict[str, Any]) -> None:
    assert found["mixed"]["before"] < 1e-2
    assert found["mixed"]["weights"] < 2 * ranked.UPDATES * ranked.OPTIMIZER.learning_rate, "AdamW moves no further"


@pytest.mark.slow
def test_updates_on_fewer_rows_than_ranks_are_the_same(found: dict[str, Any]) -> None:
    assert ranked.largest(found["few rows"].values()) < TOLERANCE["float64"]


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_refused_by_every_rank_and_blamed_on_its_rows(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert refused["blamed"] == [2]
    assert refused["lambda"].startswith("engine.learner: fsdp; ")
    assert "name code of your own in the run file as file.py:function" in refused["lambda"]
    assert ranked.largest([refused["metrics"], refused["weights"]]) < TOLERANCE["float64"], (
        "nothing was changed; all are in step"
    )


@pytest.mark.slow
def test_what_one_rank_saved_two_continue_from(found: dict[str, Any]) -> None:
    assert ranked.largest(found["resumed"].values()) < TOLERANCE["float64"]


@pytest.mark.slow
def test_what_two_ranks_saved_one_continues_from(folder: Path) -> None:
    apart = alone(ranked.split_learner, ranked.RESUMED, partial(ranked.resumes, folder=folder / "of two"))
    assert ranked.largest(apart.values()) < TOLERANCE["float64"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ranked.CRITICS if name != "critic mixed"])
def test_a_critic_on_two_ranks_has_the_metrics_values_and_weights_of_one_process(
    name: str, found: dict[str, Any]
) -> None:
    assert ranked.largest(found[name].values()) < TOLERANCE[ranked.CRITICS[name]["dtype"]]


@pytest.mark.slow
def test_a_critic_gathered_in_bfloat16_computes_what_autocast_does(found: dict[str, Any]) -> None:
    assert found["critic mixed"]["values"] < 1e-2
    assert found["critic mixed"]["weights"] < 2 * ranked.UPDATES * ranked.OPTIMIZER.learning_rate


def test_a_value_head_is_not_rounded_with_the_layers() -> None:
    case = ranked.CRITICS["critic mixed"]

    def values(critic: Any) -> torch.Tensor:
        ranked.judged(critic, case, range(2))
        return critic.values(ranked.made_batch(ranked.algorithm_of(case), 99, case))

    found = alone(ranked.split_critic, case, values)
    assert (found != found.bfloat16()).sum() > found.count_nonzero() / 2


@pytest.mark.slow
def test_a_critics_update_that_is_not_finite_is_refused_and_few_rows_are_enough(found: dict[str, Any]) -> None:
    refused = found["critic refused"]
    assert refused.pop("blamed") == [2]
    assert ranked.largest(refused.values()) < TOLERANCE["float64"], "nothing was changed; all are in step"


@pytest.mark.slow
def test_a_critic_continues_on_another_number_of_ranks(folder: Path, found: dict[str, Any]) -> None:
    resumes = partial(ranked.critic_resumes, folder=folder / "critic of two")
    for apart in (found["critic resumed"], alone(ranked.split_critic, ranked.JUDGED, resumes)):
        assert ranked.largest(apart.values()) < TOLERANCE["float64"]


@pytest.mark.slow
def test_completions_are_those_of_one_process_and_a_mistake_in_one_rank_is_told_by_rank_0(
    found: dict[str, Any],
) -> None:
    said = found["sampled"]
    assert said["tokens"]
    assert said["logprobs"] < 1e-12
    assert said["versions"] == [4]
    assert said["error"].startswith("a prompt of 64 tokens leaves no room")


def test_a_checkpoint_that_is_missing_damaged_or_of_another_model_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    alone(ranked.split_learner, {**ranked.RESUMED, "architecture": "gpt2"}, lambda learner: learner.snapshot()(other))

    def refused(learner: Any) -> None:
        with pytest.raises(CheckpointError, match=r"nowhere: a rank on \S+ does not see that folder: .* output=DIR"):
            learner.snapshot()(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"not a complete checkpoint of engine\.learner: fsdp"):
            learner.restore(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="not a checkpoint of this model, or damaged"):
            learner.restore(other)
        (shard,) = other.glob("*.distcp")
        shard.write_bytes(shard.read_bytes()[:100])
        with pytest.raises(CheckpointError, match="not a checkpoint of this model, or damaged"):
            learner.restore(other)

    alone(ranked.split_learner, ranked.RESUMED, refused)


def test_shares_are_disjoint_keep_prompts_together_and_are_about_equal() -> None:
    rng = np.random.default_rng(0)
    rollouts = []
    for group in range(20):
        prompt = np.append(rng.integers(2, 90, 4), group)
        for length in rng.integers(1, 40, 4):
            tokens = np.concatenate([prompt, rng.integers(2, 90, length)]).astype(np.int32)
            mask = (np.arange(len(tokens)) >= 5) & (group != 7)  # of group 7 nothing is learned
            rollouts.append(Rollout(tokens=tokens, loss_mask=mask, logprobs=0.0 * tokens, group=group))
    batch = collate(rollouts)
    dealt = shares(batch, 3)
    rows = torch.cat(dealt)
    assert sorted(rows.tolist()) == [row for row in range(80) if row // 4 != 7]
    groups = [set(batch.groups[share].tolist()) for share in dealt]
    assert sum(map(len, groups)) == len(set.union(*groups)), "no group is torn"
    tokens = [int(batch.lengths[share].sum()) for share in dealt]
    assert max(tokens) < 1.1 * min(tokens)
    few = shares(batch.rows(torch.arange(4)), 3)
    assert sorted(map(len, few)) == [1, 1, 2], "fewer prompts than ranks: rows are dealt out"


def test_where_attention_costs_something_a_long_row_weighs_more_than_short_ones_of_as_many_tokens() -> None:
    batch = collate(
        [
            Rollout(np.full(length, 5 + group, np.int32), np.arange(length) > 0, np.zeros(length, np.float32), group)
            for group, length in enumerate([400, *[100] * 8])
        ]
    )
    assert [len(share) for share in shares(batch, 2)] == [3, 6], "600 tokens each"
    assert [len(share) for share in shares(batch, 2, 0.01)] == [1, 8], "1200 and 8 x 150"


def test_a_pair_of_tokens_costs_what_attention_computes_beside_the_weights_of_the_layers() -> None:
    model = tiny_model("qwen3")
    config, decoder = model.config, model.get_decoder()
    weights = sum(weight.numel() for name, weight in decoder.named_parameters() if "embed_tokens" not in name)
    products = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert pair_cost(model) == products / weights


# A run --------------------------------------------------------------------------------------------------------------

FAILS = """
import os, pathlib, signal
from groupwise.losses import Clip

UPDATES = []
FAULTS = [(3, "SIGSTOP"), (1, "SIGKILL")]

def clip(*arguments):
    UPDATES.append(1)
    faults = [fault for fault in FAULTS if not pathlib.Path(__file__).with_name(fault[1]).exists()]
    if os.environ.get("RANK") == "1" and faults and len(UPDATES) == faults[0][0]:
        pathlib.Path(__file__).with_name(faults[0][1]).touch()
        os.kill(os.getpid(), getattr(signal, faults[0][1]))
    return Clip()(*arguments)
"""
"""A surrogate with which rank 1 gets stuck in its third update; then, tried again, dies; then does what it should."""


def toy_runs(folder: Path, **changes: Any) -> tuple[Config, Config]:
    """The same run twice, in float64, so that no draw hangs on rounding: into folder/one, and into folder/two."""
    toy_folder(folder / "model")
    toy_rows(folder / "rows.jsonl")
    shared = {"engine": {"dtype": "float64", "device": "cpu"}, **changes}
    one, two = (toy_config(folder, **shared, output=str(folder / name)) for name in ("one", "two"))
    return one, two


def same(folder: Path, step: int) -> list[dict[str, Any]]:
    """Check that both runs are one; the records of the second."""
    ours, theirs = (metrics(folder / name, timings=False) for name in ("two", "one"))
    assert [one.keys() for one in ours] == [one.keys() for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
    mine, others = ([row["text"] for row in sampled(folder / name, step)] for name in ("two", "one"))
    assert mine == others
    return ours


@pytest.mark.slow
def test_a_run_of_two_ranks_learns_and_is_that_of_one_process(tmp_path: Path) -> None:
    evaluation = {"data": {"path": str(tmp_path / "rows.jsonl"), "limit": 4}}
    shape = {"steps": 35, "prompts_per_step": 8, "group_size": 8, "evaluation": evaluation}
    one, two = toy_runs(tmp_path, **shape, algorithm={"preset": "grpo", "kl": {"coef": 0.01}})
    train(one, console=terminal()[0])
    done = command(as_file(two, tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    rewards = [record["reward"] for record in same(tmp_path, 35) if "reward" in record]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8
    assert done.stderr.count("step  1/35") == 1, "rank 0 alone speaks"
    assert done.stdout == f"trained model: {tmp_path / 'two' / 'model'}\n"


@pytest.mark.slow
def test_a_rank_that_is_stuck_or_dies_is_named_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    algorithm = {"preset": "ppo", "surrogate": f"{tmp_path / 'fails.py'}:clip"}
    shape = {"steps": 4, "checkpoint": {"every": 1}, "algorithm": algorithm}
    one, two = toy_runs(tmp_path, **shape)
    train(one, console=terminal()[0])
    file, run = as_file(two, tmp_path / "run.yaml", timeout_seconds=4.0), tmp_path / "two"
    lost = r"groupwise: rank 0 on \S+ \(process \d+\), in update after step [12]: "
    lost += r"rank 1 on \S+ \(process \d+\) has died or does not answer; "
    lost += rf"the last good state is {run}/checkpoints/step-0000[12]; .*`groupwise train --resume {run}`"
    for name, arguments in (("SIGSTOP", [file]), ("SIGKILL", ["--resume", str(run)])):
        ended = command(*arguments)
        assert ended.returncode == 1
        assert (tmp_path / name).exists()
        assert re.search(lost, ended.stderr), ended.stderr
        assert "Traceback" not in ended.stderr
    assert re.search(r"groupwise: rank 1 \(process \d+\) was ended by SIGKILL", ended.stderr)
    train(Config.load(run / "config.yaml", ["engine.learner.ranks=1"]), resume=run, console=terminal()[0])
    same(tmp_path, 4)


def test_a_program_that_is_started_too_often_or_too_rarely_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = toy_runs(tmp_path)
    alone = Config.load(as_file(two, tmp_path / "run.yaml"))
    with pytest.raises(ConfigError, match=r"engine\.learner\.ranks: 2; .* `torchrun --nproc-per-node 2 PROGRAM\.py`"):
        train(alone)
    with pytest.raises(ConfigError, match=r"engine\.learner: .*toy_reward\.py:always; accepted: local, fsdp"):
        Config.load(tmp_path / "run.yaml", [f"engine.learner={REWARD.replace('starts_low', 'always')}"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"engine\.learner: local; .* 2 processes, .* set engine\.learner: fsdp"):
        train(one)


def test_a_rank_needs_a_part_of_the_memory_and_room_for_a_copy_to_sample_with(tmp_path: Path) -> None:
    model = tiny_model("llama")
    shape = {"tokens": 0, "reference": True, "critic": False, "checkpointing": False}
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert memory_of(model, torch.float32, **shape).fixed == 5 * weights
    assert memory_of(model, torch.float32, **shape, ranks=5).fixed == 2 * weights
    assert memory_of(model, torch.float32, **{**shape, "critic": True}, ranks=3).fixed == 4 * weights
