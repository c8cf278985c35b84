"""Offline and online filters: what they do to learning and what they cost in rollouts (sections 3.3 and 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from bench.filters import KINDS, STEPS, Curve, measure
from bench.report import Grid, Section, Statement
from bench.seeds import difference, estimate, is_above, named

SETTING: Final = (
    f"`bench/filters.py`: the demo's recipe with 128 rollouts a step and {STEPS} steps, on rows of 2 to 13 digits, "
    "many too long for its first policy; pass@1 on 256 held-out rows of 4 to 8 digits, 2 answers each. Offline: "
    "tasks from a pool. Online: groups without signal are replaced, for up to four times the rollouts. Rewards "
    "are of each way's own tasks: those of different rows cannot be compared, pass@1 can."
)
_REWARD_STEPS: Final = 5
_NAMES: Final = {"none": "no filter", "offline": "offline", "online": "online", "both": "both"}


def run(seeds: Sequence[int], *, quick: bool, report: Callable[[str], None]) -> Section:
    """Every kind of filter with every seed."""
    measured = measure(seeds, quick=quick)
    kept = f"The pool holds {measured.kept} of {measured.tasks} tasks: those solved once to four times in eight."
    section = Section("filters", f"{SETTING} {kept} {named(seeds)}")
    last = max(measured.curves["none"][0].passed)
    passed = {kind: [curve.passed[last] for curve in curves] for kind, curves in measured.curves.items()}
    for kind, values in passed.items():
        report(f"{_NAMES[kind]}: {estimate(values).text()}")
        section.figures |= {f"{kind}_seed_{seed}": value for seed, value in zip(seeds, values, strict=True)}
    section.grids = [_grid(measured.curves), _reward_grid(measured.curves)]
    if not quick:
        section.statements = [_helps(kind, passed) for kind in KINDS if kind != "none"]
        section.statements.append(_costs(measured.curves))
    return section


def _helps(kind: str, passed: dict[str, list[float]]) -> Statement:
    gain = difference(passed[kind], passed["none"])
    which = "both filters" if kind == "both" else f"the {kind} filter"
    return Statement(
        f"with {which} more is learned in as many steps", is_above(gain.low, gain.high, 0.0), gain.text(sign=True)
    )


def _costs(curves: dict[str, list[Curve]]) -> Statement:
    saved = difference(_generated(curves["online"]), _generated(curves["both"]))
    return Statement(
        "the offline filter saves the online one rollouts",
        is_above(saved.low, saved.high, 0.0),
        f"{saved.text(digits=0, sign=True)} rollouts with the online filter alone, against both",
    )


def _generated(curves: Sequence[Curve]) -> list[float]:
    return [curve.rollouts for curve in curves]


def _grid(found: dict[str, list[Curve]]) -> Grid:
    steps = list(found["none"][0].passed)
    rows = [
        (
            _NAMES[kind],
            *(estimate([curve.passed[step] for curve in curves]).text() for step in steps),
            f"{fmean(curve.rollouts for curve in curves):,.0f}",
            f"{fmean(curve.used for curve in curves):,.0f}",
        )
        for kind, curves in found.items()
    ]
    columns = ("filter", *(f"step {step}" for step in steps), "rollouts generated", "trained on")
    return Grid("pass@1 on other tasks, and rollouts", columns, rows)


def _reward_grid(found: dict[str, list[Curve]]) -> Grid:
    count = len(found["none"][0].reward)
    starts = range(0, count, min(count, _REWARD_STEPS))
    rows = [
        (
            _NAMES[kind],
            *(
                f"{fmean(value for one in curves for value in one.reward[at : at + _REWARD_STEPS]):.2f}"
                for at in starts
            ),
        )
        for kind, curves in found.items()
    ]
    columns = ("filter", *(f"{at + 1}–{min(count, at + _REWARD_STEPS)}" for at in starts))
    return Grid("mean reward by step, of all rollouts that were generated", columns, rows)
