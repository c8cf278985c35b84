"""What each contributor costs itself, a relay and the trainer, from 5 nodes to 40, and on paper up to 10 000.

Real nodes in network namespaces (root) on one machine: up to 44, and some twenty-five minutes. Contributors are light:
one engine, outside of what is counted, answers for all of them. In one series each hands in one submission a step, so
that steps grow with the swarm; in the other the step is the same and shared by more and more of them.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.table import Table

from bench.harness import Result
from bench.swarm_fleet import RELAYS, Shape, Use, running
from bench.swarm_model import FAN_OUT_COPIES, PARAMETERS, Constants, Need, fit, need, spread
from protocol.errors import ConfigError

STEP_S: Final = 8.0
GROWING: Final[tuple[Shape, ...]] = tuple(Shape(count, 1, STEP_S) for count in (5, 10, 20, 40))
SHARED: Final[tuple[Shape, ...]] = (Shape(5, 8, STEP_S),)
"""As much in a step as the last of GROWING, by fewer."""
QUICK_GROWING: Final[tuple[Shape, ...]] = (Shape(1, 1, STEP_S), Shape(2, 1, STEP_S))
QUICK_SHARED: Final[tuple[Shape, ...]] = (Shape(1, 2, STEP_S),)
SETTLE_S: Final = 45.0
"""After everybody's first hand-in: nodes look for relays often in their first minute."""
WATCH_S: Final = 40.0
QUICK_S: Final = 8.0
YARDSTICK: Final = 100_000
YARDSTICK_EVERY_S: Final = 0.5
CONTRIBUTORS: Final = (100, 1000, 10_000)
MOST_GROWTH: Final = 0.15
FOR_POLICIES: Final = "GET checkpoints"
ROLES: Final = ("trainer", "relay", "validator", "node")


@dataclass(frozen=True)
class Rates:
    """What the nodes of one role take each, a second unless it says otherwise."""

    bytes_in: float
    bytes_out: float
    requests: float
    asked: Mapping[str, float]
    """Requests by what they are about."""
    dht_messages: float
    cpu_ms: float
    policy_bytes: float
    hand_ins: float
    private_mb: float
    steps: float

    @property
    def bytes(self) -> float:
        return self.bytes_in + self.bytes_out

    @property
    def messages(self) -> float:
        """HTTP requests that it made, and messages of the DHT that it sent."""
        return self.requests + self.dht_messages


@dataclass(frozen=True)
class Point:
    """One swarm, measured."""

    shape: Shape
    roles: Mapping[str, Rates]
    took_s: float
    yardstick_ms: float
    """CPU time of the same small work meanwhile."""

    @property
    def node(self) -> Rates:
        return self.roles["node"]

    @property
    def beside_policies(self) -> float:
        """Bytes a second of a contributor beside policies, if those cost as many as they are long."""
        return self.node.bytes - self.node.policy_bytes

    @property
    def messages_beside_policies(self) -> float:
        """Requests and messages a second of a contributor beside those for policies."""
        return self.node.messages - self.node.asked.get(FOR_POLICIES, 0.0)

    def of_a_step(self, every_s: float, with_policy: float) -> float:
        """What is `every_s` a second, and `with_policy` a second because of policies, in a step of STEP_S.

        A busy machine makes steps longer, and swarms of different sizes are compared by steps of one length.
        """
        return every_s * STEP_S + (with_policy / self.node.steps if self.node.steps else 0.0)


def bench(*, quick: bool, only: str | None = None) -> Result:
    """Measure each swarm, one after another. `only` takes a number of contributors, one submission each."""
    growing, shared = (QUICK_GROWING, QUICK_SHARED) if quick else (GROWING, SHARED)
    if only is not None:
        if not only.isdecimal() or int(only) < 1:
            raise ConfigError(
                f"--only {only[:40]!r} is no number of contributors", hint="give 1 or more, such as --only 5"
            )
        growing, shared = (Shape(int(only), 1, STEP_S),), ()
    settle_s, watch_s = (0.0, QUICK_S) if quick else (SETTLE_S, WATCH_S)
    found = [measure(shape, settle_s=settle_s, watch_s=watch_s) for shape in (*growing, *shared)]
    return result_of(found[: len(growing)], [*found[len(growing) :], found[len(growing) - 1]], quick=quick)


