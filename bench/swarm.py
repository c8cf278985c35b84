"""What each contributor costs itself, a relay and the trainer, from 5 nodes to 40, and on paper up to 10 000.

Real nodes in network namespaces (root) on one machine: up to 44, and some half an hour. Contributors are light:
one engine, outside of what is counted, answers for all of them. In one series each hands in one submission a step, so
that steps grow with the swarm; in the other the step is the same and shared by more and more of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.harness import Result, tell
from bench.swarm_fleet import Shape, running
from bench.swarm_growth import OF_GROWING, OF_SHARED, STEP_S, ask, constants_of
from bench.swarm_model import PARAMETERS, need
from bench.swarm_rates import ROLES, Point, rates_by_role
from bench.swarm_tables import compared, measured
from bench.swarm_yardstick import yardstick
from protocol.errors import ConfigError

GROWING: Final[tuple[Shape, ...]] = tuple(Shape(count, 1, STEP_S) for count in (5, 10, 20, 40))
SHARED: Final[tuple[Shape, ...]] = (Shape(5, 8, STEP_S),)
"""As much in a step as the last of GROWING, by fewer."""
QUICK_GROWING: Final[tuple[Shape, ...]] = (Shape(1, 1, STEP_S), Shape(2, 1, STEP_S))
QUICK_SHARED: Final[tuple[Shape, ...]] = (Shape(1, 2, STEP_S),)
SETTLE_S: Final = 45.0
"""After everybody's first hand-in: nodes look for relays often in their first minute."""
WATCH_S: Final = 90.0
"""Three of the half minutes in which a node looks for relays and asks who else is there: one more or less is little."""
QUICK_S: Final = 8.0
CONTRIBUTORS: Final = (100, 1000, 10_000)


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
    found: list[Point] = []
    shapes = (*growing, *shared)
    for number, shape in enumerate(shapes, start=1):
        tell(
            f"{time.strftime('%H:%M:%S')} swarm {number} of {len(shapes)}: {shape.contributors} contributors, "
            f"{shape.submissions_each} submissions each; it starts and settles, then is watched for {watch_s:.0f} s"
        )
        found.append(measure(shape, settle_s=settle_s, watch_s=watch_s))
    return result_of(
        found[: len(growing)],
        [*found[len(growing) :], found[len(growing) - 1]],
        quick=quick or only is not None,
        watch_s=watch_s,
    )


def measure(shape: Shape, *, settle_s: float, watch_s: float) -> Point:
    """Start a swarm, let it settle, and look at it twice, each time as a step opens."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-swarm-") as directory, running(shape, Path(directory)) as swarm:
        time.sleep(settle_s)
        with yardstick(Path(directory) / "yardstick") as request_ms:
            before = swarm.use_at_step()
            time.sleep(watch_s)
            roles = rates_by_role(before, swarm.use_at_step())
            return Point(shape, roles, time.monotonic() - began_s, request_ms())


def result_of(
    growing: Sequence[Point], shared: Sequence[Point], *, quick: bool = False, watch_s: float = WATCH_S
) -> Result:
    """Figures and tables; goals and what follows on paper, unless it was too `quick` to say."""
    section = measured(growing, shared, watch_s=watch_s)
    result = Result(sections=[section])
    for series, points in (("growing", growing), ("shared", shared)):
        for point in points:
            _add_figures(result.figures, f"{series}_{point.count}", point)
    if quick:
        return result
    constants = constants_of(growing, shared)
    ask(result, OF_GROWING, growing, constants)
    ask(result, OF_SHARED, shared, constants)
    result.figures |= {f"model_{name}": value for name, value in vars(constants).items()}
    needs = [need(constants, count, policy) for policy in PARAMETERS for count in CONTRIBUTORS]
    for one in needs:
        result.figures[f"{one.policy}_{one.contributors}_relays"] = one.relays
        result.figures[f"{one.policy}_{one.contributors}_trainer_mbit"] = one.trainer_mbit
        result.figures[f"{one.policy}_{one.contributors}_relay_messages_per_s"] = one.relay_messages_per_s
    result.sections = [compared(section, growing, shared, constants, needs)]
    return result


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
