r"""Whether two answers are equal as mathematics: `1/2`, `\frac{1}{2}`, `0.5` and `50\%` agree.

`notation` brings both into one spelling, the rules of this file take lists, intervals, tuples, equations and units
apart, and `formulas` compares what remains.  A number is exact: 0.333 is not 1/3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import ClassVar, Literal

from groupwise.records import Rollout
from groupwise.rewards.answers import boxed, choice, final_part
from groupwise.rewards.formulas import endless, found_in, same_as_found, same_formula, same_relation
from groupwise.rewards.notation import bracketed, exact, listed, plain
from groupwise.rewards.units import factor, quantity
from groupwise.slots import Slot

_LONGEST = 200


class MathAnswer(Slot):
    r"""1 when the final answer equals the reference as mathematics: `1/2`, `\frac{1}{2}`, `0.5` and `50\%` agree.

    The answer is the last `\boxed{...}` after the thinking, or else what math-verify finds there (the last number or
    formula).  `docs/rewards.md` says what counts as equal, and how often this is right.

    Raises:
        ValueError: the answer could take for ever to evaluate, such as `9^{9^9}`; the rollout is then not valid.
    """

    preload: ClassVar[tuple[str, ...]] = ("math_verify",)
    type: Literal["math_answer"] = "math_answer"
    column: str = "answer"
    """The column with the reference answer: a number, or text with or without `$...$` or a box."""
    only_boxed: bool = False
    r"""Count an answer only when it stands in `\boxed{...}`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column,)

    def answer(self, text: str) -> str | None:
        """The final answer of a completion, in one spelling for the most usual ways to write it."""
        part = final_part(text)
        answer = boxed(part)
        if answer is None:
            answer = None if self.only_boxed else _unboxed(part)
        if answer is None or len(answer) > 5 * _LONGEST:
            return answer
        number = exact(plain(answer))
        brief = number is not None and max(number.numerator, number.denominator, key=abs).bit_length() < 5 * _LONGEST
        return str(number) if brief else plain(answer) or None  # a number of thousands of digits stays as it is

    def doubtful(self, one: str, other: str) -> bool:
        """Whether two of those spellings may be equal though they differ; those of two numbers are not."""
        return exact(one) is None or exact(other) is None

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
    if len(answer) > 5 * _LONGEST:
        return answer == reference
    left, right = plain(reference), plain(answer)
    if left == right:
        return left != ""
    if not left or not right or len(right) > _LONGEST:
        return False
    for text in (left, right):
        if exact(text) is None and endless(text):
            raise ValueError(f"the answer {text!r} could take for ever to evaluate")
    return _same(left, right)


def _same_unboxed(reference: str, text: str) -> bool:
    """Whether the last number or formula of some prose equals the reference; one word is an answer as it stands."""
    if len(text.split()) <= 1:
        return same_answer(reference, text)
    end = _end(text)
    return not endless(end) and same_as_found(plain(reference), end)


def _unboxed(text: str) -> str | None:
    """That last number or formula, or the one word."""
    if len(text.split()) <= 1:
        return text.strip() or None
    end = _end(text)
    return None if endless(end) else found_in(end)


def _end(text: str) -> str:
    return re.sub(r"!(?=\s|$)", ".", text.strip()[-_LONGEST:])  # an exclamation, not a factorial


def _same(left: str, right: str) -> bool:
    """Of two plain texts: by value where both are numbers, else by the first rule that knows such answers."""
    numbers = exact(left), exact(right)
    if left == right or None not in numbers:
        return left == right or numbers[0] == numbers[1]
    verdicts = (rule(left, right) for rule in _RULES)
    known = next((verdict for verdict in verdicts if verdict is not None), None)
    return same_formula(left, right) if known is None else known


# The rules.  Each knows one kind of answer, and says None when these two are not of its kind.

_WORD = re.compile(r"(?=.*[aeiou])[A-Za-z]{3,}([ '-][A-Za-z]+)*", re.IGNORECASE)
_VERDICTS = ("yes", "no", "true", "false")
_NAME = (
    r"(?!\\(?:sin|cos|tan|log|ln)\b)\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([\w, ]+\))?|\([a-z](?:, ?[a-z])+\)|\\text\{[^{}]*\}"
)
_NAMED = re.compile(rf"({_NAME})\s*(?:=|\\in(?![a-z]))\s*(?=[^=<>])(.+)")
_EQUALS = re.compile(r"(?<![<>!\\:=])=(?!=)")
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![a-z])|(?<!\\)[<>]")
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")
_STRICT = {"<": True, r"\le": False, ">": True, r"\ge": False}
_CLOCK = re.compile(r"(\d+)\s*:\s*(\d+)\s*(?:\\text\{\s*)?([ap]\.?m\.?)?\s*\}?", re.IGNORECASE)
_IN_BASE = re.compile(r"(\d[\dA-F]*|[\dA-F]+(?=_\{?16\b))_\{?(\d\d?)\}?")


