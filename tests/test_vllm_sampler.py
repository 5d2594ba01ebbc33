"""The vLLM sampler in front of a stub: what it asks, what it makes of answers, and what it does about failures."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_stub
from models import tiny_model
from processes import alive, members, parent, wait_until
from safetensors.torch import load_file
from torch import Tensor
from toys import as_file, command, metrics, sampled, terminal, toy_config, toy_folder, toy_rows
from vllm_stub import Told, interpreter, serve

from groupwise.build import load_sampler
from groupwise.cautions import cautions
from groupwise.config import Config, Engine
from groupwise.engines import Completion, Request, Sampler, Sampling, Serving
from groupwise.engines.local import load_policy
from groupwise.engines.local_sampler import LocalSampler
from groupwise.engines.steps import distinct
from groupwise.engines.vllm import Vllm
from groupwise.engines.vllm_sampler import SEEDS, VllmSampler
from groupwise.engines.vllm_server import SIDE, Started
from groupwise.engines.vllm_weights import tied
from groupwise.errors import ConfigError, EngineError, GroupwiseError, ModelError
from groupwise.records import Batch
from groupwise.train import train

Running = Callable[..., AbstractContextManager[tuple[VllmSampler, Path]]]
SOON = 10.0
"""Seconds after which a test has failed rather than that it waits."""


def serving(model: Path, **changes: Any) -> Serving:
    """What a run would say of a model, whose learner finds everything certain, as the stub does."""
    policy = tiny_model("qwen3")

    def logprobs(batch: Batch) -> Tensor:
        return torch.zeros(batch.tokens.shape)

    said = Serving(
        model=str(model),
        dtype=torch.float32,
        mixed=False,
        device=torch.device("cpu"),
        threads=1,
        stop_ids=(1,),
        temperature=1.0,
        weights=lambda: distinct(policy.state_dict()),
        logprobs=logprobs,
    )
    return dataclasses.replace(said, **changes)


def group(*keys: int, prompt: Sequence[int] = (5, 6, 7)) -> Request:
    return Request(np.array(prompt, dtype=np.int32), keys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("stub") / "model")


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Running:
    """A sampler in front of a stub, and the run folder: a stub at a URL that does as told, or a process of its own."""

    @contextmanager
    def run(told: Told | None = None, given: Serving | None = None, **settings: Any) -> Iterator[tuple[Any, Path]]:
        if told is None:
            sampler = Vllm(**settings)(given or serving(model))
            with sampler.running(tmp_path, print):
                yield sampler, tmp_path
            return
        with serve(told) as url, run(None, given, url=url, **settings) as both:
            yield both

    return run


def answered(told: Told) -> list[dict[str, Any]]:
    """The requests for completions, but for those of the fixed prompt."""
    bodies = [body for path, body in told.asked if path.startswith("/inference")]
    return [body for body in bodies if body["token_ids"][:1] == [5]]


# --------------------------------------------------------------------------------------------------------------- groups


def test_a_group_is_one_request_that_says_everything_about_the_distribution(running: Running) -> None:
    with running(told := Told()) as (sampler, _):
        groups = sampler.sample([group(1, 2, 3), group(4)], Sampling(max_tokens=4, temperature=0.7))
    assert [len(completions) for completions in groups] == [3, 1]
    first, second = sorted(answered(told), key=lambda body: -body["sampling_params"]["n"])
    assert first["token_ids"] == [5, 6, 7]
    asked = first["sampling_params"]
    assert (asked["n"], asked["max_tokens"], asked["temperature"], asked["top_p"], asked["top_k"]) == (3, 4, 0.7, 1, 0)
    assert asked["stop_token_ids"] == [1]
    assert asked["logprobs"] == 0
    assert asked["seed"] != second["sampling_params"]["seed"]


def test_completions_come_in_the_order_of_their_keys_and_say_which_weights_drew_them(running: Running) -> None:
    with running(told := Told()) as (sampler, _):
        sampler.load(distinct(tiny_model("qwen3").state_dict()), 7)
        (completions,) = sampler.sample([group(1, 2, 3)], Sampling(max_tokens=4))
    seed = answered(told)[0]["sampling_params"]["seed"]
    assert [c.tokens.tolist() for c in completions] == [[(seed + i + t) % 90 + 2 for t in range(4)] for i in range(3)]
    assert {(c.policy_version, c.finish_reason, c.entropies) for c in completions} == {(7, "length", None)}
    assert all(c.logprobs.dtype == np.float32 and len(c.logprobs) == 4 for c in completions)


def test_the_same_keys_give_the_same_seed_and_other_keys_another(running: Running) -> None:
    with running(told := Told()) as (sampler, _):
        for keys in ((1, 2), (1, 2), (2, 1), (1, 3)):
            sampler.sample([group(*keys)], Sampling(max_tokens=1))
    first, again, *others = [body["sampling_params"]["seed"] for body in answered(told)]
    assert first == again
    assert len({first, *others}) == 3
    assert 0 <= max(first, *others) < SEEDS


def test_a_greedy_group_is_asked_for_once(running: Running) -> None:
    with running(told := Told()) as (sampler, _):
        (completions,) = sampler.sample([group(1, 2, 3)], Sampling(max_tokens=2, temperature=0.0))
    assert answered(told)[0]["sampling_params"]["n"] == 1
    assert len(completions) == 3
    assert len({tuple(completion.tokens) for completion in completions}) == 1


def test_a_completion_ends_where_the_context_does_and_a_prompt_beyond_it_is_refused(running: Running) -> None:
    with running(told := Told()) as (sampler, _):
        sampler.sample([group(1, prompt=[5] * 60)], Sampling(max_tokens=32))
        assert answered(told)[0]["sampling_params"]["max_tokens"] == 4
        with pytest.raises(ModelError, match="a prompt of 64 tokens leaves no room in the context of 64"):
            sampler.sample([group(1, prompt=[5] * 64)], Sampling())


def test_a_group_larger_than_the_server_allows_is_refused(running: Running) -> None:
    told = Told(facts={**vllm_stub.FACTS, "sequences": 2})
    with (
        running(told) as (sampler, _),
        pytest.raises(ConfigError, match=r"max_sequences: 2; a group has 3 completions"),
    ):
        sampler.sample([group(1, 2, 3)], Sampling())


# -------------------------------------------------------------------------------------------------------------- weights


def test_tied_weights_are_written_under_each_of_their_names(running: Running) -> None:
    policy = tiny_model("qwen3", seed=3)
    with running(told := Told()) as (sampler, folder):
        sampler.load(distinct(policy.state_dict()), 1)
        (file,) = (folder / "vllm").glob("*.safetensors")
        written = load_file(file)
    assert "lm_head.weight" not in dict(distinct(policy.state_dict())), "the learner names tied weights once"
    assert written.keys() == policy.state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in policy.state_dict().items())
    assert [body["args"] for path, body in told.asked if "rpc" in path and body.get("args")][-1] == [str(file)]
    assert not file.exists(), "it is removed at the end"


def test_weights_that_are_not_tied_have_one_name() -> None:
    assert tied(tiny_model("llama")) == {}
    assert tied(tiny_model("qwen3")) == {"model.embed_tokens.weight": ("lm_head.weight",)}


def test_weights_are_written_in_the_dtype_of_the_server(running: Running) -> None:
    with running(Told(facts={**vllm_stub.FACTS, "dtype": "bfloat16"})) as (_, folder):
        (file,) = (folder / "vllm").glob("*.safetensors")
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


def test_an_update_happens_in_a_pause_and_forgets_what_older_weights_computed(running: Running) -> None:
    with running(told := Told()) as (sampler, _):
        told.asked.clear()
        sampler.load(distinct(tiny_model("qwen3").state_dict()), 1)
    steps = [path.removeprefix("/").split("?")[0] for path, _ in told.asked[:5]]
    assert steps == ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]


def test_the_engine_is_told_which_weights_were_taken_over(running: Running, model: Path) -> None:
    versions: list[int] = []
    with running(Told(), serving(model, loaded=versions.append)) as (sampler, _):
        sampler.load(distinct(tiny_model("qwen3").state_dict()), 3)
    assert versions == [0, 3]


def test_a_run_does_not_go_on_with_a_server_that_disagrees_with_the_learner(running: Running) -> None:
    def stale_later(told: Told) -> float:
        return -0.3 if told.version.endswith(".1") else 0.0

    with (
        running(Told(logprob=stale_later)) as (sampler, _),
        pytest.raises(GroupwiseError, match=r"after 1 training steps .* disagree on log-probs by 0\.3 nats a token"),
    ):
        sampler.load(distinct(tiny_model("qwen3").state_dict()), 1)


@pytest.mark.parametrize(("changes", "tolerance"), [({}, "0.0001"), ({"mixed": True}, "0.05")])
def test_how_much_they_may_differ_depends_on_how_they_compute(
    running: Running, model: Path, changes: dict[str, Any], tolerance: str
) -> None:
    with (
        pytest.raises(GroupwiseError, match=rf"engine\.sampler\.tolerance: {tolerance}"),
        running(Told(logprob=lambda told: -0.1), serving(model, **changes)),
    ):
        raise AssertionError("it began")


def test_a_folder_that_is_not_there_is_named(running: Running) -> None:
    problem = r"no-folder.*cannot be written.*engine\.sampler\.folder"
    with pytest.raises(GroupwiseError, match=problem), running(Told(), folder="/no-folder"):
        raise AssertionError("it began")


# ------------------------------------------------------------------------------------------------------------- failures


def test_weights_reach_a_server_that_dies_while_it_is_asked_about_them(running: Running, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "python", STUB_DIES_AT=1, STUB_ONCE=tmp_path / "died")
    with running(python=python, restarts=1) as (sampler, _):
        sampler.load(distinct(tiny_model("qwen3").state_dict()), 9)
        (completions,) = sampler.sample([group(1)], Sampling(max_tokens=3))
    assert completions[0].policy_version == 9


def test_what_weights_of_others_drew_is_drawn_again_with_ours(running: Running) -> None:
    with running(told := Told(), restarts=1) as (sampler, _):
        told.version = "default"  # somebody has started the server again
        (completions,) = sampler.sample([group(1, 2)], Sampling(max_tokens=2))
        assert completions[0].policy_version == 0
        assert len(answered(told)) == 2
        told.version = "another.5"
        with pytest.raises(GroupwiseError, match=r"has weights 'another\.5' that are not of this run.*allows no more"):
            sampler.sample([group(1, 2)], Sampling(max_tokens=2))


def test_a_request_that_the_server_refuses_is_an_error_and_no_restart(running: Running) -> None:
    refusals = iter([(400, {"error": "no such thing"}), (500, {"error": "out of range"})])
    told = Told(by=lambda number, body: next(refusals) if body["token_ids"][0] == 5 else None)
    with running(told) as (sampler, _):
        for status in ("400: .*no such thing", "500: .*out of range"):
            with pytest.raises(GroupwiseError, match=f"refuses /inference/v1/generate: {status}"):
                sampler.sample([group(1)], Sampling(max_tokens=2))
    assert len([path for path, _ in told.asked if path.startswith("/pause")]) == 1


def test_a_server_that_does_not_answer_in_time_is_lost(running: Running) -> None:
    def slow(number: int, body: dict[str, Any]) -> None:
        time.sleep(1.0 if body["token_ids"][0] == 5 else 0.0)

    began = time.monotonic()
    with running(Told(by=slow), restarts=0, timeout_seconds=0.3) as (sampler, _):
        with pytest.raises(GroupwiseError, match=r"no answer within 0\.3 seconds .timeout_seconds"):
            sampler.sample([group(1), group(2)], Sampling(max_tokens=2))
        assert time.monotonic() - began < 1.0


def test_a_server_that_is_not_there_is_waited_for_as_long_as_allowed(running: Running) -> None:
    settings = {"url": "http://127.0.0.1:9", "startup_seconds": 0.3}
    with (
        pytest.raises(GroupwiseError, match=r"127\.0\.0\.1:9 did not start: no answer within 0\.3 seconds"),
        running(**settings),
    ):
        raise AssertionError("it began")


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({}, r"has no worker of ours.*--worker-extension-cls groupwise_worker\.Worker"),
        ({"logprobs_mode": "raw_logprobs"}, r"--logprobs-mode raw_logprobs; the log-probs have to be"),
        ({"chunked_prefill": True}, r"reads prompts in chunks.*--no-enable-chunked-prefill"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_how_to_be_started(
    running: Running, facts: dict[str, Any], problem: str
) -> None:
    told = Told(facts={**vllm_stub.FACTS, **facts} if facts else {})
    with pytest.raises(GroupwiseError, match=problem), running(told):
        raise AssertionError("it began")


# ------------------------------------------------------------------------------------------------------ several threads


def test_what_waits_for_an_answer_in_another_thread_is_given_up_when_the_run_ends(running: Running) -> None:
    asked, end = threading.Event(), threading.Event()

    def slow(number: int, body: dict[str, Any]) -> None:
        if body["token_ids"][0] == 5:
            asked.set()
            end.wait(SOON)

    with ThreadPoolExecutor(1) as threads:
        with running(Told(by=slow)) as (sampler, _):
            ahead = threads.submit(sampler.sample, [group(1)], Sampling(max_tokens=2))
            assert asked.wait(SOON)
        with pytest.raises(EngineError, match="is asked for nothing any more: the run has ended"):
            ahead.result(SOON / 2)
        end.set()
    with pytest.raises(EngineError, match="the run has ended"):
        sampler.sample([group(1)], Sampling(max_tokens=2))


def dead(told: Told) -> threading.Event:
    """Have a stub look as if its engine had died when a group is asked for; set when the first one was."""
    asked = threading.Event()

    def gone(number: int, body: dict[str, Any]) -> vllm_stub.Reply | None:
        if body["token_ids"][0] != 5 or (asked.is_set() and told.healthy):
            return None
        told.healthy = False
        asked.set()
        return 500, {"error": "the engine is dead"}

    told.by = gone
    return asked


def test_a_thread_that_waits_for_a_server_to_come_back_does_not_keep_the_run_from_ending(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    asked, began = dead(told := Told()), time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        with running(told, startup_seconds=60, restarts=1) as (sampler, _):
            ahead = threads.submit(sampler.sample, [group(1)], Sampling(max_tokens=2))
            assert asked.wait(SOON)
            wait_until(lambda: "restart 1 of 1" in caplog.text)
        with pytest.raises(EngineError, match="the run has ended"):
            ahead.result(SOON)
    assert time.monotonic() - began < 2 * SOON


def test_who_begins_while_a_server_is_started_waits_for_it_and_does_not_start_it_again(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    asked = dead(told := Told())
    with ThreadPoolExecutor(2) as threads, running(told, startup_seconds=60, restarts=1) as (sampler, _):
        first = threads.submit(sampler.sample, [group(1)], Sampling(max_tokens=2))
        assert asked.wait(SOON)
        wait_until(lambda: "restart 1 of 1" in caplog.text)
        second = threads.submit(sampler.sample, [group(2)], Sampling(max_tokens=2))
        time.sleep(0.5)
        told.healthy = True
        assert [len(one.result(SOON)) for one in (first, second)] == [1, 1]
    assert len(answered(told)) == 3, "the first group twice, the second once"


def test_a_server_that_dies_under_several_threads_and_a_hand_over_is_started_once(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = interpreter(tmp_path / "python", STUB_DIES_AT=30, STUB_ONCE=tmp_path / "died")
    weights = dict(distinct(tiny_model("qwen3").state_dict()))
    over = threading.Event()

    def sample() -> list[tuple[int, int, int]]:
        """(newest version before, that of a group, newest after), again and again."""
        found = []
        while not over.is_set():
            before = sampler._version
            (completions,) = sampler.sample([group(1, 2)], Sampling(max_tokens=3))
            found += [(before, one.policy_version, sampler._version) for one in completions]
        return found

    with ThreadPoolExecutor(3) as threads, running(python=python, restarts=1) as (sampler, _):
        threaded = [threads.submit(sample) for _ in range(3)]
        try:
            for version in range(1, 100):
                sampler.load(weights.items(), version)
                if (tmp_path / "died").exists() and version >= 9:
                    break
        finally:
            over.set()
        found = [triple for thread in threaded for triple in thread.result(SOON)]
    assert caplog.text.count("restart 1 of 1") == 1
    assert all(before <= version + 1 and version <= after for before, version, after in found)
    assert len({version for _, version, _ in found}) > 2


# ------------------------------------------------------------------------------------------------- a server of our own


def test_a_server_that_dies_is_started_again_and_its_groups_are_sampled_again(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = interpreter(tmp_path / "python", STUB_DIES_AT=3, STUB_ONCE=tmp_path / "died")
    with running(python=python, restarts=1) as (sampler, folder):
        sampler.load(distinct(tiny_model("qwen3").state_dict()), 4)
        groups = sampler.sample([group(i, i + 100) for i in range(6)], Sampling(max_tokens=3))
        log = (folder / "vllm" / "server.log").read_text()
    assert [len(completions) for completions in groups] == [2] * 6
    assert {completion.policy_version for completions in groups for completion in completions} == {4}
    assert "was lost after 4 training steps: it ended with code 0: stub" in caplog.text
    assert "restart 1 of 1" in caplog.text
    assert len(set(log.split())) == 3, "two processes have said their number"


def test_a_server_that_dies_too_often_ends_the_run_with_the_reason(running: Running, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "python", STUB_DIES_AT=1)
    with (
        pytest.raises(GroupwiseError, match=r"ended with code 0: stub \d+; engine\.sampler\.restarts: 1 allows no"),
        running(python=python, restarts=1) as (sampler, _),
    ):
        sampler.sample([group(1)], Sampling(max_tokens=3))


def test_a_server_that_does_not_come_up_says_why(running: Running, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "python", STUB_BROKEN=1)
    reason = r"server\.log\) did not start: it ended with code 0: ValueError: no room for keys and values"
    with pytest.raises(GroupwiseError, match=reason), running(python=python):
        raise AssertionError("it began")


def test_nothing_is_left_of_a_server_after_the_run(running: Running, tmp_path: Path) -> None:
    with running(python=interpreter(tmp_path / "python")) as (_, folder):
        (pid,) = stubs(folder)
        assert alive(pid)
    assert not alive(pid)
    assert [path.name for path in (folder / "vllm").iterdir()] == ["server.log"]


def test_no_server_survives_a_trainer_that_is_killed() -> None:
    program = (
        "import subprocess, sys\n"
        "pipe = subprocess.PIPE\n"
        "watch = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=pipe, stdout=pipe)\n"
        "print(int(watch.stdout.readline()), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(SIDE / "groupwise_watch.py"), "sh", "-c", "sleep 1000 & sleep 1000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        group = int(trainer.stdout.readline())
        assert members(group)
        trainer.kill()
    wait_until(lambda: not members(group))


def test_no_server_survives_when_who_watches_over_it_is_killed(running: Running, tmp_path: Path) -> None:
    with running(python=interpreter(tmp_path / "python")) as (_, folder):
        (pid,) = stubs(folder)
        os.kill(parent(pid), signal.SIGKILL)
        time.sleep(0.1)
        assert alive(pid)
    wait_until(lambda: not alive(pid))


def stubs(folder: Path) -> list[int]:
    words = (folder / "vllm" / "server.log").read_text().split()
    return [int(word) for word in words if word.isdigit()]


def test_a_server_is_reached_by_nobody_else() -> None:
    server = Started(["true"], dict(os.environ), Path(os.devnull))
    server.start()
    assert Path(server.socket).parent.stat().st_mode & 0o077 == 0
    server.stop()
    assert not Path(server.socket).parent.exists()


def test_a_server_does_not_take_the_ranks_of_the_learner_for_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*of_ranks, "TORCHELASTIC_USE_AGENT_STORE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    variables = Vllm(environment={"MASTER_PORT": "7"}).variables(serving(model))
    assert {name for name in (*of_ranks, "TORCHELASTIC_USE_AGENT_STORE") if name in variables} == {"MASTER_PORT"}
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_command_line_serves_the_model_as_the_learner_has_it(model: Path) -> None:
    command = Vllm(arguments=("--seed=3",))(serving(model))._how_to_start.split()
    assert command[command.index("--dtype") + 1] == "float32"
    assert command[command.index("--max-model-len") + 1] == "64"
    assert command[-1] == "--seed=3"
    on_gpu = serving(model, device=torch.device("cuda"), mixed=True)
    assert Vllm().server_dtype(on_gpu) == torch.bfloat16
    assert "--enforce-eager" not in Vllm().command(on_gpu, 64)


# ------------------------------------------------------------------------------------------------------- the whole run


class Mute:
    """A sampler with a model of its own that says no entropies."""

    def __init__(self, serving: Serving) -> None:
        policy, _, stop_ids = load_policy(serving.model, serving.dtype, serving.device)
        self._inner = LocalSampler(policy, stop_ids, max_batch_tokens=4096)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        groups = self._inner.sample(requests, sampling)
        return [[dataclasses.replace(one, entropies=None) for one in completions] for completions in groups]

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._inner.load(weights, version)


def test_a_sampler_with_a_model_of_its_own_that_says_no_entropies_trains_the_same(tmp_path: Path) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    make: Callable[[Serving], Sampler] = Mute
    runs = {name: toy_config(tmp_path, output=str(tmp_path / name)) for name in ("shared", "own")}
    engine = runs["own"].engine.model_copy(update={"sampler": make})
    train(runs["shared"])
    train(runs["own"].model_copy(update={"engine": engine}))
    shared, own = (metrics(tmp_path / name, timings=False) for name in runs)
    assert [record.pop("entropy") for record in own if "reward" in record] == [None] * 6
    assert [{name: value for name, value in record.items() if name != "entropy"} for record in shared] == own
    assert "entropies" not in sampled(tmp_path / "own", 1)[0]


def test_a_run_ahead_of_a_server_trains_on_nothing_older_than_allowed(tmp_path: Path) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    drawn = Told(by=lambda number, body: time.sleep(0.01))
    with serve(drawn) as url:
        server = {"type": "vllm", "url": url, "tolerance": 99}
        changes = {"steps": 8, "ahead": 2, "output": str(tmp_path / "run"), "evaluation": {"fraction": 0.2, "every": 3}}
        train(toy_config(tmp_path, engine={"sampler": server}, **changes), console=terminal()[0])
    ages = [{step - 1 - row["policy_version"] for row in sampled(tmp_path / "run", step)} for step in range(1, 9)]
    assert set().union(*ages) <= {0, 1, 2}
    assert set().union(*ages[3:]) & {1, 2}, "it did run ahead"
    records = [record for record in metrics(tmp_path / "run") if "reward" in record]
    assert [record["age"] for record in records] == [max(of) for of in ages]
    assert all(0 <= record["queue"] <= 2 for record in records)
    assert all(0 <= record[f"idle/{side}"] <= 1 for record in records for side in ("sampler", "learner"))
    assert min(record["idle/learner"] for record in records[1:]) < 1


STOPS = """
import os, pathlib, signal
from groupwise.losses import Clip

