"""Trackers hold the numbers of metrics.jsonl, and environment.json holds what the run ran on."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from toys import metrics, toy_config, toy_folder, toy_rows
from wandb.proto import wandb_internal_pb2

from groupwise.environment import VARIABLES
from groupwise.errors import ConfigError
from groupwise.trackers import open_trackers
from groupwise.train import train

Numbers = dict[tuple[int, str], float]
BLOCK, FULL, LAST = 32768, 1, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with evaluations and both trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    toy_folder(folder / "model")
    rows = toy_rows(folder / "rows.jsonl")
    config = toy_config(
        folder,
        output=str(folder / "run"),
        steps=3,
        evaluation={"data": {"path": str(rows), "limit": 4}, "every": 2},
        trackers=["tensorboard", "wandb"],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("MY_API_KEY", "do-not-tell")
        return train(config, console=Console(quiet=True)).folder


def numbers(run: Path) -> Numbers:
    """Every finite number of metrics.jsonl, by step and name."""
    return {
        (record["step"], name): value
        for record in metrics(run)
        for name, value in record.items()
        if name != "step" and value is not None
    }


def test_tensorboard_holds_the_numbers_of_metrics_jsonl(run: Path) -> None:
    (file,) = (run / "tensorboard").glob("events.out.tfevents.*")
    found: Numbers = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found[event.step, value.tag] = value.tensor.float_val[0]
    assert found == pytest.approx(numbers(run), rel=1e-6)


def test_wandb_holds_the_numbers_of_metrics_jsonl(run: Path) -> None:
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    found: Numbers = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = int(items["_step"])
            found |= {(step, name): value for name, value in items.items() if not name.startswith("_")}
    assert found == pytest.approx(numbers(run))


def test_trackio_holds_the_numbers_of_metrics_jsonl_and_asks_nobody(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio", reason="needs the extra: pip install -e '.[trackio]'")
    from trackio import sqlite_storage

    asked: list[object] = []

    def unreachable(host: object, *_: Any) -> None:
        asked.append(host)
        raise OSError("no network in tests")

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    (tracker,) = open_trackers(["trackio"], run, {"steps": 3})
    for record in metrics(run):
        finite = {name: value for name, value in record.items() if name != "step" and value is not None}
        tracker.log(record["step"], finite)
    tracker.close()
    with contextlib.closing(sqlite3.connect(sqlite_storage.SQLiteStorage.get_project_db_path("groupwise"))) as base:
        rows = base.execute("select run_name, step, metrics from metrics").fetchall()
        (config,) = base.execute("select config from configs").fetchone()
    found = {(step, name): value for _, step, text in rows for name, value in json.loads(text).items()}
    assert found == pytest.approx(numbers(run))
    assert {name for name, _, _ in rows} == {run.name}
    assert json.loads(config)["steps"] == 3
    assert json.loads(config)["_Username"] is None
    assert (asked, capsys.readouterr().out) == ([], "")
    assert not constants.HF_HUB_OFFLINE


def records(file: Path) -> Iterator[Any]:
    """What a W&B file is made of: LevelDB's log format after 7 bytes of its own."""
    content, place, joined = file.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while place + 7 <= len(content):
        left = BLOCK - place % BLOCK
        if left < 7:  # too little for a header: the rest of a block is empty
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        joined += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(joined)
            yield record
            joined = b""


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    monkeypatch.delitem(sys.modules, "groupwise.trackers.tensorboard", raising=False)
    config = toy_config(tmp_path, output=str(tmp_path / "run"), trackers=["tensorboard"])
    with pytest.raises(ConfigError, match=r"trackers: tensorboard; not installed; run `pip install 'groupwise\["):
        train(config, console=Console(quiet=True))
    with pytest.raises(ConfigError, match="trackers"):
        toy_config(tmp_path, trackers=["paper"])


def test_environment_json_tells_what_the_run_ran_on_and_no_secret(run: Path) -> None:
    text = (run / "environment.json").read_text()
    told: Mapping[str, Any] = json.loads(text)
    assert told["packages"]["torch"] == torch.__version__
    assert told["threads"] == torch.get_num_threads()
    assert told["command"] == sys.argv
    assert told["variables"]["OMP_NUM_THREADS"] == "1"
    assert set(told["variables"]) <= set(VARIABLES)
    assert "do-not-tell" not in text
