"""Inside a reward worker: answer lines of JSON with lines of JSON, within limits of memory and processor time.

Time is measured in CPU-seconds, so that a busy machine does not judge otherwise than an idle one. A limit that is hit
is answered as such even where the library being called swallows the exception. Runs in a child
(environments.worker_pool) and imports nothing of the program, so that a worker may run under another interpreter.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_REPEAT_S: Final = 0.1
"""The exception is raised again this often: a library may catch the first one."""
_SPARE_CPU_S: Final = 1
"""Beyond the limit, for code in C that no signal handler interrupts; then the system ends the process."""


class OutOfTimeError(BaseException):
    """Raised inside a call that has used its CPU time; no `except Exception` catches it."""


class Limits:
    """The limits of one call, and whether they were hit."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self.hit = False
        signal.signal(signal.SIGPROF, self._out_of_time)

    def run(self, work: Callable[[], Any]) -> Any:
        """The result of `work`. Raises OutOfTimeError, or whatever `work` raises."""
        self.hit = False
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        spent = int(used.ru_utime + used.ru_stime + self._cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (spent + _SPARE_CPU_S, hard))
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s, _REPEAT_S)
        try:
            result = work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if self.hit:
            raise OutOfTimeError
        return result

    def _out_of_time(self, number: int, frame: FrameType | None) -> None:
        self.hit = True
        raise OutOfTimeError


def serve(
    prepare: Callable[[], Callable[[Any], Any]], *, memory_bytes: int, cpu_s: float, confined: bool = True
) -> None:
    """Answer requests until standard input ends. `prepare` imports what is needed and gives the handler.

    The first line out is {"ready": true} or {"error": why}. Answers are {"value": …}, {"error": …} where the handler
    raised, and {"limit": …} where memory, recursion or time ran out, which says nothing about the request; each with
    the CPU-seconds that it took, "cpu_s". `confined` denies files and, to others than root, processes and threads.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    try:
        handle = prepare()
    except Exception as error:  # the parent is told why this worker cannot work, whatever it is
        answers.write(_line({"error": _brief(error)}))
        return
    _limit(memory_bytes, confined=confined)
    limits = Limits(cpu_s)
    answers.write(_line({"ready": True}))
    for line in sys.stdin.buffer:
        answers.write(_answer(handle, line, limits))


def _answer(handle: Callable[[Any], Any], line: bytes, limits: Limits) -> bytes:
    began = time.process_time()
    answer = _outcome(handle, line, limits)
    return _line({**answer, "cpu_s": time.process_time() - began})


def _outcome(handle: Callable[[Any], Any], line: bytes, limits: Limits) -> dict[str, Any]:
    try:
        value = limits.run(lambda: handle(json.loads(line)))
        json.dumps(value)
    except OutOfTimeError:
        return {"limit": "time"}
    except MemoryError:
        return {"limit": "memory"}
    except RecursionError:
        return {"limit": "recursion"}
    except Exception as error:  # what a library raises for a text that a policy wrote is the answer to it
        return {"limit": "time"} if limits.hit else {"error": _brief(error)}
    return {"value": value}


def _limit(memory_bytes: int, *, confined: bool) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not confined:
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if os.getuid():
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # has no effect on root


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
