"""Sampling with a real vLLM server on the CPU.  `make test-vllm` installs one; these tests are skipped without it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import members, wait_until
from toys import as_file, command, metrics, toy_config, toy_folder, toy_rows
from toys import sampled as rows_of

from groupwise.engines import Completion, Optimizer, Request, Sampling, Serving
from groupwise.engines.local import LocalEngine, local_engine
from groupwise.engines.vllm import PYTHON, PYTHON_VARIABLE, Vllm
from groupwise.engines.vllm_sampler import VllmSampler
from groupwise.engines.vllm_server import SIDE, Started
from groupwise.engines.vllm_weights import write
from groupwise.errors import GroupwiseError
from groupwise.quickstart import quickstart
from groupwise.records import Rollout, collate
from groupwise.train import train

INTERPRETER = Path(os.environ.get(PYTHON_VARIABLE) or Path(__file__).parents[1] / PYTHON)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETER.exists(), reason=f"no vLLM at {INTERPRETER}: `make test-vllm` installs it"),
]
TOLERANCE = 1e-5
"""Of log-probs in float32, in nats."""
TEMPERATURE = 0.7
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""A head of 32 is the smallest that vLLM's attention on a CPU knows."""
LONG = tuple(2 + i * i % 90 for i in range(300))


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tied model, undecided at first, and prompts."""
    folder = tmp_path_factory.mktemp("toys")
    toy_folder(folder / "model", max_position_embeddings=512, **SHAPE)
    toy_rows(folder / "rows.jsonl")
    return folder


@pytest.fixture(scope="module")
def policy(toys: Path) -> LocalEngine:
    return local_engine(
        toys / "model",
        dtype=torch.float32,
        device="cpu",
        max_batch_tokens=4096,
        microbatch_tokens=4096,
        optimizer=Optimizer(),
        temperature=TEMPERATURE,
        total_updates=1,
    )


@pytest.fixture(scope="module")
def given(toys: Path, policy: LocalEngine) -> Serving:
    return Serving(
        model=str(toys / "model"),
        dtype=torch.float32,
        mixed=False,
        device=torch.device("cpu"),
        threads=1,
        stop_ids=policy.stop_ids,
        temperature=TEMPERATURE,
        weights=policy.learner.weights,
        logprobs=policy.learner.logprobs,
    )


@pytest.fixture(scope="module")
def url(toys: Path, given: Serving) -> Iterator[str]:
    """Of a server that somebody else started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Vllm(python=str(INTERPRETER))
    command = [*settings.command(given, 512), "--host", "127.0.0.1", "--port", str(port)]
    with (
        (toys / "server.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, str(SIDE / "groupwise_watch.py"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=settings.variables(given),
        ),
    ):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def sampler(url: str, given: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    made = Vllm(url=url, startup_seconds=300)(given)
    with made.running(tmp_path_factory.mktemp("run"), print):
        yield made


def move(policy: LocalEngine, seed: int) -> None:
    """As a large optimizer step would: every weight is another one."""
    torch.manual_seed(seed)
    for _, tensor in policy.learner.weights():
        tensor.add_(0.05 * torch.randn_like(tensor))


def sampled(sampler: VllmSampler, policy: LocalEngine, prompts: list[tuple[int, ...]]) -> float:
    """The largest difference between the log-probs that groups came with and those of the learner."""
    groups = sampler.sample(requests(prompts), Sampling(max_tokens=24, temperature=TEMPERATURE))
    return disagreement(policy, prompts, groups)


def requests(prompts: list[tuple[int, ...]], count: int = 8, first_key: int = 0) -> list[Request]:
    keys = [tuple(range(first_key + 100 * i, first_key + 100 * i + count)) for i in range(len(prompts))]
    return [Request(np.array(prompt, dtype=np.int32), key) for prompt, key in zip(prompts, keys, strict=True)]


def disagreement(policy: LocalEngine, prompts: list[tuple[int, ...]], groups: list[list[Completion]]) -> float:
    rollouts = [
        Rollout(
            tokens=np.concatenate([np.array(prompt, dtype=np.int32), one.tokens]),
            loss_mask=np.arange(len(prompt) + len(one.tokens)) >= len(prompt),
            logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), one.logprobs]),
            group=0,
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for one in group
    ]
    batch = collate(rollouts)
    difference = policy.learner.logprobs(batch) - batch.rollout_logprobs
    return float(difference[batch.loss_mask].abs().max())


