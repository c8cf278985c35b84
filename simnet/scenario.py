"""What a simulation is: a TOML file that says who takes part, over which links, which faults strike, until when, and
what must hold.

Here are the schema and the reading of files. What is wrong with one beyond its form is found in
`simnet.scenario_checks`; when which fault strikes is worked out in `simnet.timeline`; which cheats exist is
`simnet.cheats`'s business, what an expectation means `simnet.expectations`'.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from protocol.errors import ConfigError
from simnet.files import bytes_of
from simnet.names import nearest

SCENARIO_DIR = Path(__file__).parent / "scenarios"
MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH: Final = 32
MAX_NODES = 240
"""Each node may have a network of its own, of which there are so many (simnet.links)."""

Role = Literal["trainer", "relay", "validator", "inference", "watch", "hostile"]
Engine = Literal["torch", "transformers", "vllm"]
Nat = Literal["none", "port-preserving", "symmetric"]
Action = Literal[
    "kill",
    "stop",
    "continue",
    "leave",
    "join",
    "restart",
    "partition",
    "heal",
    "clock",
    "disk-full",
    "disk-free",
    "disk-slow",
    "disk-normal",
]
NodeName = Annotated[str, Meta(min_length=1, max_length=24, pattern=r"^[a-z][a-z0-9-]*\Z")]
Pattern = Annotated[str, Meta(min_length=1, max_length=40)]
"""A node's name, or several's as a shell would match them: `relay-*`, `relay-[12]`."""
Fraction = Annotated[float, Meta(ge=0, lt=1)]
"""Less than the whole: a share never exceeds it, so that expecting 1 at most would ask nothing."""
Natural = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=7 * 86400)]
Mbit = Annotated[float, Meta(ge=0.01, le=10_000)]
"""10 kbit/s at least: with less, not even the handshakes are over in time."""

PROCESS_ACTIONS: Final = ("kill", "stop", "continue", "leave", "join", "restart")


class Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a scenario file."""


class RunPlan(Part, frozen=True, kw_only=True):
    """`[run]`: which run the trainer offers."""

    recipe: str = "demo"
    """A recipe that comes with the program, or the path of a recipe file."""
    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")] = "simnet"
    overrides: dict[str, Any] = {}
    """Recipe settings to replace, by their names in the recipe."""
    keep_weights: bool = True
    """Whether checkpoints stay on the nodes' disks. If not, the trainer keeps the newest, and the others none."""


class Link(Part, frozen=True, kw_only=True):
    """`[link.NAME]`: what lies between a node and all others. Without a value there is no such limit."""

    down_mbit: Mbit | None = None
    up_mbit: Mbit | None = None
    delay_ms: Annotated[float, Meta(ge=0, le=5000)] = 0.0
    """One way; a round trip between two nodes takes twice the sum of theirs."""
    loss: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    """Share of packets that are lost, in each direction."""
    nat: Nat = "none"
    """Whether the node sits behind a router that translates addresses, and how that chooses ports."""


class FleetEntry(Part, frozen=True, kw_only=True):
    """`[[fleet]]`: some nodes of one kind, named `<name>-0`, `<name>-1` …"""

    role: Role
    name: NodeName | None = None
    """Without one: the cheat's or attack's name, or the role."""
    count: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    short_count: Annotated[int, Meta(ge=1, le=MAX_NODES)] | None = None
    """`count` in the short form."""
    fill: bool = False
    """Fewer than `count` if this machine's memory holds no more, but at least one."""
    declared: int | None = None
    """`count` as the file has it, where there are fewer; worked out."""
    cheat: str | None = None
    attack: str | None = None
    """What a hostile peer of the DHT does."""
    engine: Engine = "torch"
    """What an inference node generates with."""
    threads: Annotated[int, Meta(ge=1, le=64)] = 1
    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    memory_mb: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """What one of them takes; unless given, what nodes of small policies do."""
    link: str | None = None
    """The name of a `[link.NAME]`."""
    settings: dict[str, Any] = {}
    """Settings of the nodes, as in a file for `--config`."""
    disk_mb: Annotated[int, Meta(ge=8, le=1 << 16)] | None = None
    """Size of its data directory, a file system in memory; needs root."""
    clock_ahead_s: Annotated[float, Meta(ge=-1e9, le=1e9)] = 0.0
    """How far its clock is ahead from the start; negative: behind."""
    join_at_s: Seconds | None = None
    """When the first of them starts; without it, at the start."""
    join_every_s: Seconds = 0.0
    """How long after it the next one does, and so on."""
    leave_at_s: Seconds | None = None
    leave_every_s: Seconds = 0.0


