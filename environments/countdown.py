"""Countdown: reach a number with some given numbers, each used once at most, and the four operations.

The target is made from the numbers, so there is always a way. What the policy writes is read by a small parser of
exact fractions, and never run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from environments.answers import NotAnExpressionError, evaluate, last_line
from environments.base import RIGHT, Environment, Reward, Task, user_message
from protocol.seeds import SeedStream

_TRIES: Final = 64
"""Ways to combine the numbers that are tried for a target in range, before their sum is taken."""


@dataclass(frozen=True)
class Countdown(Environment):
    """`min_numbers` to `max_numbers` numbers from 1 to `largest`, and a target up to `largest_target`."""

    name: ClassVar[str] = "countdown"

    min_numbers: Annotated[int, Meta(ge=2, le=8)] = 3
    max_numbers: Annotated[int, Meta(ge=2, le=8)] = 4
    largest: Annotated[int, Meta(ge=2, le=10_000)] = 99
    largest_target: Annotated[int, Meta(ge=2, le=1_000_000)] = 999

    def __post_init__(self) -> None:
        if self.min_numbers > self.max_numbers:
            raise ValueError(f"min_numbers = {self.min_numbers} is more than max_numbers = {self.max_numbers}")

    def task(self, seed: bytes) -> Task:
        """The numbers and the target of a 32-byte seed."""
        stream = SeedStream(seed)
        count = self.min_numbers + stream.below(self.max_numbers - self.min_numbers + 1)
        numbers = [1 + stream.below(self.largest) for _ in range(count)]
        target = next(filter(self._in_range, (_combine(numbers, stream) for _ in range(_TRIES))), sum(numbers))
        shown = ", ".join(map(str, numbers))
        ask = (
            f"Make {target} from the numbers {shown}. Use each of them once at most, with +, -, *, / and parentheses. "
            "Write the expression, and nothing else, on the last line."
        )
        return Task(user_message(ask), {"numbers": numbers, "target": int(target)})

    def reward(self, task: Task, completion: str) -> Reward:
        """1 if the last line is an expression of the given numbers that comes to the target."""
        try:
            value, used = evaluate(last_line(completion))
        except NotAnExpressionError as error:
            return Reward(0.0, f"no expression: {error}")
        if Counter(used) - Counter(task.data["numbers"]):
            return Reward(0.0, "a number that is not given, or is used too often")
        return RIGHT if value == task.data["target"] else Reward(0.0, f"comes to {str(value)[:40]}")

    def _in_range(self, value: Fraction) -> bool:
        return value.denominator == 1 and 1 <= value <= self.largest_target


def _combine(numbers: list[int], stream: SeedStream) -> Fraction:
    """All numbers brought together by random operations in random order."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        stream.shuffle(values)
        right, left = values.pop(), values.pop()
        operation = stream.choice("+-*/")
        if operation == "+":
            values.append(left + right)
        elif operation == "-":
            values.append(left - right)
        elif operation == "*":
            values.append(left * right)
        else:
            values.append(left / right if right else left)
    return values[0]