UPDATES = []
MARK = pathlib.Path(__file__).with_name("stopped")

def clip(*arguments):
    UPDATES.append(1)
    if os.environ.get("RANK") == "0" and len(UPDATES) == 3 and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return Clip()(*arguments)
"""
"""A surrogate in whose third update rank 0 is asked to stop, once."""
ODD = """
def odd(rollout):
    return float(rollout.text.split()[0][-1] in "13579")
"""
"""A reward that half of each group of the stub earns: it counts up."""


class Keeping(Told):
    """A stub that keeps the weights it was given, by their version, and once has others."""

    def __init__(self) -> None:
        super().__init__(by=self.forget_once)
        self.given: dict[int, dict[str, Tensor]] = {}
        self.forgotten, self._last = 0, Path()

    def forget_once(self, number: int, body: dict[str, Any]) -> None:
        if len(self.given) == 2 and body["sampling_params"]["max_tokens"] == 4 and not self.forgotten:
            self.version, self.forgotten = "default", 1  # somebody has started it again

    def reply(self, path: str, body: Any) -> vllm_stub.Reply:
        if path == "/collective_rpc" and "args" in body:
            self._last = Path(body["args"][0])
        if path == "/update_weight_version":
            self.given[int(body["new_version"].split(".")[1])] = load_file(self._last)
        return super().reply(path, body)


@pytest.mark.slow
def test_with_a_learner_of_two_ranks_a_run_is_that_of_one_process_stopped_or_not(tmp_path: Path) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    (tmp_path / "stops.py").write_text(STOPS)
    (tmp_path / "odd.py").write_text(ODD)
    shared = {"steps": 5, "rewards": [f"{tmp_path / 'odd.py'}:odd"]}
    shared["algorithm"] = {"surrogate": f"{tmp_path / 'stops.py'}:clip"}
    with serve(alone := Keeping()) as url_of_one, serve(split := Keeping()) as url_of_two:
        one, two = (
            toy_config(
                tmp_path,
                **shared,
                output=str(tmp_path / name),
                engine={"dtype": "float32", "device": "cpu", "sampler": {"type": "vllm", "url": url, "tolerance": 99}},
            )
            for name, url in (("one", url_of_one), ("two", url_of_two))
        )
        train(one, console=terminal()[0])
        stopped = command(as_file(two, tmp_path / "run.yaml"))
        done = command("--resume", str(tmp_path / "two"))
    assert "stopped by SIGTERM" in stopped.stderr
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "stopped").exists()
    assert "has weights 'default' that are not of this run; restart 1 of 2" in stopped.stderr
    ours, theirs = (metrics(tmp_path / name, timings=False) for name in ("two", "one"))
    assert len(ours) == 5
    for record, other in zip(ours, theirs, strict=True):
        assert record.pop("entropy") is other.pop("entropy") is None
        assert record == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert [sampled(tmp_path / "two", step)[0]["text"] for step in range(1, 6)] == [
        sampled(tmp_path / "one", step)[0]["text"] for step in range(1, 6)
    ]
    assert split.given.keys() == alone.given.keys() == set(range(6))
    for version, weights in alone.given.items():
        assert weights.keys() == split.given[version].keys()
        assert all((weights[name] - split.given[version][name]).abs().max() < 1e-5 for name in weights)
    moved = [(alone.given[5][name] - weight).abs().max() for name, weight in alone.given[0].items()]
    assert max(moved) > 1e-3, "there was something to publish"


def test_an_algorithm_that_needs_entropies_is_refused(tmp_path: Path) -> None:
    for algorithm, path in (
        ({"selection": "top_entropy"}, "algorithm.selection"),
        ({"entropy": {"type": "entropy", "target": 0.5}}, "algorithm.entropy.target"),
    ):
        with pytest.raises(ConfigError, match=f"{path}: needs the entropies of what was sampled"):
            toy_config(tmp_path, algorithm=algorithm, engine={"sampler": "vllm"})


def test_a_setting_that_whoever_starts_a_server_decides_has_no_effect_on_one_that_runs(tmp_path: Path) -> None:
    sampler = {"type": "vllm", "url": "http://127.0.0.1:1", "dtype": "float32", "restarts": 0}
    said = cautions(toy_config(tmp_path, engine={"sampler": sampler}))
    assert said == ["engine.sampler.dtype has no effect with url: whoever starts that server decides"]


def test_settings_of_a_sampler_are_written_and_read_again(tmp_path: Path) -> None:
    config = toy_config(tmp_path, engine={"sampler": {"type": "vllm", "restarts": 0, "arguments": ["--seed=1"]}})
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "run.yaml") == config
    assert Config.load(tmp_path / "run.yaml", ["engine.sampler=none"]).engine.sampler is None


def test_what_samples_in_this_process_refuses_another_sampler(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.sampler: is that of training"):
        load_sampler(str(model), Engine(sampler=Vllm()))
