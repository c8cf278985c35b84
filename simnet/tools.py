"""Running the system's tools that make and take away networks and disks, also while somebody presses Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Final

from protocol.errors import NodeError

TIMEOUT_S: Final = 60.0
ATTEMPTS: Final = 3


def run_tool(command: Sequence[str], lines: str | None = None) -> None:
    """Run a tool to its end, with `lines` as its input. Raises NodeError with the tool's words.

    It leads a session of its own, so that Ctrl-C in a terminal does not end it. One that was hit before it had come
    so far has done nothing yet and is started again.
    """
    for _ in range(ATTEMPTS):
        done = _run(command, lines)
        if done.returncode != -signal.SIGINT:
            break
    if done.returncode:
        raise NodeError(f"{' '.join(command)}: {done.stderr.strip()[:500] or f'ended with code {done.returncode}'}")


def _run(command: Sequence[str], lines: str | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=lines,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeError(f"{command[0]} cannot be run: {error}") from error
