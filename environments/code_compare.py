"""Whether what a solution gave is what was expected; compared outside the box, on plain values of known types.

Nothing here calls a method that a solution could have written: values were read from JSON.
"""

from __future__ import annotations

import math
from typing import Any


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
    """Whether a returned value is the expected one, types included: True is not 1, and 1.0 is not 1.

    Where a float is expected, an integer of that value will do. `tuples_are_lists` is for values written as JSON, which
    has no tuples.
    """
    if tuples_are_lists and isinstance(got, tuple):
        got = list(got)
    if isinstance(expected, float):
        return type(got) in (int, float) and _near(got, expected, tolerance)
    if type(got) is not type(expected):
        return False
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(
            same_value(mine, theirs, tolerance=tolerance, tuples_are_lists=tuples_are_lists)
            for mine, theirs in zip(got, expected, strict=True)
        )
    if isinstance(expected, dict):
        return _same_dict(got, expected, tolerance=tolerance, tuples_are_lists=tuples_are_lists)
    if isinstance(expected, set):
        return {_typed(item) for item in got} == {_typed(item) for item in expected}
    return bool(got == expected)


def _same_dict(got: dict[Any, Any], expected: dict[Any, Any], *, tolerance: float, tuples_are_lists: bool) -> bool:
    mine = {_typed(key): value for key, value in got.items()}
    theirs = {_typed(key): value for key, value in expected.items()}
    return mine.keys() == theirs.keys() and all(
        same_value(mine[key], theirs[key], tolerance=tolerance, tuples_are_lists=tuples_are_lists) for key in theirs
    )


def _typed(value: Any) -> tuple[str, Any]:
    """A hashable value with its type, so that True and 1 are two."""
    if isinstance(value, tuple):
        return "tuple", tuple(map(_typed, value))
    return type(value).__name__, value


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
    try:
        got, expected = float(word), float(wanted)
    except ValueError:
        return False
    return math.isfinite(got) and math.isfinite(expected) and _near(got, expected, tolerance)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
