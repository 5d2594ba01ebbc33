"""Parts of a run say themselves what of it they cannot serve, and what they ignore."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.cautions import cautions
from groupwise.config import Config
from groupwise.demands import Demands, Remarks
from groupwise.engines import Sampler, Serving
from groupwise.errors import ConfigError

TREE: dict[str, Any] = {"model": "some/model", "data": {"path": "rows.jsonl"}, "rewards": ["math_answer"]}


class Narrow:
    """A sampler of somebody else's, that can write two completions at most."""

    def __call__(self, serving: Serving) -> Sampler:
        raise NotImplementedError

    def refusals(self, demands: Demands) -> Remarks:
        yield demands.largest_request > 2, f"group_size: {demands.largest_request}; narrow; use 2"
        yield demands.critic, "algorithm.critic: narrow; leave it out"

    def cautions(self, demands: Demands) -> Remarks:
        yield demands.largest_request > 1, "narrow is slow"
        yield demands.largest_request < 1, "never said"


def test_a_part_that_nobody_here_knows_is_asked_what_it_refuses_and_ignores() -> None:
    tree = {**TREE, "engine": {"sampler": Narrow()}}
    assert cautions(Config.parse({**tree, "group_size": 2})) == ["narrow is slow"]
    with pytest.raises(ConfigError, match=r"^group_size: 4; narrow; use 2$"):
        Config.parse({**tree, "group_size": 2, "evaluation": {"samples": 4}})
    with pytest.raises(ConfigError, match=r"2 problems\n1\. group_size: 8; narrow; use 2\n2\. algorithm\.critic: "):
        Config.parse({**tree, "algorithm": "ppo"})


def test_parts_that_do_not_work_together_are_named_as_they_were_set() -> None:
    with pytest.raises(ConfigError, match=r"engine\.learner: fsdp and engine\.sampler: test_demands:Narrow; they do"):
        Config.parse({**TREE, "group_size": 2, "engine": {"learner": "fsdp", "sampler": Narrow()}})
