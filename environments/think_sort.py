"""Put a row of digits in ascending order after thinking for a while: small enough to learn how long to think.

Prompt `s51648=`, right answer `.....:14568` with any number of dots. A wanted length of 14 tokens, end token included,
is a letter in front, the 14th: `ns51648=` (INTELLECT-2, section 3.1.2, for a policy that reads one character a token).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Annotated, ClassVar

from msgspec import Meta

from environments.base import RIGHT, WRONG, Environment, Reward, Task, user_message
from protocol.errors import ConfigError
from protocol.seeds import SeedStream


@dataclass(frozen=True)
class ThinkSort(Environment):
    """Rows of `min_digits` to `max_digits` digits, each length and each digit equally likely."""

    name: ClassVar[str] = "think-sort"

    min_digits: Annotated[int, Meta(ge=1, le=64)] = 4
    max_digits: Annotated[int, Meta(ge=1, le=64)] = 6

    def __post_init__(self) -> None:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits = {self.min_digits} is more than max_digits = {self.max_digits}")

    def task(self, seed: bytes) -> Task:
        """The row of digits of a 32-byte seed."""
        stream = SeedStream(seed)
        length = self.min_digits + stream.below(self.max_digits - self.min_digits + 1)
        digits = "".join(str(stream.below(10)) for _ in range(length))
        return Task(user_message(f"s{digits}="), {"answer": "".join(sorted(digits))})

    def with_length_target(self, task: Task, target: int) -> Task:
        """The target's letter in front of the prompt."""
        if not 1 <= target <= len(ascii_lowercase):
            raise ConfigError(f"think-sort has no letter for {target} tokens: its targets go from 1 to 26")
        return dataclasses.replace(task, prompt=user_message(ascii_lowercase[target - 1] + task.text))

    def reward(self, task: Task, completion: str) -> Reward:
        """1 for dots, a colon and the digits in ascending order, and nothing else, otherwise 0."""
        thought, _, answer = completion.partition(":")
        return RIGHT if not thought.strip(".") and answer == task.data["answer"] and ":" in completion else WRONG
