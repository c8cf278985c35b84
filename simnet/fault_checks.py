"""What is wrong with the faults of a scenario: they name nobody, cannot happen, or come after the end.

What is drawn depends on the seed, so a plan is looked at once more with the seed that it is to run with. Whether goals
can be met in spite of it is `simnet.goal_checks`'s business.
"""

from __future__ import annotations

from typing import Final

import msgspec

from protocol.errors import ConfigError
from simnet.names import nearest
from simnet.scenario import Fault, Scenario
from simnet.timeline import EFFECTS, UNDO, clock_of, left_in, plan_faults

_BEGIN_ON_DISKS: Final = ("disk-full", "disk-slow")


def check_faults(scenario: Scenario) -> None:
    """Refuse faults and draws that no seed makes possible. Raises ConfigError."""
    _check_each_fault(scenario)
    _check_each_draw(scenario)
    fixed = plan_faults(msgspec.structs.replace(scenario, random=()), seed=0)
    _check_clocks(scenario, fixed)
    _check_draws_end(scenario)
    _check_order(scenario, fixed, "")
    _check_moments(scenario, fixed)
    _check_queues(scenario, fixed, "")


def check_plan(scenario: Scenario, seed: int) -> None:
    """Refuse what a seed draws that cannot happen to a node by then. Raises ConfigError."""
    if scenario.random:
        faults, drawn = plan_faults(scenario, seed), f", with --seed {seed}"
        _check_order(scenario, faults, drawn)
        _check_queues(scenario, faults, drawn)


def _check_each_fault(scenario: Scenario) -> None:
    names = [name for _, _, name in scenario.named()]
    latest: dict[tuple[str, str], float] = {}
    for number, fault in enumerate(scenario.fault, start=1):
        where = f"scenario {scenario.name!r}, [[fault]] number {number}"
        if not scenario.matching(fault.node):
            raise ConfigError(f"{where}: unknown node {fault.node!r}{nearest(fault.node, names)}")
        if (fault.at_step is None) == (fault.at_s is None):
            raise ConfigError(f"{where}: give exactly one of at_step and at_s")
        if fault.for_s is not None and fault.action not in UNDO:
            raise ConfigError(f"{where}: {fault.action} has no for_s: there is nothing to undo")
        if (fault.action == "clock") != (fault.seconds is not None):
            raise ConfigError(f"{where}: `clock`, and nothing else, has `seconds`")
        if (fault.action == "disk-slow") != (fault.sync_ms is not None):
            raise ConfigError(f"{where}: `disk-slow`, and nothing else, has `sync_ms`")
        clock, moment = ("at_s", fault.at_s) if fault.at_step is None else ("at_step", float(fault.at_step))
        if moment is not None and moment < latest.get((fault.node, clock), 0.0):
            raise ConfigError(f"{where}: faults of {fault.node} must be in the order in which they happen")
        latest[fault.node, clock] = moment or 0.0


def _check_each_draw(scenario: Scenario) -> None:
    for number, draw in enumerate(scenario.random, start=1):
        where = _draw_at(scenario, number)
        if not scenario.matching(draw.nodes):
            names = [name for _, _, name in scenario.named()]
            raise ConfigError(f"{where}: no node is named {draw.nodes!r}{nearest(draw.nodes, names)}")
        lonely = [action for action in draw.actions if action not in UNDO and action != "restart"]
        if lonely:
            raise ConfigError(f"{where}: {lonely[0]} cannot be drawn: it undoes another", hint="; ".join(sorted(UNDO)))
        ends = [(draw.from_step, draw.to_step), (draw.from_s, draw.to_s)]
        given = [(first, last) for first, last in ends if first is not None and last is not None]
        if len(given) != 1 or sum(end is not None for pair in ends for end in pair) != 2:
            raise ConfigError(f"{where}: give from_step and to_step, or from_s and to_s")
        if given[0][0] > given[0][1] or draw.for_s[0] > draw.for_s[1]:
            raise ConfigError(f"{where}: a range ends before it begins")


def _check_clocks(scenario: Scenario, fixed: tuple[Fault, ...]) -> None:
    """Refuse draws by steps of a node to which something else happens by seconds, or the other way round.

    Which of them comes first nobody knows; one queue would hold the other up, and nothing would strike when it says.
    """
    clocks: dict[str, set[str]] = {}
    for fault in fixed:
        clocks.setdefault(fault.node, set()).add(clock_of(fault))
    for number, draw in enumerate(scenario.random, start=1):
        own = "seconds" if draw.from_step is None else "steps"
        for name in scenario.matching(draw.nodes):
            others = clocks.setdefault(name, set())
            if others - {own}:
                raise ConfigError(
                    f"{_draw_at(scenario, number)}: it draws by {own} what happens to {name}, to which other faults, "
                    f"joins or leaves come by {min(others - {own})}: which comes first nobody knows",
                    hint="give all of them in steps, or all in seconds",
                )
            others.add(own)


