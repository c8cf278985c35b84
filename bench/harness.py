"""What benchmarks have in common: figures, goals, how both are shown, and how benchmarks are found."""

from __future__ import annotations

import ast
import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.report import Section
from protocol.errors import ConfigError

FUNCTION: Final = "bench"
PIPED_WIDTH: Final = 240
"""Columns where there is no terminal: headings of wide tables are not cut then."""
_DIRECTORY: Final = Path(__file__).parent


@dataclass(frozen=True)
class Goal:
    """What a figure should be, as it is written, and whether it is."""

    name: str
    goal: str
    value: float
    met: bool


@dataclass
class Result:
    """Figures of one benchmark by name, and what was asked of them."""

    figures: dict[str, float] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    """What to show people in place of the figures that nothing is asked of."""
    sections: list[Section] = field(default_factory=list)
    """The same, where there are claims to be judged."""

    def at_least(self, name: str, least: float) -> None:
        """Ask of a figure to be at least so much; one that is missing is not."""
        value = self.figures.get(name)
        self.goals.append(Goal(name, f"≥ {least:g}", _known(value), value is not None and value >= least))

    def at_most(self, name: str, most: float) -> None:
        """Ask of a figure to be at most so much; one that is missing is not."""
        value = self.figures.get(name)
        self.goals.append(Goal(name, f"≤ {most:g}", _known(value), value is not None and value <= most))

    @property
    def met(self) -> bool:
        return all(goal.met for goal in self.goals)


def benchmark_names() -> dict[str, str]:
    """Every benchmark with the first line of its description. Imports none of them."""
    found = {}
    for path in sorted(_DIRECTORY.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == FUNCTION for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def load_benchmark(name: str, **given: object) -> Callable[..., Result]:
    """A benchmark's function, with what it is to take (model, only …). Raises ConfigError for what it does not know."""
    known = benchmark_names()
    if name not in known:
        raise ConfigError(f"there is no benchmark {name[:80]!r}", hint=f"known: {', '.join(known)}")
    function: Callable[..., Result] = getattr(importlib.import_module(f"bench.{name}"), FUNCTION)
    options = {option: value for option, value in given.items() if value is not None}
    for option in options.keys() - inspect.signature(function).parameters.keys():
        raise ConfigError(f"the benchmark {name} takes no --{option.replace('_', '-')}")
    return partial(function, **options)


def rate(work: Callable[[], Any], *, seconds: float) -> float:
    """How often a second `work` can be done, by doing it for about so many seconds. Once before, to warm up."""
    work()
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        work()
        count += 1
    return count / elapsed


def tell(text: str) -> None:
    """How far a long benchmark is, for whoever waits for it: on stderr, beside the figures."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def show(name: str, result: Result, console: Console) -> None:
    """A table for people, then one line of JSON for programs."""
    goals = {goal.name: goal for goal in result.goals}
    table = Table(title=f"bench {name}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("goal")
    told = result.tables or result.sections
    shown = [figure for figure in result.figures if not told or figure in goals]
    for figure in [*shown, *(missing for missing in goals if missing not in result.figures)]:
        table.add_row(Text(figure), Text(_number(result.figures.get(figure))), _goal_text(goals.get(figure)))
    for section in result.sections:
        section.show(console)
    for one in [*result.tables, *([table] if table.rows else [])]:
        console.print(one)
    console.print(as_json(name, result), markup=False, highlight=False, soft_wrap=True)


def as_json(name: str, result: Result) -> str:
    """`{"bench": …, "figures": {…}, "goals": […]}` in one line, and `statements`; a value that is missing is null."""
    statements = [
        {"section": section.name, **msgspec.to_builtins(statement)}
        for section in result.sections
        for statement in section.statements
    ]
    told = {"statements": statements} if result.sections else {}
    return msgspec.json.encode({"bench": name, "figures": result.figures, "goals": result.goals, **told}).decode()


def _goal_text(goal: Goal | None) -> Text:
    if goal is None:
        return Text("")
    return Text(f"{goal.goal} ✓", style="green") if goal.met else Text(f"{goal.goal} ✗", style="red")


def _known(value: float | None) -> float:
    return float("nan") if value is None else value  # which JSON shows as null


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:,.3g}"
