"""What the classes of the settings say of themselves: a reference of all, and in words what is wrong with a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import yaml
from pydantic_core import ErrorDetails

from groupwise.errors import did_you_mean
from groupwise.slots import OneOf, Slot


def reference(slot: type[Slot], prefix: str = "", made: Slot | None = None) -> Iterator[tuple[str, str, str]]:
    """(dotted path, default, what it does) of each setting; a member of a family is `path[member]`.

    `made` is the value that stands in the tree when nothing is set; its settings are the defaults, not its class's.
    """
    for name, field in slot.model_fields.items():
        below = _slot_in(field.annotation)
        path = f"{prefix}{name}"
        text = " ".join((field.description or "").split())
        if name == "type":
            continue
        default = field.get_default() if made is None else getattr(made, name)
        yield path, "required" if field.is_required() else _short(default), text
        if below is not None:
            yield from reference(below, f"{path}.", default if isinstance(default, below) else None)
        for member, choice in members_of(field.metadata).items():
            yield f"{path}[{member}]", "", " ".join((choice.__doc__ or "").split("\n\n")[0].split())
            yield from reference(choice, f"{path}[{member}].")


def members_of(metadata: Sequence[Any]) -> dict[str, type[Slot]]:
    """The slots that a field annotated with `OneOf` chooses from."""
    return next((note.members for note in metadata if isinstance(note, OneOf)), {})


def _short(value: Any) -> str:
    if isinstance(value, Slot):
        return str(getattr(value, "type", ""))
    plain: Any = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).split("\n")[0]


def _slot_in(annotation: Any) -> type[Slot] | None:
    """The slot class inside `Slot`, `Slot | None`, `tuple[Slot, ...]`, ..."""
    if isinstance(annotation, type) and issubclass(annotation, Slot):
        return annotation
    return next((found for found in map(_slot_in, get_args(annotation)) if found), None)


# Errors in words -----------------------------------------------------------------------------------------------------


def explained(detail: ErrorDetails, tree: type[Slot]) -> list[str]:
    """What one of pydantic's errors about `tree` says: one problem, or several where settings were checked together."""
    path, owner = _locate(detail["loc"], tree)
    value, messages = detail["input"], detail["msg"].removeprefix("Value error, ").split("\n")
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden":
        if owner and name in owner.refused:
            return [f"{path}: {value!r}; {owner.refused[name]}"]
        known = list(owner.model_fields) if owner else []
        elsewhere = next((path for path, _, _ in reference(tree) if path.endswith(f".{name}")), "")
        hint = f" (did you mean {elsewhere}?)" if elsewhere else did_you_mean(name, known)
        return [f"{path}: no such setting{hint}; accepted: {', '.join(known)}"]
    if detail["type"] == "missing":
        return [f"{path}: missing; {_description(owner, name)}"]
    if detail["type"] == "together" or not path:
        return messages
    shown = "" if isinstance(value, Slot | Mapping) else f" {value!r};"
    field = owner.model_fields.get(name) if owner else None
    default = "" if field is None or field.is_required() or not shown else _short(field.default)
    usual = f"; the default is {default}" if default else ""
    return [f"{path}:{shown} {message[:1].lower()}{message[1:]}{usual}" for message in messages]


def _description(owner: type[Slot] | None, name: str) -> str:
    field = owner.model_fields.get(name) if owner else None
    text = " ".join((field.description or "").split()) if field else ""
    return f"set {name}: {text}" if text else f"set {name}"


def _locate(loc: tuple[int | str, ...], tree: type[Slot]) -> tuple[str, type[Slot] | None]:
    """The dotted path of an error without pydantic's own steps, and the slot that owns its last name."""
    path, below, members = "", cast("type[Slot] | None", tree), cast("OneOf | None", None)
    owner = below
    for item in loc:
        if members is not None and item in members.members:
            # Pydantic names the member that was taken; the path that the user wrote does not.
            below, members = members.members[str(item)], None
            continue
        owner = below
        path += f"[{item}]" if isinstance(item, int) else f"{'.' if path else ''}{item}"
        field = owner.model_fields.get(str(item)) if owner is not None and isinstance(item, str) else None
        if field is None:
            continue
        members = next((note for note in field.metadata if isinstance(note, OneOf)), None)
        inner = _slot_in(field.annotation)
        below = inner if inner is not None or members is not None else owner
    return path, owner