def _choices(left: str, right: str) -> bool | None:
    """`B` and `(B)` and `(B) 12`, where the reference is one of A to J, bare or with the text of that choice."""
    chosen = choice(right)
    known = re.fullmatch(r"\(?[A-J]\)?|\\text\{\s*\([A-J]\).*", left)
    return None if known is None or chosen is None else chosen == choice(left)


def _words(left: str, right: str) -> bool | None:
    """To a parser of mathematics a word is a product of letters, and `listen` equals `silent`."""
    words = [_WORD.fullmatch(text) is not None for text in (left, right)]
    return left.casefold() == right.casefold() if all(words) or left.casefold() in _VERDICTS else None


def _cases(left: str, right: str) -> bool | None:
    """X is not x; to math-verify it is."""
    return False if left.casefold() == right.casefold() else None


def _quantities(left: str, right: str) -> bool | None:
    """A unit that only one of them has is left out; two units must be the same, or multiples of one another."""
    one, two = quantity(left), quantity(right)
    if any(len(listed(value)) > 1 and exact(value) is None for value, _ in (one, two)):
        return None
    if one.unit == two.unit:
        return _same(one.value, two.value) if one.unit else None
    if one.unit and two.unit:
        ratio = factor(one.unit, two.unit)
        return ratio is not None and same_formula(f"({one.value})*{ratio.numerator}/{ratio.denominator}", two.value)
    value, bare, unit = (one.value, right, one.unit) if one.unit else (two.value, left, two.unit)
    number = exact(bare)
    if unit == "%":
        share = same_formula(rf"\frac{{{value}}}{{100}}", bare)
        return share or ((number is None or abs(number) >= 1) and _same(value, bare))  # 0.5 is no 0.5%
    return _same(value, bare) or (unit == "degree" and same_formula(rf"\frac{{({value})\pi}}{{180}}", bare))


def _lists(left: str, right: str) -> bool | None:
    r"""Several answers, in any order, and sets; `\pm` stands for two.  Bare items equal a tuple in its order."""
    sets = [(found := bracketed(text)) is not None and found.kind == "{}" for text in (left, right)]
    one, two = _answers(left), _answers(right)
    single = len(one) == len(two) == 1 and not any(sets)
    if single or any(_RELATION.search(text) or r"\cup" in text for text in (left, right)):
        return None
    for text, items in ((left, two), (right, one)):
        whole = bracketed(text)
        if whole is not None and whole.kind == "()" and len(items) > 1 and not any(sets):
            return _same_in_order(whole.items, items)
    names = [[_named(item)[0] for item in items] for items in (one, two)]
    if any(len({*given} - {""}) > 1 for given in names) and names.count([""] * len(one)) == 1:
        return _same_in_order([_named(item)[1] for item in one], [_named(item)[1] for item in two])
    if len({*names[0], *names[1]} - {""}) <= 1:
        one, two = [_named(item)[1] for item in one], [_named(item)[1] for item in two]
    within = all(any(_same(a, b) for b in two) for a in one) and all(any(_same(a, b) for a in one) for b in two)
    return within and (any(sets) or len(one) == len(two))


def _answers(text: str) -> Sequence[str]:
    r"""The items of a list or of a set in braces, with `\pm` written out; an empty set has none."""
    if text == r"\emptyset":
        return []
    whole = bracketed(text)
    items = (
        whole.items if whole is not None and whole.kind == "{}" else listed(text) if exact(text) is None else (text,)
    )
    return [re.sub(r"\\pm\s*", sign, item) for item in items for sign in ("+-" if item.count(r"\pm") == 1 else "+")]


def _same_in_order(one: Sequence[str], two: Sequence[str]) -> bool:
    return len(one) == len(two) and all(map(_same, one, two))


def _named(text: str) -> tuple[str, str]:
    r"""`x = 5`, `5 = x`, `f(x) = 5` or `x \in S` as the name and the value; no name: (empty, text)."""
    sides = [side.strip() for side in _EQUALS.split(text)]
    if len(sides) == 2 and re.fullmatch(_NAME, sides[1]) and not re.search("[a-z]", sides[0]):
        return sides[1], sides[0]
    match = _NAMED.fullmatch(text)
    return (match[1], sides[-1] if len(sides) > 2 else match[2]) if match else ("", text)


