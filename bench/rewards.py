"""Rewards a second: how fast environments judge answers, kind by kind, each with its median and its 99th percentile.

Every kind judges a mix of right and wrong answers to its own sample. A second of work is one of a core: the CPU time of
this process and of everything it started, boxes and workers included.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bench.harness import Result
from environments.base import Environment, Task
from environments.code import CodeProblems
from environments.maths import Maths
from environments.sort_digits import SortDigits
from protocol.errors import ConfigError

_PR_SET_CHILD_SUBREAPER: Final = 36
Answers = Sequence[tuple[Task, str]]


def bench(*, quick: bool = False, only: str | None = None) -> Result:
    """Measure every kind, or one. Raises ConfigError for an unknown one."""
    if only is not None and only not in MEASUREMENTS:
        raise ConfigError(f"rewards of {only[:64]!r} are not measured", hint=f"known: {', '.join(MEASUREMENTS)}")
    result = Result()
    for name, (measured, least) in MEASUREMENTS.items():
        if only in (None, name):
            result.figures |= {f"{name}: {what}": value for what, value in measured(quick).items()}
            result.at_least(f"{name}: rewards a second of a core", least)
    return result


def measure(environment: Environment, answers: Answers, *, rounds: int) -> dict[str, float]:
    """Judge the answers one by one for latency, then in batches for throughput, `rounds` times over.

    The CPU time of a worker shows only once it has ended, so what it takes to start everything and to judge all answers
    for the first time is measured by itself and taken off.
    """
    _adopt_orphans()
    started_s = _cpu_of(environment, lambda: environment.rewards(answers))
    rewards, taken, wall_s = [], [], 0.0

    def judge() -> None:
        nonlocal wall_s
        environment.rewards(answers)
        for task, completion in answers:
            began = time.perf_counter()
            rewards.append(environment.reward(task, completion))
            taken.append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(rounds):
            rewards.extend(environment.rewards(answers))
        wall_s = time.perf_counter() - began

    judged_s = max(1e-6, _cpu_of(environment, judge) - started_s)
    return {
        "rewards a second of a core": len(rewards) / judged_s,
        "rewards a second": rounds * len(answers) / wall_s,
        "p50 ms": 1000 * statistics.median(taken),
        "p99 ms": 1000 * sorted(taken)[int(0.99 * (len(taken) - 1))],
        "could not tell": float(sum(reward.value is None for reward in rewards)),
    }


def _cpu_of(environment: Environment, work: Callable[[], object]) -> float:
    """CPU-seconds of some work, of all that was started for it, and of ending that."""
    before = _cpu_s()
    work()
    environment.close()
    _reap()
    return _cpu_s() - before


def _adopt_orphans() -> None:
    """Have what boxes leave behind when they are killed counted with this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Wait for everything that is left; the environment is closed, so all of it is ending."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _cpu_s() -> float:
    """CPU time of this process, and of all that it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def seeds(count: int) -> list[bytes]:
    """Seeds of tasks."""
    return [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(count)]


def measure_code(quick: bool) -> dict[str, float]:
    """Programs and functions of five tests each, right and wrong, in boxes of one use."""
    environment = CodeProblems(python=f"{sys.version_info.major}.{sys.version_info.minor}")
    environment.use_data("\n".join(map(json.dumps, CODE_PROBLEMS)).encode())
    tasks = [environment.task(seed) for seed in seeds(8 if quick else 64)]
    solutions = [CODE_SOLUTIONS[task.data["id"]][number % 2] for number, task in enumerate(tasks)]
    answers = [(task, f"```python\n{source}\n```") for task, source in zip(tasks, solutions, strict=True)]
    return measure(environment, answers, rounds=1 if quick else 3)


def measure_digits(quick: bool) -> dict[str, float]:
    """The demo's rows of digits."""
    environment = SortDigits()
    tasks = [environment.task(seed) for seed in seeds(256)]
    answers = [(task, task.data["answer"][:: 1 - 2 * (number % 2)]) for number, task in enumerate(tasks)]
    return measure(environment, answers, rounds=1000 if quick else 4000)


def measure_maths(quick: bool) -> dict[str, float]:
    """Formulas, which all go to math-verify; numbers that are written out cost nothing beside them."""
    environment = Maths()
    pairs = [(gold, answer) for gold, others in MATHS_ANSWERS.items() for answer in (gold, *others)]
    answers = [(Task([], {"answer": gold}), f"Thus $\\boxed{{{answer}}}$.") for gold, answer in pairs]
    return measure(environment, answers, rounds=2 if quick else 60)


MATHS_ANSWERS: Final = {
    "\\{-3,2\\}": ("\\{2,-3\\}", "\\{3,-2\\}"),
    "2\\sqrt{3}": ("\\sqrt{12}", "3\\sqrt{2}"),
    "(x-2)(x+2)": ("x^2-4", "x^2+4"),
    "1<x<3": ("3>x>1", "1<x<4"),
    "[0,4]": ("[0, 4]", "[0,4)"),
    "12\\pi": ("\\pi\\cdot 12", "12"),
    "(3,-1)": ("(3, -1)", "(-1,3)"),
    "3x^2-2": ("-2+3x^2", "3x^2"),
    "\\log_2 10": ("\\frac{\\ln 10}{\\ln 2}", "\\log_{10} 2"),
    "\\frac{a}{b+1}": ("\\frac{2a}{2b+2}", "\\frac{a}{b}+1"),
    "\\begin{pmatrix}7\\\\4\\end{pmatrix}": ("\\begin{pmatrix}4\\\\7\\end{pmatrix}",),
}
"""Right answers, with others that are right or wrong."""
CODE_PROBLEMS: Final = [
    {
        "kind": "program",
        "id": "largest",
        "question": "Print the largest of the numbers.",
        "tests": [{"input": f"{n} {2 * n} 3\n", "output": f"{max(2 * n, 3)}\n"} for n in range(5)],
    },
    {
        "kind": "function",
        "id": "count",
        "question": "Write count(words).",
        "entry": "count",
        "tests": [{"args": [["a", "b"] * n], "expected": [n, n]} for n in range(1, 6)],
    },
]
CODE_SOLUTIONS: Final = {
    "largest": ("print(max(map(int, input().split())))", "print(max(input().split()[:2]))"),
    "count": (
        "from collections import Counter\n\ndef count(words):\n    return [Counter(words)[w] for w in ('a', 'b')]",
        "def count(words):\n    return [1, len(words) - 1]",
    ),
}
"""A right one and a wrong one each."""
MEASUREMENTS: Final[Mapping[str, tuple[Callable[[bool], dict[str, float]], float]]] = {
    "digits": (measure_digits, 10_000.0),
    "maths": (measure_maths, 50.0),
    "code": (measure_code, 10.0),
}
"""What is measured, and how many rewards a second of a core are asked of it."""
