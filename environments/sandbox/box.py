"""One box, seen from the node: started, asked, and killed to its last process.

What comes back is bytes with a count of what they cost. The driver inside is trusted no further than its bytes: frames
have a largest size, every wait has a deadline, and a box that breaks either is broken, which is nobody's fault.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from environments.sandbox.inside import values
from environments.sandbox.inside.boot import CONFINED
from environments.sandbox.launch import BoxSpec, Isolation
from environments.sandbox.limits import Limits
from protocol.errors import BoxError

_log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
"""A busy machine starts a dozen at once."""
_GRACE_S: Final = 10.0
"""Beyond a job's own wall limit, for the driver to say so."""
_REAP_TIMEOUT_S: Final = 10.0
_MAX_HEADER_BYTES: Final = 1 << 12
_SLACK_BYTES: Final = 1 << 18
"""What the driver may have read beyond the output limit before it noticed."""
_CPU_ROUNDING_S: Final = 0.5
_MAX_QUESTIONS: Final = 10_000


class Ended(Enum):
    """How a job ended."""

    WELL = "ended well"
    BADLY = "ended badly"
    """With an exception or another exit status than 0."""
    CRASH = "crashed"
    CPU = "used up its CPU time"
    OUTPUT = "printed too much"
    WALL = "did not end in time"


@dataclass(frozen=True)
class Outcome:
    """What one job gave, and what it used."""

    ended: Ended
    output: bytes
    """What it printed."""
    result: bytes
    """Of a call: the value, which values.parse reads; values.loads too, for programs that are trusted."""
    detail: str
    """The exception's name, or the signal's; whatever the program says it is."""
    cpu_s: float
    peak_bytes: int
    wall_s: float

    def within(self, limits: Limits) -> bool:
        """Whether every other machine, if slower, would have let it come as far."""
        return self.cpu_s <= limits.cpu_s and self.peak_bytes <= limits.memory_bytes


@dataclass(frozen=True)
class Checked:
    """What a checker says; `error` names the exception that it ended with."""

    passed: bool
    error: str = ""


Answer = Callable[[list[Any]], Any]
"""Gives what a checker's question comes to, from encoded arguments to an encoded value (environments.sandbox.inside.
values): the node passes them on and builds neither. What raises CandidateError is raised in the checker too."""


class CandidateError(Exception):
    """The solution gave no value for a checker's question; the message names why."""