def _check_draws_end(scenario: Scenario) -> None:
    for number, draw in enumerate(scenario.random, start=1):
        where = f"[[random]] number {number}"
        _check_moment(scenario, f"{where} is to end", draw.to_s, draw.to_step)
        longest_s = draw.for_s[1] if any(action in UNDO for action in draw.actions) else 0.0
        _check_undone(scenario, where, draw.to_s, longest_s)


def _check_order(scenario: Scenario, faults: tuple[Fault, ...], seed: str) -> None:
    """Walk through what happens to every node: a node that is gone cannot be stopped, and so on."""
    first = next(node for node in scenario.nodes() if node.role == "relay")
    if first.absent:
        raise ConfigError(f"{first.name} is what the other nodes bootstrap from: it cannot start by a join")
    states: dict[str, dict[str, str]] = {
        plan.name: {"process": "gone" if plan.absent else "running"} for plan in scenario.nodes()
    }
    for fault in faults:
        why_not = _hindered(states[fault.node], fault)
        if why_not:
            raise ConfigError(
                f"scenario {scenario.name!r}{seed}: {fault.node} cannot {fault.action}, it is {why_not} by then",
                hint="draw from a range in which nothing else keeps it away, or take another --seed" if seed else "",
            )
        states[fault.node][EFFECTS[fault.action].on] = left_in(fault)


def _hindered(states: dict[str, str], fault: Fault) -> str:
    """What a node is that cannot have a fault happen to it; empty where it can."""
    effect = EFFECTS[fault.action]
    now = states.get(effect.on, effect.usual)
    if now not in effect.before:
        return now
    return "gone" if fault.action in _BEGIN_ON_DISKS and states["process"] == "gone" else ""


def _check_moments(scenario: Scenario, faults: tuple[Fault, ...]) -> None:
    """Refuse what would only happen, or be undone, after the simulation has ended."""
    for fault in faults:
        what = f"{fault.node} is to {fault.action}"
        _check_moment(scenario, what, fault.at_s, fault.at_step)
        _check_undone(scenario, what, fault.at_s, fault.for_s)


def _check_queues(scenario: Scenario, faults: tuple[Fault, ...], seed: str) -> None:
    """Refuse what waits past the end for what comes to its node before: each is undone before the next strikes.

    By when at the latest nobody knows (a node takes its time to leave, and a run to come to a step): by when at best.
    """
    free_s: dict[str, float] = {}
    until_s = scenario.until.timeout_s
    for fault in faults:
        begins_s = max(fault.at_s or 0.0, free_s.get(fault.node, 0.0))
        free_s[fault.node] = begins_s + (fault.for_s or 0.0)
        if free_s[fault.node] > until_s:
            raise ConfigError(
                f"scenario {scenario.name!r}{seed}: {fault.node} is to {fault.action}, and with what comes before "
                f"that lasts until {free_s[fault.node]:g} s or longer, but [until] timeout_s is {until_s:g}",
                hint="have less happen to one node, for a shorter time, or raise timeout_s",
            )


def _check_moment(scenario: Scenario, what: str, at_s: float | None, at_step: int | None) -> None:
    until, name = scenario.until, scenario.name
    if at_s is not None and at_s > until.timeout_s:
        raise ConfigError(f"scenario {name!r}: {what} at {at_s:g} s, but [until] timeout_s is {until.timeout_s:g}")
    if at_step is not None and until.step is not None and at_step > until.step:
        raise ConfigError(f"scenario {name!r}: {what} at step {at_step}, but [until] step is {until.step}")


def _check_undone(scenario: Scenario, what: str, at_s: float | None, for_s: float | None) -> None:
    undone_s = (at_s or 0.0) + (for_s or 0.0)
    if for_s is not None and undone_s > scenario.until.timeout_s:
        raise ConfigError(
            f"scenario {scenario.name!r}: {what}, and for_s lasts until {undone_s:g} s or longer, but [until] "
            f"timeout_s is {scenario.until.timeout_s:g}",
            hint="lower for_s, or raise timeout_s; without for_s nothing undoes a fault",
        )


def _draw_at(scenario: Scenario, number: int) -> str:
    return f"scenario {scenario.name!r}, [[random]] number {number}"
