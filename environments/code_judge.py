"""Judging a solution: every test in boxes, and each way in which that can end.

1 if all tests pass, 0 if one fails for certain, and could-not-tell where another machine might see it otherwise: the
result came near a limit of time or memory, or the sandbox itself did not do its part.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

from environments.allowance import Allowance
from environments.base import RIGHT, Reward
from environments.code_compare import same_output, same_value
from environments.code_problems import AnyProblem, FunctionProblem, Problem, ProgramProblem
from environments.sandbox.box import Box, CandidateError, Ended, Outcome
from environments.sandbox.inside import values
from environments.sandbox.pool import SandboxPool
from protocol.errors import BoxError

TOTAL_CPU_LIMITS: Final = 16
"""All tests of a problem together may take so many times the CPU limit of one."""
TOTAL_WALL_LIMITS: Final = 4
"""And so many times the limit of one on the clock, waiting included."""
_CHECKER: Final = "checker"


class _Decided(Exception):
    """The reward is known before the last test."""

    def __init__(self, reward: Reward) -> None:
        super().__init__(reward.reason)
        self.reward = reward


def judge(pool: SandboxPool, problem: AnyProblem, *, source: str, allowance: Allowance | None = None) -> Reward:
    """The reward of a solution's source text. Raises SandboxError only where nothing can be run on this machine."""
    pool.start()
    if allowance is not None and allowance.used_up:
        return Reward(None, allowance.used_up)
    try:
        with pool.box() as box:
            _examination(box, problem, source, allowance).run(pool)
    except _Decided as decided:
        return decided.reward
    except BoxError as error:
        return Reward(None, f"the sandbox could not tell: {error.message[:200]}")
    return RIGHT


def _examination(box: Box, problem: AnyProblem, source: str, allowance: Allowance | None) -> _Examination:
    if isinstance(problem, FunctionProblem):
        return _FunctionExamination(box, problem, source, allowance)
    return _ProgramExamination(box, problem, source, allowance)


class _Examination(ABC):
    """One solution in one box."""

    def __init__(self, box: Box, problem: Problem, source: str, allowance: Allowance | None) -> None:
        self._box = box
        self._problem = problem
        self._source = source
        self._allowance = allowance
        self._cpu_s = 0.0
        self._began = time.monotonic()

    @abstractmethod
    def tests(self) -> Iterator[bool]:
        """Run one test after another; whether each passes."""

    @abstractmethod
    def answer(self, arguments: list[Any]) -> Any:
        """What the solution gives to a checker's question, encoded. Raises CandidateError where it gives nothing."""

    def run(self, pool: SandboxPool) -> None:
        """Raises _Decided unless everything passes, BoxError where the sandbox breaks."""
        for number, passed in enumerate(self.tests(), 1):
            if not passed:
                raise _Decided(Reward(0.0, f"test {number}: wrong answer"))
        if not self._problem.checker:
            return
        began = time.monotonic()
        try:
            with pool.box() as box:  # one of its own: the checker meets the solution's values as plain data
                checked = box.check(self._problem.checker, self.answer)
        finally:
            self._charge(time.monotonic() - began)  # more than its CPU time, which nobody counts
        if not checked.passed:
            raise _Decided(Reward(0.0, f"the checker refuses it{f' ({checked.error})' if checked.error else ''}"))

    def settled(self, outcome: Outcome, name: str) -> Outcome:
        """The outcome, if it ended well and every machine would say so."""
        self._charge(outcome.cpu_s)
        reason = f"{name}: {outcome.ended.value}{f' ({outcome.detail})' if outcome.detail else ''}"
        if outcome.ended is Ended.WALL:
            raise _Decided(Reward(None, reason))
        if outcome.ended is Ended.BADLY and name == _CHECKER:
            raise CandidateError(outcome.detail)
        if outcome.ended is not Ended.WELL:
            raise _Decided(Reward(0.0, reason))
        self._cpu_s += outcome.cpu_s
        limits = self._box.limits
        if not outcome.within(limits) or self._cpu_s > TOTAL_CPU_LIMITS * limits.cpu_s:
            raise _Decided(Reward(None, f"{name}: too near the limits of time or memory to tell"))
        if time.monotonic() - self._began > TOTAL_WALL_LIMITS * limits.wall_s:
            raise _Decided(Reward(None, f"{name}: did not end in time, with those before it"))
        return outcome

    def _charge(self, cpu_s: float) -> None:
        """Raises _Decided where the answers judged together may use no more."""
        if self._allowance is not None:
            self._allowance.charge(cpu_s)
            if self._allowance.used_up:
                raise _Decided(Reward(None, self._allowance.used_up))


class _ProgramExamination(_Examination):
    """A program that reads standard input and prints."""

    def __init__(self, box: Box, problem: ProgramProblem, source: str, allowance: Allowance | None) -> None:
        super().__init__(box, problem, source, allowance)
        self._given = problem

    def tests(self) -> Iterator[bool]:
        for number, test in enumerate(self._given.tests, 1):
            printed = self._printed(test.input, f"test {number}")
            yield same_output(printed, test.output, tolerance=self._given.tolerance)

    def answer(self, arguments: list[Any]) -> str:
        stdin = arguments[0] if arguments and isinstance(arguments[0], str) else ""
        try:
            return self._printed(stdin, _CHECKER).decode()
        except UnicodeDecodeError as error:
            raise CandidateError("UnicodeDecodeError") from error

    def _printed(self, stdin: str, name: str) -> bytes:
        return self.settled(self._box.run_program(self._source, stdin), name).output


class _FunctionExamination(_Examination):
    """A function that is called."""

    def __init__(self, box: Box, problem: FunctionProblem, source: str, allowance: Allowance | None) -> None:
        super().__init__(box, problem, source, allowance)
        self._given = problem

    def tests(self) -> Iterator[bool]:
        for number, test in enumerate(self._given.tests, 1):
            arguments, expected = map(values.encode, self._given.call(test))
            got = self._returned(arguments, f"test {number}")
            tolerance, plain_json = self._given.tolerance, not self._given.literals
            yield same_value(got, expected, tolerance=tolerance, tuples_are_lists=plain_json)

    def answer(self, arguments: list[Any]) -> Any:
        return self._returned(arguments, _CHECKER)

    def _returned(self, arguments: list[Any], name: str) -> Any:
        outcome = self._box.call_encoded(self._source, self._given.entry, arguments=arguments)
        result = self.settled(outcome, name).result
        try:
            return values.parse(result)
        except ValueError as error:
            raise _Decided(Reward(0.0, f"{name}: a value that cannot be read")) from error