class Box:
    """A driver process in its own isolation. Not for several threads at once."""

    def __init__(self, isolation: Isolation, spec: BoxSpec, *, stderr: int = subprocess.DEVNULL) -> None:
        """Start it, without waiting. Raises BoxError."""
        self.limits = spec.limits
        self.landlock = 0
        try:
            settings = isolation.settings(spec)
            self.process = subprocess.Popen(
                isolation.command(spec),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=isolation.environment(),
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise BoxError(f"a box cannot be started: {error.strerror}") from error
        for pipe in (self.process.stdin, self.process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        try:
            self._send(settings, time.monotonic() + START_TIMEOUT_S)
        except BoxError:
            self.kill()
            raise

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the driver has confined itself. Raises BoxError."""
        hello = self._receive(_MAX_HEADER_BYTES, time.monotonic() + timeout_s)
        if hello.get("ready") is not True:
            raise BoxError(f"a box could not confine itself: {str(hello.get('why'))[:300]}")
        self.landlock = int(hello.get("landlock", 0))

    def run_program(self, source: str, stdin: str = "") -> Outcome:
        """Run a source text as a program with a text as its standard input. Raises BoxError."""
        return self._job({"op": "program", "source": source, "stdin": stdin})

    def call(self, source: str, entry: str, arguments: tuple[Any, ...] | list[Any]) -> Outcome:
        """Call a function of a source text, `name` or `Class.method`, with plain values. Raises BoxError."""
        return self.call_encoded(source, entry, arguments=values.encode(list(arguments)))

    def call_encoded(self, source: str, entry: str, *, arguments: list[Any]) -> Outcome:
        """The same with arguments as `values.encode` gives them."""
        return self._job({"op": "call", "source": source, "entry": entry, "args": arguments})

    def check(self, source: str, answer: Answer) -> Checked:
        """Run a checker's `check(candidate)`; each call of `candidate` is answered here. The box's last job.

        Raises BoxError, also where the checker gives no verdict in time.
        """
        deadline = time.monotonic() + self.limits.wall_s + _GRACE_S
        self._send({"op": "check", "source": source}, deadline)
        for _ in range(_MAX_QUESTIONS):
            message = self._receive(self.limits.output_bytes, deadline)
            if "verdict" in message:
                return Checked(message["verdict"] is True, str(message.get("error", ""))[:64])
            self._send(_answered(message, answer), deadline)
        raise BoxError(f"a checker asked more than {_MAX_QUESTIONS} questions")

    def kill(self) -> None:
        """End every process of the box, whatever it is doing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # the kernel takes its time, and will end it
            _log.warning("box is slow to end pid=%d", self.process.pid)

    def _job(self, job: Mapping[str, Any]) -> Outcome:
        deadline = time.monotonic() + self.limits.wall_s + _GRACE_S
        self._send(job, deadline)
        header = self._receive(_MAX_HEADER_BYTES, deadline)
        largest = self.limits.output_bytes + _SLACK_BYTES
        output, result = self._frame(largest, deadline), self._frame(largest, deadline)
        try:
            return _outcome(header, output, result, self.limits)
        except (KeyError, TypeError, ValueError) as error:
            raise BoxError(f"a box's driver gave a reply that makes no sense: {str(error)[:80]}") from error

    def _send(self, message: Mapping[str, Any], deadline: float) -> None:
        data = json.dumps(message).encode()
        view = memoryview(struct.pack(">I", len(data)) + data)
        descriptor = self.process.stdin.fileno()  # type: ignore[union-attr]
        while view:
            _wait(descriptor, select.POLLOUT, deadline)
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise BoxError(f"a box is gone: {error.strerror}") from error

    def _receive(self, max_bytes: int, deadline: float) -> dict[str, Any]:
        try:
            message = json.loads(self._frame(max_bytes, deadline))
        except (ValueError, RecursionError) as error:
            raise BoxError("a box sent what is no message") from error
        if not isinstance(message, dict):
            raise BoxError("a box sent what is no message")
        return message

    def _frame(self, max_bytes: int, deadline: float) -> bytes:
        (length,) = struct.unpack(">I", self._read(4, deadline))
        if length > max_bytes:
            raise BoxError(f"a box sent {length} bytes where {max_bytes} are allowed")
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        descriptor = self.process.stdout.fileno()  # type: ignore[union-attr]
        data = bytearray()
        while len(data) < count:
            _wait(descriptor, select.POLLIN, deadline)
            try:
                part = os.read(descriptor, count - len(data))
            except BlockingIOError:
                continue
            if not part:
                raise BoxError("a box is gone")
            data += part
        return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise BoxError("a box did not answer in time")


def _answered(message: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """The reply to a checker's question."""
    try:
        arguments = values.checked(message.get("ask"))["tuple"]
        return {"value": values.checked(answer(arguments))}
    except CandidateError as error:
        return {"error": str(error)[:64]}
    except (ValueError, TypeError, KeyError) as error:
        raise BoxError("a checker asked what is no question") from error


def _outcome(header: Mapping[str, Any], output: bytes, result: bytes, limits: Limits) -> Outcome:
    """Raises KeyError, TypeError or ValueError for a header that does not make sense."""
    if not result.startswith(CONFINED):
        raise ValueError("a job's process could not confine itself")
    result = result.removeprefix(CONFINED)
    status, cpu_s = int(header["status"]), float(header["cpu_s"])
    ended, detail = _how(str(header["ended"]), status, cpu_s, limits)
    if ended is Ended.BADLY and result[:1] == b"e":
        detail = _printable(result[1:])
    return Outcome(
        ended=ended,
        output=output,
        result=result[1:] if result[:1] == b"v" else b"",
        detail=detail,
        cpu_s=cpu_s,
        peak_bytes=int(header["peak_bytes"]),
        wall_s=float(header["wall_s"]),
    )


def _how(ended: str, status: int, cpu_s: float, limits: Limits) -> tuple[Ended, str]:
    if ended == "output":
        return Ended.OUTPUT, f"more than {limits.output_bytes} bytes"
    if ended == "wall":
        return Ended.WALL, f"within {limits.wall_s:g} s"
    if status == -signal.SIGKILL:
        if cpu_s < limits.cpu_end_s - _CPU_ROUNDING_S:  # the kernel ran out of memory, or somebody killed it
            raise ValueError("a job was killed from outside")
        return Ended.CPU, f"more than {limits.cpu_s:g} s"
    if status < 0:
        return Ended.CRASH, signal.Signals(-status).name
    return (Ended.BADLY, f"exit status {status}") if status else (Ended.WELL, "")


def _printable(name: bytes) -> str:
    text = name[:64].decode("ascii", errors="replace")
    return "".join(letter if letter.isidentifier() or letter.isdigit() else "?" for letter in text) or "?"
