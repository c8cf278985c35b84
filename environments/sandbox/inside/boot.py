"""The driver of a box: confines itself, says that it is ready, and runs each job in a process of its own.

It never runs a line of what is not trusted. A job's process has no descriptor of the driver's, cannot signal it, and
gives up every system call it does not need before it starts. The driver ends when its pipe to the node does.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import math
import os
import random
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from environments.sandbox.inside import confine, frames, jobs, sameness

REQUESTS_FD: Final = 0
REPLIES_FD: Final = 1
SETUP_FAILED_EXIT: Final = 97
CONFINED: Final = b"."
"""Opens what a job's process writes about its result: it gave up everything before it started."""
_CHUNK_BYTES: Final = 1 << 16
_LOOK_FOR_NODE_S: Final = 0.1
_HIGH_FD: Final = 16


@dataclass(frozen=True)
class Settings:
    """What the node says of this box, once."""

    limits: Mapping[str, int]
    """Of every job, by the names after RLIMIT_."""
    wall_s: float
    output_bytes: int
    filter: bytes
    uid: int | None
    readable: list[str]
    listed: list[str]
    needs_landlock: bool
    import_paths: list[str]
    preload: list[str]
    root: str
    """Where this package was found; forgotten before anything runs."""


@dataclass
class Pipes:
    """A job's three pipes, seen from the driver."""

    stdin: int
    output: int
    result: int


def main() -> None:
    """Read the settings, get ready, and work until the node is gone."""
    settings = read_settings()
    try:
        version = prepare(settings)
    except Exception as error:
        frames.write_message(REPLIES_FD, {"ready": False, "why": f"{type(error).__name__}: {str(error)[:200]}"})
        os._exit(SETUP_FAILED_EXIT)
    frames.write_message(REPLIES_FD, {"ready": True, "landlock": version, "python": list(sys.version_info[:3])})
    with contextlib.suppress(EOFError):
        while True:
            serve(frames.read_message(REQUESTS_FD), settings)


def read_settings() -> Settings:
    message = frames.read_message(REQUESTS_FD)
    return Settings(**(message | {"filter": bytes.fromhex(message["filter"])}))


def prepare(settings: Settings) -> int:
    """Import what jobs will want, then give up what the driver itself does not need. Gives Landlock's version."""
    sys.path[:] = [path for path in sys.path if path != settings.root] + list(settings.import_paths)
    for name in settings.preload:
        importlib.import_module(name)
    jobs.add_exits()
    sameness.fix()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if settings.uid is not None:
        confine.drop_user(settings.uid)
    version = confine.restrict_files(settings.readable, settings.listed)
    if settings.needs_landlock and not version:
        raise OSError("the kernel has no Landlock")
    confine.forbid_new_privileges()
    return version


def serve(job: Mapping[str, Any], settings: Settings) -> None:
    """Do one job and reply."""
    if job["op"] == "check":
        become_checker(job, settings)
    started = time.monotonic()
    child, pipes = start_job(job, settings)
    outcome, output, result = watch(child, pipes, job.get("stdin", "").encode(), settings)
    outcome["wall_s"] = time.monotonic() - started
    frames.write_message(REPLIES_FD, outcome, output, result)


def start_job(job: Mapping[str, Any], settings: Settings) -> tuple[int, Pipes]:
    """Fork the process that runs it."""
    stdin, feed = os.pipe()
    output, printed = os.pipe()
    result, written = os.pipe()
    driver = os.getpid()
    child = os.fork()
    if child == 0:
        become_job(job, settings, (stdin, printed, written), driver=driver)
    for descriptor in (stdin, printed, written):
        os.close(descriptor)
    for descriptor in (feed, output, result):
        os.set_blocking(descriptor, False)
    return child, Pipes(feed, output, result)


