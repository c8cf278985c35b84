"""What is wrong with a scenario beyond its form: unknown names, fleets that are no swarm, settings that nodes would
refuse, and expectations that nothing could meet. Faults are looked at in `simnet.fault_checks`.

Each is a ConfigError with the nearest right name, or with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from node.config import NodeConfig, resolve
from protocol.errors import ConfigError
from protocol.identity import Identity
from simnet.attacks import ATTACKS
from simnet.cheats import CHEATS, VALIDATORS
from simnet.fault_checks import check_faults, check_plan
from simnet.goal_checks import check_disks, check_finite, check_goals
from simnet.names import check_choice, check_keys
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
from trainer.recipe import Recipe

_TABLES: Final[Mapping[str, Any]] = {
    "run": RunPlan,
    "fleet": FleetEntry,
    "fault": Fault,
    "random": RandomFaults,
    "until": Until,
    "expect": Expect,
}
UNASKED: Final = "unasked"
"""In `[short]`: expectations of the whole that the short form does not have."""
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
    check_keys(table, _TOP, f"scenario {name!r}")
    _check_short(table, name)
    for key, kind in _TABLES.items():
        for index, part in _parts(table.get(key)):
            where = f"scenario {name!r}, [[{key}]] number {index + 1}" if index >= 0 else f"scenario {name!r}, [{key}]"
            check_keys(part, [field for field in kind.__struct_fields__ if field not in _WORKED_OUT], where)
            _check_values(part, where)
    links = table.get("link")
    for key, part in (links if isinstance(links, Mapping) else {}).items():
        if isinstance(part, Mapping):
            where = f"scenario {name!r}, [link.{str(key)[:80]}]"
            check_keys(part, Link.__struct_fields__, where)
            check_choice(part.get("nat"), get_args(Nat), "nat", where)


def check_links_used(scenario: Scenario, also: Scenario) -> None:
    """Refuse links that are nobody's, in a scenario and in its short form."""
    used = {entry.link for one in (scenario, also) for entry in one.fleet}
    idle = [name for name in scenario.link if name not in used]
    if idle:
        raise ConfigError(
            f"scenario {scenario.name!r}: no node has the link {idle[0][:80]!r}",
            hint=f'give a [[fleet]] entry `link = "{idle[0][:80]}"`, or remove the table [link.{idle[0][:80]}]',
        )


def check(scenario: Scenario) -> None:
    """Refuse a scenario that cannot be run, whatever its recipe."""
    check_finite(scenario)
    _check_fleet(scenario)
    check_disks(scenario)
    _check_settings(scenario)
    check_faults(scenario)
    _check_expectations(scenario)


def check_possible(scenario: Scenario, recipe: Recipe, *, seed: int) -> None:
    """Refuse expectations and faults that the run of a recipe, with what a seed draws, can never come to."""
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
    _check_quorum(scenario, recipe)
    check_plan(scenario, seed)
    check_goals(scenario, recipe, seed=seed)


def _check_quorum(scenario: Scenario, recipe: Recipe) -> None:
    validators = sum(plan.role == "validator" for plan in scenario.nodes())
    if recipe.quorum > validators:
        raise ConfigError(
            f"scenario {scenario.name!r} has {validators} validators, and {recipe.quorum} must agree in its recipe",
            hint='raise `count` of the [[fleet]] with role = "validator", or lower quorum in [run.overrides]',
        )


def _check_short(table: Mapping[str, Any], name: str) -> None:
    """Names of the short form's own, whether or not it is asked for."""
    short = table.get("short", {})
    where = f"scenario {name!r}, [short]"
    if not isinstance(short, Mapping):
        raise ConfigError(f"{where} is {str(short)[:80]!r} and not a table", hint="write [short.until], for example")
    check_keys(short, [UNASKED, *(key for key in _TOP if key != "short")], where)
    unasked, expect = short.get(UNASKED, []), table.get("expect")
    if not isinstance(unasked, list | tuple) or not all(isinstance(one, str) for one in unasked):
        raise ConfigError(f"{where}: {UNASKED} is a list of names of [expect]")
    for one in unasked:
        check_choice(one, expect if isinstance(expect, Mapping) else (), "expectation", f"{where}, {UNASKED}")


def _parts(value: object) -> Iterable[tuple[int, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        yield -1, value
    elif isinstance(value, list | tuple):
        yield from ((index, part) for index, part in enumerate(value) if isinstance(part, Mapping))


def _check_values(part: Mapping[str, Any], where: str) -> None:
    check_choice(part.get("role"), get_args(Role), "role", where)
    check_choice(part.get("action"), get_args(Action), "action", where)
    check_choice(part.get("cheat"), CHEATS | VALIDATORS, "cheat", where)
    check_choice(part.get("attack"), ATTACKS, "attack", where)
    actions = part.get("actions")
    for action in actions if isinstance(actions, list | tuple) else ():
        check_choice(action, get_args(Action), "action", where)


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
    check_choice(entry.link, scenario.link, "link", name)
    if scenario.link[entry.link].nat != "none" and entry.role in ("trainer", "relay", "hostile"):
        raise ConfigError(f"{name}: others dial a {entry.role}, which they cannot behind a translating router")


def _check_settings(scenario: Scenario) -> None:
    known = [name for name in NodeConfig.__struct_fields__ if name not in _OWNED]
    anyone = Identity.from_phrase("anyone").peer_id
    for entry in scenario.fleet:
        if not entry.settings:
            continue
        where = f"scenario {scenario.name!r}, settings of {entry.name or entry.cheat or entry.role}"
        check_keys(entry.settings, known, where)
        if entry.role == "hostile":
            raise ConfigError(f"{where}: a hostile peer has none")
        try:
            resolve({**entry.settings, "role": entry.role, "run": f"{anyone}/x"}, environ={})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error


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
