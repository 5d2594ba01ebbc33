r"""Columns made of other columns, so that a dataset in any layout becomes prompts and reference answers.

    columns:
      prompt: "{{ question }}\nPut the final answer in \\boxed{}."   a Jinja template: text made of the row's columns
      answer: "{{ answer.split('####')[1] }}"
      target: reward_model.ground_truth                            the name of a column: its value as it is

The templates run in Jinja's sandbox, because a run file may come from somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from groupwise.errors import ConfigError, DataError, did_you_mean

_JINJA = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


def with_columns(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], where: str) -> list[dict[str, Any]]:
    """The rows with some columns added or replaced; each is made of the columns that the row had before.

    Args:
        columns: by name, a Jinja template (text with `{{` or `{%`) or the name of a column, in which dots reach inside.
        where: the path of this setting, for messages.

    Raises:
        ConfigError: a template is not Jinja.
        DataError: naming the first row that lacks something a column is made of.
    """
    makers = {name: maker(text, f"{where}.{name}") for name, text in columns.items()}
    return [
        {**row, **{name: make(row, f"rows[{index}]") for name, make in makers.items()}}
        for index, row in enumerate(rows)
    ]


def maker(text: str, where: str) -> Callable[[Mapping[str, Any], str], Any]:
    """`f(row, name of the row)`, the value of a column made as `text` says; it raises as `with_columns` does."""
    if "{{" not in text and "{%" not in text:
        return lambda row, name: _inside(row, text, f"{where}: {name}")
    try:
        template = _JINJA.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{where}: {text!r} is not a Jinja template: {error}; write {{{{ column }}}} where a column's value belongs"
        ) from error

    def fill(row: Mapping[str, Any], name: str) -> str:
        try:
            return template.render(row)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            unknown = str(error).split("'")[1] if str(error).endswith("is undefined") else ""
            raise DataError(
                f"{where}: {name}: {error}{did_you_mean(unknown, row) if unknown else ''}; columns: {', '.join(row)}; "
                "mend the template, or that row"
            ) from error

    return fill


def _inside(row: Mapping[str, Any], path: str, where: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = list(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else []
            has = f"; columns: {', '.join(known)}" if known else f": it is inside {value!r}"
            raise DataError(
                f"{where} has no column {path!r}{did_you_mean(name, known)}{has}; name one of them, or write a "
                "template with {{ column }} in it"
            )
        value = cast(Mapping[str, Any], value)[name]
    return value