def measure(shape: Shape, *, settle_s: float, watch_s: float) -> Point:
    """Start a swarm, let it settle, and look at it twice, each time as a step opens."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-swarm-") as directory, running(shape, Path(directory)) as swarm:
        time.sleep(settle_s)
        before = swarm.use_at_step()
        yardstick = watch(watch_s)
        return Point(shape, rates_by_role(before, swarm.use_at_step()), time.monotonic() - began_s, yardstick)


def watch(seconds: float) -> float:
    """Wait; gives the CPU milliseconds that the same small work in Python took meanwhile, in the mean.

    The more a machine has to do, the more CPU time the same work takes: caches and cores are shared.
    """
    found, until_s = [], time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.thread_time()
        sum(number * number % 7 for number in range(YARDSTICK))
        found.append((time.thread_time() - began_s) * 1e3)
        time.sleep(min(YARDSTICK_EVERY_S, max(0.0, until_s - time.monotonic())))
    return fmean(found)


def rates_by_role(before: Mapping[str, Use], after: Mapping[str, Use]) -> dict[str, Rates]:
    """The mean over each role's nodes."""
    of_role: dict[str, list[Rates]] = {}
    for name, late in after.items():
        of_role.setdefault(name.rpartition("-")[0], []).append(_rates(before[name], late))
    return {role: _mean(each) for role, each in of_role.items()}


def _rates(early: Use, late: Use) -> Rates:
    seconds = late.at_s - early.at_s
    asked = {name: (count - early.requests[name]) / seconds for name, count in late.requests.items()}
    return Rates(
        bytes_in=(late.bytes_in - early.bytes_in) / seconds,
        bytes_out=(late.bytes_out - early.bytes_out) / seconds,
        requests=sum(asked.values()),
        asked=asked,
        dht_messages=(late.dht_messages - early.dht_messages) / seconds,
        cpu_ms=(late.cpu_s - early.cpu_s) / seconds * 1e3,
        policy_bytes=(late.policy_bytes - early.policy_bytes) / seconds,
        hand_ins=asked.get("POST submissions", 0.0),
        private_mb=late.private_mb,
        steps=(late.step - early.step) / seconds,
    )


def _mean(each: Sequence[Rates]) -> Rates:
    def mean(name: str) -> float:
        return fmean(getattr(one, name) for one in each)

    asked: Counter[str] = Counter()
    for one in each:
        asked.update(one.asked)
    names = [name for name in Rates.__dataclass_fields__ if name != "asked"]
    means = {name: mean(name) for name in names}
    return Rates(asked={name: total / len(each) for name, total in asked.items()}, **means)


def result_of(growing: Sequence[Point], shared: Sequence[Point], *, quick: bool = False) -> Result:
    """Figures and tables; goals and what follows on paper, unless it was too `quick` to say."""
    result = Result()
    for series, points in (("growing", growing), ("shared", shared)):
        for point in points:
            _add_figures(result.figures, f"{series}_{point.shape.contributors}", point)
    result.tables = [_table(title, points) for title, points in _titles(growing, shared)]
    if quick or len(growing) < 2:
        return result
    for name, of in _CONTRIBUTOR.items():
        result.figures[f"contributor_{name}_growth"] = spread([of(point) for point in growing])
        result.at_most(f"contributor_{name}_growth", MOST_GROWTH)
    for name, of in _TRAINER.items():
        result.figures[f"trainer_{name}_growth"] = spread([of(point) for point in shared])
        result.at_most(f"trainer_{name}_growth", MOST_GROWTH)
    constants = constants_of(growing, shared)
    result.figures |= {f"model_{name}": value for name, value in vars(constants).items()}
    needs = [need(constants, count, policy) for policy in PARAMETERS for count in CONTRIBUTORS]
    for one in needs:
        result.figures[f"{one.policy}_{one.contributors}_relays"] = one.relays
        result.figures[f"{one.policy}_{one.contributors}_trainer_mbit"] = one.trainer_mbit
        result.figures[f"{one.policy}_{one.contributors}_relay_messages_per_s"] = one.relay_messages_per_s
    result.tables.append(_needs_table(needs))
    return result


_CONTRIBUTOR: Final[dict[str, Callable[[Point], float]]] = {
    "bytes": lambda point: point.of_a_step(point.beside_policies, point.node.policy_bytes),
    "messages": lambda point: point.of_a_step(
        point.messages_beside_policies,
        point.node.asked.get(FOR_POLICIES, 0.0),
    ),
    "cpu": lambda point: point.node.cpu_ms / point.yardstick_ms,
}
_TRAINER: Final[dict[str, Callable[[Point], float]]] = {
    "bytes": lambda point: point.roles["trainer"].bytes,
    "requests": lambda point: point.roles["trainer"].requests,
    "cpu": lambda point: point.roles["trainer"].cpu_ms,
}


