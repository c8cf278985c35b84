"""Put a row of digits in ascending order: small enough for a policy that learns in a minute on one CPU core.

Prompt `s51648=`, right answer `14568`. The reward is 1 for exactly that text and 0 for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from environments.base import Message, Reward, Task, environment_digest
from protocol.seeds import SeedStream


@dataclass(frozen=True)
class SortDigits:
    """Rows of `min_digits` to `max_digits` digits, each length and each digit equally likely."""

    min_digits: int = 4
    max_digits: int = 8

    @property
    def name(self) -> str:
        return "sort-digits"

    @property
    def version(self) -> int:
        return 1

    @property
    def digest(self) -> bytes:
        parameters = {"min_digits": self.min_digits, "max_digits": self.max_digits}
        return environment_digest(self.name, self.version, parameters)

    def task(self, seed: bytes) -> Task:
        """The row of digits of a 32-byte seed."""
        stream = SeedStream(seed)
        length = self.min_digits + stream.below(self.max_digits - self.min_digits + 1)
        digits = "".join(str(stream.below(10)) for _ in range(length))
        message: Message = {"role": "user", "content": f"s{digits}="}
        return Task([message], {"answer": "".join(sorted(digits))})

    def reward(self, task: Task, completion: str) -> Reward:
        """1 for the digits in ascending order and nothing else, otherwise 0."""
        if completion == task.data["answer"]:
            return Reward(1.0, "right")
        return Reward(0.0, "wrong")
