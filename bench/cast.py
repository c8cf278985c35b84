"""Starting and talking to the processes of bench.cast_node. Not a benchmark itself."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from protocol.errors import ComputeError

START_TIMEOUT_S: Final = 60.0


class CastNode:
    """One process; a context manager. `prefix` is put before its command, to run it in a network namespace."""

    def __init__(self, role: str, directory: Path, *, prefix: Sequence[str] = (), **setup: Any) -> None:
        directory.mkdir(parents=True)
        self.role = role
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "bench.cast_node", role, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self.order(**setup)
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> CastNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def peer(self) -> str:
        return str(self.ready["peer"])

    def wait_ready(self) -> CastNode:
        self.ready = self.wait("ready", timeout_s=START_TIMEOUT_S)
        return self

    def order(self, **what: Any) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(what) + b"\n")
            self._process.stdin.flush()

    def upstream(
        self, *others: CastNode, tokens: Mapping[str, str] | None = None, urls: Sequence[str] | None = None
    ) -> None:
        """Have it fetch from others, at their own URLs unless others are given."""
        token = (tokens or {}).get(self.peer, "none")
        known = [
            {"peer": each.peer, "url": url, "fingerprint": each.ready["fingerprint"], "token": token}
            for each, url in zip(others, urls or [each.ready["url"] for each in others], strict=True)
        ]
        self.order(do="upstream", upstream=known)

    def wait(self, event: str, *, timeout_s: float) -> dict[str, Any]:
        """The next event of this name; those before it are dropped. Raises ComputeError."""
        give_up = time.monotonic() + timeout_s
        while (left_s := give_up - time.monotonic()) > 0:
            try:
                said = self._said.get(timeout=left_s)
            except queue.Empty:
                break
            if said["event"] == event:
                return said
            if said["event"] == "ended":
                raise ComputeError(f"the {self.role} ended before it said {event!r}", hint=f"see {self._log.name}")
        raise ComputeError(
            f"the {self.role} did not say {event!r} within {timeout_s:g} s", hint=f"see {self._log.name}"
        )

    def report(self) -> dict[str, Any]:
        """CPU seconds since it was ready, anonymous memory, bytes received by peer."""
        self.order(do="report")
        return self.wait("report", timeout_s=START_TIMEOUT_S)

    def _listen(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._said.put(msgspec.json.decode(line, type=dict[str, Any]))
        self._said.put({"event": "ended"})
