"""Programming problems with unit tests, run in the sandbox: 1 if every test passes, else 0 (INTELLECT-2, section 3.1).

The last fenced code block of an answer is the solution. What is expected never enters the interpreter that runs it;
docs/sandbox.md says how answers are judged and what such data looks like.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from environments.base import Environment, Reward, Task, environment_digest, user_message
from environments.code_judge import judge
from environments.code_problems import SAMPLE, AnyProblem, FunctionProblem, Problems
from environments.sandbox.launch import BoxSpec
from environments.sandbox.limits import Limits
from environments.sandbox.pool import SandboxPool
from environments.sandbox.status import establish
from protocol.errors import ConfigError
from protocol.seeds import SeedStream

MAX_CODE_CHARS: Final = 1 << 16
_MAX_FILE_BYTES: Final = 256 << 20
_CPU_MARGIN: Final = 4
"""A program is ended at so many times the CPU time within which a result counts: machines differ by less."""
_MEMORY_MARGIN: Final = 3
_WALL_MARGIN: Final = 10
_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^`]{0,64})")
_PYTHON: Final = ("", "python", "python3", "py")


@dataclass(eq=False)
class CodeProblems(Environment):
    """Problems from JSON lines: those that travel with the policy, or a small sample that comes with the program."""

    name: ClassVar[str] = "code"
    version: ClassVar[int] = 2
    repeatable = False

    python: Annotated[str, Meta(pattern=r"^3\.[0-9]{2}$")] = "3.11"
    """Release of the language in which solutions run, the same on every machine."""
    cpu_limit_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """CPU time of one test. Ended at four times as much; in between nobody can tell."""
    memory_limit_mb: Annotated[int, Meta(ge=32, le=4096)] = 256
    """Memory of one test. Ended at three times as much; in between nobody can tell."""
    _boxes: int = 0
    """Started ahead; 0 takes as many as there are cores."""
    _problems: Problems | None = field(default=None, repr=False)
    _pool: SandboxPool | None = field(default=None, repr=False)

    @property
    def digest(self) -> bytes:
        """As everywhere, and over the sample where it is in use; the release of Python is a parameter."""
        sample = {} if self.data_sha256 else {"sample": hashlib.sha256(SAMPLE.read_bytes()).hexdigest()}
        return environment_digest(
            self.name,
            self.version,
            self.parameters | sample,
            data_sha256=self.data_sha256,
            repeatable=self.repeatable,
        )

    @property
    def problems(self) -> Problems:
        """What tasks are drawn from."""
        if self._problems is None:
            self._problems = Problems(SAMPLE.read_bytes(), origin=SAMPLE.name)
        return self._problems

    def task(self, seed: bytes) -> Task:
        """One of the problems, each as likely."""
        index = SeedStream(seed).below(len(self.problems))
        problem = self.problems[index]
        return Task(user_message(f"{problem.question}\n\n{self._form(problem)}"), {"index": index, "id": problem.id})

    def reward(self, task: Task, completion: str) -> Reward:
        """1 for a last code block that passes all tests of the problem. Raises SandboxError where none may be run."""
        source = last_code_block(completion)
        if source is None:
            return Reward(0.0, "no code block")
        if len(source) > MAX_CODE_CHARS:
            return Reward(0.0, f"a code block of {len(source)} characters; {MAX_CODE_CHARS} are allowed")
        problem = self.problems[task.data["index"]]
        return judge(self.pool, problem, source=source, allowance=self.allowance)

    def rewards(self, pairs: Sequence[tuple[Task, str]]) -> list[Reward]:
        """Judge several completions side by side, one a core."""
        return self.pool.map(lambda pair: self.reward(*pair), pairs)

    def import_data(self, source: Path) -> bytes:
        """The problems of a JSON-lines file, each line checked. Raises ConfigError that names file and line."""
        try:
            with source.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"the problems cannot be read from {source}: {error.strerror}") from error
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{source} is larger than {_MAX_FILE_BYTES} bytes", hint="use fewer problems")
        Problems(data, origin=str(source))
        return data

    def use_data(self, data: bytes) -> None:
        """Take problems as `import_data` gives them. Raises ConfigError."""
        self._problems = Problems(data, origin="the code problems")

    def require_machine(self) -> None:
        """Prove the sandbox. Raises SandboxError."""
        establish(self.pool.spec)

    def close(self) -> None:
        """End the boxes."""
        if self._pool is not None:
            self._pool.close()

    @property
    def pool(self) -> SandboxPool:
        """The boxes in which solutions run; none is started before the first reward."""
        if self._pool is None:
            self._pool = SandboxPool(BoxSpec(python=self.python, limits=self.limits), size=self._boxes or None)
        return self._pool

    @property
    def limits(self) -> Limits:
        """Of one test."""
        memory = self.memory_limit_mb << 20
        return Limits(
            cpu_s=self.cpu_limit_s,
            cpu_end_s=math.ceil(_CPU_MARGIN * self.cpu_limit_s),
            memory_bytes=memory,
            address_space_bytes=_MEMORY_MARGIN * memory,
            wall_s=_WALL_MARGIN * self.cpu_limit_s,
        )

    def _form(self, problem: AnyProblem) -> str:
        """How to answer."""
        if isinstance(problem, FunctionProblem):
            owner, _, method = problem.entry.partition(".")
            what = f"a class `{owner}` with a method `{method}`" if method else f"a function `{owner}`"
        else:
            what = "a program that reads standard input and prints the answer to standard output"
        return (
            f"Write {what} in Python {self.python}, with the standard library alone. "
            "Put all of it into one fenced code block at the end of your answer."
        )


def last_code_block(text: str) -> str | None:
    """What the last closed fenced block (CommonMark) of Python, or of no named language, holds; None without one.

    Lines end at newlines alone: what else Unicode calls a line end may stand inside a Python text.
    """
    found: str | None = None
    fence, start = "", 0
    lines = text.split("\n")
    for number, line in enumerate(lines):
        match = _FENCE.fullmatch(line.rstrip())
        if match is None:
            continue
        if not fence:
            fence, start, language = match[1], number + 1, match[2].strip().lower()
        elif match[1].startswith(fence) and not match[2]:
            if language in _PYTHON:
                found = "\n".join(lines[start:number])
            fence = ""
    return found
