r"""Rewards that compare the final answer of a completion with a column of the dataset.

The final answer is looked for after the thinking: the content of the last `\boxed{...}`, or what each reward says.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from groupwise.records import Rollout
from groupwise.slots import Slot

_CHOICE = re.compile(r"\s*(?:\\(?:text|mathrm|mathbf|textbf|textrm)\s*\{\s*)?\(?([A-Ja-j])(?:\)|[.:](?=\s|$)|\}|$)")


def final_part(text: str) -> str:
    """What follows the thinking; all of it when there is no `</think>`."""
    return text.rpartition("</think>")[2]


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces close, or None."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def choice(text: str) -> str | None:
    r"""The letter, in upper case, of a bare choice: `B`, `(b)`, `B.`, `\text{(B)}` or `(B) 12`; None: it is none."""
    match = _CHOICE.match(text)
    return match[1].upper() if match else None


class ExactMatch(Slot):
    r"""1 when the final answer is the reference, letter for letter.

    The answer is the last `\boxed{...}` after the thinking, or else everything after the thinking, stripped.
    """

    type: Literal["exact_match"] = "exact_match"
    column: str = "answer"
    """The column with the reference answer."""
    ignore_case: bool = False
    """`Paris` equals `paris`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column,)

    def __call__(self, rollout: Rollout) -> float:
        part = final_part(rollout.text)
        found = boxed(part)
        answer, reference = (part if found is None else found).strip(), str(rollout.example[self.column]).strip()
        return float(answer.casefold() == reference.casefold() if self.ignore_case else answer == reference)


class RegexMatch(Slot):
    """1 when a regular expression is found in the completion and, with `column`, its group 1 is the reference.

    `{type: regex_match, pattern: "answer is ([A-D])", column: answer}` grades multiple choice; the last match counts.
    """

    type: Literal["regex_match"] = "regex_match"
    pattern: str
    """A Python regular expression, searched for in the whole completion; a dot matches a line end, too."""
    column: str = ""
    """The column that group 1 of the pattern must equal; empty: the match alone counts."""

    @model_validator(mode="after")
    def _compiles(self) -> RegexMatch:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
        if self.column and not groups:
            raise ValueError(f"pattern {self.pattern!r} has no group to compare with column {self.column!r}; add (...)")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column,) if self.column else ()

    def __call__(self, rollout: Rollout) -> float:
        matches = list(re.finditer(self.pattern, rollout.text, re.DOTALL))
        if not matches or not self.column:
            return float(bool(matches))
        return float(matches[-1][1] == str(rollout.example[self.column]).strip())
