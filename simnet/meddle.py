"""A node whose clock is wrong or whose disk is slow, in each of its Python processes.

`write_hook` makes a directory that a simulation puts first on a node's PYTHONPATH, which the processes that the node
starts inherit. What Python runs there before anything else moves wall-clock time and makes writes durable later, as a
control file says at the moment: `{"clock_ahead_s": 90, "sync_ms": 20}`. No node does this on its own. Not meddled with:
what libraries in C read of the clock (certificates), and the sandboxes of environments, which see no PYTHONPATH.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocol.atomic import write_atomically

LOOK_EVERY_S: Final = 0.2
_CHANGES: Final = ("INSERT", "UPDATE", "DELETE", "REPLACE", "COMMIT")


class Control(Struct, frozen=True):
    """What is wrong with a node's surroundings."""

    clock_ahead_s: float = 0.0
    sync_ms: float = 0.0


def write_control(path: Path, control: Control) -> None:
    """Tell a node's process; it looks a few times a second."""
    write_atomically(path, msgspec.json.encode(control), sync=False)


def write_hook(directory: Path, control: Path) -> None:
    """Make a directory that has every Python obey a control file whose PYTHONPATH begins with it."""
    directory.mkdir(exist_ok=True)
    code = f"from simnet.meddle import take_over\n\ntake_over({str(control.absolute())!r})\n"
    write_atomically(directory / "sitecustomize.py", code.encode(), sync=False)


def take_over(control: str) -> None:
    """Make this process obey a control file, for good."""
    Meddler(Path(control)).install()


class Meddler:
    """Reads the control file now and then, and puts itself between a process and its clock and disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_s = -LOOK_EVERY_S
        self._control = Control()

    @property
    def control(self) -> Control:
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            try:
                self._control = msgspec.json.decode(self._path.read_bytes(), type=Control)
            except (OSError, msgspec.MsgspecError) as error:
                sys.stderr.write(f"the control file cannot be read: {error}\n")
        return self._control

    def install(self) -> None:
        """Replace the functions that everything else in this process will call."""
        real_ns, connect = time.time_ns, sqlite3.connect
        time.time_ns = lambda: real_ns() + int(self.control.clock_ahead_s * 1e9)
        time.time = lambda: real_ns() / 1e9 + self.control.clock_ahead_s
        factory = self._connection()
        for owner, name, replacement in (
            (os, "fsync", self._slowed(os.fsync)),
            (os, "fdatasync", self._slowed(os.fdatasync)),
            (sqlite3, "connect", lambda *arguments, **named: connect(*arguments, factory=factory, **named)),
        ):
            setattr(owner, name, replacement)

    def wait(self) -> None:
        """As long as the disk takes longer than it should."""
        if self.control.sync_ms:
            time.sleep(self.control.sync_ms / 1000)

    def _slowed(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def slow(descriptor: Any) -> None:
            sync(descriptor)
            self.wait()

        return slow

    def _connection(self) -> type[sqlite3.Connection]:
        wait = self.wait

        class Slow(sqlite3.Connection):
            """Durable at the end of a change outside of transactions, and at the end of a transaction."""

            def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
                done = super().execute(query, *values)
                if not self.in_transaction and query.lstrip().upper().startswith(_CHANGES):
                    wait()
                return done

            def __exit__(self, *error: Any) -> Any:
                ended = super().__exit__(*error)
                wait()
                return ended

        return Slow
