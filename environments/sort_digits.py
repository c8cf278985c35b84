"""Put a row of digits in ascending order: small enough for a policy that learns in a minute on one CPU core.

Prompt `s51648=`, right answer `14568`. The reward is 1 for exactly that text and 0 for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from environments.base import RIGHT, WRONG, Environment, Reward, Task, user_message
from protocol.seeds import SeedStream


@dataclass(frozen=True)
class SortDigits(Environment):
    """Rows of `min_digits` to `max_digits` digits, each length and each digit equally likely."""

    name: ClassVar[str] = "sort-digits"

    min_digits: Annotated[int, Meta(ge=1, le=64)] = 4
    max_digits: Annotated[int, Meta(ge=1, le=64)] = 8

    def __post_init__(self) -> None:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits = {self.min_digits} is more than max_digits = {self.max_digits}")

    def task(self, seed: bytes) -> Task:
        """The row of digits of a 32-byte seed."""
        stream = SeedStream(seed)
        length = self.min_digits + stream.below(self.max_digits - self.min_digits + 1)
        digits = "".join(str(stream.below(10)) for _ in range(length))
        return Task(user_message(f"s{digits}="), {"answer": "".join(sorted(digits))})

    def reward(self, task: Task, completion: str) -> Reward:
        """1 for the digits in ascending order and nothing else, otherwise 0."""
        return RIGHT if completion == task.data["answer"] else WRONG
