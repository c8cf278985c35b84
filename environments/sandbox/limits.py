"""How much a program in a box may use, and what the node makes of a program that used more.

Machines differ in speed, so there are two bounds: a result counts only within the first, and a program is ended at the
second, several times as far. Between them nobody can tell, and nobody is blamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

THREADS: Final = 64
MARGIN_THREADS: Final = 256
"""Where the kernel counts a user's threads elsewhere too: those that may come to be after a box was started."""
OPEN_FILES: Final = 64
STACK_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Limits:
    """Of one job: a run of a program on one input, or one call."""

    cpu_s: float = 2.0
    """A result that took more CPU time than this counts for nothing: another machine may see it ended."""
    cpu_end_s: int = 8
    """The kernel ends the program here."""
    memory_bytes: int = 256 << 20
    """A result that took more memory (resident, at its peak) counts for nothing."""
    address_space_bytes: int = 768 << 20
    """An allocation that leads beyond this fails."""
    wall_s: float = 20.0
    """Waiting and a busy machine included. Passing it says nothing about the program."""
    output_bytes: int = 1 << 20

    def resources(self, threads: int) -> dict[str, int]:
        """Resource limits by the names after RLIMIT_."""
        return {
            "AS": self.address_space_bytes,
            "CPU": self.cpu_end_s,
            "STACK": STACK_BYTES,
            "NPROC": threads,
            "NOFILE": OPEN_FILES,
            "FSIZE": 0,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }
