"""When which fault is to strike: a pure function of a scenario and a seed, the same on every machine.

Patterns become nodes, staggered joins and leaves become faults, and what is left to chance is drawn. When a fault in
fact strikes depends on the run's pace; `simnet.faults` sees to that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from simnet.scenario import Action, Fault, RandomFaults, Scenario


@dataclass(frozen=True)
class Effect:
    """What an action does to one thing about a node: from which states, and to which."""

    on: str
    before: tuple[str, ...]
    after: str
    usual: str = "normal"


EFFECTS: Final[dict[Action, Effect]] = {
    "kill": Effect("process", ("running", "stopped"), "gone", "running"),
    "leave": Effect("process", ("running",), "gone", "running"),
    "join": Effect("process", ("gone",), "running", "running"),
    "restart": Effect("process", ("running", "stopped"), "running", "running"),
    "stop": Effect("process", ("running",), "stopped", "running"),
    "continue": Effect("process", ("stopped",), "running", "running"),
    "partition": Effect("network", ("whole",), "cut off", "whole"),
    "heal": Effect("network", ("cut off",), "whole", "whole"),
    "clock": Effect("clock", ("normal", "shifted"), "shifted"),
    "disk-full": Effect("space", ("normal",), "full"),
    "disk-free": Effect("space", ("full",), "normal"),
    "disk-slow": Effect("disk", ("normal",), "slow"),
    "disk-normal": Effect("disk", ("slow",), "normal"),
}
UNDO: Final[dict[Action, Action]] = {
    "kill": "join",
    "leave": "join",
    "stop": "continue",
    "partition": "heal",
    "clock": "clock",
    "disk-full": "disk-free",
    "disk-slow": "disk-normal",
}


def plan_faults(scenario: Scenario, seed: int) -> tuple[Fault, ...]:
    """Every fault with the name of one node, those of each node in the order in which they are to strike."""
    faults = [*_comings_and_goings(scenario), *_of_patterns(scenario), *_drawn(scenario, seed)]
    by_node: dict[str, list[Fault]] = {}
    for fault in faults:
        by_node.setdefault(fault.node, []).append(fault)
    return tuple(fault for own in by_node.values() for fault in _in_order(own))


def undone(fault: Fault, *, at_s: float) -> Fault:
    """The fault that takes one back that was to last a while; a clock goes back to what it was at the start."""
    return Fault(node=fault.node, action=UNDO[fault.action], at_s=at_s)


def left_in(fault: Fault) -> str:
    """What a fault leaves in the end of that about a node which it changes: undone, if it is to last a while."""
    action = fault.action if fault.for_s is None else UNDO[fault.action]
    return EFFECTS[action].after


def clock_of(fault: Fault) -> str:
    """What its moment is counted in."""
    return "seconds" if fault.at_step is None else "steps"


def describe(faults: Iterable[Fault]) -> Iterator[str]:
    """A line a fault, for people. One behind a fault of its node that another clock strikes may have to wait for it."""
    clocks: dict[str, set[str]] = {}
    for fault in faults:
        when = f"step {fault.at_step}" if fault.at_step is not None else f"{fault.at_s:g} s"
        before = clocks.setdefault(fault.node, set())
        when += " or later" if before - {clock_of(fault)} else ""
        before.add(clock_of(fault))
        lasting = f" for {fault.for_s:.1f} s" if fault.for_s is not None else ""
        moved = f" {fault.seconds:+g} s" if fault.seconds is not None else ""
        slowed = f" {fault.sync_ms:g} ms" if fault.sync_ms is not None else ""
        yield f"{when}: {fault.node} {fault.action}{moved}{slowed}{lasting}"


def _comings_and_goings(scenario: Scenario) -> Iterator[Fault]:
    for entry, number, name in scenario.named():
        if entry.join_at_s is not None:
            yield Fault(node=name, action="join", at_s=entry.join_at_s + number * entry.join_every_s)
        if entry.leave_at_s is not None:
            yield Fault(node=name, action="leave", at_s=entry.leave_at_s + number * entry.leave_every_s)


def _of_patterns(scenario: Scenario) -> Iterator[Fault]:
    for fault in scenario.fault:
        side = fault.node if fault.action == "partition" else ""
        for name in scenario.matching(fault.node):
            yield msgspec.structs.replace(fault, node=name, side=side)


def _drawn(scenario: Scenario, seed: int) -> Iterator[Fault]:
    for number, draw in enumerate(scenario.random):
        source = random.Random(f"{scenario.name} {number} {seed}")  # a text seeds alike everywhere
        names, here = scenario.declared().matching(draw.nodes), set(scenario.matching(draw.nodes))
        for _ in range(draw.count):
            fault = _draw(draw, source.choice(names), source)
            if fault.node in here:  # there may be no room for it on this machine
                yield fault


def _draw(draw: RandomFaults, node: str, source: random.Random) -> Fault:
    action = source.choice(draw.actions)
    lasting = round(source.uniform(*draw.for_s), 1)
    at_step = at_s = None
    if draw.from_step is not None and draw.to_step is not None:
        at_step = source.randint(draw.from_step, draw.to_step)
    elif draw.from_s is not None and draw.to_s is not None:
        at_s = round(source.uniform(draw.from_s, draw.to_s), 1)
    moved_s = round(source.uniform(-draw.seconds, draw.seconds), 1)
    return Fault(
        node=node,
        action=action,
        at_step=at_step,
        at_s=at_s,
        for_s=lasting if action in UNDO else None,
        seconds=moved_s if action == "clock" else None,
        sync_ms=draw.sync_ms if action == "disk-slow" else None,
        side=node if action == "partition" else "",
    )


def _in_order(faults: list[Fault]) -> list[Fault]:
    """By their moments where these can be compared; as the file has them where steps and seconds meet.

    What is drawn never meets another clock (simnet.fault_checks).
    """
    if all(fault.at_step is not None for fault in faults):
        return sorted(faults, key=lambda fault: fault.at_step or 0)
    if all(fault.at_s is not None for fault in faults):
        return sorted(faults, key=lambda fault: fault.at_s or 0.0)
    return faults
