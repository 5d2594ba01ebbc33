r"""The Countdown game: reach a target with some numbers and `+ - * /`.  Any right way counts, so it is worked out."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from typing import Any, Literal

from groupwise.records import Rollout
from groupwise.rewards.answers import tagged
from groupwise.slots import Slot

_SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", "[": "(", "]": ")"}
_FRACTION = re.compile(r"\\d?frac\{([^{}]*)\}\{([^{}]*)\}")
_ARITHMETIC = re.compile(r"[\d\s.+\-*/()]{1,200}")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Countdown(Slot):
    r"""1 when the final answer is an expression of the row's numbers, each used once, that equals the row's target.

    The answer is the last `\boxed{...}` or `<answer>...</answer>` after the thinking, or else all that follows the
    thinking; of `55 - 36 = 19` the left side counts.  The arithmetic is exact.
    """

    type: Literal["countdown"] = "countdown"
    numbers: str = "nums"
    """The column with the list of numbers."""
    target: str = "target"
    """The column with the number to reach."""
    use_all: bool = True
    """Every number has to be used; else none more often than it is given."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.target, self.numbers)

    def answer(self, text: str) -> str:
        """The expression of a completion, without spaces."""
        return "".join(tagged(text).split())

    def __call__(self, rollout: Rollout) -> float:
        found = calculated(tagged(rollout.text))
        if found is None:
            return 0.0
        value, used = found
        given = Counter(Fraction(number) for number in rollout.example[self.numbers])
        fair = used == given if self.use_all else used <= given
        return float(fair and value == Fraction(rollout.example[self.target]))

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """A right answer to a row; None when there is none."""
        numbers = [(Fraction(number), str(number)) for number in row[self.numbers]]
        found = next(_solutions(numbers, Fraction(row[self.target]), self.use_all), None)
        return None if found is None else f"\\boxed{{{found}}}"


def calculated(text: str) -> tuple[Fraction, Counter[Fraction]] | None:
    r"""(value, the numbers used) of an arithmetic expression, read and never run; None when it is not one.

    `\frac{a}{b}`, `\times`, `\div` and an `= result` at the end are understood.
    """
    plain = text.partition("=")[0].strip(" \n$.`")
    while (flatter := _FRACTION.sub(r"((\1)/(\2))", plain)) != plain:  # the innermost first
        plain = flatter
    for sign, ours in _SIGNS.items():
        plain = plain.replace(sign, ours)
    if not _ARITHMETIC.fullmatch(plain):
        return None
    used: Counter[Fraction] = Counter()
    try:
        return _value(ast.parse(plain.strip(), mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr, used: Counter[Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            used[Fraction(number)] += 1
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, used), _value(right, used))
        case _:
            raise ValueError("not arithmetic")


def _solutions(numbers: Sequence[tuple[Fraction, str]], target: Fraction, use_all: bool) -> Iterator[str]:
    for value, text in numbers if len(numbers) == 1 or not use_all else ():
        if value == target:
            yield text
    for i, j in permutations(range(len(numbers)), 2):
        (a, left), (b, right) = numbers[i], numbers[j]
        rest = [numbers[k] for k in range(len(numbers)) if k not in (i, j)]
        for sign, operate in zip("+-*/", _OPERATIONS.values(), strict=True):
            if (sign in "+*" and i > j) or (sign == "/" and b == 0):
                continue  # the same again, or no number
            yield from _solutions([(operate(a, b), f"({left} {sign} {right})"), *rest], target, use_all)
