"""Run files of other trainers, read into ours: every key is taken over, approximated or said to have no counterpart.

`Reader` hands out the keys of a foreign file and keeps a note on each.  What nobody took is noted as well when the
import ends, so nothing is dropped in silence.  `roll.py` and `trl.py` know the two vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import yaml
from pydantic import ValidationError

from groupwise.algorithms import Algorithm
from groupwise.errors import ConfigError, did_you_mean
from groupwise.trees import Tree

Reasons = Sequence[tuple[str, str]]
"""(patterns of keys, separated by spaces; why they have no counterpart); the first that matches speaks."""


class Imported(NamedTuple):
    """What became of a foreign run file."""

    tree: Tree
    """Settings for `Config`; without what the file does not say, such as the model."""
    notes: list[str]
    """One line on each key: what it became, why it has no counterpart, or what is still to be set."""

    def to_yaml(self) -> str:
        """The tree as a run file."""
        return yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)


class Reader:
    """The keys of a foreign file by dotted path, and a note on each.

    A note is made on keys that the file has, and by `became` also on a default that shapes the run.
    """

    def __init__(self, settings: Mapping[str, Any], peer: str) -> None:
        self.given: dict[str, Any] = dict(_leaves(settings))
        self.peer = peer
        self._defaults: dict[str, Any] = {}
        self._said: dict[str, str] = {}
        self._assumed: dict[str, str] = {}
        self._to_do: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self.given

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; what the peer uses, `default`, where the file does not have it."""
        if key in self.given:
            return self.given[key]
        self._defaults[key] = default
        return default

    def number(self, key: str, default: float | None = None) -> Any:
        """The value of a key that holds a number or nothing.

        Raises:
            ConfigError: it holds something else.
        """
        value = self.take(key, default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ConfigError(f"{key}: {value!r}; {self.peer} takes a number here")

    def became(self, key: str, what: str, but: str = "") -> None:
        """Note what a key became; `but` is how that differs from what the peer does."""
        default = self._defaults.get(key)
        if key not in self.given and (default is None or (default in (0, 1, "none") and not but)):
            return
        value = _shown(self.given[key]) if key in self.given else f"{_shown(default)} ({self.peer}'s default)"
        line = f"approximated: {key}: {value} -> {what}; {but}" if but else f"{key}: {value} -> {what}"
        (self._said if key in self.given else self._assumed).setdefault(key, line)

    def no_counterpart(self, key: str, why: str) -> None:
        """Note why a key did not become anything."""
        self._note(key, f"{key}: no counterpart because {why}")

    def dead(self, key: str, why: str) -> None:
        """Note that the peer itself does not read a key, and what it does."""
        self._note(key, f"{key}: dead in {self.peer}: {why}")

    def _note(self, key: str, line: str) -> None:
        if key in self.given:
            self._said.setdefault(key, line)

    def ask(self, setting: str, why: str) -> None:
        """Note a setting of ours that the file cannot answer."""
        self._to_do.append(f"to do: {setting}: {why}")

    def finish(self, dead: Reasons, reasons: Reasons, unknown: Callable[[str], str]) -> list[str]:
        """One note on every key, in the order of the file; then the defaults that shape the run, and what is to do."""
        for key in self.given:
            if key in self._said:
                continue
            if (why := _reason(key, dead)) is not None:
                self.dead(key, why)
            elif (why := _reason(key, reasons)) is not None:
                self.no_counterpart(key, why)
            else:
                self.no_counterpart(key, unknown(key) + did_you_mean(key, self._defaults))
        return [*(self._said[key] for key in self.given), *self._assumed.values(), *self._to_do]

    def algorithm(self, **slots: Any) -> Tree:
        """An algorithm of these slots, as settings.

        Raises:
            ConfigError: the combination is one that we refuse.
        """
        try:
            return Algorithm(**slots).model_dump(mode="json")
        except ValidationError as error:
            reasons = "; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors())
            raise ConfigError(f"{self.peer} accepts these settings together, we do not: {reasons}") from None


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _reason(key: str, table: Reasons) -> str | None:
    return next((why for keys, why in table if any(fnmatchcase(key, pattern) for pattern in keys.split())), None)


def _shown(value: Any) -> str:
    """A value as YAML writes it, on one line."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def put(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key of a tree, with the mappings above it."""
    *parents, last = key.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


SHARES_ROWS = "the completions of an update are drawn at random there; here an update gets whole groups"
ONE_PASS = "each rollout is trained on once; more updates on the same rollouts want more prompts_per_step instead"
BF16 = (
    "engine.dtype: float32",
    "mixed precision keeps float32 weights; engine.dtype: bfloat16 would keep them in bfloat16, which loses steps "
    "as small as those of a learning rate of 1e-6",
)
"""What bf16 mixed precision becomes, and how it differs."""
