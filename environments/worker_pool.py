"""A pool of restartable child processes that judge what policies wrote: a broken one costs one answer, told as such.

A worker answers one request at a time (environments.worker_loop). Past the wall deadline, or when it dies, it is killed
and another takes its place at the next request. Children get a bare environment: none of the node's secrets.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from environments.allowance import Allowance

_START_S: Final = 120.0
_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_CALLS: Final = 5000
"""A worker is replaced after so many calls: libraries keep caches."""
_ROOT: Final = Path(__file__).parents[1]

_log = logging.getLogger(__name__)


class CouldNotTellError(Exception):
    """Raised where a worker gave no answer: a limit, a crash, a worker that does not start. Nobody's fault."""


class FailedError(Exception):
    """Raised where the handler raised for this very request, which it does every time."""


@dataclass
class WorkerPool:
    """Up to `size` workers that run a module, started when they are first needed. Safe to use from several threads."""

    command: Sequence[str]
    """What follows the interpreter, mostly `-P -m MODULE`."""
    deadline_s: float
    """Wall time of one call; the worker's own CPU limit comes first unless the machine is very busy."""
    size: int = 0
    """0: a worker a core, four at most."""
    python: str = sys.executable
    path: str = str(_ROOT)
    """Where the interpreter finds modules first; empty for one that must not mistake ours for its own."""
    lost: int = 0
    """Workers that had to be killed or died."""
    _idle: SimpleQueue[_Worker | None] = field(default_factory=SimpleQueue, repr=False)
    _open: list[_Worker] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.size = self.size or min(4, len(os.sched_getaffinity(0)))
        for _ in range(self.size):
            self._idle.put(None)

    def call(self, request: Any, *, allowance: Allowance | None = None) -> Any:
        """A worker's answer. Raises CouldNotTellError or FailedError."""
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
            try:
                value = worker.call(request, deadline_s=self.deadline_s)
            finally:
                if allowance is not None:
                    allowance.charge(worker.cpu_s)
        except CouldNotTellError:
            if worker is not None and worker.broken:
                self._drop(worker)
                worker = None
            raise
        else:
            return value
        finally:
            if worker is not None and worker.calls >= _MAX_CALLS:
                self._end(worker)
                worker = None
            self._idle.put(worker)

    def map(self, requests: Sequence[Any], *, allowance: Allowance | None = None) -> list[Any]:
        """Answers in order, from all workers side by side; the error in place of an answer that is missing.

        Once the allowance is used up, the rest is missing.
        """
        ask = partial(self._caught, allowance=allowance)
        threads = min(self.size, len(requests))
        if threads <= 1:
            return [ask(request) for request in requests]
        with ThreadPoolExecutor(threads) as executor:
            return list(executor.map(ask, requests))

    def close(self) -> None:
        """End all workers, while no call is under way; later calls start new ones."""
        for worker in list(self._open):
            self._end(worker)
        for _ in range(self._idle.qsize()):
            self._idle.get()
            self._idle.put(None)

    def _caught(self, request: Any, *, allowance: Allowance | None) -> Any:
        if allowance is not None and allowance.used_up:
            return CouldNotTellError(allowance.used_up)
        try:
            return self.call(request, allowance=allowance)
        except (CouldNotTellError, FailedError) as error:
            return error

    def _start(self) -> _Worker:
        worker = _Worker(self.python, self.command, path=self.path)
        self._open.append(worker)
        try:
            worker.wait_ready(_START_S)
        except CouldNotTellError:
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: _Worker) -> None:
        self.lost += 1
        _log.warning("reward worker lost pid=%d calls=%d lost=%d", worker.pid, worker.calls, self.lost)
        self._end(worker)

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        if worker in self._open:
            self._open.remove(worker)


class _Worker:
    """One child and its pipes."""

    def __init__(self, python: str, command: Sequence[str], *, path: str) -> None:
        try:
            self._process = subprocess.Popen(
                [python, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=bare_environment(path),
                cwd="/",
                close_fds=True,
            )
        except OSError as error:
            raise CouldNotTellError(f"{python} cannot be started: {error.strerror}") from error
        if self._process.stdin is None or self._process.stdout is None:
            raise CouldNotTellError("a worker has no pipes")
        self.pid = self._process.pid
        self.calls = 0
        self.cpu_s = 0.0
        """Of the last call."""
        self.broken = False
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)

    def wait_ready(self, timeout_s: float) -> None:
        answer = self._exchange(b"", timeout_s)
        if "ready" not in answer:
            self.broken = True
            raise CouldNotTellError(f"the worker does not start: {answer.get('error', 'it says nothing')}")

    def call(self, request: Any, *, deadline_s: float) -> Any:
        self.calls += 1
        began = time.monotonic()
        try:
            answer = self._exchange(json.dumps(request).encode() + b"\n", deadline_s)
        except CouldNotTellError:
            self.cpu_s = time.monotonic() - began  # more than it used, which it did not say
            raise
        spent = answer.get("cpu_s")
        self.cpu_s = spent if isinstance(spent, float) else 0.0
        if "value" in answer:
            return answer["value"]
        if "error" in answer:
            raise FailedError(str(answer["error"])[:240])
        raise CouldNotTellError(f"the limit of {str(answer.get('limit', 'something'))[:40]} was reached")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a line, wait for a line. Marks the worker broken, and raises, where none comes in time."""
        try:
            found = json.loads(self._talk(request, time.monotonic() + timeout_s))
        except (OSError, ValueError, RecursionError) as error:
            self.broken = True
            raise CouldNotTellError(f"the worker broke down: {str(error)[:120]}") from error
        except CouldNotTellError:
            self.broken = True
            raise
        return found if isinstance(found, dict) else {}

    def _talk(self, request: bytes, give_up: float) -> bytes:
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            if request:
                selector.register(self._input, selectors.EVENT_WRITE)
            while not received.endswith(b"\n"):
                ready = selector.select(max(0.0, give_up - time.monotonic()))
                if not ready:
                    raise CouldNotTellError("no answer in time")
                for key, _ in ready:
                    if key.fd == self._output:
                        received += self._received(len(received))
                    else:
                        request = request[os.write(self._input, request[:65536]) :]
                        if not request:
                            selector.unregister(self._input)
        return received

    def _received(self, already: int) -> bytes:
        part = os.read(self._output, 65536)
        if not part:
            raise CouldNotTellError("the worker died")
        if already + len(part) > _MAX_ANSWER_BYTES:
            raise CouldNotTellError("the worker answers with too much")
        return part


def module_command(module: str) -> tuple[str, ...]:
    """Runs a module of this program, whatever lies in the working directory."""
    return ("-P", "-m", module)


def bare_environment(path: str = str(_ROOT)) -> dict[str, str]:
    """The environment variables of a worker."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    fixed = {
        "PYTHONPATH": path,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
    }
    return kept | fixed
