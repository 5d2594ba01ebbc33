"""Parts of a run say themselves what of it they cannot serve, and what they ignore."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.cautions import cautions
from groupwise.checks import Outline
from groupwise.config import Config
from groupwise.demands import Demands, Remarks
from groupwise.engines import Sampler, Serving
from groupwise.errors import ConfigError
from groupwise.settling import settle

TREE: dict[str, Any] = {"model": "some/model", "data": {"path": "rows.jsonl"}, "rewards": ["math_answer"]}


class Narrow:
    """A sampler of somebody else's, that can write two completions at most."""

    def __call__(self, serving: Serving) -> Sampler:
        raise NotImplementedError

    def refusals(self, demands: Demands) -> Remarks:
        yield demands.largest_request > 2, f"group_size: {demands.largest_request}; narrow; use 2"
        yield demands.ahead > 0, "ahead: narrow; leave it out"

    def cautions(self, demands: Demands) -> Remarks:
        yield demands.largest_request > 1, "narrow is slow"
        yield demands.largest_request < 1, "never said"


def test_a_part_that_nobody_here_knows_is_asked_what_it_refuses_and_ignores() -> None:
    tree = {**TREE, "engine": {"sampler": Narrow()}}
    assert cautions(Config.parse({**tree, "group_size": 2})) == ["narrow is slow"]
    with pytest.raises(ConfigError, match=r"^group_size: 4; narrow; use 2$"):
        Config.parse({**tree, "group_size": 2, "evaluation": {"samples": 4}})
    with pytest.raises(
        ConfigError, match=r"2 problems\n1\. group_size: 8; narrow; use 2\n2\. ahead: narrow; leave it out$"
    ):
        Config.parse({**tree, "ahead": 1})


def test_parts_that_do_not_work_together_are_named_as_they_were_set() -> None:
    named = r"engine\.sampler: test_demands:Narrow and engine\.placement: ray; they do"
    with pytest.raises(ConfigError, match=named):
        Config.parse({**TREE, "group_size": 2, "engine": {"placement": "ray", "sampler": Narrow()}})


def test_gpus_of_actors_have_no_effect_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = {**TREE, "engine": {"placement": {"type": "ray", "gpus": 0.5}, "device": "cpu"}}
    assert cautions(Config.parse(placed)) == [
        "engine.placement.gpus has no effect with engine.device: cpu, which is no GPU here"
    ]
    assert not cautions(Config.parse({**TREE, "engine": {"placement": "ray", "device": "cpu"}}))
    monkeypatch.setattr("groupwise.engines.ray.find_device", lambda name, setting: torch.device("cuda"))
    assert not cautions(Config.parse(placed))


def test_tokens_of_this_process_have_no_effect_on_a_server_and_are_left_open() -> None:
    served = {**TREE, "engine": {"sampler": "vllm", "threads": 1}}
    (said,) = cautions(Config.parse({**TREE, "engine": {"sampler": "vllm", "sample_tokens": 7}}))
    assert said.startswith("engine.sample_tokens has no effect with engine.sampler: vllm: ")
    config, _ = settle(Config.parse(served), Outline(), torch.device("cpu"))
    assert (config.engine.sample_tokens, cautions(config)) == (0, []), "what was chosen is not what was set"


@pytest.mark.parametrize(("started", "said"), [("2", 0), ("3", 1), ("0", 0)])
def test_ranks_have_no_effect_where_somebody_else_starts_them(
    started: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", started)
    found = cautions(Config.parse({**TREE, "engine": {"learner": {"type": "fsdp", "ranks": 2}}}))
    told = "engine.learner.ranks: 2 has no effect: somebody started this program as 3 processes"
    assert found == [told] * said
    assert not cautions(Config.parse({**TREE, "engine": {"learner": "fsdp"}}))
    actors = {"learner": {"type": "fsdp", "ranks": 2}, "placement": "ray"}
    assert not cautions(Config.parse({**TREE, "engine": actors}))
