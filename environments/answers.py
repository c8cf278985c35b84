"""Finding the answer in what a policy wrote, and reading it without ever running it. Bounded time for any text.

Digits are ASCII digits: int() and str.isdigit() take those of every script, which no tokenizer of a reward's author had
in mind.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

TAIL_CHARS: Final = 4096
"""An answer is looked for in so much of a completion's end."""
MAX_EXPRESSION_CHARS: Final = 256
_MAX_DEPTH: Final = 32
_INTEGER: Final = re.compile(r"-?[0-9]{1,64}")
_TOKEN: Final = re.compile(r" *([0-9]{1,9}|[-+*/()])")


def last_line(completion: str) -> str:
    """The last line that is not blank, without the blanks around it."""
    return completion[-TAIL_CHARS:].rstrip(" \t\r\n").rpartition("\n")[2].strip(" \t\r")


def integer(text: str) -> int | None:
    """The integer that a text is, or None."""
    return int(text) if _INTEGER.fullmatch(text) else None


def tagged(completion: str, tag: str) -> str | None:
    """What the last <tag>…</tag> holds, without the blanks around it."""
    before, closing, _ = completion.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if closing and opening else None


class NotAnExpressionError(ValueError):
    """Raised for a text that is no sum, difference, product or quotient of whole numbers, and for a division by 0."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of + - * / ( ) and whole numbers, and the numbers in it.

    Raises NotAnExpressionError, also for more than MAX_EXPRESSION_CHARS characters.
    """
    return _Expression(text).value()


class _Expression:
    """sum = product { (+|-) product };  product = factor { (*|/) factor };  factor = number | ( sum ) | - factor"""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._place = 0
        self._depth = 0
        self._numbers: list[int] = []

    def value(self) -> tuple[Fraction, list[int]]:
        value = self._sum()
        if self._next():
            raise NotAnExpressionError(f"{self._next()!r} is left over")
        return value, self._numbers

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor()
            else:
                value = _quotient(value, self._factor())
        return value

    def _factor(self) -> Fraction:
        token = self._take()
        if token.isdigit():
            self._numbers.append(int(token))
            return Fraction(token)
        self._depth += 1
        if self._depth > _MAX_DEPTH or token not in ("-", "("):
            raise NotAnExpressionError("nested too deeply" if self._depth > _MAX_DEPTH else f"unexpected {token!r}")
        value = -self._factor() if token == "-" else self._sum()
        if token == "(" and self._take() != ")":
            raise NotAnExpressionError("a parenthesis is not closed")
        self._depth -= 1
        return value

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._place += 1
        return token


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_EXPRESSION_CHARS:
        raise NotAnExpressionError(f"{len(text)} characters; {MAX_EXPRESSION_CHARS} are allowed")
    tokens, place = [], 0
    text = text.rstrip(" ")
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise NotAnExpressionError(f"unexpected {text[place]!r}")
        tokens.append(found[1])
        place = found.end()
    return tokens


def _quotient(value: Fraction, by: Fraction) -> Fraction:
    if not by:
        raise NotAnExpressionError("a division by zero")
    return value / by
