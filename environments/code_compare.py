"""Whether what a solution gave is what was expected; compared outside the box, on plain values of known types.

Values are compared as environments.sandbox.inside.values encodes them. Nothing here calls a method that a solution
could have written, and nothing hashes what it chose: keys and sets are put in order instead.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
"""float() takes more: 1_0, nan, and the digits of every script."""


def same_output(printed: bytes, expected: str, *, tolerance: float = 0.0) -> bool:
    """Whether a program printed the expected text, blanks at line ends and blank lines at the end aside.

    With a tolerance texts are compared word by word, and words that are numbers may differ by it.
    """
    try:
        text = printed.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if not tolerance:
        return _lines(text) == _lines(expected)
    words, wanted = text.split(), expected.split()
    return len(words) == len(wanted) and all(map(_near_word, words, wanted, [tolerance] * len(wanted)))


def same_value(got: Any, expected: Any, *, tolerance: float = 0.0, tuples_are_lists: bool = False) -> bool:
    """Whether an encoded value is the expected one, types included: True is not 1, and 1.0 is not 1.

    Where a float is expected, an integer of that value will do. `tuples_are_lists` is for values written as JSON, which
    has no tuples.
    """
    (kind, mine), (wanted, theirs) = _typed(got), _typed(expected)
    if tuples_are_lists and kind == "tuple":
        kind = "list"
    if wanted == "float":
        return kind in ("int", "float") and _near(mine, theirs, tolerance)
    if kind != wanted:
        return False
    if kind == "set":
        return sorted(map(_key, mine)) == sorted(map(_key, theirs))
    if kind not in ("list", "tuple", "dict"):
        return bool(mine == theirs)
    if len(mine) != len(theirs):
        return False
    if kind == "dict":
        mine, theirs = _in_order(mine), _in_order(theirs)
        if [key for key, _ in mine] != [key for key, _ in theirs]:
            return False
        mine, theirs = [value for _, value in mine], [value for _, value in theirs]
    return all(
        same_value(one, other, tolerance=tolerance, tuples_are_lists=tuples_are_lists)
        for one, other in zip(mine, theirs, strict=True)
    )


def _typed(value: Any) -> tuple[str, Any]:
    """An encoded value's kind and content, floats and bytes in one spelling."""
    if not isinstance(value, dict):
        return type(value).__name__, value
    kind, content = next(iter(value.items()))
    if kind == "float":
        return kind, float(content)
    return kind, bytes.fromhex(content) if kind == "bytes" else content


def _key(value: Any) -> str:
    """A text that two keys have in common only if they are the same and of one type, so that True and 1 are two."""
    kind, content = _typed(value)
    if kind == "tuple":
        return f"({','.join(map(_key, content))})"
    if kind == "float":
        return repr(content + 0.0)  # -0.0 is 0.0
    return f"b{content.hex()}" if kind == "bytes" else json.dumps(content)


def _in_order(pairs: list[list[Any]]) -> list[tuple[str, Any]]:
    return sorted(((_key(key), value) for key, value in pairs), key=lambda pair: pair[0])


def _near(got: float, expected: float, tolerance: float) -> bool:
    if got == expected or (math.isnan(expected) and got != got):
        return True
    try:
        return abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer beyond every float
        return False


def _near_word(word: str, wanted: str, tolerance: float) -> bool:
    if word == wanted:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(wanted)):
        return False
    got, expected = float(word), float(wanted)
    return math.isfinite(got) and math.isfinite(expected) and _near(got, expected, tolerance)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
