"""How `python -m bench swarm` tells what it found: a section for a terminal and for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.report import Grid, Section
from bench.swarm_growth import OF_GROWING, OF_SHARED, STEP_S, growth_grid, number
from bench.swarm_model import Constants, Need, fit
from bench.swarm_rates import Point, Rates

NAME: Final = "swarm"
SETTING: Final = (
    "Real nodes, each in a network namespace of its own: a trainer, two relays, a validator and light contributors, "
    "the demo's policy, one submission of 8 rollouts each in steps of eight seconds or what is said. Whole steps, for "
    "some {watch_s:g} s. Bytes are those of interfaces in both directions; messages are HTTP requests that a node made "
    "and the DHT's that it sent; CPU is of network processes."
)
NORMALISED: Final = (
    "What one takes in a step is compared: for a contributor, what it takes while it waits for eight seconds and all "
    "the rest by the steps that there were; a relay's bytes and CPU in proportion to its contributors' bytes and "
    "messages; the trainer's by the step. CPU is counted in requests too: what one over TLS took a process beside "
    "them meanwhile. Found is the dearest over the cheapest; of contributors' CPU in requests the ends of a line "
    "through all swarms, by doublings; of a relay the last over a straight line through the others."
)
_MEASURED: Final = (
    *("contributors", "contributor, kB in / out", "messages", "CPU ms", "relay, kB in / out", "CPU ms", "memory, MB"),
    *("trainer, kB in / out", "requests", "CPU ms", "step, s", "a request's CPU, ms"),
)
_NEEDS: Final = (
    *("policy, contributors", "relays", "because of", "Mbit/s of each", "cores of each", "messages/s that reach each"),
    *("MB a contributor and step, with newcomers'", "messages a contributor and step", "Mbit/s of the trainer"),
    "of it for relays",
)


def measured(growing: Sequence[Point], shared: Sequence[Point], *, watch_s: float) -> Section:
    """What the swarms were and took, and nothing about it."""
    alone = [point for point in shared if point not in growing]
    rows = [_measured_row(point) for point in [*growing, *alone]]
    return Section(NAME, SETTING.format(watch_s=watch_s), [Grid("a second, of one node", _MEASURED, rows)])


def compared(
    section: Section, growing: Sequence[Point], shared: Sequence[Point], constants: Constants, needs: Sequence[Need]
) -> Section:
    """The same with what follows: growth, the model's constants, and what runs need by them."""
    each = f"in a step of {STEP_S:g} s"
    grids = [
        growth_grid(f"{each}, one submission each, by contributors", OF_GROWING, growing, constants),
        growth_grid(f"{each} with as many submissions, by contributors", OF_SHARED, shared, constants),
        _constants_grid(growing, constants),
        Grid(
            "on paper: steps of 20 minutes, relays of 1 Gbit/s and one core",
            _NEEDS,
            [_needs_row(need) for need in needs],
        ),
    ]
    return Section(section.name, f"{section.setting} {NORMALISED}", [*section.grids, *grids])


def _measured_row(point: Point) -> tuple[str, ...]:
    each = point.shape.submissions_each
    node, relay, trainer = point.node, point.relay, point.trainer
    return (
        f"{point.count}, {each} submissions each" if each > 1 else str(point.count),
        *(_in_out(node), number(node.messages), number(node.cpu_ms)),
        *(_in_out(relay), number(relay.cpu_ms), f"{relay.private_mb:.0f}"),
        *(_in_out(trainer), number(trainer.requests), number(trainer.cpu_ms)),
        *(number(1 / trainer.steps) if trainer.steps else "none", f"{point.yardstick_ms:.2f}"),
    )


def _in_out(rates: Rates) -> str:
    return f"{rates.bytes_in / 1e3:.1f} / {rates.bytes_out / 1e3:.1f}"


def _constants_grid(growing: Sequence[Point], constants: Constants) -> Grid:
    relay_bytes = fit([(point.of_each_relay, point.relay.bytes) for point in growing])[1]
    memory = fit([(point.count, point.relay.private_mb) for point in growing])[1]
    rows = [
        ("contributor that waits, kB/s", constants.contributor_bytes_per_s / 1e3),
        ("contributor that waits, messages/s", constants.contributor_messages_per_s),
        ("submission, kB beside waiting", constants.hand_in_bytes / 1e3),
        ("submission, messages beside waiting", constants.hand_in_messages),
        ("relay, kB/s for each contributor of its own", relay_bytes / 1e3),
        ("relay, CPU ms/s for each contributor of its own", constants.relay_cpu_share * 1e3),
        ("relay, messages/s that it sends for each contributor of its own", constants.relay_messages_per_s),
        ("relay, MB of memory for each contributor that knows it", memory),
        ("trainer that waits, kB/s for each relay", constants.trainer_bytes_per_relay_s / 1e3),
    ]
    return Grid("slopes and intercepts of straight lines", ("of", "found"), [(what, number(one)) for what, one in rows])


def _needs_row(need: Need) -> tuple[str, ...]:
    return (
        f"{need.policy}, {need.contributors:,}",
        *(str(need.relays), need.bound_by, f"{need.relay_mbit:.0f}", f"{need.relay_cpu_share:.2f}"),
        *(f"{need.relay_messages_per_s:.0f}", f"{need.contributor_mb_per_step:,.0f}"),
        *(f"{need.contributor_messages_per_step:,.0f}", f"{need.trainer_mbit:.1f}"),
        f"{need.trainer_share_of_relays * 100:.0f} %",
    )
