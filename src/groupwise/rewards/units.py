r"""Numbers with a unit: what is the number, what is the unit, and which units are one another's multiples."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_NAMES = {
    "%": "percent percentage pct", "degree": "degrees deg °", "dollar": "dollars usd $", "euro": "euros eur €",
    "pound": "pounds gbp £", "rupee": "rupees inr ₹ rs", "yen": "jpy ¥", "cent": "cents ¢",
    "mm": "millimeter millimeters millimetre millimetres", "cm": "centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres", "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches", "ft": "foot feet", "yd": "yard yards", "mi": "mile miles",
    "mg": "milligram milligrams", "g": "gram grams", "kg": "kilogram kilograms", "lb": "lbs", "oz": "ounce ounces",
    "s": "second seconds sec secs", "min": "minute minutes mins", "h": "hour hours hr hrs", "day": "days",
    "ml": "milliliter milliliters millilitre millilitres", "l": "liter liters litre litres",
    "mph": "", "km/h": "kmh kph", "m/s": "", "week": "weeks", "month": "months", "year": "years", "n": "newton newtons",
    "j": "joule joules", "w": "watt watts", "v": "volt volts", "hz": "hertz", "pa": "pascal pascals",
}  # fmt: skip
_CANONICAL = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases.split())}
_SIZES = {  # in the first unit of each line
    "m": {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000"},
    "ft": {"in": "1/12", "ft": "1", "yd": "3", "mi": "5280"},
    "g": {"mg": "1/1000", "g": "1", "kg": "1000"},
    "s": {"s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"},
    "l": {"ml": "1/1000", "l": "1"},
    "dollar": {"cent": "1/100", "dollar": "1"},
}
_SIZE = {unit: (base, Fraction(size)) for base, sizes in _SIZES.items() for unit, size in sizes.items()}

_POWER = r"(?:\s*\^\s*\{?\s*(?P<power>[23])\s*\}?)?"
_IN_TEXT = re.compile(rf"(?P<value>.*[\d}})a-z])\s*\\text\s*\{{\s*(?P<unit>[^{{}}\d]+?)\.?\s*\}}{_POWER}")
_BARE = re.compile(
    rf"(?P<value>(?!.*\\(?:sin|cos|tan|cot|sec|csc)).*(?:\d|\}}|\\pi)\)?)(?P<gap>\s*)(?P<unit>%|\^\\circ|[€£₹¥¢]|[A-Za-z]+(?:/[A-Za-z]+)?(?:\s[A-Za-z]+)*)\.?{_POWER}"
)
_BEFORE = re.compile(r"(?P<sign>-?)\s*(?P<unit>\\\$|[€£₹¥]|US\\?\$|Rs\.?)\s*(?P<value>[\d.].*)")
_NO_UNIT = re.compile(  # words that change the number
    r"""\\ | \b ( (hundred | thousand | million | billion | trillion | dozen | third | quarter | fourth | fifth | sixth
    | seventh | eighth | ninth | tenth ) s? | half | halves | times | plus | minus | over | divided | squared | cubed
    | factorial | choose | to | or | and | not | if | more | less | mod | sin | cos | tan | log | ln | pi ) \b""",
    re.VERBOSE | re.IGNORECASE,
)


class Quantity(NamedTuple):
    """A value as text, and its unit by its one name; the unit is empty where there is none."""

    value: str
    unit: str


@lru_cache(maxsize=4096)
def quantity(text: str) -> Quantity:
    r"""The value and the unit of `5 cm`, `5\text{ cm}^2`, `\$5`, `12 apples`, `90^\circ` or `50%`.

    Letters after a number are a unit when they stand in `\text{}`, are a known one, or are a word of three letters or
    more; `2x` and `2 xy` are products.
    """
    if match := _BEFORE.fullmatch(text):
        return Quantity(match["sign"] + match["value"], _name(match["unit"].lstrip("\\US"), None))
    if (match := _IN_TEXT.fullmatch(text)) and not _NO_UNIT.search(match["unit"]):
        return Quantity(match["value"].strip(), _name(match["unit"], match["power"]))
    match = _BARE.fullmatch(text)
    if match is None or not _is_unit(match["unit"], match["gap"]):
        return Quantity(text, "")
    return Quantity(match["value"].strip(), _name(match["unit"], match["power"]))


def _is_unit(letters: str, gap: str) -> bool:
    if letters in ("%", r"^\circ") or not letters.isascii():
        return True
    if _NO_UNIT.search(letters):
        return False
    known = _CANONICAL.get(letters.lower()) is not None or "/" in letters
    return (known and (bool(gap) or len(letters) > 2)) or (bool(gap) and bool(re.match(r"[A-Za-z]{3}.*", letters)))


def _name(unit: str, power: str | None) -> str:
    words = unit.strip().strip("~.").lower().replace(r"^\circ", "degree")
    square = re.fullmatch(r"(square|sq|cubic|cu)\.? (.*)", words)
    if square and square[2] not in ("unit", "units"):
        words, power = square[2], "2" if square[1] in ("square", "sq") else "3"
    name = _CANONICAL.get(words, words)
    return f"{name}^{power}" if power else name


def factor(unit: str, other: str) -> Fraction | None:
    """How many of `other` one `unit` is; None where they do not measure the same, or their sizes are not known here."""
    if unit == other:
        return Fraction(1)
    (name, _, power), (other_name, _, other_power) = unit.partition("^"), other.partition("^")
    if name not in _SIZE or other_name not in _SIZE or power != other_power:
        return None
    (base, size), (other_base, other_size) = _SIZE[name], _SIZE[other_name]
    return (size / other_size) ** int(power or 1) if base == other_base else None
