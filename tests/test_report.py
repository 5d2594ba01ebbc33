"""What the report knows of a run, how much of it fits, the two commands, and whom the live page answers."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from runs import GROUP, PROMPTS, STEPS, TRAP, grow, made_chat, made_log, made_rollout, made_run
from toys import toy_config, toy_folder, toy_rows
from typer.testing import CliRunner

from groupwise.cli import app
from groupwise.completions import table
from groupwise.errors import CheckpointError, ConfigError
from groupwise.report import write_report
from groupwise.report.completions import Digest, choose, digest, question, whole_groups
from groupwise.report.data import MOST_POINTS, RunFolder, duration, groups_to_show, overview
from groupwise.report.watch import Server
from groupwise.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "first")


def data_of(page: str) -> Any:
    """What a page has embedded."""
    return json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])


def digest_of(step: int, groups: int, lengths: int) -> Digest:
    numbers = np.repeat(np.arange(groups), 4)
    scores = numbers / groups
    return Digest(
        step=step,
        groups=numbers,
        prompts=[f"{group}" for group in numbers],
        texts=[""] * len(numbers),
        lengths=np.full(len(numbers), lengths - 1.0),
        rewards=np.where(numbers == groups - 2, np.arange(len(numbers)) % 2, scores),
        headline=scores,
        truncated=np.zeros(len(numbers), dtype=np.bool_),
    )


# What a report knows -------------------------------------------------------------------------------------------------


def test_the_report_of_a_real_run_has_its_numbers(tmp_path: Path) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    held_out = {"data": {"path": str(tmp_path / "rows.jsonl")}}
    done = train(toy_config(tmp_path, evaluation=held_out, algorithm="dr_grpo", output=str(tmp_path / "run")))
    data = data_of(write_report([done.folder], tmp_path / "page.html").read_text())
    [shown], [groups] = data["runs"], data["groups"]
    assert done.before is not None
    assert done.after is not None
    assert [one["mean"] for one in shown["evaluations"]] == pytest.approx([done.before.headline, done.after.headline])
    assert shown["evaluations"][0]["low"] == pytest.approx(done.before.interval[0], rel=1e-3)
    assert ["Algorithm", "dr_grpo"] in shown["about"]
    records = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert shown["curves"]["reward"] == pytest.approx([r["reward"] for r in records if "reward" in r], rel=1e-5)
    rows = pq.read_table(done.folder / "rollouts" / "step-00003.parquet").to_pylist()
    drawn = [one for group in groups["steps"]["3"] for one in group["completions"]]
    for one, row in zip(drawn, rows, strict=True):
        said = "".join(groups["pieces"][token] for token in one["tokens"])
        assert said.replace(" <stop>", "").replace(" <pad>", "").split() == row["text"].split()
        assert one["logprobs"] == [round(1000 * p) for p, m in zip(row["logprobs"], row["loss_mask"], strict=True) if m]
        assert one["advantage"] == pytest.approx(row["advantage"], abs=1e-4)


def test_held_out_prompts_are_sorted_by_what_became_of_them(run: Path) -> None:
    found = {(one["kind"], one["prompt"]) for one in overview(RunFolder(run))["held_out"]}
    assert found == {("solved", "Held-out 1?"), ("solved", "Held-out 2?"), ("lost", "Held-out 3?")}


def test_the_hardest_prompts_come_first(run: Path) -> None:
    hardest = overview(RunFolder(run))["hardest"]
    assert [one["mean"] for one in hardest] == sorted(one["mean"] for one in hardest)
    assert hardest[0] == {"prompt": f"What is {STEPS} + 0?", "step": STEPS, "group": 0, "mean": 0.25, "tries": 1}


def test_distributions_count_every_completion(run: Path) -> None:
    spread = overview(RunFolder(run))["spread"]
    assert sum(map(sum, spread["completion_length"]["counts"])) == STEPS * PROMPTS * GROUP
    assert sum(map(sum, spread["reward"]["counts"])) == STEPS * (PROMPTS * GROUP - 1)  # one a step has no reward


def test_a_line_that_is_still_being_written_is_left_for_later(run: Path, tmp_path: Path) -> None:
    young = made_run(tmp_path / "young", steps=2)
    with (young / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert overview(RunFolder(young))["curves"]["step"] == [1, 2]


def test_the_curves_of_a_long_run_are_means_of_neighbours(tmp_path: Path) -> None:
    long = made_run(tmp_path / "long", steps=1)
    with (long / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": i, "reward": i % 2}) + "\n" for i in range(2 * MOST_POINTS))
    curves = overview(RunFolder(long))["curves"]
    assert curves["reward"] == [0.5] * MOST_POINTS


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "2+2?"),
        ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n", "2+2?"),
        ("<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n", "2+2?"),
        ("<s>[INST] 2+2? [/INST]", "2+2?"),
        ("<\uff5cUser\uff5c>2+2?<\uff5cAssistant\uff5c>", "2+2?"),
        ("2+2 = ", "2+2 ="),
    ],
)
def test_a_prompt_is_named_by_its_last_question(prompt: str, asked: str) -> None:
    assert question(prompt) == asked


@pytest.mark.parametrize(("seconds", "said"), [(47, "47 s"), (720, "12 min"), (12_000, "3 h 20 min")])
def test_durations_are_for_people(seconds: float, said: str) -> None:
    assert duration(seconds) == said


# How much of it fits -------------------------------------------------------------------------------------------------


def test_a_small_run_is_shown_whole(run: Path) -> None:
    [chosen] = groups_to_show([RunFolder(run)], 500_000)
    assert chosen == {step: list(range(PROMPTS)) for step in range(1, STEPS + 1)}


@pytest.mark.parametrize("lengths", [10, 100, 1000])
def test_a_long_run_is_shown_in_about_as_many_tokens_as_fit(lengths: int) -> None:
    steps = [digest_of(step, groups=16, lengths=lengths) for step in range(1, 501)]
    chosen = choose(steps, budget=100_000)
    tokens = sum(len(groups) for groups in chosen.values()) * 4 * lengths
    assert 50_000 < tokens <= 110_000
    assert {1, 500} <= chosen.keys()
    for groups in chosen.values():  # the hardest, the easiest, and the one whose rewards differ most
        assert {0, 14, 15} <= set(groups)


def test_of_a_very_long_completion_the_two_ends_are_shown(tmp_path: Path) -> None:
    chat = made_chat()
    text = "a" * 1500 + "b" * 1500
    pq.write_table(table(1, [made_rollout(chat, "Why?", text, right=True)], chat), tmp_path / "step-00001.parquet")
    shown = whole_groups({1: tmp_path / "step-00001.parquet"}, {1: None})
    [one] = shown["steps"]["1"][0]["completions"]
    said = "".join(shown["pieces"][token] for token in one["tokens"])
    assert said == "a" * 1000 + "b" * 999 + "<|im_end|>"
    assert (one["length"], one["left_out"]) == (3001, 1001)


# The commands --------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_says_where(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.output.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert TRAP not in page  # `<` of the data is spelled so that nothing in it can be a tag
    assert TRAP.replace("<", "\\u003c") not in page.split('<script id="data"')[0]


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: not a run folder .*pass the folder that a run printed"):
        write_report([tmp_path / "nowhere"], tmp_path / "page.html")
    with pytest.raises(CheckpointError, match=r"absent/page.html: cannot be written: No such file .*--output"):
        write_report([run], tmp_path / "absent" / "page.html")


def test_completions_of_another_version_are_refused(run: Path, tmp_path: Path) -> None:
    old = pq.read_table(run / "rollouts" / "step-00001.parquet").drop_columns(["length"])
    pq.write_table(old, tmp_path / "step-00001.parquet")
    with pytest.raises(CheckpointError, match=r"step-00001.parquet: has no column length, .*another version"):
        digest(tmp_path / "step-00001.parquet", "math_answer")


def test_watch_serves_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "groupwise.cli", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        address = job.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        status, _, content = get(address.removeprefix("http://").rstrip("/"), "/data.json")
        job.send_signal(signal.SIGINT)
        job.wait(timeout=20)
        assert (status, json.loads(content)["live"]) == (200, True)
        assert (job.returncode, job.stderr.read()) == (0, "")


# Whom the live page answers ------------------------------------------------------------------------------------------


@contextmanager
def serving(*runs: Path, host: str = "127.0.0.1") -> Iterator[Server]:
    with Server(runs, host=host) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def get(netloc: str, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(netloc, timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def test_the_data_is_sent_again_only_when_the_run_has_written(tmp_path: Path) -> None:
    run = made_run(tmp_path / "live", steps=1, of=3)
    with serving(run) as server:
        netloc = f"127.0.0.1:{server.server_address[1]}"
        status, headers, first = get(netloc, "/data.json")
        assert (status, json.loads(first)["runs"][0]["steps"]) == (200, [1])
        assert get(netloc, "/data.json", If_None_Match=headers["ETag"])[0] == 304
        grow(made_log(run, 3), 2)
        status, _, second = get(netloc, "/data.json", If_None_Match=headers["ETag"])
        assert (status, json.loads(second)["runs"][0]["steps"]) == (200, [1, 2])


def test_a_step_is_sent_whole_and_one_that_is_not_there_is_not(run: Path) -> None:
    with serving(run) as server:
        netloc = f"127.0.0.1:{server.server_address[1]}"
        groups = json.loads(get(netloc, "/step.json?run=0&step=7")[2])["steps"]["7"]
        assert [len(group["completions"]) for group in groups] == [GROUP] * PROMPTS
        for path in ("/step.json?run=0&step=99", "/step.json?run=5&step=1", "/step.json", "/config.yaml", "/../x"):
            assert get(netloc, path)[0] == 404
        assert get(netloc, "/data.json", method="POST")[0] == 501  # read-only


def test_a_name_of_someone_else_for_this_machine_is_not_answered(run: Path) -> None:
    with serving(run) as server:
        netloc = f"127.0.0.1:{server.server_address[1]}"
        assert server.token == ""
        for path in ("/", "/data.json", "/step.json?run=0&step=1"):
            assert get(netloc, path, Host="rebound.example")[0] == 403
            assert get(netloc, path, Host="localhost:8765")[0] == 200


def test_beyond_loopback_only_the_token_opens_the_page(run: Path) -> None:
    with serving(run, host="0.0.0.0") as server:
        netloc = f"127.0.0.1:{server.server_address[1]}"
        assert len(server.token) >= 20
        assert server.address.endswith(f"/?token={server.token}")
        for path in ("/", "/data.json", "/step.json?run=0&step=1"):
            joined = "&" if "?" in path else "?"
            assert get(netloc, path)[0] == 403
            assert get(netloc, f"{path}{joined}token=guess")[0] == 403
            assert get(netloc, f"{path}{joined}token={server.token}")[0] == 200


def test_a_port_that_is_taken_is_refused(run: Path) -> None:
    with (
        serving(run) as server,
        pytest.raises(ConfigError, match=r"--host 127.0.0.1 --port \d+: cannot be listened on: Address already in use"),
    ):
        Server([run], port=int(server.server_address[1]))
