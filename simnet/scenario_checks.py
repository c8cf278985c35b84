"""What is wrong with a scenario beyond its form: unknown names, fleets that are no swarm, faults that cannot happen,
settings that nodes would refuse, and expectations that nothing could meet.

Each is a ConfigError with the nearest right name, or with the reason.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from node.config import NodeConfig, resolve
from protocol.errors import ConfigError
from protocol.identity import Identity
from simnet.attacks import ATTACKS
from simnet.cheats import CHEATS, VALIDATORS
from simnet.goal_checks import check_disks, check_finite, check_goals
from simnet.scenario import (
    MAX_NODES,
    Action,
    Expect,
    Fault,
    FleetEntry,
    Link,
    Nat,
    RandomFaults,
    Role,
    RunPlan,
    Scenario,
    Until,
)
from simnet.timeline import EFFECTS, UNDO, plan_faults
from trainer.recipe import Recipe

_TABLES: Final[Mapping[str, Any]] = {
    "run": RunPlan,
    "fleet": FleetEntry,
    "fault": Fault,
    "random": RandomFaults,
    "until": Until,
    "expect": Expect,
}
_TOP: Final = ("title", "network", "link", "short", *_TABLES)
_WORKED_OUT: Final = ("side", "declared")
_OWNED: Final = frozenset(
    (
        *("role", "run", "bootstrap", "data_dir", "listen", "announce", "http_host", "http_port", "public_url"),
        *("status_port", "threads", "engine", "passphrase", "webhook_secret", "join_timeout_s"),
    )
)
"""Settings of a node that the simulation itself gives."""


def check_names(table: Mapping[str, Any], name: str) -> None:
    """Refuse what msgspec would refuse too, but with the nearest known name."""
    _check_keys(table, _TOP, f"scenario {name!r}")
    short = table.get("short")
    if isinstance(short, Mapping):
        _check_keys(short, [key for key in _TOP if key != "short"], f"scenario {name!r}, [short]")
    for key, kind in _TABLES.items():
        for index, part in _parts(table.get(key)):
            where = f"scenario {name!r}, [[{key}]] number {index + 1}" if index >= 0 else f"scenario {name!r}, [{key}]"
            _check_keys(part, [field for field in kind.__struct_fields__ if field not in _WORKED_OUT], where)
            _check_values(part, where)
    links = table.get("link")
    for key, part in (links if isinstance(links, Mapping) else {}).items():
        if isinstance(part, Mapping):
            where = f"scenario {name!r}, [link.{str(key)[:80]}]"
            _check_keys(part, Link.__struct_fields__, where)
            _check_choice(part.get("nat"), get_args(Nat), "nat", where)


def check(scenario: Scenario) -> None:
    """Refuse a scenario that cannot be run, whatever its recipe."""
    check_finite(scenario)
    _check_fleet(scenario)
    check_disks(scenario)
    _check_settings(scenario)
    _check_faults(scenario)
    _check_random(scenario)
    _check_order(scenario)
    _check_moments(scenario)
    _check_expectations(scenario)


def check_possible(scenario: Scenario, recipe: Recipe) -> None:
    """Refuse expectations and faults that the run of a recipe can never come to."""
    total = recipe.batch.total_steps
    wanted = {
        "[expect] steps_at_least": scenario.expect.steps_at_least,
        "[until] step": scenario.until.step,
        **{f"[[fault]] number {number}, at_step": one.at_step for number, one in enumerate(scenario.fault, start=1)},
        **{f"[[random]] number {number}, to_step": one.to_step for number, one in enumerate(scenario.random, start=1)},
    }
    for what, step in wanted.items():
        if step is not None and step > total:
            raise ConfigError(
                f"scenario {scenario.name!r}, {what} is {step}, but the run ends after {total} steps",
                hint="lower it, or raise batch.total_steps in [run.overrides]",
            )
    if scenario.expect.evaluation_rises and not recipe.evaluation.every_steps:
        raise ConfigError(
            f"scenario {scenario.name!r} expects evaluation_rises, but its recipe evaluates nothing",
            hint="set evaluation.every_steps in [run.overrides]",
        )
    check_goals(scenario, recipe)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as the end of a sentence; empty where none is near."""
    close = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parts(value: object) -> Iterable[tuple[int, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        yield -1, value
    elif isinstance(value, list | tuple):
        yield from ((index, part) for index, part in enumerate(value) if isinstance(part, Mapping))


def _check_keys(part: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for key in part:
        if key not in names:
            raise ConfigError(
                f"{where}: unknown name {str(key)[:80]!r}{nearest(str(key), names)}", hint=f"known: {', '.join(names)}"
            )


def _check_values(part: Mapping[str, Any], where: str) -> None:
    _check_choice(part.get("role"), get_args(Role), "role", where)
    _check_choice(part.get("action"), get_args(Action), "action", where)
    _check_choice(part.get("cheat"), CHEATS | VALIDATORS, "cheat", where)
    _check_choice(part.get("attack"), ATTACKS, "attack", where)
    actions = part.get("actions")
    for action in actions if isinstance(actions, list | tuple) else ():
        _check_choice(action, get_args(Action), "action", where)


def _check_choice(value: object, known: Iterable[str], what: str, where: str) -> None:
    names = list(known)
    if isinstance(value, str) and value not in names:
        raise ConfigError(
            f"{where}: unknown {what} {value[:80]!r}{nearest(value, names)}", hint=f"known: {', '.join(names)}"
        )


def _check_fleet(scenario: Scenario) -> None:
    nodes = scenario.named()
    if len(nodes) > MAX_NODES:
        raise ConfigError(f"scenario {scenario.name!r} has {len(nodes)} nodes; at most {MAX_NODES} are allowed")
    counts = Counter(entry.role for entry, _, _ in nodes)
    if counts["trainer"] != 1:
        raise ConfigError(f"scenario {scenario.name!r} has {counts['trainer']} trainers; a run has exactly one")
    for role in ("relay", "validator"):
        if not counts[role]:
            raise ConfigError(f"scenario {scenario.name!r} has no {role}", hint=f'add [[fleet]] role = "{role}"')
    for entry, _, name in nodes:
        _check_entry(entry, name, scenario)


def _check_entry(entry: FleetEntry, name: str, scenario: Scenario) -> None:
    if entry.cheat and entry.cheat not in {"inference": CHEATS, "validator": VALIDATORS}.get(entry.role, {}):
        kind = "an inference node" if entry.cheat in CHEATS else "a validator"
        raise ConfigError(f"{name}: a cheat that is {entry.cheat} is {kind}, not a {entry.role}")
    if entry.role != "inference" and entry.engine != "torch":
        raise ConfigError(f"{name}: only inference nodes choose their engine, a {entry.role} uses torch")
    if (entry.role == "hostile") != bool(entry.attack):
        raise ConfigError(
            f"{name}: a hostile peer, and no other node, has an attack", hint=f"known: {', '.join(ATTACKS)}"
        )
    if entry.fill and entry.role in ("trainer", "relay"):
        raise ConfigError(f"{name}: the number of {entry.role}s cannot be left to the memory")
    if entry.link is None:
        return
    if not scenario.link:
        raise ConfigError(f"{name}: unknown link {entry.link[:80]!r}", hint=f"add a table [link.{entry.link[:80]}]")
    _check_choice(entry.link, scenario.link, "link", name)
    if scenario.link[entry.link].nat != "none" and entry.role in ("trainer", "relay", "hostile"):
        raise ConfigError(f"{name}: others dial a {entry.role}, which they cannot behind a translating router")


def _check_settings(scenario: Scenario) -> None:
    known = [name for name in NodeConfig.__struct_fields__ if name not in _OWNED]
    anyone = Identity.from_phrase("anyone").peer_id
    for entry in scenario.fleet:
        if not entry.settings:
            continue
        where = f"scenario {scenario.name!r}, settings of {entry.name or entry.cheat or entry.role}"
        _check_keys(entry.settings, known, where)
        if entry.role == "hostile":
            raise ConfigError(f"{where}: a hostile peer has none")
        try:
            resolve({**entry.settings, "role": entry.role, "run": f"{anyone}/x"}, environ={})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error


def _check_faults(scenario: Scenario) -> None:
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


def _check_random(scenario: Scenario) -> None:
    for number, draw in enumerate(scenario.random, start=1):
        where = f"scenario {scenario.name!r}, [[random]] number {number}"
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


def _check_order(scenario: Scenario) -> None:
    """Walk through what happens to every node: a node that is gone cannot be stopped, and so on."""
    first = next(node for node in scenario.nodes() if node.role == "relay")
    if first.absent:
        raise ConfigError(f"{first.name} is what the other nodes bootstrap from: it cannot start by a join")
    states: dict[str, dict[str, str]] = {
        plan.name: {"process": "gone" if plan.absent else "running"} for plan in scenario.nodes()
    }
    for fault in plan_faults(scenario, seed=0):
        effect = EFFECTS[fault.action]
        now = states[fault.node].get(effect.on, effect.usual)
        if now not in effect.before:
            raise ConfigError(f"scenario {scenario.name!r}: {fault.node} cannot {fault.action}, it is {now} by then")
        states[fault.node][effect.on] = now if fault.for_s is not None else effect.after


def _check_moments(scenario: Scenario) -> None:
    """Refuse what would only happen after the simulation has ended."""
    until, name = scenario.until, scenario.name
    moments = [(f"{one.node} is to {one.action}", one.at_s, one.at_step) for one in plan_faults(scenario, seed=0)]
    moments += [
        (f"[[random]] number {at} is to end", one.to_s, one.to_step) for at, one in enumerate(scenario.random, 1)
    ]
    for what, at_s, at_step in moments:
        if at_s is not None and at_s > until.timeout_s:
            raise ConfigError(f"scenario {name!r}: {what} at {at_s:g} s, but [until] timeout_s is {until.timeout_s:g}")
        if None not in (at_step, until.step) and at_step > until.step:  # type: ignore[operator]
            raise ConfigError(f"scenario {name!r}: {what} at step {at_step}, but [until] step is {until.step}")


def _check_expectations(scenario: Scenario) -> None:
    expect, nodes = scenario.expect, scenario.nodes()
    lying = {node.role for node in nodes if node.cheat}
    honest = any(node.role == "inference" and node.cheat is None for node in nodes)
    impossible = {
        "cheats_evicted": expect.cheats_evicted is True and "inference" not in lying and "has no cheat",
        "liars_overruled": expect.liars_overruled is True and "validator" not in lying and "has no validator that lies",
        "accepted_per_honest_at_least": expect.accepted_per_honest_at_least and not honest and "has no honest one",
        "steps_at_least": expect.steps_at_least and not honest and "has no honest contributor to train on",
        "accepted_at_least": expect.accepted_at_least and not honest and "has no honest contributor",
    }
    for name, why in impossible.items():
        if why:
            raise ConfigError(f"scenario {scenario.name!r} expects {name}, but its fleet {why}")
    if None not in (expect.steps_at_least, scenario.until.step) and expect.steps_at_least > scenario.until.step:  # type: ignore[operator]
        raise ConfigError(
            f"scenario {scenario.name!r} expects {expect.steps_at_least} steps, but ends at step {scenario.until.step}"
        )