def constants_of(growing: Sequence[Point], shared: Sequence[Point]) -> Constants:
    """What the model takes from the measurements: intercepts and slopes of straight lines."""
    per_hand_in = fit([(point.node.hand_ins, point.beside_policies) for point in [*growing, *shared]])  # its file too
    per_contributor = [(point.shape.contributors / RELAYS, point.roles["relay"]) for point in growing]
    relay_cpu = fit([(count, relay.cpu_ms) for count, relay in per_contributor])
    relay_messages = fit([(count, relay.messages) for count, relay in per_contributor])
    every = [*growing, *shared]
    trainer = fit([(_count(point) * point.node.hand_ins, point.roles["trainer"].bytes) for point in every])
    messages = fit([(point.node.hand_ins, point.messages_beside_policies) for point in every])
    waiting = trainer[0] - FAN_OUT_COPIES * fmean(point.node.policy_bytes for point in every)
    return Constants(
        contributor_bytes_per_s=max(0.0, per_hand_in[0]),
        relay_cpu_share=max(0.0, relay_cpu[1]) / 1e3,
        hand_in_bytes=max(0.0, per_hand_in[1]),
        trainer_bytes_per_relay_s=max(0.0, waiting) / RELAYS,
        contributor_messages_per_s=max(0.0, messages[0]),
        hand_in_messages=max(0.0, messages[1]),
        relay_messages_per_s=max(0.0, relay_messages[1]),
    )


def _add_figures(figures: dict[str, float], prefix: str, point: Point) -> None:
    for role in ROLES:
        rates = point.roles[role]
        for name in ("bytes_in", "bytes_out", "requests", "dht_messages", "cpu_ms", "private_mb"):
            figures[f"{prefix}_{role}_{name}"] = getattr(rates, name)
        figures |= {f"{prefix}_{role}_{name.replace(' ', '_')}": value for name, value in rates.asked.items()}
    figures[f"{prefix}_policy_bytes"] = point.node.policy_bytes
    figures[f"{prefix}_steps"] = point.node.steps
    figures[f"{prefix}_took_s"] = point.took_s
    figures[f"{prefix}_yardstick_ms"] = point.yardstick_ms


def _titles(growing: Sequence[Point], shared: Sequence[Point]) -> Iterable[tuple[str, Sequence[Point]]]:
    yield "one submission a step each: a second, of each node", growing
    if len(shared) > 1:
        sizes = sorted({point.shape.contributors * point.shape.submissions_each for point in shared})
        yield (
            f"{' or '.join(map(str, sizes))} submissions a step, shared: a second, of each node",
            sorted(shared, key=_count),
        )


def _count(point: Point) -> int:
    return point.shape.contributors


def _table(title: str, points: Sequence[Point]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("contributors", "role", "kB in", "kB out", "requests", "DHT messages", "CPU ms", "MB", "step, s"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for point in points:
        for role in ROLES:
            rates = point.roles[role]
            numbers = (rates.bytes_in / 1e3, rates.bytes_out / 1e3, rates.requests, rates.dht_messages, rates.cpu_ms)
            step_s = f"{1 / rates.steps:.1f}" if rates.steps else ""
            texts = [f"{number:.2f}" for number in numbers]
            table.add_row(str(_count(point)), role, *texts, f"{rates.private_mb:.0f}", step_s)
    return table


def _needs_table(needs: Sequence[Need]) -> Table:
    table = Table(title="on paper: steps of 20 minutes, relays of 1 Gbit/s and one core", title_justify="left")
    columns = ("policy", "contributors", "relays", "bound by", "Mbit/s a relay", "cores a relay", "messages/s a relay")
    of_contributors = ("MB a contributor, step", "messages a contributor, step")
    for column in (*columns, *of_contributors, "Mbit/s of the trainer", "of it for relays"):
        table.add_column(column, justify="right")
    for one in needs:
        table.add_row(
            *(one.policy, f"{one.contributors:,}", str(one.relays), one.bound_by, f"{one.relay_mbit:.0f}"),
            *(f"{one.relay_cpu_share:.2f}", f"{one.relay_messages_per_s:.0f}", f"{one.contributor_mb_per_step:.0f}"),
            *(f"{one.contributor_messages_per_step:,.0f}", f"{one.trainer_mbit:.1f}"),
            f"{one.trainer_share_of_relays:.0%}",
        )
    return table
