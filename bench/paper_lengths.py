"""Length rewards: answers come to have the length that the prompt asks for (sections 3.1.2 and 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from bench.lengths import FIRST_STEPS, LAST_STEPS, Curves, measure
from bench.report import Grid, Section, Statement
from bench.seeds import difference, estimate, is_above, is_no_worse, named

SETTING: Final = (
    "`bench/lengths.py`: the recipe think-sort, 40 steps of 128 rollouts, α = 0.05, targets of 10, 14 and 18 tokens, "
    f"against next to no α with the targets still in the prompt. First {FIRST_STEPS} steps and last {LAST_STEPS}."
)
_EVERY: Final = 5


def run(seeds: Sequence[int], *, quick: bool, report: Callable[[str], None]) -> Section:
    """With the penalty and without, every seed."""
    found = measure(seeds, quick=quick)
    section = Section("lengths", f"{SETTING} {named(seeds)}")
    for name, curves in found.items():
        report(f"{name}: {estimate(curves.off_last).text()} tokens off at the end")
        for figure in ("off_first", "off_last", "task_first", "task_last"):
            for seed, value in zip(seeds, getattr(curves, figure), strict=True):
                section.figures[f"{name}_{figure}_seed_{seed}"] = value
    section.grids = [_grid(found), _curve_grid(found)]
    if not quick:
        section.statements = statements(found["penalty"], found["control"])
    return section


def statements(penalty: Curves, control: Curves) -> list[Statement]:
    """What the curves say of the penalty."""
    falls = difference(penalty.off_first, penalty.off_last)
    apart = difference(control.off_last, penalty.off_last)
    task = difference(penalty.task_last, control.task_last)
    return [
        Statement(
            "the length penalty falls",
            is_above(falls.low, falls.high, 0.0),
            f"by {falls.text(digits=2)} tokens of {fmean(penalty.off_first):.2f}",
        ),
        Statement(
            "because of the penalty, not of the prompt alone",
            is_above(apart.low, apart.high, 0.0),
            f"{apart.text(digits=2)} tokens further off without",
        ),
        Statement("the task's reward does not suffer", is_no_worse(task), task.text(sign=True)),
    ]


def _grid(found: dict[str, Curves]) -> Grid:
    rows = [
        (
            {"penalty": "α = 0.05", "control": "without"}[name],
            estimate(curves.off_first).text(digits=2),
            estimate(curves.off_last).text(digits=2),
            estimate(curves.task_first).text(),
            estimate(curves.task_last).text(),
        )
        for name, curves in found.items()
    ]
    columns = ("penalty", "tokens off target, first", "last", "task reward, first", "last")
    return Grid("lengths and task reward", columns, rows)


def _curve_grid(found: dict[str, Curves]) -> Grid:
    count = len(found["penalty"].runs[0])
    starts = range(0, count, min(count, _EVERY))
    rows = []
    for name, curves in found.items():
        off = [fmean(row["length_penalty"] for run in curves.runs for row in run[at : at + _EVERY]) for at in starts]
        rows.append(
            ({"penalty": "α = 0.05", "control": "without"}[name], *(f"{value / curves.alpha:.2f}" for value in off))
        )
    return Grid(
        "tokens off target by step", ("penalty", *(f"{at + 1}–{min(count, at + _EVERY)}" for at in starts)), rows
    )
