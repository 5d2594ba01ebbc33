r"""Rewards that compare the final answer of a completion with a column of the dataset.

The final answer is looked for after the thinking: the content of the last `\boxed{...}`, or what each reward says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import model_validator

from groupwise.records import Rollout
from groupwise.slots import Slot

_CHOICE = re.compile(
    r"\s*(?:\*\*)?(?:\\(?:text|mathrm|mathbf|textbf|textrm)\s*\{\s*)?\(?([A-Ja-j])(?:\)|[.:](?=\s|$)|\}|\*\*|$)(.*)",
    re.DOTALL,
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANOTHER_CHOICE = re.compile(r"\([A-Ja-j]\)|\b[A-J]\b|\b(?:or|and)\b")
_CHOSEN = re.compile(
    r"""(?i:answer|option|choice) (?: \s+ (?i:is|would\ be) )? \s* [:=]? (?: \s | \*\* | \$ | \\boxed\{ | \\text\{ )*
    (?: \(([A-J])\) | ([A-J]) (?= [*}$.,:;!)] | \s*$ | \s+(?:because|since|as)\b ) )""",
    re.VERBOSE | re.MULTILINE,
)


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


def tagged(text: str) -> str:
    r"""The last `\boxed{...}` or `<answer>...</answer>` after the thinking, or else all that follows the thinking."""
    part = final_part(text)
    found = _TAGGED.findall(part)
    return boxed(part) or (found[-1] if found else part)


def choice(text: str) -> str | None:
    r"""The letter, in upper case, of a single choice: `B`, `(b)`, `B.`, `\text{(B)}` or `(B) 12`; None: it is none."""
    match = _CHOICE.fullmatch(text.strip())
    return match[1].upper() if match and not _ANOTHER_CHOICE.search(match[2]) else None


class ExactMatch(Slot):
    r"""1 when the final answer is the reference, letter for letter.

    The answer is the last `\boxed{...}` after the thinking, or else everything after the thinking, stripped.
    """

    in_process: ClassVar[bool] = True
    type: Literal["exact_match"] = "exact_match"
    column: str = "answer"
    """The column with the reference answer."""
    ignore_case: bool = False
    """`Paris` equals `paris`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column,)

    def answer(self, text: str) -> str:
        """The final answer of a completion, as it is compared."""
        part = final_part(text)
        found = boxed(part)
        return self._compared(part if found is None else found)

    def _compared(self, answer: str) -> str:
        return answer.strip().casefold() if self.ignore_case else answer.strip()

    def __call__(self, rollout: Rollout) -> float:
        return float(self.answer(rollout.text) == self._compared(str(rollout.example[self.column])))


class MultipleChoice(Slot):
    r"""1 when the letter that the completion chooses, A to J, is the reference.

    The choice is the content of the last `\boxed{...}` after the thinking; or else the last `answer is (B)`,
    `Answer: B`, `option B`; or else a last line such as `B`, `(B)` or `B. Paris`.
    """

    in_process: ClassVar[bool] = True
    type: Literal["multiple_choice"] = "multiple_choice"
    column: str = "answer"
    """The column with the letter, bare or as `(B)`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column,)

    def answer(self, text: str) -> str | None:
        """The letter that a completion chooses."""
        return _chosen(final_part(text))

    def __call__(self, rollout: Rollout) -> float:
        reference = choice(str(rollout.example[self.column]))
        if reference is None:
            raise ValueError(f"the reference {rollout.example[self.column]!r} is no letter from A to J")
        return float(self.answer(rollout.text) == reference)


def _chosen(part: str) -> str | None:
    found = boxed(part)
    if found is not None:
        return choice(found)
    phrases = [match[1] or match[2] for match in _CHOSEN.finditer(part)]
    return phrases[-1] if phrases else choice((part.strip().splitlines() or [""])[-1])


class RegexMatch(Slot):
    """1 when a regular expression is found in the completion and, with `column`, its group 1 is the reference.

    `{type: regex_match, pattern: "population: (\\d+)", column: answer}` compares a number; the last match counts.
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

    @property
    def answer(self) -> Callable[[str], str | None] | None:
        """Group 1 of the last match in a completion; without a column nothing is compared, and there is no answer."""
        return self._found if self.column else None

    def _found(self, text: str) -> str | None:
        matches = list(re.finditer(self.pattern, text, re.DOTALL))
        return matches[-1][1] if matches else None

    def __call__(self, rollout: Rollout) -> float:
        if not self.column:
            return float(re.search(self.pattern, rollout.text, re.DOTALL) is not None)
        return float(self._found(rollout.text) == str(rollout.example[self.column]).strip())
