"""A reward for answers that are JSON of a given shape; needs the extra `json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import model_validator

from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards.answers import final_part
from groupwise.slots import Slot

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class JsonSchema(Slot):
    """1 when the answer is JSON that a JSON Schema accepts (draft 2020-12, unless `$schema` names another).

    The answer is the last fenced code block after the thinking, or else everything after the thinking.  A `$ref` to
    elsewhere is never fetched.

    Raises:
        RewardError: jsonschema is not installed.
        jsonschema.SchemaError: the schema of a row is none; the rollout is then not valid.
    """

    type: Literal["json_schema"] = "json_schema"
    expected: dict[str, Any] | None = None
    """The schema that every answer must match."""
    column: str = ""
    """The column with the schema of each row, as JSON text or a mapping, in place of `expected`."""

    @model_validator(mode="after")
    def _has_one_schema(self) -> JsonSchema:
        if (self.expected is None) == (not self.column):
            raise ValueError("names no schema, or two; give `expected` (a schema) or `column` (a schema in each row)")
        if self.expected is not None:
            jsonschema = _library()
            try:
                _validator(self.expected)
            except jsonschema.SchemaError as error:
                raise ValueError(f"expected is not a JSON schema: {error.message} at {error.json_path}") from error
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column,) if self.column else ()

    def __call__(self, rollout: Rollout) -> float:
        schema: Any = rollout.example[self.column] if self.column else self.expected
        validator = _validator(json.loads(schema) if isinstance(schema, str) else schema)
        part = final_part(rollout.text)
        blocks = _FENCED.findall(part)
        try:
            answer = json.loads(blocks[-1] if blocks else part, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        return float(validator.is_valid(answer))


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _validator(schema: Mapping[str, Any]) -> Any:
    from referencing import Registry

    jsonschema = _library()
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=cast(Any, Registry()))


def _library() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise RewardError(
            "rewards.json_schema: needs jsonschema; install it with `pip install 'groupwise[json]'`"
        ) from error
    return jsonschema
