"""Sums and products too large for the head, with a calculator at hand: an environment of several turns.

A message that ends with <calc>expression</calc> is answered by its value, worked out by the parser of
environments.answers and never run. A last line that is the result is right. The policy is not trained on what the
calculator says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from environments.answers import NotAnExpressionError, evaluate, integer, last_line, tagged
from environments.base import RIGHT, WRONG, Environment, Message, Reward, Task, user_message
from protocol.seeds import SeedStream

_MAX_VALUE_CHARS: Final = 64


@dataclass(frozen=True)
class Calculator(Environment):
    """`products` products of two numbers of `digits` digits, added up."""

    name: ClassVar[str] = "calculator"
    max_turns: ClassVar[int] = 4

    products: Annotated[int, Meta(ge=1, le=8)] = 2
    digits: Annotated[int, Meta(ge=1, le=6)] = 3

    def task(self, seed: bytes) -> Task:
        """The sum of a 32-byte seed."""
        stream = SeedStream(seed)
        pairs = [(self._number(stream), self._number(stream)) for _ in range(self.products)]
        shown = " + ".join(f"{left} * {right}" for left, right in pairs)
        ask = (
            f"Work out {shown}. A message that ends with <calc>EXPRESSION</calc> is answered by the expression's value "
            f"(+ - * / and parentheses), {self.max_turns - 1} times at most. In the end write the result, and nothing "
            "else, on the last line."
        )
        return Task(user_message(ask), {"answer": sum(left * right for left, right in pairs)})

    def reply(self, task: Task, transcript: Sequence[Message]) -> str | None:
        """The value of the expression that a message ends with."""
        said = transcript[-1]["content"].rstrip()
        expression = tagged(said, "calc") if said.endswith("</calc>") else None
        if expression is None:
            return None
        try:
            value, _ = evaluate(expression)
        except NotAnExpressionError as error:
            return f"error: {error}"
        shown = str(value)
        return shown if len(shown) <= _MAX_VALUE_CHARS else "error: the value is too long"

    def reward(self, task: Task, completion: str) -> Reward:
        """1 if the last line of the last turn is the result."""
        return RIGHT if integer(last_line(completion)) == task.data["answer"] else WRONG

    def _number(self, stream: SeedStream) -> int:
        least = 10 ** (self.digits - 1)
        return int(least + stream.below(10**self.digits - least))
