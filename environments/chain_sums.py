"""Sums and differences of a few whole numbers: arithmetic of any length, drawn from a seed.

`Work out 7 + 12 - 3.` is answered by a last line that is `16`. As a plain prompt, `7+12-3=`, it is for policies without
a chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from environments.answers import integer, last_line
from environments.base import RIGHT, WRONG, Environment, Reward, Task, user_message
from protocol.seeds import SeedStream


@dataclass(frozen=True)
class ChainSums(Environment):
    """`min_terms` to `max_terms` numbers of `min_digits` to `max_digits` digits."""

    name: ClassVar[str] = "chain-sums"

    min_terms: Annotated[int, Meta(ge=2, le=64)] = 2
    max_terms: Annotated[int, Meta(ge=2, le=64)] = 4
    min_digits: Annotated[int, Meta(ge=1, le=12)] = 1
    max_digits: Annotated[int, Meta(ge=1, le=12)] = 2
    plain: bool = False

    def __post_init__(self) -> None:
        if self.min_terms > self.max_terms or self.min_digits > self.max_digits:
            raise ValueError("min_terms and min_digits may not be more than max_terms and max_digits")

    def task(self, seed: bytes) -> Task:
        """The sum of a 32-byte seed."""
        stream = SeedStream(seed)
        terms = self.min_terms + stream.below(self.max_terms - self.min_terms + 1)
        total = self._number(stream)
        text = str(total)
        for _ in range(terms - 1):
            sign, number = stream.choice("+-"), self._number(stream)
            total += number if sign == "+" else -number
            text += f"{sign}{number}" if self.plain else f" {sign} {number}"
        ask = f"{text}=" if self.plain else f"Work out {text}. Write the result, and nothing else, on the last line."
        return Task(user_message(ask), {"answer": total}, plain=self.plain)

    def reward(self, task: Task, completion: str) -> Reward:
        """1 if the last line is the result."""
        found = integer(last_line(completion))
        if found is None:
            return Reward(0.0, "the last line is no whole number")
        return RIGHT if found == task.data["answer"] else WRONG

    def _number(self, stream: SeedStream) -> int:
        digits = self.min_digits + stream.below(self.max_digits - self.min_digits + 1)
        least = 10 ** (digits - 1) if digits > 1 else 0
        return least + stream.below(10**digits - least)
