"""Settings as a tree of plain values: read from YAML, changed by `dotted.key=value`, laid over one another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from groupwise.errors import ConfigError

Tree = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-6` is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> Tree:
    """The mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, or it does not hold a mapping.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such run file; write one, or give settings as --model DIR --data FILE key=value")
    try:
        tree = yaml.load(path.read_bytes(), _Loader)
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())
        raise ConfigError(f"{path}: not valid YAML: {found}; mend that place, and save it as UTF-8") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}; a run file is a mapping of settings, as in model: DIR")
    return cast(Tree, tree)


def apply(tree: Tree, override: str) -> None:
    """Set `dotted.key=value` in a tree; the value is read as YAML.

    Raises:
        ConfigError: there is no `=`, the value is no YAML, or the key leads through a value that holds no settings.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override}: not a setting; write dotted.key=value, such as optimizer.learning_rate=1e-5")
    place: Any = tree
    *parents, last = key.split(".")
    for name in parents:
        place = _step_into(place, name, key)
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())
        raise ConfigError(
            f"{key}: {text!r} is not valid YAML: {found}; put text with special signs in quotes"
        ) from error
    if isinstance(place, list):
        place[_index(cast(list[Any], place), last, key)] = value
    else:
        place[last] = value


def _step_into(place: Any, name: str, key: str) -> Any:
    index: Any = _index(cast(list[Any], place), name, key) if isinstance(place, list) else name
    below = place[index] if isinstance(place, list) else place.get(index)
    if isinstance(below, str) and name == "algorithm":
        below = {"preset": below}
    if isinstance(below, str):
        below = {"type": below}
    if below is None:
        below = {}
    if not isinstance(below, dict | list):
        raise ConfigError(f"{key}: {name} is {below!r} and holds no settings; write {name}=VALUE")
    place[index] = below
    return cast(Any, below)


def _index(place: list[Any], name: str, key: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise ConfigError(f"{key}: {name} is not a place in a list of {len(place)}; use 0 to {len(place) - 1}")
    return int(name)


def merge(base: Any, changes: Any) -> Any:
    """`changes` laid over `base`; a member that is named by its `type` starts from that type's own defaults."""
    if not isinstance(base, dict) or not isinstance(changes, Mapping):
        return changes
    under, over = cast(Tree, base), cast(Mapping[str, Any], changes)
    if "type" in over:
        return dict(over)
    return {**under, **{name: merge(under.get(name), value) for name, value in over.items()}}
