"""Programming problems as JSON lines: what they look like, and everything that can be wrong with one.

A line is an object with `kind` "program" (reads standard input, prints) or "function" (is called). docs/sandbox.md has
the fields. Data travels with a policy, so lines are as hostile as any other bytes; a fault is named with its line.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from environments.sandbox.inside import values
from protocol.errors import ConfigError

MAX_LINE_BYTES: Final = 8 << 20
MAX_PROBLEMS: Final = 1 << 18
SAMPLE: Final = Path(__file__).parent / "assets" / "code-sample.jsonl"
_CHECK_FUNCTION: Final = "check"
_ESCAPED_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF_PAIR: Final = "a text holds half a surrogate pair (\\ud800 to \\udfff), which is no character"

Text = Annotated[str, Meta(min_length=1, max_length=1 << 16)]
Code = Annotated[str, Meta(max_length=1 << 16)]
Identifier = Annotated[str, Meta(min_length=1, max_length=128)]
Tolerance = Annotated[float, Meta(ge=0, le=1)]


class ProgramTest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a program is given, and what it must print."""

    input: str
    output: str


class FunctionTest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a function is called with, and what it must return."""

    args: Any
    expected: Any


class Problem(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", kw_only=True):
    """What both kinds have. A problem has tests, a checker, or both."""

    id: Identifier
    question: Text
    checker: Code = ""
    """Python that defines `check(candidate)`: it calls the solution, and passes it unless it raises or gives False."""
    tolerance: Tolerance = 0.0
    """How far numbers may be from the expected ones, relative to them or to 1."""


class ProgramProblem(Problem, frozen=True, forbid_unknown_fields=True, tag="program", kw_only=True):
    """A program that reads standard input and prints."""

    tests: Annotated[tuple[ProgramTest, ...], Meta(max_length=256)] = ()


class FunctionProblem(Problem, frozen=True, forbid_unknown_fields=True, tag="function", kw_only=True):
    """A function, or the method of a class, that is called."""

    entry: Identifier
    """`name`, or `Class.method` of an instance made without arguments."""
    tests: Annotated[tuple[FunctionTest, ...], Meta(max_length=256)] = ()
    literals: bool = False
    """Arguments and expected values are texts of Python literals, which know tuples, sets and keys of every type."""

    def call(self, test: FunctionTest) -> tuple[list[Any], Any]:
        """Arguments and expected value of a test. Raises ValueError."""
        if not self.literals:
            if not isinstance(test.args, list):
                raise ValueError("args must be a list")
            return test.args, test.expected
        return list(_literal(test.args, "args")), _literal(test.expected, "expected")


AnyProblem = ProgramProblem | FunctionProblem
_decoder: Final = msgspec.json.Decoder(AnyProblem)


class Problems:
    """The problems of a JSON-lines text, each read again when it is asked for, so that memory holds the text alone."""

    def __init__(self, data: bytes, *, origin: str) -> None:
        """Check every line. Raises ConfigError that names the first bad one."""
        self._data = data
        self._spans: list[tuple[int, int]] = []
        seen: dict[str, int] = {}
        start = 0
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                self._add(line, start, where=f"{origin}: line {number}", number=number, seen=seen)
            start += len(line) + 1
        if not self._spans:
            raise ConfigError(f"{origin} holds no problems", hint="docs/sandbox.md shows what a line looks like")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> AnyProblem:
        start, end = self._spans[index]
        return _decoder.decode(self._data[start:end])

    def _add(self, line: bytes, start: int, *, where: str, number: int, seen: dict[str, int]) -> None:
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{where}: {len(line)} bytes; {MAX_LINE_BYTES} are allowed")
        if len(self._spans) == MAX_PROBLEMS:
            raise ConfigError(f"{where}: more than {MAX_PROBLEMS} problems")
        problem = parse_problem(line, where=where)
        if problem.id in seen:
            raise ConfigError(f"{where}: the id {problem.id[:64]!r} is taken by line {seen[problem.id]}")
        seen[problem.id] = number
        self._spans.append((start, start + len(line)))


def parse_problem(line: bytes, *, where: str) -> AnyProblem:
    """One line, checked in full. Raises ConfigError."""
    try:
        problem = _decoder.decode(line)
        _check(problem)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        said = _HALF_PAIR if _has_half_pair(line) else str(error)[:300]
        raise ConfigError(f"{where}: {said or type(error).__name__}") from error
    return problem


def _has_half_pair(line: bytes) -> bool:
    """Whether a text of the line escapes half a surrogate pair, which the decoder calls truncated data."""
    if not _ESCAPED_HALF.search(line):
        return False
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _check(problem: AnyProblem) -> None:
    """Raises ValueError for what types do not show."""
    if not problem.tests and not problem.checker:
        raise ValueError("a problem needs tests or a checker")
    if problem.checker:
        _check_checker(problem.checker)
    if isinstance(problem, FunctionProblem):
        parts = problem.entry.split(".")
        if len(parts) > 2 or not all(part.isidentifier() for part in parts):
            raise ValueError(f"entry {problem.entry[:64]!r} is neither a name nor Class.method")
        for number, test in enumerate(problem.tests, 1):
            _check_test(problem, test, number)


def _check_test(problem: FunctionProblem, test: FunctionTest, number: int) -> None:
    try:
        arguments, expected = problem.call(test)
        values.dumps(arguments)
        values.dumps(expected)
    except (ValueError, TypeError) as error:
        raise ValueError(f"test {number}: {str(error)[:200]}") from error


def _check_checker(source: str) -> None:
    tree = _parsed(source, "checker", "exec")
    body = tree.body if isinstance(tree, ast.Module) else []
    if not any(isinstance(node, ast.FunctionDef) and node.name == _CHECK_FUNCTION for node in body):
        raise ValueError("the checker defines no function check(candidate)")


def _literal(text: Any, name: str) -> Any:
    """A Python literal; arguments are those between the parentheses of a call, keywords left out."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a text, since the problem says literals")
    if name == "args":
        text = f"({text},)" if text.strip() else "()"
    tree = _parsed(text.strip(), name, "eval")
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} is no Python literal: {text[:80]!r}") from error


def _parsed(source: str, name: str, mode: str) -> ast.AST:
    try:
        return compile(source, name, mode, ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{name} does not parse: {str(error)[:120]}") from error
