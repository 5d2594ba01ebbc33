"""Samplers and a learner as actors of a real Ray cluster on this machine, which are killed while they work."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import placements
import pytest
import ray_actors
from rich.console import Console
from safetensors.torch import load_file
from toys import final_bytes, metrics, sampled, terminal, toy_config

from groupwise.engines.cluster import api, connect, once_loaded
from groupwise.engines.ray import RemoteRanks
from groupwise.errors import ConfigError, EngineError, LearnerLostError
from groupwise.train import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason='needs the extra: pip install "groupwise[ray]"'),
]
STEPS = 7


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster for all runs of this file; the folder in which its actors say what they do."""
    marks = tmp_path_factory.mktemp("marks")
    os.environ[ray_actors.MARKS] = str(marks)
    assert connect(None, 4), "it is ours"
    yield marks
    api().shutdown()


def config(toys: Path, output: Path, **changes: Any) -> Any:
    return toy_config(toys, **{"output": str(output), "checkpoint": {"every": 2}, "steps": STEPS, **changes})


def kill(marks: Path, what: str, killed: list[int]) -> None:
    """Wait until an actor says that it is at this, and end it with SIGKILL."""
    while not (found := list(marks.glob(f"*.{what}"))):
        time.sleep(0.01)
    killed.append(int(found[0].name.split(".")[0]))
    os.kill(killed[-1], signal.SIGKILL)


class Ended:
    """A run on Ray in which a sampler and then the learner were killed, and two runs in this process."""

    def __init__(self, toys: Path, home: Path, marks: Path) -> None:
        quiet = Console(quiet=True)
        self.shared = train(config(toys, home / "shared"), console=quiet).folder
        split = {"placement": f"{placements.__file__}:two"}  # the same groups go together, as on two actors
        self.split = train(config(toys, home / "split", engine=split), console=quiet).folder
        self.killed: list[int] = []
        for what in ("sampling.2", "updating.6"):
            threading.Thread(target=kill, args=(marks, what, self.killed), daemon=True).start()
        console, self.screen = terminal()
        placed = config(toys, home / "there", engine={"placement": f"{ray_actors.__file__}:slow"})
        self.there = train(placed, console=console).folder


