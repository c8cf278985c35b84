"""What sqlite does for a piece of work, counted: the same on every machine and under every load."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Steps:
    """Of sqlite's virtual machine."""

    taken: int = 0

    def _count(self) -> int:
        self.taken += 1
        return 0


@contextmanager
def counted(connection: sqlite3.Connection) -> Iterator[Steps]:
    """Count the steps that statements of this connection take within the block."""
    steps = Steps()
    connection.set_progress_handler(steps._count, 1)
    try:
        yield steps
    finally:
        connection.set_progress_handler(None, 0)
