"""What a simulation is: a TOML file that says who takes part, which faults strike, until when, and what must hold.

Unknown names are refused with the nearest known one. Which cheats exist is `simnet.cheats`'s business, what an
expectation means `simnet.expectations`'.
"""

from __future__ import annotations

import difflib
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from protocol.errors import ConfigError
from simnet.cheats import CHEATS

SCENARIO_DIR = Path(__file__).parent / "scenarios"
MAX_FILE_BYTES = 256 * 1024
MAX_NODES = 64

Role = Literal["trainer", "relay", "validator", "inference"]
Engine = Literal["torch", "transformers", "vllm"]
Action = Literal["kill", "stop", "continue", "leave", "join"]
NodeName = Annotated[str, Meta(min_length=1, max_length=24, pattern=r"^[a-z][a-z0-9-]*$")]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[int, Meta(ge=0)]

_STATE_AFTER: dict[Action, str] = {
    "kill": "gone",
    "leave": "gone",
    "join": "running",
    "stop": "stopped",
    "continue": "running",
}
_STATES_BEFORE: dict[Action, tuple[str, ...]] = {
    "kill": ("running", "stopped"),
    "leave": ("running",),
    "join": ("gone",),
    "stop": ("running",),
    "continue": ("stopped",),
}


class Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a scenario file."""


class RunPlan(Part, frozen=True, kw_only=True):
    """`[run]`: which run the trainer offers."""

    recipe: str = "demo"
    """A recipe that comes with the program, or the path of a recipe file."""
    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = "simnet"
    overrides: dict[str, Any] = {}
    """Recipe settings to replace, by their names in the recipe."""
    keep_weights: bool = True
    """Whether checkpoints stay on the nodes' disks. If not, the trainer keeps the newest, and the others none."""


class FleetEntry(Part, frozen=True, kw_only=True):
    """`[[fleet]]`: some nodes of one kind, named `<name>-0`, `<name>-1` …"""

    role: Role
    name: NodeName | None = None
    """Without one: the cheat's name, or the role."""
    count: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    cheat: str | None = None
    engine: Engine = "torch"
    """What an inference node generates with."""
    threads: Annotated[int, Meta(ge=1, le=64)] = 1
    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    memory_mb: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """What one of them takes; unless given, what nodes of small policies do."""


class Fault(Part, frozen=True, kw_only=True):
    """`[[fault]]`: what happens to a node, once the run reaches a step or some seconds after the start."""

    node: str
    action: Action
    at_step: Natural | None = None
    at_s: Annotated[float, Meta(ge=0)] | None = None


class Until(Part, frozen=True, kw_only=True):
    """`[until]`: when the simulation ends, which it also does when the run has finished."""

    step: Natural | None = None
    finished: bool = True
    """Whether not to get there in `timeout_s` is a failure. If not, and without a `step`, the time alone counts."""
    timeout_s: Annotated[float, Meta(gt=0, le=7 * 86400)] = 1800.0


class Expect(Part, frozen=True, kw_only=True):
    """`[expect]`: what must hold at the end; what is left out is not asked."""

    reward_at_least: float | None = None
    reward_gain_at_least: float | None = None
    steps_at_least: Natural | None = None
    accepted_at_least: Natural | None = None
    accepted_per_honest_at_least: Natural | None = None
    cheats_evicted: bool | None = None
    cheats_accepted: Natural | None = None
    honest_rejected: Natural | None = None
    unexpected_exits: Natural | None = None
    weights_from_relays_only: bool | None = None
    evaluation_rises: bool | None = None
    trainer_wait_fraction_at_most: Fraction | None = None


class NodePlan(Part, frozen=True, kw_only=True):
    """One node, as the fleet's entries name it."""

    name: str
    role: Role
    cheat: str | None
    threads: int
    nice: int
    engine: Engine = "torch"
    memory_mb: int | None = None
    absent: bool
    """Starts only when a `join` says so: true where the first fault of the node is one."""


class Scenario(Part, frozen=True, kw_only=True):
    """A whole scenario file, checked."""

    name: str
    title: str = ""
    run: RunPlan = RunPlan()
    fleet: Annotated[tuple[FleetEntry, ...], Meta(min_length=1)]
    fault: tuple[Fault, ...] = ()
    until: Until = Until()
    expect: Expect = Expect()

    def nodes(self) -> tuple[NodePlan, ...]:
        """Every node of the fleet in the order of the file; names are unique."""
        counts: Counter[str] = Counter()
        plans = []
        for entry in self.fleet:
            base = entry.name or entry.cheat or entry.role
            for _ in range(entry.count):
                plans.append(self._plan(entry, f"{base}-{counts[base]}"))
                counts[base] += 1
        return tuple(plans)

    def _plan(self, entry: FleetEntry, name: str) -> NodePlan:
        first = next((fault.action for fault in self.fault if fault.node == name), None)
        return NodePlan(
            name=name,
            role=entry.role,
            cheat=entry.cheat,
            threads=entry.threads,
            nice=entry.nice,
            engine=entry.engine,
            memory_mb=entry.memory_mb,
            absent=first == "join",
        )


def scenario_names() -> list[str]:
    """The scenarios that come with the program."""
    return sorted(path.stem for path in SCENARIO_DIR.glob("*.toml"))