class Fault(Part, frozen=True, kw_only=True):
    """`[[fault]]`: what happens to nodes, once the run reaches a step or some seconds after the start."""

    node: Pattern
    action: Action
    at_step: Natural | None = None
    at_s: Seconds | None = None
    for_s: Seconds | None = None
    """After how many seconds it is undone: what was killed or left joins, what was stopped continues, and so on."""
    seconds: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    """Of `clock`: how far ahead the clock then is."""
    sync_ms: Annotated[float, Meta(gt=0, le=60_000)] | None = None
    """Of `disk-slow`: how much longer each write takes to become durable."""
    side: str = ""
    """Of `partition`, worked out: nodes with the same one see each other, and no others."""


class RandomFaults(Part, frozen=True, kw_only=True):
    """`[[random]]`: faults drawn from the simulation's seed; each is undone after a while."""

    nodes: Pattern
    actions: Annotated[tuple[Action, ...], Meta(min_length=1)]
    count: Annotated[int, Meta(ge=1, le=10_000)]
    from_step: Natural | None = None
    to_step: Natural | None = None
    from_s: Seconds | None = None
    to_s: Seconds | None = None
    for_s: tuple[Seconds, Seconds] = (5.0, 20.0)
    """Shortest and longest."""
    seconds: Annotated[float, Meta(ge=0, le=1e9)] = 60.0
    """Most that a clock is moved, either way."""
    sync_ms: Annotated[float, Meta(gt=0, le=60_000)] = 50.0


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
    steps_at_least: Positive | None = None
    accepted_at_least: Positive | None = None
    accepted_per_honest_at_least: Positive | None = None
    cheats_evicted: bool | None = None
    cheats_accepted: Natural | None = None
    liars_overruled: bool | None = None
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
    absent: bool
    """Starts only when a `join` says so: true where the first thing that happens to its process is one."""
    engine: Engine = "torch"
    memory_mb: int | None = None
    attack: str | None = None
    link: Link = Link()
    settings: dict[str, Any] = {}
    disk_mb: int | None = None
    clock_ahead_s: float = 0.0
    meddled: bool = False
    """Whether something within its process is tampered with: its clock, or how fast its disk is."""


class Scenario(Part, frozen=True, kw_only=True):
    """A whole scenario file, checked."""

    name: str
    title: str = ""
    network: Literal["auto", "namespaces", "proxy"] = "auto"
    """How links and partitions are made: `auto` takes namespaces where it can."""
    run: RunPlan = RunPlan()
    link: dict[str, Link] = {}
    fleet: Annotated[tuple[FleetEntry, ...], Meta(min_length=1)]
    fault: tuple[Fault, ...] = ()
    random: tuple[RandomFaults, ...] = ()
    until: Until = Until()
    expect: Expect = Expect()

    def nodes(self) -> tuple[NodePlan, ...]:
        """Every node of the fleet in the order of the file; names are unique."""
        return tuple(self._plan(entry, name) for entry, _, name in self.named())

    def named(self) -> tuple[tuple[FleetEntry, int, str], ...]:
        """Every node as its entry, its number among that entry's nodes, and its name."""
        counts: Counter[str] = Counter()
        found = []
        for entry in self.fleet:
            base = entry.name or entry.cheat or entry.attack or entry.role
            for number in range(entry.count):
                found.append((entry, number, f"{base}-{counts[base]}"))
                counts[base] += 1
        return tuple(found)

    def declared(self) -> Scenario:
        """With as many nodes as the file says, whatever this machine holds."""
        fleet = tuple(msgspec.structs.replace(entry, count=entry.declared or entry.count) for entry in self.fleet)
        return msgspec.structs.replace(self, fleet=fleet)

    def matching(self, pattern: str) -> list[str]:
        """Names of the nodes that a pattern means."""
        return [name for _, _, name in self.named() if fnmatchcase(name, pattern)]

    def _plan(self, entry: FleetEntry, name: str) -> NodePlan:
        actions = [fault.action for fault in self.fault if fnmatchcase(name, fault.node)]
        drawn = {action for draw in self.random if fnmatchcase(name, draw.nodes) for action in draw.actions}
        process = next((action for action in actions if action in PROCESS_ACTIONS), None)
        full = "disk-full" in {*actions, *drawn}
        return NodePlan(
            name=name,
            role=entry.role,
            cheat=entry.cheat,
            threads=entry.threads,
            nice=entry.nice,
            engine=entry.engine,
            memory_mb=entry.memory_mb,
            absent=process == "join" or entry.join_at_s is not None,
            attack=entry.attack,
            link=self.link[entry.link] if entry.link in self.link else Link(),
            settings=entry.settings,
            disk_mb=entry.disk_mb or (DISK_MB if full else None),
            clock_ahead_s=entry.clock_ahead_s,
            meddled=bool(entry.clock_ahead_s or {"clock", "disk-slow"} & {*actions, *drawn}),
        )