SHORT = [(5,), (7, 8, 9), (3, 4)]


def test_log_probs_are_those_of_the_learner(sampler: VllmSampler, policy: LocalEngine) -> None:
    assert sampled(sampler, policy, [*SHORT, LONG]) < TOLERANCE


def test_a_group_is_a_function_of_its_keys(sampler: VllmSampler) -> None:
    sampling = Sampling(max_tokens=24, temperature=TEMPERATURE)
    first, again, other = (
        [[one.tokens.tolist() for one in group] for group in sampler.sample(requests(SHORT, 8, key), sampling)]
        for key in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert all(len({tuple(tokens) for tokens in group}) == 8 for group in first)


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(sampler: VllmSampler, policy: LocalEngine) -> None:
    (group,) = sampler.sample(requests([(5,)], 64), Sampling(max_tokens=40, temperature=1.0))
    ends = {one.finish_reason for one in group}
    assert ends == {"stop", "length"}
    for one in group:
        stopped = one.finish_reason == "stop"
        assert (one.tokens[-1] in policy.stop_ids) == stopped
        assert not set(one.tokens[:-1].tolist()) & set(policy.stop_ids)
        assert stopped or len(one.tokens) == 40


def test_greedy_completions_are_those_of_the_local_sampler(sampler: VllmSampler, policy: LocalEngine) -> None:
    greedy = Sampling(max_tokens=8, temperature=0.0)
    groups, local = sampler.sample(requests(SHORT, 2), greedy), policy.sampler.sample(requests(SHORT, 2), greedy)
    for group, expected in zip(groups, local, strict=True):
        for one, same in zip(group, expected, strict=True):
            assert one.tokens.tolist() == same.tokens.tolist()
            assert np.abs(one.logprobs - same.logprobs).max() < TOLERANCE


def test_an_updated_model_with_a_tied_head_is_the_learners(sampler: VllmSampler, policy: LocalEngine) -> None:
    for version in (1, 2):
        move(policy, seed=version)
        sampler.load(policy.learner.weights(), version)
        assert sampled(sampler, policy, SHORT) < TOLERANCE


def test_without_a_name_of_its_own_a_tied_head_stays_behind_and_the_run_stops(
    sampler: VllmSampler, policy: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(policy, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_tied", {})
        with pytest.raises(GroupwiseError, match="disagree on log-probs"):
            sampler.load(policy.learner.weights(), 3)
        assert sampled(sampler, policy, SHORT) > 1e-2
    sampler.load(policy.learner.weights(), 3)
    assert sampled(sampler, policy, SHORT) < TOLERANCE


def test_a_long_prompt_that_was_seen_before_an_update_is_read_anew(sampler: VllmSampler, policy: LocalEngine) -> None:
    assert sampled(sampler, policy, [LONG]) < TOLERANCE
    move(policy, seed=4)
    # Only the weights, in place: vLLM keeps what the older ones made of the prompt.
    write(sampler._weights, policy.learner.weights(), torch.float32, sampler._tied)
    sampler._server.call("/collective_rpc", {"method": "groupwise_load", "args": [str(sampler._weights)]})
    assert sampled(sampler, policy, SHORT) < TOLERANCE
    assert sampled(sampler, policy, [LONG]) > 1e-2
    with pytest.raises(GroupwiseError, match="disagree on log-probs"):
        sampler._compare()
    sampler.load(policy.learner.weights(), 4)
    assert sampled(sampler, policy, [LONG]) < TOLERANCE


def test_groups_under_way_go_on_across_an_update(sampler: VllmSampler, policy: LocalEngine) -> None:
    with ThreadPoolExecutor(1) as thread:
        sampling = Sampling(max_tokens=400, temperature=1.0)
        under_way = thread.submit(sampler.sample, requests([(5,), (6,), (7,), (8,)], 8, 999), sampling)
        wait_until(lambda: under_way.running())
        threading.Event().wait(0.3)
        before = sampler._version
        move(policy, seed=5)
        sampler.load(policy.learner.weights(), before + 1)
        assert not under_way.done(), "the update came while they were written"
        groups = under_way.result(120)
    assert {one.policy_version for group in groups for one in group} == {before}
    assert sampled(sampler, policy, [*SHORT, LONG]) < TOLERANCE


def test_weights_that_cannot_be_read_are_an_error_and_the_next_ones_are_taken(
    sampler: VllmSampler, policy: LocalEngine
) -> None:
    sampler._weights.write_bytes(b"none")
    with pytest.raises(GroupwiseError, match=r"refuses /collective_rpc: 500: .*"):
        sampler._publish()
    sampler.load(policy.learner.weights(), 6)
    assert sampled(sampler, policy, [*SHORT, LONG]) < TOLERANCE


def test_a_run_with_a_server_that_runs_already_publishes_every_step(url: str, toys: Path, tmp_path: Path) -> None:
    engine = {"dtype": "float32", "sampler": {"type": "vllm", "url": url}}
    train(toy_config(toys, steps=3, output=str(tmp_path / "run"), engine=engine))
    records = metrics(tmp_path / "run")
    assert [record["sampler_mismatch"] < TOLERANCE for record in records] == [True] * 3
    assert [record["age"] for record in records] == [0.0] * 3


def test_a_run_learns_although_its_server_is_killed_until_it_dies_too_often(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample, groups, calls = VllmSampler.sample, set[int](), []

    def killing(self: VllmSampler, *arguments: Any) -> Any:
        calls.append(1)
        home = self._server.home
        assert isinstance(home, Started)
        groups.add(home.group)
        victims = {4: engine_of(home.group), 20: [home.group]}.get(len(calls), [])
        timers = [threading.Timer(0.02, os.kill, (pid, signal.SIGKILL)) for pid in victims]
        for timer in timers:
            timer.start()
        return sample(self, *arguments)

    monkeypatch.setattr(VllmSampler, "sample", killing)
    config = toy_config(
        toys,
        steps=30,
        prompts_per_step=8,
        group_size=8,
        sampling={"max_tokens": 2},
        optimizer={"learning_rate": 3e-2},
        output=str(tmp_path / "run"),
        engine={"dtype": "float32", "sampler": {"type": "vllm", "python": str(INTERPRETER), "restarts": 1}},
    )
    with pytest.raises(GroupwiseError, match=r"was lost after \d+ training steps: .*restarts: 1 allows no more"):
        train(config)
    assert "restart 1 of 1" in caplog.text
    records = metrics(tmp_path / "run")
    assert 18 <= len(records) <= 20
    assert np.mean([record["reward"] for record in records[:3]]) < 0.5
    assert np.mean([record["reward"] for record in records[-3:]]) > 0.9
    assert max(record.get("sampler_mismatch", 0.0) for record in records) < TOLERANCE  # none where nothing is learned
    assert len(groups) == 2
    wait_until(lambda: not any(map(members, groups)))


def engine_of(group: int) -> list[int]:
    """The processes of a server but for the one that takes requests."""
    return [
        pid for pid in members(group) if pid != group and b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_a_learner_of_two_ranks_trains_on_what_a_server_samples_ahead(toys: Path, tmp_path: Path) -> None:
    config = toy_config(
        toys,
        steps=6,
        ahead=1,
        output=str(tmp_path / "run"),
        engine={"dtype": "float32", "device": "cpu", "sampler": {"type": "vllm", "python": str(INTERPRETER)}},
    )
    done = command(as_file(config, tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr  # each publication was compared with the learner
    records = metrics(tmp_path / "run")
    assert {record["age"] for record in records} <= {0.0, 1.0}
    assert {record["policy_version"] for step in range(1, 7) for record in rows_of(tmp_path / "run", step)} > {0, 1}
    assert max(record["sampler_mismatch"] for record in records if record.get("age") == 0) < TOLERANCE


def test_the_quickstart_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(INTERPRETER))
    result = quickstart(overrides=["engine.sampler=vllm", "engine.dtype=float32", "steps=25"], home=tmp_path)
    assert result["before"] < 0.45
    assert result["after"] > 0.7
    assert max(record.get("sampler_mismatch", 0.0) for record in metrics(Path(result["run"]))) < TOLERANCE
