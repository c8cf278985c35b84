"""Mathematics with an answer that can be checked symbolically (INTELLECT-2, section 2.1.1): problems from a data set.

The last \\boxed{…} counts. Numbers that are written out are compared here, exactly; everything else by math-verify in
worker processes with limits (extra `math`). What a limit stops is "could not tell".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from environments.base import RIGHT, WRONG, Environment, Reward, Task, user_message
from environments.maths_text import (
    MAX_ANSWER_CHARS,
    comparable,
    is_exact,
    is_finished,
    last_box,
    letters,
    plain_number,
    rising,
    split_unit,
    without_assignment,
)
from environments.problems import Problem, decode_problems, encode_problems, read_problems
from environments.worker_pool import CouldNotTellError, FailedError, WorkerPool, module_command
from protocol.errors import ConfigError
from protocol.seeds import SeedStream

SAMPLE: Final = Path(__file__).parent / "assets" / "maths-sample.jsonl"
"""What problems are drawn from where a run brings no data. Changing it needs another `version`."""
_DEADLINE_S: Final = 30.0
_SHOWN_FAULTS: Final = 5
_UNREADABLE: Final = Reward(None, "the right answer cannot be read")


@dataclass(eq=False)
class Maths(Environment):
    """Problems of a data file, or of a small sample without one."""

    name: ClassVar[str] = "maths"
    version: ClassVar[int] = 2
    requires: ClassVar[tuple[str, ...]] = (
        "math-verify",
        "latex2sympy2_extended",
        "sympy",
        "antlr4-python3-runtime",
    )

    instruction: Annotated[str, Meta(max_length=512)] = "Put the final answer in \\boxed{}."
    _problems: list[Problem] = field(default_factory=list, init=False, repr=False)
    _pool: WorkerPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._pool = WorkerPool(module_command("environments.maths_worker"), _DEADLINE_S)

    def import_data(self, source: Path) -> bytes:
        """Check every line of an operator's file, its answer included. Raises ConfigError."""
        numbered = read_problems(source)
        faults = self._gold_faults([problem.answer for _, problem in numbered])
        if faults:
            shown = "; ".join(f"line {numbered[place][0]}: {why}" for place, why in faults[:_SHOWN_FAULTS])
            raise ConfigError(
                f"{source}: {len(faults)} of {len(numbered)} answers cannot be checked against: {shown}",
                hint="remove or mend these lines",
            )
        return encode_problems([problem for _, problem in numbered])

    def use_data(self, data: bytes) -> None:
        """Draw problems from this data set instead of the sample."""
        self._problems = decode_problems(data)

    def task(self, seed: bytes) -> Task:
        """The problem of a 32-byte seed."""
        if not self._problems:
            self._problems = decode_problems(SAMPLE.read_bytes())
        drawn = self._problems[SeedStream(seed).below(len(self._problems))]
        ask = f"{drawn.problem}\n\n{self.instruction}" if self.instruction else drawn.problem
        return Task(user_message(ask), {"answer": drawn.answer})

    def reward(self, task: Task, completion: str) -> Reward:
        """1 if the last box holds the answer."""
        return self.rewards([(task, completion)])[0]

    def rewards(self, pairs: Sequence[tuple[Task, str]]) -> list[Reward]:
        """The same for several, side by side."""
        judged = [compare(str(task.data["answer"]), completion) for task, completion in pairs]
        open_places = [place for place, found in enumerate(judged) if not isinstance(found, Reward)]
        answers = self._pool.map([judged[place] for place in open_places], allowance=self.allowance)
        settled = dict(zip(open_places, map(_reward_of, answers), strict=True))
        return [found if isinstance(found, Reward) else settled[place] for place, found in enumerate(judged)]

    def close(self) -> None:
        self._pool.close()

    def _gold_faults(self, golds: Sequence[str]) -> list[tuple[int, str]]:
        """Place and fault of every answer that nothing can be compared with."""
        unclear = [place for place, gold in enumerate(golds) if plain_number(gold) is None]
        answers = self._pool.map([[rising(golds[place])] for place in unclear])
        found = zip(unclear, answers, strict=True)
        return [(place, f"{golds[place][:60]!r} {_why(answer)}") for place, answer in found if answer != "read"]


def compare(gold: str, completion: str) -> Reward | list[str]:
    """The reward where text alone tells it, or the pair of formulas that math-verify is to compare."""
    answer = last_box(completion)
    if answer is None:
        return Reward(0.0, "no \\boxed{} answer")
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return Reward(0.0, f"an answer of {len(answer)} characters")
    gold_number, gold_unit = split_unit(without_assignment(gold))
    number, unit = split_unit(without_assignment(answer))
    if gold_unit and unit and gold_unit != unit:
        return Reward(0.0, f"in {unit} instead of {gold_unit}")
    right, found = plain_number(gold_number), plain_number(number)
    if right is not None:
        exact = is_exact(gold_number) and is_exact(number)
        return _compare_number(right, found, exact=exact) or [_formula(gold_number), _formula(number)]
    gold, answer = comparable(gold, answer)
    if not is_finished(answer, gold):
        return Reward(0.0, "not worked out, or an equation or a percentage where none is asked for")
    if (name := letters(gold)) is not None:
        return RIGHT if letters(answer) == name else WRONG
    return [rising(gold), rising(answer)]


def _formula(number: str) -> str:
    """A number for math-verify, which would read a percentage in two ways."""
    value = plain_number(number)
    return number if value is None or "%" not in number else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _compare_number(right: Any, found: Any, *, exact: bool) -> Reward | None:
    """None where rounding has to be judged: a right answer such as 0.333 is met by 1/3."""
    if found is None:
        return Reward(0.0, "not a number that is worked out")
    if right == found:
        return RIGHT
    return WRONG if exact else None


def _reward_of(answer: Any) -> Reward:
    if isinstance(answer, CouldNotTellError):
        return Reward(None, f"could not tell: {answer}")
    if isinstance(answer, FailedError):
        return Reward(0.0, "an answer that cannot be read")
    if answer == "gold":
        return _UNREADABLE
    return RIGHT if answer is True else WRONG


def _why(answer: Any) -> str:
    return f"is not judged: {answer}" if isinstance(answer, CouldNotTellError) else "cannot be read"
