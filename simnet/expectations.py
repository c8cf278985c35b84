"""What a scenario's `[expect]` table asks, each as a comparison of a figure of the report with a goal.

A new expectation is a field of `simnet.scenario.Expect` and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from simnet.summary import Expectation, Report

if TYPE_CHECKING:
    from simnet.scenario import Expect


@dataclass(frozen=True)
class _Rule:
    sign: str
    figure: Callable[[Report], Any]
    holds: Callable[[Any, Any], bool]


def _at_least(figure: Callable[[Report], Any]) -> _Rule:
    return _Rule("≥", figure, lambda value, goal: value >= goal)


def _at_most(figure: Callable[[Report], Any]) -> _Rule:
    return _Rule("≤", figure, lambda value, goal: value <= goal)


def _equal(figure: Callable[[Report], Any]) -> _Rule:
    return _Rule("=", figure, lambda value, goal: value == goal)


RULES: Final[dict[str, _Rule]] = {
    "reward_at_least": _at_least(lambda report: report.reward_last_tenth),
    "reward_gain_at_least": _at_least(lambda report: report.reward_gain),
    "steps_at_least": _at_least(lambda report: report.steps),
    "accepted_at_least": _at_least(lambda report: report.accepted),
    "accepted_per_honest_at_least": _at_least(lambda report: report.accepted_per_honest),
    "cheats_evicted": _equal(lambda report: report.cheats > 0 and report.cheats_evicted == report.cheats),
    "cheats_accepted": _at_most(lambda report: report.cheats_accepted),
    "liars_overruled": _equal(lambda report: report.liars_overruled),
    "honest_rejected": _at_most(lambda report: report.honest_rejected),
    "unexpected_exits": _at_most(lambda report: len(report.unexpected_exits)),
    "weights_from_relays_only": _equal(lambda report: report.weights_from_relays_only),
    "evaluation_rises": _equal(lambda report: report.evaluation_rises),
    "trainer_wait_fraction_at_most": _at_most(lambda report: report.trainer_wait_fraction),
}


def judge(expect: Expect, report: Report) -> list[Expectation]:
    """Every expectation that the scenario has, met or not. A figure that there is none of is never met."""
    goals = {name: getattr(expect, name) for name in expect.__struct_fields__}
    return [_judge(name, goal, report) for name, goal in goals.items() if goal is not None]


def _judge(name: str, goal: Any, report: Report) -> Expectation:
    rule = RULES[name]
    value = rule.figure(report)
    met = value is not None and rule.holds(value, goal)
    return Expectation(name, f"{rule.sign} {_text(goal)}", _text(value), met)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
