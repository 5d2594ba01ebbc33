r"""How mathematics is written: one spelling for many (`plain`), exact numbers, brackets, and lists.

Everything here is about text.  No formula is evaluated, so nothing here can take long.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_WRAPPING = re.compile(r"^\$+|(?<!\\)\$+$|^\\\(|\\\)$|^\\\[|\\\]$|^\\(?:text|boxed)\s*\{([^{}]*)\}$|(?<=[^.])\.$")
_FONT = r"\\(?:mathrm|mathbf|mathit|mathsf|textbf|textrm|textit|textnormal|mbox|operatorname\*?)\s*(?=\{)"
_SPACE = r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-z])|~|\{\\,\}|\u00a0|\u2009|\u202f"
_WRITTEN = [
    (rf"(?<=\d)(?:\{{,\}}|\\!|{_SPACE})+(?=\d\d\d(?!\d))", ""),  # thousands
    (r"\{,\}\\!|,\\!", ","),
    (_SPACE, " "),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])|\\displaystyle(?![a-z])", ""),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (_FONT, r"\\text"),
    (r"\\text\s*\{\s*([ie])\s*\}", r"\1"),
    (r"\\%", "%"),
    (r"\\langle(?![a-z])", "("),
    (r"\\rangle(?![a-z])", ")"),
    (r"\\lbrace(?![a-z])", r"\\{"),
    (r"\\rbrace(?![a-z])", r"\\}"),
    (r">=|\\geq(?:slant)?(?![a-z])", r"\\ge "),
    (r"<=|=<|\\leq(?:slant)?(?![a-z])", r"\\le "),
    (r"\\gt(?![a-z])", ">"),
    (r"\\lt(?![a-z])", "<"),
    (r"\\(?:varnothing|empty)(?![a-z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"(?<![\\A-Za-z])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"(?<![\\A-Za-z])(pi|sqrt)(?![A-Za-z])", r"\\\1 "),
    (r"\\sqrt\s*(\d+|\([^()]*\))", r"\\sqrt{\1}"),
    (r"\\[bp]mod(?![a-z])", r"\\mod"),
    (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"\\begin\{(?:[bpvBV]?matrix|array)\}(?:\{[lcr]*\})?([^&]*?)\\end\{\w+\}", r"\\column{\1}"),
    (r"[\[(]\s*\\column\{(.*?)\}\s*[\])]", r"\\column{\1}"),
]
_SPELLINGS = [(re.compile(pattern), spelling) for pattern, spelling in _WRITTEN]
_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∞": r"\infty ", "√": r"\sqrt ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "±": r"\pm ", "⟨": "(", "⟩": ")", "％": "%", "π": r"\pi ",
}  # fmt: skip

_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d{1,3}(?: \d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+"
_EUROPEAN = re.compile(r"([-+]?\s*)(\d{1,3}(?:\.\d{3})+),(\d+)")
_DECIMAL = re.compile(rf"[-+]?\s*(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}})?")
_SCIENTIFIC = re.compile(
    r"(?:(.+?)\s*(?:\\times|\\cdot|\*|[xX])\s*)?10\s*\^\s*(?:(\d)|\{\s*([-+]?\s*\d{1,3})\s*\}|([-+]?\d{1,3}))"
)
_INTEGER = r"[-+]?\s*\d+"
_FRACTION = re.compile(
    rf"""(?P<sign>[-+]?)\s* (?: (?P<whole>\d+) (?: \s* (?=\\frac) | \s+ (?=\d) ) )?
    (?: \\frac\s* (?: \{{\s*(?P<a>{_INTEGER})\s*\}} | (?P<b>\d) ) \s* (?: \{{\s*(?P<c>{_INTEGER})\s*\}} | (?P<d>\d) )
      | (?P<e>\d+)\s*/\s*(?P<f>{_INTEGER}) )""",
    re.VERBOSE,
)  # fmt: skip
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_OPEN, _CLOSE = "([{", ")]}"
_SEPARATOR = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))|[,;]")


@lru_cache(maxsize=4096)
def plain(text: str) -> str:
    r"""The same answer in one spelling: without `$`, `\left`, `\text{}` around everything, spacing and a full stop."""
    spelled = "".join(map(_ascii, text))
    for pattern, spelling in _SPELLINGS:
        spelled = pattern.sub(spelling, spelled)
    bare = " ".join(spelled.split())
    while (shorter := _WRAPPING.sub(r"\1", bare).strip()) != bare:
        bare = shorter
    return bare


def _ascii(sign: str) -> str:
    if sign.isascii():
        return sign
    if sign in _SIGNS:
        return _SIGNS[sign]
    decomposed = unicodedata.decomposition(sign)
    if decomposed.startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", sign).replace("⁄", "/") + " "
    if decomposed.startswith("<super>"):
        return "^{" + unicodedata.normalize("NFKC", sign) + "}"
    name = unicodedata.name(sign, "")
    return f"\\{name.rpartition(' ')[2].lower()} " if name.startswith("GREEK SMALL LETTER ") else sign


@lru_cache(maxsize=4096)
def exact(text: str) -> Fraction | None:
    r"""The number that the text spells, or None: `1,234.5`, `1.234,5`, `3\frac{1}{2}`, `6 \times 10^{-3}`,
    `0.\overline{3}`.

    A comma between groups of three digits separates thousands.  After thousands set apart by full stops it is a decimal
    comma; otherwise it separates two numbers, and the text is not one.
    """
    bare = text.strip()
    european = _EUROPEAN.fullmatch(bare)
    if european:
        bare = f"{european[1]}{european[2].replace('.', '')}.{european[3]}"
    if _DECIMAL.fullmatch(bare):
        return Fraction(Decimal(re.sub(r"[,\s]", "", bare)))
    if match := _SCIENTIFIC.fullmatch(bare):
        power = int((match[2] or match[3] or match[4]).replace(" ", ""))
        factor = Fraction(1) if match[1] is None else exact(match[1])
        return None if factor is None else factor * Fraction(10) ** power
    if match := _REPEATING.fullmatch(bare):
        sign, whole, fixed, period = match.groups()
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return (Fraction(f"{whole or 0}.{fixed or 0}") + tail) * (-1 if sign == "-" else 1)
    return _fraction(bare)


def _fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    above, below = (int(re.sub(r"\s", "", match[x] or match[y] or match[z])) for x, y, z in ("abe", "cdf"))
    if below == 0 or (match["whole"] and (above < 0 or below < 0)):
        return None
    value = int(match["whole"] or 0) + Fraction(above, below)
    return -value if match["sign"] == "-" else value


class Bracketed(NamedTuple):
    """What stands in brackets around the whole text."""

    kind: str
    """Its opening and closing bracket: `()`, `[)`, `{}`, ..."""
    items: tuple[str, ...]
    """What stands between its commas."""


@lru_cache(maxsize=4096)
def bracketed(text: str) -> Bracketed | None:
    r"""The text as a tuple, interval or set; a column vector is a tuple, and `]0,1[` is `(0,1)`.  None: it is none."""
    column = re.fullmatch(r"\\column\{(.*)\}", text)
    if column:
        return Bracketed("()", tuple(item.strip() for item in re.split(r"\\\\", column[1])))
    bare = re.sub(r"\\([{}])", r"\1", text)
    if len(bare) < 2:
        return None
    first, last = {"]": "("}.get(bare[0], bare[0]), {"[": ")"}.get(bare[-1], bare[-1])
    bare = first + bare[1:-1] + last
    if first not in _OPEN or last not in _CLOSE:
        return None
    depths = list(_depths(bare))
    if 0 in depths[:-1] or depths[-1] != 0:
        return None
    items = listed(bare[1:-1])
    return Bracketed(bare[0] + bare[-1], items) if len(items) > 1 or bare[0] == "{" else None


def listed(text: str) -> tuple[str, ...]:
    """What stands between commas, semicolons, `and` and `or` that are not inside brackets."""
    depths = list(_depths(text))
    starts, ends = [0], list[int]()
    for match in _SEPARATOR.finditer(text):
        if depths[match.start()] == 0 and (match.start() == 0 or depths[match.start() - 1] <= 0):
            ends.append(match.start())
            starts.append(match.end())
    return tuple(text[start:end].strip() for start, end in zip(starts, [*ends, len(text)], strict=True))


def _depths(text: str) -> Iterator[int]:
    """After each character, the number of brackets that are open."""
    depth = 0
    for character in text:
        depth += (character in _OPEN) - (character in _CLOSE)
        yield depth
