"""The nodes of a simulation as operating system processes: started, signalled, restarted, and ended without a trace.

`Commands` is the seam to the program under test: `CliCommands` is the real command line, tests give their own.
A node leads a session of its own, so that Ctrl-C in the terminal reaches the simulation alone. Only own children and
their descendants are ever signalled.
"""

from __future__ import annotations

import logging
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from protocol.errors import ConfigError, MalformedError, NodeError
from protocol.identity import PeerId
from simnet.processes import ProcessKey, ProcessTable, Usage, send
from simnet.scenario import Action, NodePlan, Scenario

log = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
TERM_AFTER_S = 3.0
KILLED_WITHIN_S = 2.0
COMPUTE_NODE_MB = 350
RELAY_MB = 90
_HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)  # below the range from which systems pick ports of outgoing connections


@dataclass(frozen=True)
class Launch:
    """What a node's command line needs beside its plan."""

    data_dir: Path
    run: str
    bootstrap: tuple[str, ...]
    p2p_port: int
    http_port: int
    seed: int

    @property
    def listen(self) -> str:
        return f"/ip4/{_HOST}/tcp/{self.p2p_port}"


class Commands(Protocol):
    """Builds the command lines of the program under test."""

    def create_identity(self, data_dir: Path) -> list[str]:
        """Print the node's peer id as the last line of stdout."""

    def create_run(self, trainer_dir: Path, recipe: Path, *, name: str, validators: Sequence[str]) -> list[str]:
        """Print the run's address as the last line of stdout."""

    def start(self, plan: NodePlan, launch: Launch) -> list[str]:
        """Run the node until it ends or is told to."""


class CliCommands:
    """The real command line, run by this interpreter."""

    _PYTHON = (sys.executable, "-P", "-m")  # -P: nothing that lies in the working directory is taken for a module

    def create_identity(self, data_dir: Path) -> list[str]:
        return [*self._PYTHON, "cli", "id", "--data-dir", str(data_dir)]

    def create_run(self, trainer_dir: Path, recipe: Path, *, name: str, validators: Sequence[str]) -> list[str]:
        flags = ["--recipe", str(recipe), "--name", name, "--data-dir", str(trainer_dir)]
        for validator in validators:
            flags += ["--validator", validator]
        return [*self._PYTHON, "cli", "run", "create", *flags]

    def start(self, plan: NodePlan, launch: Launch) -> list[str]:
        flags = ["--run", launch.run, "--data-dir", str(launch.data_dir), "--join-timeout-s", "0"]
        for address in launch.bootstrap:
            flags += ["--bootstrap", address]
        if plan.role == "relay":
            flags += ["--listen", launch.listen]
        else:
            flags += ["--threads", str(plan.threads)]
        if plan.engine != "torch":
            flags += ["--engine", plan.engine]
        if plan.role in ("relay", "trainer"):
            flags += ["--http-host", _HOST, "--http-port", str(launch.http_port)]
        if plan.cheat:
            return [*self._PYTHON, "simnet.zoo", plan.cheat, "--cheat-seed", str(launch.seed), *flags]
        return [*self._PYTHON, "cli", "--role", plan.role, *flags]


@dataclass
class Member:
    """One node of the fleet."""

    plan: NodePlan
    directory: Path
    peer_id: str
    p2p_port: int
    http_port: int
    process: subprocess.Popen[bytes] | None = None
    ended_by: str = ""
    """What made the latest process end: a fault's action, `close`, or nothing that we did."""
    offspring: set[ProcessKey] = field(default_factory=set)
    """Every descendant that was ever seen and may still run."""
    usage: Usage = field(default_factory=Usage)
    """Of all its processes, in all its lives."""

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        return self.directory / "log.txt"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def multiaddr(self) -> str:
        return f"/ip4/{_HOST}/tcp/{self.p2p_port}/p2p/{self.peer_id}"


