"""What the confined process does: run a program, call one function of it, or run a checker that asks questions.

Everything here shares an interpreter with a program that nobody trusts, so nothing here is relied on: whatever is
written to the pipes is taken as data, and the driver outside this process counts and limits it.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from environments.sandbox.inside import frames, values

RESULT_FD: Final = 3
"""Where a call's value goes, or the name of the exception that ended a job."""
ERROR_EXIT: Final = 1
MAX_NAME_CHARS: Final = 64


class SolutionFailed(Exception):
    """What a checker's `candidate` raises where the solution gave no value."""


def run_program(job: Mapping[str, Any]) -> NoReturn:
    """Run a source text as a program of its own; what it prints is its output."""
    status = _guarded(lambda: _execute(job["source"], "__main__"))
    _leave(status)


def call_function(job: Mapping[str, Any]) -> NoReturn:
    """Load a source text as a module, call its entry, and write the value as JSON."""
    status = _guarded(lambda: _call(job))
    _leave(status)


def _call(job: Mapping[str, Any]) -> None:
    dumps, write = values.dumps, os.write
    arguments = values.decode(job["args"])
    function = _entry(_execute(job["source"], "solution"), job["entry"])
    data = memoryview(b"v" + dumps(function(*arguments)).encode())
    while data:
        data = data[write(RESULT_FD, data) :]


def _entry(module: types.ModuleType, entry: str) -> Callable[..., Any]:
    """A function of a module, or `Class.method` of an instance made without arguments."""
    name, _, method = entry.partition(".")
    function: Callable[..., Any] = getattr(module, name)
    if method:
        function = getattr(function(), method)
    return function


def run_checker(job: Mapping[str, Any], *, questions: int, answers: int) -> NoReturn:
    """Run a checker's `check(candidate)`; each call of `candidate` is a question that is answered from outside."""

    def candidate(*arguments: Any) -> Any:
        frames.write_message(questions, {"ask": values.encode(arguments)})
        answer = frames.read_message(answers)
        if "error" in answer:
            raise SolutionFailed(answer["error"])
        return values.decode(answer["value"])

    def check() -> None:
        module = _execute(job["source"], "checker", SolutionFailed=SolutionFailed)
        passed = module.check(candidate) is not False
        frames.write_message(questions, {"verdict": passed})

    failed: list[str] = []
    if _guarded(check, failed.append):
        frames.write_message(questions, {"verdict": False, "error": (failed or ["SystemExit"])[0]})
    os._exit(0)


def _execute(source: str, name: str, **given: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(given)
    sys.modules[name] = module
    exec(compile(source, f"{name.strip('_')}.py", "exec"), module.__dict__)
    return module


def _guarded(work: Callable[[], object], report: Callable[[str], object] | None = None) -> int:
    """Do it, and give an exit status; the name of an exception is reported."""
    try:
        work()
        _join_threads()
        return 0
    except SystemExit as leaving:
        return _exit_status(leaving.code)
    except BaseException as error:
        name = type(error).__name__[:MAX_NAME_CHARS]
        (report or _report)(name)
        return ERROR_EXIT


def _report(name: str) -> None:
    os.write(RESULT_FD, b"e" + name.encode(errors="replace"))


def _exit_status(code: object) -> int:
    """What the interpreter makes of sys.exit's argument."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else ERROR_EXIT


def _join_threads() -> None:
    """As an interpreter does before it ends."""
    threading = sys.modules.get("threading")
    if threading is None:
        return
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _leave(status: int) -> NoReturn:
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
    except BaseException:
        status = status or ERROR_EXIT
    os._exit(status)


def add_exits() -> None:
    """`exit` and `quit`, which programs use and which come with the `site` module that boxes do without."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
