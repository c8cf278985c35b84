"""Answers of mathematics as text: the last box, and what can be told of it before any algebra.

math-verify has faults that matter for rewards: it drops units, it does not see that 1 < x < 3 is 3 > x > 1, and it
takes an expression for its value, so that a policy may answer a question with the question. Each is met here.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

MAX_ANSWER_CHARS: Final = 400
_TAIL_CHARS: Final = 20_000
_BOXES: Final = ("\\boxed", "\\fbox")
_DIGITS: Final = r"(?:[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+|[0-9]{1,40})"
_DECIMAL: Final = re.compile(rf"({_DIGITS})?(\.[0-9]{{1,40}})?")
_FRACTION: Final = re.compile(rf"({_DIGITS})?\\[dt]?frac(?:\{{([0-9]{{1,40}})\}}\{{([0-9]{{1,40}})\}}|([0-9])([0-9]))")
_SLASH: Final = re.compile(r"([0-9]{1,40})/([0-9]{1,40})")
_POWER_OF_TEN: Final = re.compile(r"(.+?)(?:\\times|\\cdot)10\^(?:\{(-?[0-9]{1,3})\}|([0-9]))")
_SPACES: Final = re.compile(r"\\[,;!: ]|~|\s|\\(?:quad|left|right)(?![a-zA-Z])|\\\$|\$")
_ASSIGNED: Final = re.compile(r"[a-zA-Z]\s*=(?!=)")
_MEASURED: Final = re.compile(
    r"(.*?[0-9}])\s*(?:\\[,;: ])*\s*(?:\\(?:text|mathrm|textrm|mbox)\{([^{}]*)\}|([a-zA-Z]+))(?:\^\{?([23])\}?)?\.?",
    re.DOTALL,
)
_DEGREES: Final = re.compile(r"\^\{?\\circ\}?\s*$")
_RELATION: Final = re.compile(r"\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt)(?![a-zA-Z])|<=|>=|<|>")
_FLIPPED: Final = {
    "\\leqslant": "\\geq", "\\geqslant": "\\leq", "\\leq": "\\geq", "\\geq": "\\leq", "\\le": "\\geq", "\\ge": "\\leq",
    "\\lt": ">", "\\gt": "<", "<=": "\\geq", ">=": "\\leq", "<": ">", ">": "<",
}  # fmt: skip
_UNITS: Final = {
    alias: unit
    for unit, aliases in {
        "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
        "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "mi": "mi mile", "mg": "mg",
        "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "s": "s sec second", "min": "min minute",
        "h": "h hr hour", "day": "day", "week": "week", "year": "year", "cent": "cent", "dollar": "dollar",
        "degree": "degree deg", "rad": "rad radian", "mph": "mph", "l": "l liter litre", "ml": "ml",
    }.items()
    for alias in aliases.split()
}  # fmt: skip


def last_box(completion: str) -> str | None:
    """What the last \\boxed{…} holds; None where there is none, or its braces do not close."""
    tail = completion[-_TAIL_CHARS:]
    start = max(tail.rfind(box + "{") for box in _BOXES)
    if start < 0:
        return None
    opening = tail.index("{", start)
    depth, place = 0, opening
    while place < len(tail):
        letter = tail[place]
        if letter == "\\":
            place += 1
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
            if not depth:
                return tail[opening + 1 : place].strip()
        place += 1
    return None


def plain_number(text: str) -> Fraction | None:
    """The value of a number that is written out: 1,000, -2.50, 3/4, 1\\frac{1}{2}, 2.5\\times10^{3}; else None."""
    bare = _SPACES.sub("", text)
    bare = bare.removesuffix(".")
    sign = -1 if bare.startswith("-") else 1
    bare = bare[1:] if bare[:1] in ("-", "+") else bare
    value = _scaled(bare)
    return None if value is None else sign * value


def is_exact(text: str) -> bool:
    """Whether a plain number has no decimal point, so that it leaves no room for rounding."""
    return "." not in text.strip().removesuffix(".")


def without_assignment(text: str) -> str:
    """`x = 5` becomes `5`."""
    return text[found.end() :] if (found := _ASSIGNED.match(text.strip())) else text


def split_unit(text: str) -> tuple[str, str]:
    """A number and its unit in one spelling, `("5", "cm^2")`; the text and nothing where no unit follows a number.

    A word in \\text{…} that is no known unit, as in `5 \\text{ apples}`, is dropped.
    """
    stripped = text.strip()
    if degrees := _DEGREES.search(stripped):
        return stripped[: degrees.start()], "degree"
    found = _MEASURED.fullmatch(stripped)
    if found is None:
        return text, ""
    number, word, power = found[1], (found[2] or found[3]).strip().rstrip(".").lower(), found[4]
    unit = _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
    if plain_number(number) is None or (unit is None and found[2] is None):
        return text, ""
    return number, f"{unit}^{power}" if unit and power else unit or ""


def rising(text: str) -> str:
    """A chain of two greater-than signs, the other way round: `3 > x > 1` becomes `1 < x < 3`."""
    relations = _RELATION.findall(text)
    if len(relations) != 2 or not all(each in (">", ">=") or each.startswith("\\g") for each in relations):
        return text
    left, middle, right = _RELATION.split(text)
    return f"{right} {_FLIPPED[relations[1]]} {middle} {_FLIPPED[relations[0]]} {left}"


def _scaled(text: str) -> Fraction | None:
    if power := _POWER_OF_TEN.fullmatch(text):
        value = _unsigned(power[1])
        return None if value is None else value * Fraction(10) ** int(power[2] or power[3])
    return _unsigned(text)


def _unsigned(text: str) -> Fraction | None:
    if found := _FRACTION.fullmatch(text):
        whole, top, bottom = found[1], found[2] or found[4], found[3] or found[5]
        return _ratio(top, bottom, whole=_digits(whole) if whole else 0)
    if found := _SLASH.fullmatch(text):
        return _ratio(found[1], found[2])
    found = _DECIMAL.fullmatch(text)
    if found is None or not text:
        return None
    return Fraction(_digits(found[1] or "0")) + Fraction(f"0{found[2] or ''}")


def _ratio(top: str, bottom: str, *, whole: int = 0) -> Fraction | None:
    return Fraction(int(top), int(bottom)) + whole if int(bottom) else None


def _digits(text: str) -> int:
    return int(text.replace("{,}", "").replace(",", ""))