class Fleet:
    """All nodes of a simulation. Use as a context manager: on leaving it, every process has ended."""

    def __init__(self, scenario: Scenario, out_dir: Path, *, commands: Commands, seed: int = 0) -> None:
        self.run = ""
        self._scenario = scenario
        self._commands = commands
        self._seed = seed
        ports = iter(free_ports(2 * len(scenario.nodes())))
        self.members = {
            plan.name: Member(plan, out_dir / "nodes" / plan.name, "", next(ports), next(ports))
            for plan in scenario.nodes()
        }
        for member in self.members.values():
            member.directory.mkdir(parents=True)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap(self) -> Member:
        """The relay that starts first and that the others are told."""
        return self.of_role("relay")[0]

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.plan.role == role]

    def prepare(self, recipe: Path) -> None:
        """Create every identity and the run of a recipe file. Raises NodeError with what the command printed."""
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            for member, peer_id in zip(
                self.members.values(), pool.map(self._identify, self.members.values()), strict=True
            ):
                member.peer_id = peer_id
        trainer = self.of_role("trainer")[0]
        validators = [member.peer_id for member in self.of_role("validator")]
        create = self._commands.create_run(
            trainer.data_dir, recipe, name=self._scenario.run.name, validators=validators
        )
        self.run = _last_line(create, _environment(trainer.plan))

    def start(self, name: str) -> None:
        """Start a node's process; its output is appended to its log."""
        member = self.members[name]
        (member.data_dir / "status.url").unlink(missing_ok=True)
        command = self._commands.start(member.plan, self._launch(member))
        with member.log_path.open("ab") as output:
            member.process = subprocess.Popen(
                command,
                cwd=member.directory,
                env=_environment(member.plan),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        member.ended_by = ""
        if member.plan.nice:
            with suppress(ProcessLookupError, PermissionError):
                os.setpriority(os.PRIO_PROCESS, member.process.pid, member.plan.nice)
        log.info("node started name=%s pid=%d", name, member.process.pid)

    def apply(self, name: str, action: Action) -> bool:
        """Do what a fault says to a node; False while it cannot be done yet (a join while the node still leaves)."""
        member = self.members[name]
        if action == "join":
            if member.running:
                return False
            self.start(name)
            return True
        if member.running and member.process is not None:
            self._signal(member, member.process.pid, action)
        return True

    def reap(self) -> None:
        """Look who runs and what it uses, and remember their descendants."""
        table = ProcessTable()
        for member in self.members.values():
            member.offspring = table.alive(member.offspring)
            if member.running and member.process is not None:
                member.offspring |= table.descendants(member.process.pid)
            own = table.key(member.process.pid) if member.process is not None else None
            member.usage.note(table, {*member.offspring, *([own] if own else [])})

    def close(self) -> None:
        """End every process: SIGINT, then SIGTERM, then SIGKILL, within `END_TIMEOUT_S`. Ctrl-C meanwhile kills now."""
        try:
            self._end_within(END_TIMEOUT_S)
        except KeyboardInterrupt:
            log.warning("interrupted again; killing the nodes")
        finally:
            self._kill_all()

    def log_tail(self, name: str, *, lines: int = 8) -> str:
        """The newest lines of a node's log, for messages."""
        try:
            with self.members[name].log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _identify(self, member: Member) -> str:
        printed = _last_line(self._commands.create_identity(member.data_dir), _environment(member.plan))
        try:
            return str(PeerId.parse(printed))
        except MalformedError as error:
            raise NodeError(
                f"the identity of {member.plan.name} could not be created: it printed {printed[:200]!r}"
            ) from error

    def _launch(self, member: Member) -> Launch:
        relays = [relay.multiaddr for relay in self.of_role("relay") if relay is not member]
        return Launch(
            data_dir=member.data_dir,
            run=self.run,
            bootstrap=self._bootstrap_of(member, relays),
            p2p_port=member.p2p_port,
            http_port=member.http_port,
            seed=self._seed,
        )

    def _bootstrap_of(self, member: Member, relays: list[str]) -> tuple[str, ...]:
        """The first relay for everyone; that one asks the others when it comes back, and nobody at its first start."""
        if member is not self.bootstrap:
            return (self.bootstrap.multiaddr,)
        return tuple(relays) if member.process else ()

    def _signal(self, member: Member, pid: int, action: Action) -> None:
        log.info("fault name=%s action=%s", member.plan.name, action)
        if action in ("kill", "leave"):
            member.ended_by = action
        if action == "leave":
            send(pid, signal.SIGINT)
            return
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[action]
        self.reap()
        send(pid, number, group=True)
        for key in ProcessTable().alive(member.offspring):
            send(key.pid, number)
        if action == "kill" and member.process is not None:
            member.process.wait()

    def _end_within(self, timeout_s: float) -> None:
        self.reap()
        started = time.monotonic()
        for member in self._running():
            member.ended_by = member.ended_by or "close"
            self._tell(member, signal.SIGCONT)
            self._tell(member, signal.SIGINT)
        _wait_until(lambda: not self._running(), started + TERM_AFTER_S)
        self.reap()
        for member in self._running():
            self._tell(member, signal.SIGTERM)
        _wait_until(lambda: not self._running() and not self._left_over(), started + timeout_s)

    def _kill_all(self) -> None:
        self.reap()
        for member in self._running():
            log.warning("node had to be killed name=%s", member.plan.name)
            self._tell(member, signal.SIGKILL)
        for key in self._left_over():
            log.warning("left-over process had to be killed pid=%d", key.pid)
            send(key.pid, signal.SIGKILL)
        _wait_until(lambda: not self._left_over(), time.monotonic() + KILLED_WITHIN_S)
        for member in self.members.values():
            if member.process is not None:
                member.process.wait()

    def _tell(self, member: Member, number: signal.Signals) -> None:
        if member.process is not None:
            send(member.process.pid, number, group=number in (signal.SIGCONT, signal.SIGKILL))

    def _running(self) -> list[Member]:
        return [member for member in self.members.values() if member.running]

    def _left_over(self) -> set[ProcessKey]:
        return ProcessTable().alive(key for member in self.members.values() for key in member.offspring)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now, all different."""
    found: list[int] = []
    for port in random.sample(_PORTS, k=len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_HOST, port))
            found.append(port)
    if len(found) < count:
        raise NodeError(f"fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop}")
    return found


def needed_memory_mb(scenario: Scenario) -> int:
    """Estimate of the memory that a scenario's nodes take together."""
    usual = {"relay": RELAY_MB}
    return sum(plan.memory_mb or usual.get(plan.role, COMPUTE_NODE_MB) for plan in scenario.nodes())


def check_memory(scenario: Scenario, available_mb: int | None) -> None:
    """Refuse a scenario that this machine has no room for. `None`: the system does not say."""
    needed = needed_memory_mb(scenario)
    if available_mb is not None and needed > available_mb:
        raise ConfigError(
            f"scenario {scenario.name!r} needs about {needed} MB of memory for {len(scenario.nodes())} nodes; "
            f"{available_mb} MB are free",
            hint="close other programs, or lower `count` in the scenario's [[fleet]] entries",
        )


def available_memory_mb() -> int | None:
    """Memory that new processes can have, by the system and by the control group this process is in."""
    figures = [_meminfo_available_mb(), _cgroup_free_mb()]
    known = [figure for figure in figures if figure is not None]
    return min(known) if known else None


def _meminfo_available_mb() -> int | None:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) // 1024
    return None


def _cgroup_free_mb() -> int | None:
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no limit is written as `max`
        limit, used = (int((root / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
        return (limit - used + int(stat["inactive_file"])) // 2**20  # cached files make room when asked
    return None


def _environment(plan: NodePlan) -> dict[str, str]:
    """The caller's without settings of nodes; this program is found wherever it lies; threads are bounded."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTELLECT_")}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(plan.threads),
    }


def _last_line(command: list[str], env: dict[str, str]) -> str:
    """The last line that a short command prints. Raises NodeError when it fails or prints nothing."""
    shown = shlex.join(command)[:500]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=SETUP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"a command took longer than {SETUP_TIMEOUT_S:.0f} s: {shown}") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise NodeError(f"a command ended with code {done.returncode}: {done.stderr.strip()[-1500:]}", hint=shown)
    return lines[-1].strip()


def _wait_until(done: Callable[[], bool], deadline: float) -> None:
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
