"""The nodes of a simulation as operating system processes: started, signalled, restarted, and ended without a trace.

Their command lines are `simnet.commands`' business, what lies between them is `simnet.network`'s. A node leads a
session of its own, so that Ctrl-C in the terminal reaches the simulation alone. Only own children and their
descendants are ever signalled.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from protocol.errors import MalformedError, NodeError
from protocol.identity import PeerId
from simnet.commands import Commands, Launch, ShortCommands, environment_of
from simnet.disks import Disks
from simnet.faults import Struck, undoes
from simnet.interrupts import shielded
from simnet.meddle import Control, write_control, write_hook
from simnet.member import Member
from simnet.network import LOOPBACK, make_network
from simnet.processes import ProcessKey, ProcessTable, send
from simnet.recipe_file import to_toml
from simnet.scenario import Fault, Scenario

log = logging.getLogger(__name__)

END_TIMEOUT_S = 3.5
TERM_AFTER_S = 2.5
KILLED_WITHIN_S = 1.0
LEAVE_TIMEOUT_S = 90.0
"""How long a node that has not shown a status yet is waited for, before it is asked to leave all the same."""
DISK_FULL = "disk-full"
SERVING = ("relay", "trainer", "hostile")
_PORTS = range(20_000, 32_000)  # below the range from which systems pick ports of outgoing connections


class Fleet:
    """All nodes of a simulation. Use as a context manager: on leaving it, every process has ended."""

    def __init__(self, scenario: Scenario, out_dir: Path, *, commands: Commands, seed: int = 0) -> None:
        self.run = ""
        self.left_behind: list[str] = []
        """Processes that outlived the node that started them and had to be killed at the close: node and pid."""
        self._scenario = scenario
        self._commands = commands
        self._seed = seed
        drawn = free_ports(2 * len(scenario.nodes()))
        ports = iter(drawn)
        self.members = {
            plan.name: Member(plan, out_dir / "nodes" / plan.name, "", next(ports), next(ports))
            for plan in scenario.nodes()
        }
        for name, member in self.members.items():
            member.directory.mkdir(parents=True)
            member.control = Control(clock_ahead_s=member.plan.clock_ahead_s)
            member.inside = partial(self._inside, name)
        serving = [member for member in self.members.values() if member.plan.role in SERVING]
        ports_of = {member.plan.name: (member.p2p_port, member.http_port) for member in serving}
        self._network = make_network(scenario, ports_of, partial(free_ports, taken=drawn))
        self._disks = Disks(
            {name: (one.data_dir, one.plan.disk_mb) for name, one in self.members.items() if one.plan.disk_mb}
        )
        self._short = ShortCommands()

    def __enter__(self) -> Fleet:
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """What this machine or user cannot do of what the scenario asks, and what is done instead."""
        return (*self._network.notes, *self._disks.notes)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap(self) -> Member:
        """The relay that starts first and that the others are told."""
        return self.of_role("relay")[0]

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.plan.role == role]

    def prepare(self, recipe: Path) -> None:
        """Make the network, every identity and the run of a recipe file. Raises NodeError with what a command said."""
        self._disks.start()
        self._network.start()
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            try:
                for member, peer_id in zip(
                    self.members.values(), pool.map(self._identify, self.members.values()), strict=True
                ):
                    member.peer_id = peer_id
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._short.end()
                raise
        for member in self.members.values():
            self._settle(member)
        trainer = self.of_role("trainer")[0]
        validators = [member.peer_id for member in self.of_role("validator")]
        create = self._commands.create_run(
            trainer.data_dir, recipe, name=self._scenario.run.name, validators=validators
        )
        self.run = self._short.last_line(create, environment_of(trainer.plan))

    def start(self, name: str) -> None:
        """Start a node's process; its output is appended to its log."""
        member = self.members[name]
        member.bury()
        (member.data_dir / "status.url").unlink(missing_ok=True)
        command = self._network.wrap(name, self._commands.start(member.plan, self._launch(member)))
        with member.log_path.open("ab") as output, shielded():
            member.process = subprocess.Popen(
                command,
                cwd=member.directory,
                env=environment_of(member.plan, hook=member.hook if member.plan.meddled else None),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            member.started_s, member.started_ms = time.monotonic(), time.time_ns() // 1_000_000
            member.ended_by = DISK_FULL if member.disk_full else ""
        self._disks.begun(name, [member.process.pid])
        if member.plan.nice:
            with suppress(ProcessLookupError, PermissionError):
                os.setpriority(os.PRIO_PROCESS, member.process.pid, member.plan.nice)
        log.info("node started name=%s pid=%d", name, member.process.pid)

    def apply(self, fault: Fault) -> Struck:
        """Do what a fault says. "not yet": a join while the node still leaves, or a leave before it takes signals.

        "missed", and nothing is done: the node is not there to be struck. Whatever undoes a fault is always done.
        """
        member = self.members[fault.node]
        if member.gone and not undoes(fault):
            return "missed"
        if fault.action in ("partition", "heal"):
            self._network.part(fault.node, fault.side)
        elif fault.action in ("clock", "disk-slow", "disk-normal"):
            self._meddle(member, fault)
        elif fault.action in ("disk-full", "disk-free"):
            self._fill(member, full=fault.action == "disk-full")
        elif fault.action == "join":
            return self._join(member)
        elif not member.running or member.process is None:
            return "struck" if undoes(fault) else "missed"
        elif fault.action == "leave" and not self._can_leave(member):
            return "not yet"
        else:
            self._signal(member, member.process.pid, fault)
        return "struck"

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
        with ExitStack() as stack:
            stack.callback(self._disks.close)
            stack.callback(self._network.close)
            stack.callback(self._kill_all)
            try:
                self._short.end()
                self._end_within(END_TIMEOUT_S)
            except KeyboardInterrupt:
                log.warning("interrupted again; killing the nodes")

    def log_tail(self, name: str, *, lines: int = 8) -> str:
        """The newest lines of a node's log, for messages."""
        try:
            with self.members[name].log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _identify(self, member: Member) -> str:
        printed = self._short.last_line(self._commands.create_identity(member.data_dir), environment_of(member.plan))
        try:
            return str(PeerId.parse(printed))
        except MalformedError as error:
            raise NodeError(
                f"the identity of {member.plan.name} could not be created: it printed {printed[:200]!r}"
            ) from error

    def _settle(self, member: Member) -> None:
        """What follows from a node's identity and place, written where it will look for it."""
        name, plan = member.plan.name, member.plan
        port = self._network.public_port(name, member.p2p_port)
        member.multiaddr = f"/ip4/{self._network.host(name)}/tcp/{port}/p2p/{member.peer_id}"
        if plan.settings:
            member.settings_path.write_text("".join(f"{line}\n" for line in to_toml(plan.settings)), encoding="utf-8")
        if plan.meddled:
            write_control(member.control_path, member.control)
            write_hook(member.hook, member.control_path)

    def _launch(self, member: Member) -> Launch:
        name, network = member.plan.name, self._network
        relays = [relay.multiaddr for relay in self.of_role("relay") if relay is not member]
        public = [network.public_port(name, port) for port in (member.p2p_port, member.http_port)]
        moved = public != [member.p2p_port, member.http_port]
        return Launch(
            data_dir=member.data_dir,
            run=self.run,
            bootstrap=self._bootstrap_of(member, relays),
            p2p_port=member.p2p_port,
            http_port=member.http_port,
            seed=self._seed,
            host=network.host(name),
            announce=f"/ip4/{LOOPBACK}/tcp/{public[0]}" if moved else "",
            public_url=f"https://{LOOPBACK}:{public[1]}" if moved else "",
            settings=member.settings_path if member.plan.settings else None,
        )

    def _inside(self, name: str) -> AbstractContextManager[None]:
        return self._network.inside(name)

    def _bootstrap_of(self, member: Member, relays: list[str]) -> tuple[str, ...]:
        """The first relay for everyone; that one asks the others when it comes back, and nobody at its first start."""
        if member is not self.bootstrap:
            return (self.bootstrap.multiaddr,)
        return tuple(relays) if member.process else ()

    def _join(self, member: Member) -> Struck:
        if member.running:
            return "not yet"
        self.start(member.plan.name)
        return "struck"

    def _can_leave(self, member: Member) -> bool:
        """Whether a node takes the signal as it should: before that, Python itself would end it with an error."""
        return member.answers or time.monotonic() - member.started_s > LEAVE_TIMEOUT_S

    def _meddle(self, member: Member, fault: Fault) -> None:
        """Change what is wrong with a node's clock or disk; its process sees it within a moment."""
        if fault.action == "clock":
            ahead_s = member.plan.clock_ahead_s if fault.seconds is None else fault.seconds
            member.control = msgspec.structs.replace(member.control, clock_ahead_s=ahead_s)
        else:
            member.control = msgspec.structs.replace(member.control, sync_ms=fault.sync_ms or 0.0)
        write_control(member.control_path, member.control)

    def _fill(self, member: Member, *, full: bool) -> None:
        """Take a disk's room away, or give it back: then a node that ended for want of it is started again."""
        self.reap()
        member.disk_full = full
        if full:
            self._disks.fill(member.plan.name, member.pids)
            member.ended_by = member.ended_by or DISK_FULL  # whatever it ends by from now on
            return
        self._disks.free(member.plan.name, member.pids)
        if member.process is None or member.ended_by != DISK_FULL:
            return
        if member.running:
            member.ended_by = ""
        else:
            self.start(member.plan.name)

    def _signal(self, member: Member, pid: int, fault: Fault) -> None:
        action = "kill" if fault.action == "restart" else fault.action
        log.info("fault name=%s action=%s", member.plan.name, fault.action)
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
            leaves, member.ended_by = member.ended_by == "leave", "close"
            self._tell(member, signal.SIGCONT)
            if not leaves:  # a second signal would end it at once
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
        self._note_left_behind()
        for key in self._left_over():
            log.warning("left-over process had to be killed pid=%d", key.pid)
            send(key.pid, signal.SIGKILL)
        _wait_until(lambda: not self._left_over(), time.monotonic() + KILLED_WITHIN_S)
        for member in self.members.values():
            if member.process is not None:
                member.process.wait()

    def _note_left_behind(self) -> None:
        """Only of nodes that ended by themselves: who is killed cannot clean up."""
        table = ProcessTable()
        for member in self.members.values():
            if member.process is not None and member.process.returncode is not None and member.ended_by != "kill":
                self.left_behind += [f"{member.plan.name}: pid {key.pid}" for key in table.alive(member.offspring)]

    def _tell(self, member: Member, number: signal.Signals) -> None:
        if member.process is not None:
            send(member.process.pid, number, group=number in (signal.SIGCONT, signal.SIGKILL))

    def _running(self) -> list[Member]:
        return [member for member in self.members.values() if member.running]

    def _left_over(self) -> set[ProcessKey]:
        return ProcessTable().alive(key for member in self.members.values() for key in member.offspring)


def free_ports(count: int, *, taken: Collection[int] = ()) -> list[int]:
    """Ports that nothing listens on now, all different, and none of those that somebody is to listen on."""
    found: list[int] = []
    for port in random.sample(_PORTS, k=len(_PORTS)):
        if len(found) == count:
            break
        if port in taken:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            found.append(port)
    if len(found) < count:
        raise NodeError(f"fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop}")
    return found


def _wait_until(done: Callable[[], bool], deadline: float) -> None:
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
