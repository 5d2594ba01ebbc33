"""What a setting is made of: frozen, typed, strict values, and slots that hold one of several such values.

A `Slot` is a pydantic model and, where it has a `__call__`, the function it configures: `Clip(low=0.2)` is the
surrogate, its schema, its validation and its documentation at once.  `OneOf` lets a field hold a member of a
family, spelled in YAML by name (`surrogate: cispo`), by mapping (`{type: cispo, cap: 5}`) or as code
(`mine.py:surrogate`), while from Python any callable of the right signature fits.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast, get_args, runtime_checkable

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import PydanticCustomError, core_schema

from groupwise.errors import did_you_mean


class Slot(BaseModel):
    """A frozen value with named, typed settings; unknown names are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    refused: ClassVar[Mapping[str, str]] = {}
    """Settings that others have and this slot has not, on purpose: what to say about each."""

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, value: Any) -> Any:
        """YAML may spell an empty slot `none`, in every slot that may be empty."""
        if not isinstance(value, Mapping):
            return value
        settings = cast(Mapping[str, Any], value)
        return {name: None if _is_empty(cls, name, given) else given for name, given in settings.items()}


def _is_empty(owner: type[Slot], name: str, given: Any) -> bool:
    choices = get_args(owner.model_fields[name].annotation) if name in owner.model_fields else ()
    return isinstance(given, str) and given == "none" and type(None) in choices and str not in choices


S = TypeVar("S", bound=Slot)


def replace(value: S, **changes: Any) -> S:
    """A copy of `value` with some settings changed, validated like a new one.

    `replace(DAPO, surrogate=Cispo(cap=5.0))` is how a new variant is written.

    Raises:
        pydantic.ValidationError: a name is unknown or a value is out of range.
    """
    given = {name: getattr(value, name) for name in value.model_fields_set}
    return type(value)(**{**given, **changes})


def changed(value: Slot) -> set[str]:
    """The settings that differ from their defaults."""
    return {name for name, field in type(value).model_fields.items() if getattr(value, name) != field.default}


class OneOf:
    """Pydantic metadata: the field holds one of these slots, or any callable of the annotated signature.

    Where the annotation admits None, so does the slot, and YAML may spell it `none`.
    """

    def __init__(self, *members: type[Slot]) -> None:
        self.members = {cast(str, member.model_fields["type"].default): member for member in members}
        self.optional = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        self.optional = type(None) in get_args(source)
        choices = {name: handler.generate_schema(member) for name, member in self.members.items()}
        return core_schema.no_info_wrap_validator_function(
            self._validate,
            core_schema.tagged_union_schema(choices, discriminator="type"),
            serialization=core_schema.plain_serializer_function_ser_schema(spell),
        )

    def _validate(self, value: Any, members: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if self.optional and (value is None or value == "none"):
            return None
        if callable(value):
            return value
        if isinstance(value, str):
            return load_code(value) if ":" in value else members({"type": self._known(value)})
        if isinstance(value, Mapping):
            settings = cast(Mapping[str, Any], value)
            if "type" not in settings:
                accepted = ", ".join(self.members)
                raise PydanticCustomError("no_type", "names no `type`; accepted: {accepted}", {"accepted": accepted})
            self._known(str(settings["type"]))
        return members(value)

    def _known(self, name: str) -> str:
        if name in self.members:
            return name
        raise PydanticCustomError(
            "unknown_member",
            "no such choice{hint}; accepted: {accepted}, or code as file.py:function",
            {"hint": did_you_mean(name, self.members), "accepted": ", ".join(self.members)},
        )


def spell(value: Any) -> Any:
    """How a slot's value is written in YAML: a mapping, or `file.py:function` for code."""
    if isinstance(value, Slot):
        return value.model_dump(mode="json")
    return None if value is None else code_path(value)


@runtime_checkable
class Readable(Protocol):
    """A piece of the objective that can say its formula, with its numbers filled in."""

    @property
    def formula(self) -> str:
        """The letters are those of `groupwise explain`."""
        ...


def formula_of(value: object) -> str:
    """How a slot's value reads in the objective; code that does not say is shown by its path."""
    return value.formula if isinstance(value, Readable) else code_path(cast("Callable[..., Any]", value))


_LOADED: dict[Path, Any] = {}


def load_code(path: str) -> Callable[..., Any]:
    """The object at `package.module:name` or `folder/file.py:name`.

    Raises:
        PydanticCustomError: there is no such module, file or name, or it cannot be called.
    """
    where, _, name = path.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # whatever the user's module does when it is imported is the user's to mend
        reason = str(error) if isinstance(error, ImportError | OSError | SyntaxError) else repr(error)
        raise PydanticCustomError(
            "no_code",
            "{path} cannot be imported: {error}; write package.module:function or folder/file.py:function",
            {"path": path, "error": reason},
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise PydanticCustomError(
            "no_code",
            "{where} has no function {name}{hint}; write package.module:function or folder/file.py:function"
            if found is None
            else "{where} has {name}, but {found} is no function; write package.module:function or file.py:function",
            {"where": where, "name": name, "hint": did_you_mean(name, vars(module)), "found": repr(found)},
        )
    return found


def _load_file(path: Path) -> Any:
    file = path.resolve()
    if file not in _LOADED:
        if not file.is_file():
            raise FileNotFoundError("no such file")
        spec = importlib.util.spec_from_file_location(f"groupwise_user_{file.stem}_{len(_LOADED)}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # so that classes defined in it can be pickled
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
        _LOADED[file] = module
    return _LOADED[file]


def loaded_files() -> dict[str, str]:
    """The files that code was loaded from, by the name that each has as a module."""
    return {module.__name__: str(file) for file, module in _LOADED.items()}


def code_path(function: Callable[..., Any]) -> str:
    """`module:name` or `file.py:name`, from which `load_code` finds the function again."""
    module, name = function.__module__, getattr(function, "__qualname__", type(function).__qualname__)
    for file, loaded in _LOADED.items():
        if loaded.__name__ == module:
            return f"{file}:{name}"
    return f"{module}:{name}"
