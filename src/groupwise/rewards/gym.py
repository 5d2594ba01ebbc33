r"""reasoning-gym: puzzles made on demand, each dataset with a verifier of its own (the extra `gym`).

https://github.com/open-thought/reasoning-gym.  `data: {path: "gym:chain_sum", limit: 1000}` makes the rows,
`rewards: gym` grades the answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from groupwise.errors import DataError, GroupwiseError, did_you_mean
from groupwise.records import Rollout
from groupwise.rewards.answers import tagged
from groupwise.seeding import key
from groupwise.slots import Slot

PREFIX = "gym:"
SIZE = 1000
"""Rows when the run file says no `limit`."""


class Gym(Slot):
    r"""What the reasoning-gym dataset that a row comes from says of the final answer, usually 0 or 1.

    The answer is the last `\boxed{...}` or `<answer>...</answer>` after the thinking, or else all that follows the
    thinking.  A row needs the columns `gym`, `question`, `answer` and `metadata`, as `data.path: gym:NAME` makes them.
    """

    type: Literal["gym"] = "gym"

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return ("gym",)

    def answer(self, text: str) -> str:
        """The final answer of a completion."""
        return tagged(text).strip()

    def __call__(self, rollout: Rollout) -> float:
        row = rollout.example
        entry = {name: row[name] for name in ("question", "answer", "metadata")}
        return float(_maker(row["gym"]).score_answer(answer=self.answer(rollout.text), entry=entry))

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """A right answer to a row; None when its puzzle comes without one."""
        return None if row["answer"] is None else f"<answer>{row['answer']}</answer>"


def gym_rows(name: str, split: str, options: Mapping[str, Any], size: int | None) -> list[dict[str, Any]]:
    """Rows of a reasoning-gym dataset: prompt, question, answer, metadata, and in `gym` how to make its verifier.

    Args:
        split: decides which puzzles are made: those of `train` and of `test` are different draws.
        options: settings of the dataset, such as `{max_terms: 3}`.

    Raises:
        DataError: reasoning-gym is not installed, has no dataset of this name, or refuses an option.
    """
    made_by = json.dumps({"name": name, **options, "seed": key("gym", name, split) % 2**31, "size": size or SIZE})
    try:
        entries: list[dict[str, Any]] = list(_maker(made_by))
    except GroupwiseError:
        raise
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"data.options: reasoning-gym's {name} refuses {dict(options)}: {error}; change them"
        ) from error
    return [{"prompt": entry["question"], **entry, "gym": made_by} for entry in entries]


@lru_cache(maxsize=128)
def _maker(made_by: str) -> Any:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            "data.path: gym: needs the package reasoning-gym; install it with pip install 'groupwise[gym]'"
        ) from error
    options = json.loads(made_by)
    name = options.pop("name")
    if name not in DATASETS:
        raise DataError(
            f"data.path: {PREFIX}{name}: reasoning-gym has no such dataset{did_you_mean(name, DATASETS)}; accepted: "
            f"{', '.join(sorted(DATASETS))}"
        )
    return reasoning_gym.create_dataset(name, **options)