def load_scenario(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Read a scenario by name, or from a path that ends in `.toml`; `overrides` replaces values, table by table.

    Raises ConfigError that says what is wrong and where.
    """
    path = _find(name_or_path)
    table = merge_tables(_read(path), overrides or {})
    return parse_scenario(table, name=path.stem)


def parse_scenario(table: Mapping[str, Any], *, name: str) -> Scenario:
    """Check a scenario's tables. Raises ConfigError."""
    _check_names(table, name)
    try:
        scenario = msgspec.convert({**table, "name": name}, Scenario)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"scenario {name!r}: {_readable(error)}") from error
    _check_fleet(scenario)
    _check_faults(scenario)
    return scenario


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if text.endswith(".toml"):
        return Path(text)
    known = scenario_names()
    if text not in known:
        raise ConfigError(
            f"there is no scenario {text[:80]!r}{_nearest(text, known)}",
            hint=f"name one of: {', '.join(known)}; or give the path of a .toml file",
        )
    return SCENARIO_DIR / f"{text}.toml"


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; a scenario never is")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the scenario {path} cannot be read: {error.strerror}",
            hint=f"check the path, or name one of: {', '.join(scenario_names())}",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def merge_tables(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A table with other values in place of its own, tables within tables too."""
    merged = dict(table)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = merge_tables(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _check_names(table: Mapping[str, Any], name: str) -> None:
    """Refuse what msgspec would refuse too, but with the nearest known name."""
    top = {"title": None, "run": RunPlan, "fleet": FleetEntry, "fault": Fault, "until": Until, "expect": Expect}
    _check_keys(table, top, f"scenario {name!r}")
    for key, kind in top.items():
        if kind is None:
            continue
        for index, part in _parts(table.get(key)):
            where = f"scenario {name!r}, [[{key}]] number {index + 1}" if index >= 0 else f"scenario {name!r}, [{key}]"
            _check_keys(part, kind.__struct_fields__, where)
            _check_choice(part.get("role"), get_args(Role), "role", where)
            _check_choice(part.get("action"), get_args(Action), "action", where)
            _check_choice(part.get("cheat"), CHEATS, "cheat", where)


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
                f"{where}: unknown name {key[:80]!r}{_nearest(key, names)}", hint=f"known: {', '.join(names)}"
            )


def _check_choice(value: object, known: Iterable[str], what: str, where: str) -> None:
    names = list(known)
    if isinstance(value, str) and value not in names:
        raise ConfigError(
            f"{where}: unknown {what} {value[:80]!r}{_nearest(value, names)}", hint=f"known: {', '.join(names)}"
        )


def _check_fleet(scenario: Scenario) -> None:
    nodes = scenario.nodes()
    if len(nodes) > MAX_NODES:
        raise ConfigError(f"scenario {scenario.name!r} has {len(nodes)} nodes; at most {MAX_NODES} are allowed")
    counts = Counter(node.role for node in nodes)
    if counts["trainer"] != 1:
        raise ConfigError(f"scenario {scenario.name!r} has {counts['trainer']} trainers; a run has exactly one")
    for role in ("relay", "validator"):
        if not counts[role]:
            raise ConfigError(f"scenario {scenario.name!r} has no {role}", hint=f'add [[fleet]] role = "{role}"')
    honest = [node for node in nodes if node.role != "inference" and node.cheat]
    if honest:
        raise ConfigError(f"{honest[0].name}: a cheat is an inference node, not a {honest[0].role}")
    others = [node for node in nodes if node.role != "inference" and node.engine != "torch"]
    if others:
        raise ConfigError(f"{others[0].name}: only inference nodes choose their engine, a {others[0].role} uses torch")


def _check_faults(scenario: Scenario) -> None:
    plans = {node.name: node for node in scenario.nodes()}
    states = {name: "gone" if plan.absent else "running" for name, plan in plans.items()}
    latest: dict[tuple[str, str], float] = {}
    for number, fault in enumerate(scenario.fault, start=1):
        where = f"scenario {scenario.name!r}, [[fault]] number {number}"
        _check_choice(fault.node, plans, "node", where)
        if (fault.at_step is None) == (fault.at_s is None):
            raise ConfigError(f"{where}: give exactly one of at_step and at_s")
        if states[fault.node] not in _STATES_BEFORE[fault.action]:
            raise ConfigError(f"{where}: {fault.node} cannot {fault.action}, it is {states[fault.node]} by then")
        states[fault.node] = _STATE_AFTER[fault.action]
        clock, moment = ("at_s", fault.at_s) if fault.at_step is None else ("at_step", float(fault.at_step))
        if moment is not None and moment < latest.get((fault.node, clock), 0.0):
            raise ConfigError(f"{where}: faults of {fault.node} must be in the order in which they happen")
        latest[fault.node, clock] = moment or 0.0
    first = next(node for node in scenario.nodes() if node.role == "relay")
    if first.absent:
        raise ConfigError(f"{first.name} is what the other nodes bootstrap from: it cannot start by a join")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _readable(error: Exception) -> str:
    return str(error).replace("`$.", "`").replace("Object missing required field", "missing name")[:300]