def _equations(left: str, right: str) -> bool | None:
    """`x = 5` equals `5`, and `2 + 3 = 5` does; `x^2 + y^2 = 1` equals neither 1 nor anything but an equation."""
    sides = [_EQUALS.split(text) for text in (left, right)]
    (name, value), (other_name, other) = _named(left), _named(right)
    if name and name == other_name:
        return _same(value, other)
    if all(len(parts) > 1 for parts in sides):
        return same_relation(left, right)
    if name or other_name:
        return not (name and other_name) and _same(value, other)
    if all(len(parts) == 1 for parts in sides):
        return None
    if any(len(parts) > 1 and re.search("[A-Za-z]", re.sub(r"\\[a-z]+", "", parts[0])) for parts in sides):
        return False
    return _same(sides[0][-1].strip(), sides[1][-1].strip())


def _inequalities(left: str, right: str) -> bool | None:
    r"""As intervals: `1 < x \le 2` is `(1,2]`, whichever way round it is written."""
    relations = [_RELATION.search(text) is not None for text in (left, right)]
    if not any(relations):
        return None
    one, two = _as_interval(left), _as_interval(right)
    if one is None or two is None:
        return same_relation(left, right) if all(relations) else False
    if all(relations) and one[0] != two[0]:
        return False
    return _same(one[1], two[1])


def _as_interval(text: str) -> tuple[str, str] | None:
    """The variable and the interval, or union of intervals, that inequalities joined by `or` describe."""
    if not _RELATION.search(text):
        return ("", text) if bracketed(text) or r"\cup" in text else None
    found = [_one_interval(item) for item in listed(text)]
    names = {interval[0] for interval in found if interval is not None}
    if None in found or len(names) != 1 or len(_OR.findall(text)) != len(found) - 1:
        return None
    return names.pop(), r"\cup".join(interval[1] for interval in found if interval is not None)


def _one_interval(text: str) -> tuple[str, str] | None:
    parts = [part.strip() for part in re.split(rf"({_RELATION.pattern})", text)]
    signs, values = parts[1::2], parts[::2]
    if not all(sign in _STRICT for sign in signs) or len({sign in ("<", r"\le") for sign in signs}) != 1:
        return None
    if signs[0] not in ("<", r"\le"):
        signs, values = signs[::-1], values[::-1]
    unknown = [bool(re.fullmatch(r"\\?[A-Za-z]+(_\w)?", value)) and value != r"\infty" for value in values]
    if unknown == [True, False]:
        below, name, above, signs = r"-\infty", *values, ["<", *signs]
    elif unknown == [False, True]:
        below, name, above, signs = *values, r"\infty", [*signs, "<"]
    elif unknown == [False, True, False]:
        below, name, above = values
    else:
        return None
    opened, closed = "(" if _STRICT[signs[0]] else "[", ")" if _STRICT[signs[1]] else "]"
    return name, f"{opened}{below},{above}{closed}"


def _brackets(left: str, right: str) -> bool | None:
    """Tuples and intervals: the same brackets, and each item equal to the one in its place."""
    one, two = bracketed(left), bracketed(right)
    if one is None or two is None:
        return None
    return one.kind == two.kind and _same_in_order(one.items, two.items)


def _clocks(left: str, right: str) -> bool | None:
    """`3:30` is a time of day, `2:3` a ratio."""
    one, two = _CLOCK.fullmatch(left), _CLOCK.fullmatch(right)
    if one is None or two is None:
        return None
    (hours, minutes, half), (other_hours, other_minutes, other_half) = one.groups(), two.groups()
    if len(minutes) == len(other_minutes) == 2:
        halves = {given[0].lower() for given in (half, other_half) if given}
        return int(hours) == int(other_hours) and minutes == other_minutes and len(halves) < 2
    return int(hours) * int(other_minutes) == int(other_hours) * int(minutes)


def _bases(left: str, right: str) -> bool | None:
    """`101_2` is 5; without its base, `101` is a hundred and one."""
    values = [_in_base(text) for text in (left, right)]
    if values == [None, None]:
        return None
    one, two = (exact(text) if value is None else value for value, text in zip(values, (left, right), strict=True))
    return one is not None and one == two


def _in_base(text: str) -> Fraction | None:
    match = _IN_BASE.fullmatch(text)
    if match is None or not 2 <= int(match[2]) <= 36 or not all(int(digit, 36) < int(match[2]) for digit in match[1]):
        return None
    return Fraction(int(match[1], int(match[2])))


_RULES: tuple[Callable[[str, str], bool | None], ...] = (
    _choices, _words, _quantities, _lists, _equations, _inequalities, _brackets, _clocks, _bases, _cases,
)  # fmt: skip
