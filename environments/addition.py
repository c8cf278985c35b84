"""Addition after a few worked examples, for small base models: the prompt is continued, and a newline ends the answer.

`2+3=5⏎4+4=8⏎9+6=15⏎7+8=` is answered by `15`. A model of 135 million parameters that gets a third of these right learns
to get most of them right in a dozen steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from environments.answers import integer
from environments.base import RIGHT, WRONG, Environment, Reward, Task, user_message
from protocol.seeds import SeedStream

_SMALL: Final = ((2, 3), (4, 4), (9, 6))
_LARGE: Final = ((12, 3), (4, 24), (19, 16))


@dataclass(frozen=True)
class Addition(Environment):
    """Two numbers from 1 to `largest`."""

    name: ClassVar[str] = "addition"
    stop_texts: ClassVar[tuple[str, ...]] = ("\n",)

    largest: Annotated[int, Meta(ge=1, le=10**9)] = 9

    def task(self, seed: bytes) -> Task:
        """The sum of a 32-byte seed, behind three examples of its size."""
        stream = SeedStream(seed)
        left, right = (1 + stream.below(self.largest) for _ in range(2))
        examples = "".join(f"{a}+{b}={a + b}\n" for a, b in (_SMALL if self.largest < 10 else _LARGE))
        return Task(user_message(f"{examples}{left}+{right}="), {"answer": left + right}, plain=True)

    def reward(self, task: Task, completion: str) -> Reward:
        """1 if the first line is the sum."""
        return RIGHT if integer(completion.partition("\n")[0].strip(" ")) == task.data["answer"] else WRONG
