"""Single formulas: math-verify reads them and sympy decides whether they are equal."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

# What may take sympy for ever.  It runs in our process, and no signal can stop it there: better to refuse it unread.
_ENDLESS = re.compile(
    r"""  \^ \s* [{(]? [-\d\s.]* \^                    # a tower of powers
        | \d \s* \*\* \s* \(* \d+ \s* \*\*
        | ( \^ | [\d)]\*\* ) \s* [{(]? \s* -? \d{6}  # a long exponent of a number
        | \) \s* ( \^ | \*\* ) \s* [{(]? \s* -? \d{3}  # ... of a sum
        | \d{6} \s* ! | ! \s* !                       # the factorial of a long number, or of a factorial,
        | (?<! [a-z] ) (?<! [a-z][-+]\d ) [)}] \s* !  # or of a formula other than n + 1
        | \\binom .* \d{6}
        | \\ (int | sum | prod | lim) (?![a-z])       # anything with a bound variable
    """,
    re.VERBOSE,
)


def endless(text: str) -> bool:
    """Whether evaluating the text could take for ever."""
    return _ENDLESS.search(text) is not None


def same_formula(left: str, right: str) -> bool:
    """Two plain texts (see `notation`); what cannot be read as a formula equals nothing."""
    return _verified(_formula(left), _formula(right))


def same_as_found(reference: str, prose: str) -> bool:
    """A plain text, and what math-verify takes for the answer in some prose: its last formula or number."""
    return _verified(_parsed(f"\\boxed{{{_with_columns(reference)}}}"), _parsed(prose))


def found_in(prose: str) -> str | None:
    """What math-verify takes for the answer in some prose, as it is written there; None where it finds none."""
    texts = [found for found in _parsed(prose) if isinstance(found, str)]  # it comes as a formula and as text
    return texts[-1] if texts else None


def _with_columns(text: str) -> str:
    return re.sub(r"\\column\{(.*?)\}", r"\\begin{pmatrix}\1\\end{pmatrix}", text)


def same_relation(left: str, right: str) -> bool:
    """Two equations, or two inequalities, that differ by a factor at most."""
    from sympy import simplify
    from sympy.core.relational import Relational

    one, two = _formula(left), _formula(right)
    if _verified(one, two):
        return True
    if not (one and two and isinstance(one[0], Relational) and isinstance(two[0], Relational)):
        return False
    first: Any = one[0]
    second: Any = two[0]
    ratio = simplify((first.lhs - first.rhs) / (second.lhs - second.rhs))
    if not ratio.is_number or not ratio.is_nonzero:
        return False
    return first.func == (second.func if ratio.is_positive else second.reversed.func)


@lru_cache(maxsize=4096)
def _formula(text: str) -> list[Any]:
    r"""What sympy makes of a plain text, with exact decimals, degrees in radians and `i` as the imaginary unit."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig
    from sympy import I, Symbol

    text = _with_columns(text)
    text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"\\frac{\1\\pi}{180}", text)
    text = re.sub(r"(?<![\w.])(\d*)\.(\d+)(?!\d)", _decimal_fraction, text)
    text = re.sub(r"\\text\s*\{([A-Za-z])\}", r"\1", text)
    text = re.sub(r"\^\s*-\s*(\d+|[a-z])", r"^{-\1}", text)
    # Its list of units would take the h off 2h; ours are off by now.
    as_it_stands = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
        )
    )
    found = _parsed(f"\\boxed{{{text}}}", (as_it_stands,))
    return [
        formula.xreplace(
            {s: I if s.name in ("i", "imath") else Symbol(s.name, real=True) for s in formula.free_symbols}
        )
        for formula in found
    ]


def _decimal_fraction(match: re.Match[str]) -> str:
    return rf"\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}"


@lru_cache(maxsize=4096)
def _parsed(text: str, configs: tuple[Any, ...] = ()) -> list[Any]:
    from math_verify import parse

    # Its timeout is a signal, which works in the main thread only; without one it warns at each start.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    settings: dict[str, Any] = {"extraction_config": configs, "fallback_mode": "no_fallback"} if configs else {}
    found: list[Any] = parse(text, parsing_timeout=None, **settings)  # pyright: ignore[reportArgumentType] (None is its way to say never)
    return found


def _verified(reference: list[Any], answer: list[Any]) -> bool:
    """Equal to 12 decimals where math-verify meets a float, and to 50 where it evaluates."""
    from math_verify import verify

    return bool(verify(reference, answer, float_rounding=12, numeric_precision=50, timeout_seconds=None))
