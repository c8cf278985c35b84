"""Swarms of real nodes for `python -m bench swarm`, and what each node has used of its link and its processor so far.

Every node is a process of its own in a network namespace of its own (root, Linux), so bytes are its interface's: HTTP,
TLS, the DHT, TCP and IP headers. Contributors are light (simnet.light): one engine answers for all of them, and stands
outside of what is counted. Not a benchmark itself.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from protocol.errors import NodeError
from simnet import netns
from simnet.commands import CliCommands, Launch, environment_of
from simnet.fleet import Fleet
from simnet.interrupts import interruptible, shielded
from simnet.member import Member
from simnet.memory import available_memory_mb, check_memory
from simnet.processes import ProcessTable
from simnet.recipe_file import write_recipe
from simnet.scenario import NodePlan, Scenario, parse_scenario

RELAYS: Final = 2
DEVICE: Final = "cable"
LIGHT_NODE_MB: Final = 130
ROLLOUTS: Final = 8
"""Of one submission: one group."""
MANY_STEPS: Final = 100_000
START_TIMEOUT_S: Final = 600.0
LOOK_S: Final = 1.0
STEP_LOOK_S: Final = 0.2
STEP_TIMEOUT_S: Final = 120.0
STATUS_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Shape:
    """How many contributors, and what each of them does in a step."""

    contributors: int
    submissions_each: int
    step_s: float
    """How long a contributor takes over its submissions of one step."""

    @property
    def rollouts_per_step(self) -> int:
        return self.contributors * self.submissions_each * ROLLOUTS


@dataclass
class Use:
    """What one node has used since its start."""

    at_s: float
    bytes_in: int
    bytes_out: int
    packets: int
    cpu_s: float
    """Of the network process."""
    compute_cpu_s: float
    requests: Counter[str]
    """HTTP requests that it made."""
    dht_messages: int
    """That it sent: questions, and answers to others'."""
    policy_bytes: int
    """Of checkpoints, as they came."""
    private_mb: float
    step: int


class LightCommands(CliCommands):
    """The real command line, but for contributors, whose engine is elsewhere."""

    def __init__(self, engine: Path, *, every_s: float) -> None:
        self._engine = engine
        self._every_s = every_s

    def _module(self, plan: NodePlan, launch: Launch) -> list[str]:
        if plan.role == "inference":
            return ["simnet.light", str(self._engine), str(self._every_s)]
        return super()._module(plan, launch)


class Swarm:
    """One swarm under way."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def use(self) -> dict[str, Use]:
        """What every node has used, by its name. Raises NodeError when one has ended."""
        return {name: self._use_of(member) for name, member in self._fleet.members.items()}

    def use_at_step(self) -> dict[str, Use]:
        """The same, as soon as the trainer opens another step: between two such looks lie whole steps."""
        first = self._step()
        deadline_s = time.monotonic() + STEP_TIMEOUT_S
        while self._step() == first:
            if time.monotonic() > deadline_s:
                raise NodeError(f"step {first} did not end within {STEP_TIMEOUT_S:g} s")
            time.sleep(STEP_LOOK_S)
        return self.use()

    def _step(self) -> int | None:
        step: int | None = (self._status(self._fleet.of_role("trainer")[0]) or {}).get("step")
        return step

    def wait(self, done: Callable[[dict[str, dict[str, Any]]], bool], *, timeout_s: float, what: str) -> None:
        """Until the nodes' status, by name, says so. Raises NodeError."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._fleet.reap()
            status = {name: self._status(member) or {} for name, member in self._fleet.members.items()}
            if done(status):
                return
            if time.monotonic() > deadline_s:
                states = Counter(f"{one.get('role')}: {one.get('activity')}" for one in status.values())
                raise NodeError(f"no {what} within {timeout_s:g} s; {states.most_common(6)}")
            time.sleep(LOOK_S)

    def _status(self, member: Member) -> dict[str, Any] | None:
        if not member.running:
            raise NodeError(f"{member.plan.name} ended:\n{self._fleet.log_tail(member.plan.name)}")
        try:
            parts = urlsplit((member.data_dir / "status.url").read_text(encoding="ascii").strip())
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=STATUS_TIMEOUT_S)
            with member.inside():
                connection.connect()
            connection.request("GET", parts.path)
            found: dict[str, Any] = msgspec.json.decode(connection.getresponse().read())
            connection.close()
        except (OSError, http.client.HTTPException, msgspec.MsgspecError):
            return None
        return found

    def _use_of(self, member: Member) -> Use:
        status = self._status(member)
        if status is None or member.process is None:
            raise NodeError(f"{member.plan.name} shows no status")
        pid = member.process.pid
        table = ProcessTable()
        own = table.key(pid)
        details, discovery = status["details"], status["details"].get("discovery", {})
        received, packets_in, sent, packets_out = interface(pid, DEVICE)
        return Use(
            at_s=time.monotonic(),
            bytes_in=received,
            bytes_out=sent,
            packets=packets_in + packets_out,
            cpu_s=sum(row.cpu_s for row in table.rows([own] if own else [])),
            compute_cpu_s=sum(row.cpu_s for row in table.rows(table.descendants(pid))),
            requests=Counter(details.get("requests", {})),
            dht_messages=sum(discovery.get("asked", {}).values()) + sum(discovery.get("answered", {}).values()),
            policy_bytes=details.get("patched_bytes", 0) + details.get("full_bytes", 0),
            private_mb=_private_mb(pid),
            step=status["step"] or 0,
        )


