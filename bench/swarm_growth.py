"""What swarms of different sizes cost, made comparable, and what is asked of that. Not a benchmark itself.

A busy machine makes steps longer and every message dearer, so costs are told for one step of STEP_S. What a contributor
takes while it waits counts for STEP_S seconds and all the rest for the steps there were; a relay's share of either is
its contributors'; nearly all that the trainer takes is a step's. CPU time is told in requests (bench.swarm_yardstick).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.harness import Result
from bench.report import Grid
from bench.swarm_fleet import RELAYS
from bench.swarm_model import FAN_OUT_COPIES, Constants, fit, spread
from bench.swarm_rates import Point

STEP_S: Final = 8.0
MOST_GROWTH: Final = 0.15
MOST_RELAY_BYTES: Final = 2.0
"""Of all relays together, over contributors': each contributor's, its hand-in to a validator and to the trainer."""
MOST_RELAY_CPU: Final = 1.0
"""Of all relays together, over contributors': to serve one must take no more than to be one."""

Cost = Callable[[Point, Constants], float]


@dataclass(frozen=True)
class Asked:
    """A figure made from several swarms' costs, and what it may be at most."""

    name: str
    what: str
    """For people; `cost` is of one step."""
    cost: Cost
    figure: Callable[[Sequence[tuple[float, float]]], float]
    """Of (contributors, cost) of each swarm."""
    most: float
    unit: float = 1.0
    """Of the costs as people see them."""
    is_share: bool = True

    def text(self, figure: float) -> str:
        return f"{figure * 100:.1f} %" if self.is_share else f"{figure:.2f}"


def of_a_step(every_s: float, steps: float, *, waiting: float = 0.0) -> float:
    """What goes by the second and of it `waiting` whatever the steps, in a step of STEP_S; unknown without any step."""
    return waiting * STEP_S + (every_s - waiting) / steps if steps > 0 else math.inf


def contributor_bytes(point: Point, constants: Constants) -> float:
    return of_a_step(point.node.bytes, point.trainer.steps, waiting=constants.contributor_bytes_per_s)


def contributor_messages(point: Point, constants: Constants) -> float:
    return of_a_step(point.node.messages, point.trainer.steps, waiting=constants.contributor_messages_per_s)


def contributor_cpu(point: Point, constants: Constants) -> float:
    """In requests: what a message takes it, for as many as there are in a step."""
    return _like_messages(point.node.cpu_ms, point, constants) / point.yardstick_ms


def contributor_cpu_ms(point: Point, constants: Constants) -> float:
    """As it was counted, whatever the machine did beside it."""
    return _like_messages(point.node.cpu_ms, point, constants)


def relay_bytes(point: Point, constants: Constants) -> float:
    moved = contributor_bytes(point, constants)
    return point.relay.bytes / point.node.bytes * moved if point.node.bytes > 0 else math.inf


def relay_cpu(point: Point, constants: Constants) -> float:
    """In requests."""
    return _like_messages(point.relay.cpu_ms, point, constants) / point.yardstick_ms


def trainer_bytes(point: Point, _: Constants) -> float:
    return of_a_step(point.trainer.bytes, point.trainer.steps)


def trainer_requests(point: Point, _: Constants) -> float:
    return of_a_step(point.trainer.requests, point.trainer.steps)


def trainer_cpu(point: Point, _: Constants) -> float:
    """In requests."""
    return of_a_step(point.trainer.cpu_ms, point.trainer.steps) / point.yardstick_ms


def _like_messages(every_s: float, point: Point, constants: Constants) -> float:
    said = point.node.messages
    return every_s / said * contributor_messages(point, constants) if said > 0 else math.inf


def beyond_line(costs: Sequence[tuple[float, float]]) -> float:
    """By which share the largest swarm costs more than the straight line through the smaller ones says.

    Two swarms make a line of their own, so fewer than three say nothing: infinite.
    """
    if len(costs) < 3:
        return math.inf
    *smaller, (count, cost) = sorted(costs)
    at_none, slope = fit(smaller)
    expected = at_none + slope * count
    return cost / expected - 1 if expected > 0 else math.inf


def apart(costs: Sequence[tuple[float, float]]) -> float:
    """By which share the dearest swarm is above the cheapest."""
    return spread([cost for _, cost in costs])


def along_line(costs: Sequence[tuple[float, float]]) -> float:
    """By which share one end of the straight line through all swarms, by doublings of their size, is above the other.

    CPU time is the noisiest figure: of four swarms the dearest and the cheapest alone would be mostly noise. That it
    falls counts as well, for then it is held against what does not hold for it.
    """
    at_one, slope = fit([(math.log2(count), cost) for count, cost in costs])
    return spread([at_one + slope * math.log2(count) for count, _ in (min(costs), max(costs))])