@pytest.fixture(scope="module")
def ended(toys: Path, cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return Ended(toys, tmp_path_factory.mktemp("runs"), cluster)


def test_a_run_whose_sampler_and_learner_were_killed_ends_with_the_bits_of_one_left_alone(ended: Ended) -> None:
    assert len(ended.killed) == 2, "both died, in the midst of sampling and of an update"
    assert final_bytes(ended.there) == final_bytes(ended.split)
    assert metrics(ended.there, timings=False) == metrics(ended.split, timings=False)


def test_no_rollout_is_lost_or_changed_when_a_sampler_dies(ended: Ended) -> None:
    for step in range(1, STEPS + 1):
        assert sampled(ended.there, step) == sampled(ended.split, step)


def test_with_nothing_ahead_it_is_the_run_in_one_process(ended: Ended) -> None:
    """Which groups are decoded together changes the last bits of a log-prob, as it does within one process."""
    for there, here in zip(metrics(ended.there, timings=False), metrics(ended.shared, timings=False), strict=True):
        assert there == pytest.approx(here, abs=1e-6)
    for step in range(1, STEPS + 1):
        texts = [[(r["group"], r["text"]) for r in sampled(run, step)] for run in (ended.there, ended.shared)]
        assert texts[0] == texts[1]


def test_the_run_says_who_died_and_where_it_goes_on(ended: Ended) -> None:
    said = ended.screen.getvalue()
    assert f"the learner (pid {ended.killed[1]} on {socket.gethostname()}) died: it was killed" in said
    assert "the last step written down is 5; it is started anew, 1 of at most 3 times in this run" in said
    assert f"continuing {ended.there} after step 4" in said


def test_the_actors_are_gone_when_the_run_is_over(ended: Ended, cluster: Path) -> None:
    pids = {int(path.name.split(".")[0]) for path in cluster.iterdir()}
    assert {*ended.killed} < pids
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -------------------------------------------------------------------------------------------------- what it cannot have


def test_more_samplers_than_there_is_room_for_are_refused(toys: Path, tmp_path: Path, cluster: Path) -> None:
    changes = {"engine": {"placement": {"type": "ray", "samplers": 40, "patience_seconds": 1}}}
    with pytest.raises(ConfigError, match=r"samplers: 40; .* 1 CPU each .* within 1 s; the cluster has 4 CPU in all"):
        train(config(toys, tmp_path / "run", **changes), console=Console(quiet=True))


def test_why_an_actor_cannot_be_started_is_said(cluster: Path) -> None:
    class Refusing:
        def __init__(self) -> None:
            raise FileNotFoundError("no such model")

        def where(self) -> None: ...

    with pytest.raises(EngineError, match=r"the learner cannot be started: .*FileNotFoundError: no such model"):
        once_loaded(["the learner"], [api().remote(Refusing).remote()], 60)


def test_the_run_says_that_it_waits_for_its_learner(caplog: pytest.LogCaptureFixture) -> None:
    ranks, future = RemoteRanks(lambda rank, place: None, 1, patience=0.05), Future[str]()
    ranks._names = ["the learner (pid 7 on host)"]
    threading.Timer(0.5, future.set_result, ["done"]).start()
    with caplog.at_level(logging.WARNING):
        assert ranks.wait(SimpleNamespace(future=lambda: future), "update") == "done"
    assert "the run waits since 0 s for the learner (pid 7 on host): update" in caplog.text


# -------------------------------------------------------------------------------------------------- a learner of ranks

UPDATES = 5
DIES = """
import os, pathlib, signal
from groupwise.losses import Clip

def clip(*arguments):
    folder = pathlib.Path(__file__).parent
    if os.environ.get("RANK") == "1":
        (folder / f"update.{len(list(folder.glob('update.*'))) + 1}").touch()
        if (folder / "update.4").exists() and not (folder / "update.5").exists():
            os.kill(os.getpid(), signal.SIGKILL)
    return Clip()(*arguments)
"""
"""A surrogate, of a file that the actors do not have, with which rank 1 of the learner dies in its fourth update."""


class Ranked:
    """A run whose learner is two actors, one of which was killed, and the same run in this process."""

    def __init__(self, toys: Path, home: Path) -> None:
        (home / "dies.py").write_text(DIES)
        shape = {
            "algorithm": {"surrogate": f"{home / 'dies.py'}:clip"},
            "optimizer": {"learning_rate": 1e-3},
            "steps": UPDATES,
        }
        engine = {"learner": {"type": "fsdp", "ranks": 2}, "placement": {"type": "ray", "samplers": 1}}
        self.here = train(config(toys, home / "here", **shape), console=Console(quiet=True)).folder
        console, self.screen = terminal()
        there = config(toys, home / "there", **shape, engine=engine)
        self.there = train(there, console=console).folder


@pytest.fixture(scope="module")
def ranked(toys: Path, cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranked:
    return Ranked(toys, tmp_path_factory.mktemp("ranked"))


def test_a_learner_of_two_actors_one_of_which_was_killed_trains_as_one_in_this_process(ranked: Ranked) -> None:
    for there, here in zip(metrics(ranked.there, timings=False), metrics(ranked.here, timings=False), strict=True):
        assert there == pytest.approx(here, abs=1e-5)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (ranked.there, ranked.here))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    for step in range(1, UPDATES + 1):
        assert [r["text"] for r in sampled(ranked.there, step)] == [r["text"] for r in sampled(ranked.here, step)]


def test_the_rank_that_died_is_named_and_all_ranks_are_started_anew(ranked: Ranked) -> None:
    said = ranked.screen.getvalue()
    assert re.search(rf"rank 1 of the learner \(pid \d+ on {socket.gethostname()}\) died: it was killed", said), said
    assert "the last step written down is 3; it is started anew, 1 of at most 3 times in this run" in said
    assert f"continuing {ranked.there} after step 2" in said


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (EngineError("rank 1 on b (process 8): rank 0 has died"), "^rank 1 on b .process 8.: rank 0 has died$"),
        (RuntimeError("no memory"), "^rank 1 of the learner .pid 8 on b. ended with RuntimeError: no memory$"),
    ],
)
def test_what_ends_another_rank_than_the_first_is_said_at_once(cause: Exception, said: str) -> None:
    ranks, asked, other = RemoteRanks(lambda rank, place: None, 2, patience=60), Future[str](), Future[None]()
    ranks._names = ["rank 0 of the learner (pid 7 on a)", "rank 1 of the learner (pid 8 on b)"]
    ranks._others = {other: ranks._names[1]}
    other.set_exception(api().exceptions.RayTaskError("serve", "", cause).as_instanceof_cause())
    with pytest.raises(LearnerLostError, match=said):
        ranks.wait(SimpleNamespace(future=lambda: asked), "update")