@contextmanager
def running(shape: Shape, out: Path) -> Iterator[Swarm]:
    """A swarm in which every contributor has handed in work. Raises NodeError where it cannot be."""
    reason = netns.why_not()
    if reason:
        raise NodeError(f"bytes are counted at network namespaces, which cannot be had here: {reason}")
    scenario = scenario_of(shape)
    check_memory(scenario, available_memory_mb())
    write_recipe(scenario.run, out / "recipe.toml", seed=0)
    engine = out / "engine"
    every_s = shape.step_s / shape.submissions_each
    with (
        interruptible(),
        _shared_engine(engine, scenario.nodes()[0]),
        Fleet(scenario, out, commands=LightCommands(engine, every_s=every_s)) as fleet,
    ):
        fleet.prepare(out / "recipe.toml")
        fleet.start(fleet.bootstrap.plan.name)
        swarm = Swarm(fleet)
        for name in fleet.members:
            if name != fleet.bootstrap.plan.name:
                fleet.start(name)
        swarm.wait(_all_work, timeout_s=START_TIMEOUT_S, what="accepted submission of every contributor")
        yield swarm


def scenario_of(shape: Shape) -> Scenario:
    """The demo's run with small submissions, without evaluations and without an end."""
    overrides = {
        "batch": {"rollouts_per_step": shape.rollouts_per_step, "total_steps": MANY_STEPS},
        "rollout": {"prompts_per_submission": 1, "max_submissions_per_step": max(16, 2 * shape.submissions_each)},
        "evaluation": {"every_steps": 0},
    }
    fleet = [
        {"role": "trainer", "link": "wire"},
        {"role": "relay", "count": RELAYS},
        {"role": "validator"},
        {"role": "inference", "name": "node", "count": shape.contributors, "memory_mb": LIGHT_NODE_MB},
    ]
    table = {
        "run": {"recipe": "demo", "name": "swarm", "overrides": overrides},
        "link": {"wire": {"up_mbit": 10_000}},  # no limit, but every node is given a network of its own
        "fleet": fleet,
    }
    return parse_scenario(table, name="swarm")


def interface(pid: int, device: str) -> tuple[int, int, int, int]:
    """Bytes and packets in, bytes and packets out, of a device where a process lies."""
    for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            numbers = [int(number) for number in counts.split()]
            return numbers[0], numbers[1], numbers[8], numbers[9]
    raise NodeError(f"process {pid} has no network device {device}")


def _all_work(status: dict[str, dict[str, Any]]) -> bool:
    return all(one.get("accepted") for name, one in status.items() if name.startswith("node-"))


def _private_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1000
    return 0.0


@contextmanager
def _shared_engine(socket: Path, plan: NodePlan) -> Iterator[None]:
    command: Sequence[str] = [sys.executable, "-P", "-m", "simnet.light.shared_compute", str(socket)]
    with shielded(), (socket.parent / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment_of(plan),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        if process.stdout is None or not process.stdout.readline():
            raise NodeError("the shared engine ended as it started", hint=f"read {socket.parent / 'engine.log'}")
        yield
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