DISK_MB: Final = 128
"""Size of the data directory of a node whose disk is to become full, unless the fleet says otherwise."""


def scenario_names() -> list[str]:
    """The scenarios that come with the program."""
    return sorted(path.stem for path in SCENARIO_DIR.glob("*.toml"))


def load_scenario(
    name_or_path: str | Path, overrides: Mapping[str, Any] | None = None, *, short: bool = False
) -> Scenario:
    """Read a scenario by name, or from a path that ends in `.toml`; `overrides` replaces values, table by table.

    A file that is a recipe is given the usual fleet. `short` takes its short form. Raises ConfigError that says what is
    wrong and where.
    """
    from simnet import recipe_scenario

    path = _find(name_or_path)
    table = _read(path)
    if recipe_scenario.is_recipe(table):
        table = recipe_scenario.around(path)
    return parse_scenario(table, name=path.stem, overrides=overrides, short=short)


def parse_scenario(
    table: Mapping[str, Any], *, name: str, overrides: Mapping[str, Any] | None = None, short: bool = False
) -> Scenario:
    """Check a scenario's tables, those of its short form too unless `overrides` replaces some. Raises ConfigError."""
    from simnet import scenario_checks

    _check_depth([table, overrides or {}], name)
    table = merge_tables(table, overrides or {})
    scenario_checks.check_names(table, name)
    changes = table.pop("short", {})
    if short:
        return _short_form(table, changes, name)
    scenario = _checked(table, name)
    if not overrides:
        try:
            shorter = _short_form(table, changes, name)
        except ConfigError as error:
            raise ConfigError(f"the short form cannot be run: {error.message}", hint=error.hint) from error
        scenario_checks.check_links_used(scenario, shorter)
    return scenario


def _short_form(table: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> Scenario:
    from simnet import scenario_checks

    replaced = {key: value for key, value in changes.items() if key != scenario_checks.UNASKED}
    table = merge_tables(table, replaced)
    scenario_checks.check_names(table, name)
    asked = table.get("expect", {})
    if isinstance(asked, Mapping):
        unasked = changes.get(scenario_checks.UNASKED, ())
        table["expect"] = {key: value for key, value in asked.items() if key not in unasked}
    return _checked(table, name, short=True)


def _checked(table: Mapping[str, Any], name: str, *, short: bool = False) -> Scenario:
    from simnet import scenario_checks

    try:
        scenario = msgspec.convert({**table, "name": name}, Scenario)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"scenario {name!r}: {_readable(error)}") from error
    scenario = _shortened(scenario) if short else scenario
    scenario_checks.check(scenario)
    return scenario


def _shortened(scenario: Scenario) -> Scenario:
    fleet = tuple(msgspec.structs.replace(entry, count=entry.short_count or entry.count) for entry in scenario.fleet)
    return msgspec.structs.replace(scenario, fleet=fleet)


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if text.endswith(".toml"):
        return Path(text)
    known = scenario_names()
    if text not in known:
        raise ConfigError(
            f"there is no scenario {text[:80]!r}{nearest(text, known)}",
            hint=f"name one of: {', '.join(known)}; or give the path of a .toml file",
        )
    return SCENARIO_DIR / f"{text}.toml"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(bytes_of(path, "a scenario", max_bytes=MAX_FILE_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the scenario {path} cannot be read: {error.strerror}",
            hint=f"check the path, or name one of: {', '.join(scenario_names())}",
        ) from error
    except (ValueError, RecursionError) as error:  # also of a number with more digits than Python reads
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _check_depth(tables: Collection[Any], name: str) -> None:
    """Refuse tables within tables so deep that nothing could walk through them."""
    for _ in range(MAX_DEPTH):
        inner = [one.values() if isinstance(one, Mapping) else one for one in tables]
        tables = [value for values in inner for value in values if isinstance(value, Mapping | list | tuple)]
        if not tables:
            return
    raise ConfigError(f"scenario {name!r}: tables or lists lie deeper than {MAX_DEPTH} within one another")


def merge_tables(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A table with other values in place of its own, tables within tables too."""
    merged = dict(table)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = merge_tables(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _readable(error: Exception) -> str:
    return str(error).replace("`$.", "`").replace("Object missing required field", "missing name")[:300]