def at_the_largest(costs: Sequence[tuple[float, float]]) -> float:
    return max(costs)[1]


def _relays_over_contributors(relay: Cost, contributor: Cost) -> Cost:
    return lambda point, constants: relay(point, constants) * RELAYS / (contributor(point, constants) * point.count)


OF_GROWING: Final = (
    Asked("contributor_bytes_growth", "a contributor's kB", contributor_bytes, apart, MOST_GROWTH, 1e3),
    Asked("contributor_messages_growth", "a contributor's messages", contributor_messages, apart, MOST_GROWTH),
    Asked("contributor_cpu_ms_growth", "a contributor's CPU, ms", contributor_cpu_ms, apart, MOST_GROWTH),
    Asked("contributor_cpu_growth", "a contributor's CPU, in requests", contributor_cpu, along_line, MOST_GROWTH),
    Asked("relay_bytes_beyond_line", "a relay's kB, beyond a line", relay_bytes, beyond_line, MOST_GROWTH, 1e3),
    Asked("relay_cpu_beyond_line", "a relay's CPU, in requests, beyond a line", relay_cpu, beyond_line, MOST_GROWTH),
    Asked(
        "relays_bytes_of_contributors",
        "all relays' bytes over contributors', in the last",
        _relays_over_contributors(relay_bytes, contributor_bytes),
        at_the_largest,
        MOST_RELAY_BYTES,
        is_share=False,
    ),
    Asked(
        "relays_cpu_of_contributors",
        "all relays' CPU over contributors', in the last",
        _relays_over_contributors(relay_cpu, contributor_cpu),
        at_the_largest,
        MOST_RELAY_CPU,
        is_share=False,
    ),
)
OF_SHARED: Final = (
    Asked("trainer_bytes_growth", "the trainer's kB", trainer_bytes, apart, MOST_GROWTH, 1e3),
    Asked("trainer_requests_growth", "the trainer's requests", trainer_requests, apart, MOST_GROWTH),
    Asked("trainer_cpu_growth", "the trainer's CPU, in requests", trainer_cpu, apart, MOST_GROWTH),
)


def ask(result: Result, asked: Sequence[Asked], points: Sequence[Point], constants: Constants) -> None:
    """Add the figures and goals of one series of swarms."""
    for one in asked:
        result.figures[one.name] = one.figure(_costs(one, points, constants))
        result.at_most(one.name, one.most)


def growth_grid(title: str, asked: Sequence[Asked], points: Sequence[Point], constants: Constants) -> Grid:
    """A row for each figure: what each swarm takes in a step, what was made of that, and whether it is as asked."""
    ordered = sorted(points, key=lambda point: point.count)
    rows = [_row(one, _costs(one, ordered, constants)) for one in asked]
    return Grid(title, ("", *(str(point.count) for point in ordered), "found", "to reach"), rows)


def _costs(one: Asked, points: Sequence[Point], constants: Constants) -> list[tuple[float, float]]:
    return [(point.count, one.cost(point, constants)) for point in points]


def _row(one: Asked, costs: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    found = one.figure(costs)
    told = [number(cost / one.unit) for _, cost in costs]
    return one.what, *told, one.text(found), f"≤ {one.text(one.most)} {'✓' if found <= one.most else '✗'}"


def number(value: float) -> str:
    """Three digits or so, for people."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def constants_of(growing: Sequence[Point], shared: Sequence[Point]) -> Constants:
    """What the model takes from the measurements: intercepts and slopes of straight lines."""
    every = [*growing, *(point for point in shared if point not in growing)]
    per_hand_in = fit([(point.node.hand_ins, point.beside_policies) for point in every])  # its file too
    relay_cpu_ms = fit([(point.of_each_relay, point.relay.cpu_ms) for point in growing])
    relay_messages = fit([(point.of_each_relay, point.relay.messages) for point in growing])
    trainer = fit([(point.count * point.node.hand_ins, point.trainer.bytes) for point in every])
    messages = fit([(point.node.hand_ins, point.messages_beside_policies) for point in every])
    waiting = trainer[0] - FAN_OUT_COPIES * sum(point.node.policy_bytes for point in every) / len(every)
    return Constants(
        contributor_bytes_per_s=max(0.0, per_hand_in[0]),
        relay_cpu_share=max(0.0, relay_cpu_ms[1]) / 1e3,
        hand_in_bytes=max(0.0, per_hand_in[1]),
        trainer_bytes_per_relay_s=max(0.0, waiting) / RELAYS,
        contributor_messages_per_s=max(0.0, messages[0]),
        hand_in_messages=max(0.0, messages[1]),
        relay_messages_per_s=max(0.0, relay_messages[1]),
    )