def become_job(
    job: Mapping[str, Any], settings: Settings, descriptors: tuple[int, int, int], *, driver: int
) -> NoReturn:
    """In the new process: keep its three pipes and nothing else, give up the rest, and run."""
    try:
        random.seed(0)  # the module takes another seed after each fork
        confine.end_with_parent(driver)
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH_FD) for descriptor in descriptors]
        for target, descriptor in zip((0, 1, jobs.RESULT_FD), high, strict=True):
            os.dup2(descriptor, target)
        os.closerange(jobs.RESULT_FD + 1, 1024)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        confine_job(settings)
        os.write(jobs.RESULT_FD, CONFINED)
    except BaseException:
        os._exit(SETUP_FAILED_EXIT)
    if job["op"] == "program":
        jobs.run_program(job)
    jobs.call_function(job)


def become_checker(job: Mapping[str, Any], settings: Settings) -> NoReturn:
    """Run a checker in this very process: there is no solution in this box, and a checker decides anyway."""
    questions, answers = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH_FD) for descriptor in (REPLIES_FD, REQUESTS_FD))
    os.dup2(2, REPLIES_FD)  # what it prints goes nowhere
    os.close(REQUESTS_FD)
    signal.alarm(math.ceil(settings.wall_s) + 1)  # should the node be gone by then
    confine_job(settings)
    jobs.run_checker(job, questions=questions, answers=answers)


def confine_job(settings: Settings) -> None:
    """Give up all that a job does not need. Raises OSError."""
    confine.set_limits(settings.limits)
    confine.filter_calls(settings.filter)


def watch(child: int, pipes: Pipes, stdin: bytes, settings: Settings) -> tuple[dict[str, Any], bytes, bytes]:
    """Feed a job and read from it until it ends or passes a limit; then nothing of it is left."""
    deadline = time.monotonic() + settings.wall_s
    reader = Reader(pipes, stdin, settings.output_bytes)
    ended = reader.run(deadline) or ("" if wait_until(child, deadline) else "wall")
    if ended:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    reader.close()
    outcome = {
        "ended": ended,
        "status": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    return outcome, bytes(reader.output), bytes(reader.result)


class Reader:
    """The driver's side of a job's pipes."""

    def __init__(self, pipes: Pipes, stdin: bytes, max_bytes: int) -> None:
        self.output = bytearray()
        self.result = bytearray()
        self._feed = pipes.stdin
        self._left = memoryview(stdin)
        self._sinks = {pipes.output: self.output, pipes.result: self.result}
        self._open = {pipes.stdin, pipes.output, pipes.result}
        self._max_bytes = max_bytes
        if not stdin:
            self._close(pipes.stdin)

    def run(self, deadline: float) -> str:
        """Until the job closed its pipes: "". Or what it ran into: "output" or "wall". Leaves when the node is gone."""
        poll = select.poll()
        poll.register(REQUESTS_FD, select.POLLIN)
        for descriptor in self._open:
            poll.register(descriptor, select.POLLOUT if descriptor == self._feed else select.POLLIN)
        while self._open & self._sinks.keys():
            left = deadline - time.monotonic()
            if left <= 0:
                return "wall"
            for descriptor, _ in poll.poll(left * 1000):
                if descriptor == REQUESTS_FD:
                    os._exit(0)  # nothing is asked during a job: the node is gone, and with this process the job is
                if not self._move(descriptor):
                    poll.unregister(descriptor)
                    self._close(descriptor)
            if len(self.output) + len(self.result) > self._max_bytes:
                return "output"
        return ""

    def _move(self, descriptor: int) -> bool:
        """Move some bytes; whether there can be more."""
        try:
            if descriptor == self._feed:
                self._left = self._left[os.write(descriptor, self._left[:_CHUNK_BYTES]) :]
                return bool(self._left)
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._sinks[descriptor] += data
        return bool(data)

    def close(self) -> None:
        for descriptor in list(self._open):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)


def wait_until(child: int, deadline: float) -> bool:
    """Whether a process ended in time; it stays to be waited for. Leaves when the node is gone."""
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        signal.sigtimedwait({signal.SIGCHLD}, min(left, _LOOK_FOR_NODE_S))
        if select.select([REQUESTS_FD], [], [], 0)[0]:
            os._exit(0)
    return True
