r"""Rewards that compare the final answer of a completion with a column of the dataset.

The final answer is looked for after the thinking: the content of the last `\boxed{...}`, or what each reward says.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

from pydantic import model_validator

from groupwise.records import Rollout
from groupwise.slots import Slot

_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+|(?=\.\d))(\.\d*)?(e[-+]?\d{1,3})?", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z]{3,}( [A-Za-z]+)*")
_WRAPPING = re.compile(r"^\$+|\$+$|^\\\(|\\\)$|^\\\[|\\\]$|^\\text\{([^{}]*)\}$|\.$|\\!|\\,|\{(?=,\})|(?<=\{,)\}")
_LONGEST = 200
# What may take sympy for ever.  It runs in our process, and no signal can stop it there: better to refuse it unread.
_ENDLESS = re.compile(
    r"""  \^ \s* [{(]? [-\d\s.]* \^                    # a tower of powers
        | \d \s* \*\* \s* \(* \d+ \s* \*\*
        | ( \^ | [\d)]\*\* ) \s* [{(]? \s* -? \d{6}  # a long exponent of a number
        | \) \s* ( \^ | \*\* ) \s* [{(]? \s* -? \d{3}  # ... of a sum
        | \d{6} \s* ! | [!)}] \s* !                   # the factorial of a long number, or of a formula
        | \\binom .* \d{6}
        | \\ (int | sum | prod | lim) (?![a-z])       # anything with a bound variable
    """,
    re.VERBOSE,
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


class MathAnswer(Slot):
    r"""1 when the final answer equals the reference as mathematics: `1/2`, `\frac{1}{2}`, `0.5` and `50\%` agree.

    The answer is the last `\boxed{...}` after the thinking, or else what math-verify finds there (the last number or
    formula).  Equal strings and plain numbers are compared at once; everything else by math-verify.

    Raises:
        ValueError: the answer could take for ever to evaluate, such as `9^{9^9}`; the rollout is then not valid.
    """

    type: Literal["math_answer"] = "math_answer"
    column: str = "answer"
    """The column with the reference answer: a number, or text with or without `$...$` or a box."""
    only_boxed: bool = False
    r"""Count an answer only when it stands in `\boxed{...}`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column,)

    def __call__(self, rollout: Rollout) -> float:
        reference = str(rollout.example[self.column])
        part = final_part(rollout.text)
        answer = boxed(part)
        if answer is not None:
            return float(same_answer(boxed(reference) or reference, answer))
        return 0.0 if self.only_boxed else float(_same_unboxed(boxed(reference) or reference, part))


def same_answer(reference: str, answer: str) -> bool:
    """Whether two answers, as they stand in a box, are equal as mathematics.

    Raises:
        ValueError: an answer could take for ever to evaluate.
    """
    left, right = _unwrapped(reference), _unwrapped(answer)
    if left == right:
        return left != ""
    if not right or len(right) > _LONGEST:
        return False
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return Decimal(left.replace(",", "")) == Decimal(right.replace(",", ""))
    # To a parser of mathematics a word is a product of letters, and `listen` equals `silent`.
    if _WORDS.fullmatch(left) or _WORDS.fullmatch(right):
        return left.casefold() == right.casefold()
    for text in (left, right):
        if _ENDLESS.search(text):
            raise ValueError(f"the answer {text!r} could take for ever to evaluate")
    return _verified(f"\\boxed{{{left}}}", f"\\boxed{{{right}}}")


def _same_unboxed(reference: str, text: str) -> bool:
    """Whether the last number or formula of some prose equals the reference; one word is an answer as it stands."""
    if len(text.split()) <= 1:
        return same_answer(reference, text)
    end = re.sub(r"!(?=\s|$)", ".", text.strip()[-_LONGEST:])  # an exclamation, not a factorial
    return not _ENDLESS.search(end) and _verified(f"\\boxed{{{_unwrapped(reference)}}}", end)


@lru_cache(maxsize=4096)
def _unwrapped(text: str) -> str:
    """Without dollar signs, `\\text{}`, a final full stop, and spacing commands."""
    bare = " ".join(text.split())
    while (shorter := _WRAPPING.sub(r"\1", bare).strip()) != bare:
        bare = shorter
    return bare


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    # Its timeout is a signal, which works in the main thread only; without one it warns at each start.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[Any] = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType] (None is its way to say never)
    return found


def _verified(reference: str, answer: str) -> bool:
    from math_verify import verify

    return bool(verify(_parsed(reference), _parsed(answer), timeout_seconds=None))


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
