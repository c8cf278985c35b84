"""Answers of mathematics as text: the last box, and what can be told of it before any algebra.

math-verify has faults that matter for rewards: it drops units, it does not see that 1 < x < 3 is 3 > x > 1, and it
takes an expression for its value, so that a policy may answer a question with the question. Each is met here. N\\% is
N/100 and nothing else, where that library takes it for N as well.
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
_ASSIGNED: Final = re.compile(r"[a-zA-Z](?:_(?:[a-zA-Z0-9]|\{[a-zA-Z0-9]{1,4}\}))?(?:\([a-zA-Z]\))?\s*=(?!=)")
_PERCENT: Final = re.compile(r"(.+?)\\?%\.?", re.DOTALL)
_WORD: Final = r"(?:(?:square|cubic|sq\.?|cu\.?)\s+)?[a-zA-Z]+\.?(?:\s+per\s+[a-zA-Z]+)?"
_MEASURED: Final = re.compile(
    r"(.*?[0-9}])\s*(?:\\[,;: ])*\s*(?:\\(?:text|mathrm|textrm|mbox)\{\s*("
    + _WORD
    + r")\s*\}|([a-zA-Z]+))(?:\^\{?([23])\}?)?\.?",
    re.DOTALL,
)
_POWERS: Final = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_OPEN: Final = re.compile(r"\\(?:(?:o?i|i{2,3})nt|sum|prod|coprod|lim|limsup|liminf)(?![a-zA-Z])|%|(?<![<>!])=")
"""What an answer has only where the right one has it: what is still to be worked out, percentages, equations."""
_LETTERS: Final = re.compile(r"[A-Z]{2,12}")

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
    if percent := _PERCENT.fullmatch(bare):
        value = plain_number(percent[1]) if "%" not in percent[1] else None
        return None if value is None else value / 100
    sign = -1 if bare.startswith("-") else 1
    bare = bare[1:] if bare[:1] in ("-", "+") else bare
    value = _scaled(bare)
    return None if value is None else sign * value


def is_exact(text: str) -> bool:
    """Whether a plain number has no decimal point, so that it leaves no room for rounding."""
    return "." not in text.strip().removesuffix(".")


def without_assignment(text: str) -> str:
    """`x = 5` becomes `5`, and so do `x_1 = 5` and `f(x) = 5`."""
    return text[found.end() :] if (found := _ASSIGNED.match(text.strip())) else text


def comparable(gold: str, answer: str) -> tuple[str, str]:
    """Both without assignments, unless one is an equation in what the other assigns to: `y = 2x` and `2x - y = 0`."""
    bare_gold, bare = without_assignment(gold), without_assignment(answer)
    if bare_gold != gold and bare == answer and "=" in answer and gold.strip()[0] in answer:
        return gold, answer
    return bare_gold, bare


def split_unit(text: str) -> tuple[str, str]:
    """A number and its unit in one spelling, `("5", "cm^2")`; the text and nothing where no unit follows a number.

    A word in \\text{…} that is no known unit, as in `5 \\text{ apples}`, is dropped; several words are no unit, but for
    `square`, `cubic` and `per`. Percent is the sign of that name.
    """
    stripped = text.strip()
    if degrees := _DEGREES.search(stripped):
        return stripped[: degrees.start()], "degree"
    found = _MEASURED.fullmatch(stripped)
    if found is None:
        return text, ""
    number, words, power = found[1], (found[2] or found[3]).lower().split(), found[4]
    if plain_number(number) is None:
        return text, ""
    if words in (["percent"], ["percents"]):
        return f"{number}\\%", ""
    if len(words) > 1 and words[0].rstrip(".") in _POWERS:
        power = _POWERS[words.pop(0).rstrip(".")]
    units = [_unit(word) for word in words if word != "per"]
    if None in units:
        return (number, "") if found[2] is not None else (text, "")
    unit = "/".join(filter(None, units))
    return number, f"{unit}^{power}" if power else unit


def _unit(word: str) -> str | None:
    return _UNITS.get(word.rstrip(".")) or _UNITS.get(word.rstrip(".").removesuffix("s"))


def is_finished(answer: str, gold: str) -> bool:
    """Whether an answer leaves nothing to be worked out, chosen or read that the right one does not leave."""
    return {found[0] for found in _OPEN.finditer(answer)} <= {found[0] for found in _OPEN.finditer(gold)}


def letters(text: str) -> str | None:
    """Names of points, or choices: `AB` is not `BA`. None for anything else."""
    bare = _SPACES.sub("", re.sub(r"\\(?:text|mathrm|textrm|mbox|overline)\{([^{}]*)\}", r"\1", text))
    return bare if _LETTERS.fullmatch(bare) else None


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
