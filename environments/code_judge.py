"""Judging a solution: every test in boxes, and each way in which that can end.

1 if all tests pass, 0 if one fails for certain, and could-not-tell where another machine might see it otherwise: the
result came near a limit of time or memory, or the sandbox itself did not do its part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

from environments.base import RIGHT, Reward
from environments.code_compare import same_output, same_value
from environments.code_problems import AnyProblem, FunctionProblem, Problem, ProgramProblem
from environments.sandbox.box import Box, CandidateError, Ended, Outcome
from environments.sandbox.inside import values
from environments.sandbox.pool import SandboxPool
from protocol.errors import BoxError

TOTAL_CPU_LIMITS: Final = 16
"""All tests of a problem together may take so many times the limit of one."""
_CHECKER: Final = "checker"


class _Decided(Exception):
    """The reward is known before the last test."""

    def __init__(self, reward: Reward) -> None:
        super().__init__(reward.reason)
        self.reward = reward


def judge(pool: SandboxPool, problem: AnyProblem, source: str) -> Reward:
    """The reward of a solution's source text. Raises SandboxError only where nothing can be run on this machine."""
    pool.start()
    try:
        with pool.box() as box:
            _examination(box, problem, source).run(pool)
    except _Decided as decided:
        return decided.reward
    except BoxError as error:
        return Reward(None, f"the sandbox could not tell: {error.message[:200]}")
    return RIGHT


def _examination(box: Box, problem: AnyProblem, source: str) -> _Examination:
    if isinstance(problem, FunctionProblem):
        return _FunctionExamination(box, problem, source)
    return _ProgramExamination(box, problem, source)


class _Examination(ABC):
    """One solution in one box."""

    def __init__(self, box: Box, problem: Problem, source: str) -> None:
        self._box = box
        self._problem = problem
        self._source = source
        self._cpu_s = 0.0

    @abstractmethod
    def tests(self) -> Iterator[bool]:
        """Run one test after another; whether each passes."""

    @abstractmethod
    def answer(self, arguments: tuple[Any, ...]) -> Any:
        """What the solution gives to a checker's question. Raises CandidateError where it gives nothing."""

    def run(self, pool: SandboxPool) -> None:
        """Raises _Decided unless everything passes, BoxError where the sandbox breaks."""
        for number, passed in enumerate(self.tests(), 1):
            if not passed:
                raise _Decided(Reward(0.0, f"test {number}: wrong answer"))
        if not self._problem.checker:
            return
        with pool.box() as box:  # one of its own: the checker meets the solution's values as plain data
            checked = box.check(self._problem.checker, self.answer)
        if not checked.passed:
            raise _Decided(Reward(0.0, f"the checker refuses it{f' ({checked.error})' if checked.error else ''}"))

    def settled(self, outcome: Outcome, name: str) -> Outcome:
        """The outcome, if it ended well and every machine would say so."""
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
        return outcome


class _ProgramExamination(_Examination):
    """A program that reads standard input and prints."""

    def __init__(self, box: Box, problem: ProgramProblem, source: str) -> None:
        super().__init__(box, problem, source)
        self._given = problem

    def tests(self) -> Iterator[bool]:
        for number, test in enumerate(self._given.tests, 1):
            printed = self._printed(test.input, f"test {number}")
            yield same_output(printed, test.output, tolerance=self._given.tolerance)

    def answer(self, arguments: tuple[Any, ...]) -> str:
        stdin = arguments[0] if arguments and isinstance(arguments[0], str) else ""
        try:
            return self._printed(stdin, _CHECKER).decode()
        except UnicodeDecodeError as error:
            raise CandidateError("UnicodeDecodeError") from error

    def _printed(self, stdin: str, name: str) -> bytes:
        return self.settled(self._box.run_program(self._source, stdin), name).output


class _FunctionExamination(_Examination):
    """A function that is called."""

    def __init__(self, box: Box, problem: FunctionProblem, source: str) -> None:
        super().__init__(box, problem, source)
        self._given = problem

    def tests(self) -> Iterator[bool]:
        for number, test in enumerate(self._given.tests, 1):
            arguments, expected = self._given.call(test)
            got = self._returned(arguments, f"test {number}")
            tolerance, plain_json = self._given.tolerance, not self._given.literals
            yield same_value(got, expected, tolerance=tolerance, tuples_are_lists=plain_json)

    def answer(self, arguments: tuple[Any, ...]) -> Any:
        return self._returned(list(arguments), _CHECKER)

    def _returned(self, arguments: list[Any], name: str) -> Any:
        outcome = self.settled(self._box.call(self._source, self._given.entry, arguments), name)
        try:
            return values.loads(outcome.result)
        except ValueError as error:
            raise _Decided(Reward(0.0, f"{name}: a value that cannot be read")) from error
