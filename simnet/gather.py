"""What the nodes say of themselves, read from their loopback status pages, and what became of it: the recording.

A status is hostile until checked: its size and the time to read it are bounded, and it must have the expected form.
A recording is plain data; the live view and the report are made from it alone.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from p2p.canary import core_wait_s
from simnet.fleet import Fleet, Member
from simnet.processes import ProcessTable
from simnet.sampling import SAMPLE_S, ProcessSeen, Pulse, look, processes_within
from simnet.scenario import Action, Scenario

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 1.0
MAX_STATUS_BYTES = 8 * 2**20
MAX_SAMPLES = 1000
MAX_SEGMENTS = 20_000
MAX_AGAINST = 200
LEFT_AFTER_S = 10.0
MAX_LEFT_BEHIND = 100
FINAL_STATUS_FILE = "status-final.json"


class RelaySeen(Struct):
    """A relay as a node sees it."""

    peer_id: str
    url: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    failures: int = 0


class Contributor(Struct):
    """A contributor as the trainer's ledger has it."""

    peer_id: str
    accepted: int = 0
    rejected: dict[str, int] = {}
    standing: str = "active"
    reason: str | None = ""
    credits: float = 0.0


class VerdictRow(Struct):
    """A verdict as the trainer took it up."""

    submission: str
    contributor: str
    step: int
    outcome: str
    hard: bool = False
    reason: str = ""
    mean_reward: float | None = None


class PassSeen(Struct):
    """One pass@k of an evaluation, with the ends of its 95 % interval."""

    k: int
    value: float
    low: float
    high: float


class EvaluationSeen(Struct):
    """What the trainer measured of one policy on held-out prompts."""

    step: int
    pass_at: list[PassSeen] = []
    reward: float | None = None


class LoopSeen(Struct):
    """How punctual a node's event loop was since its start, and how many tasks it has."""

    pulses: int = 0
    p50_ms: int = 0
    p99_ms: int = 0
    worst_ms: int = 0
    tasks: int = 0


class DiscoverySeen(Struct):
    """The part of discovery's account that is read."""

    loop: LoopSeen = field(default_factory=LoopSeen)


class Details(Struct):
    """What the roles add; each fills its own."""

    discovery: DiscoverySeen = field(default_factory=DiscoverySeen)

    total_steps: int | None = None
    rewards: list[tuple[int, float | None]] = []
    evaluations: list[EvaluationSeen] = []
    wait_s: float = 0.0
    train_s: float = 0.0
    contributors: list[Contributor] = []
    verdicts: list[VerdictRow] = []
    bytes_in: int = 0
    bytes_out: int = 0
    patched_bytes: int = 0
    full_bytes: int = 0
    saved_bytes: int = 0


class Status(Struct):
    """The part of a node's status page that a simulation reads."""

    peer_id: str
    pid: int
    state: str
    activity: str = ""
    since_ms: int = 0
    step: int | None = None
    checkpoint_step: int | None = None
    accepted: int = 0
    pending: int = 0
    rejected: dict[str, int] = {}
    relays: list[RelaySeen] = []
    timeline: list[tuple[int, str, str]] = []
    details: Details = field(default_factory=Details)


class Life(Struct):
    """One process of a node, from its start to its end."""

    pid: int
    started_ms: int
    ended_ms: int | None = None
    exit_code: int | None = None
    ended_by: str = ""
    """A fault's action, `close`, or nothing that the simulation did."""
    status: Status | None = None
    """The last that was read."""
    final: bool = False
    """Whether that is what the node wrote as it ended."""


class NodeRecord(Struct):
    """Everything that was seen of one node."""

    name: str
    role: str
    peer_id: str
    cheat: str | None = None
    lives: list[Life] = []
    timeline: list[tuple[int, str, str]] = []
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    processes: list[ProcessSeen] = []

    @property
    def status(self) -> Status | None:
        """The newest status of any of its lives."""
        return next((life.status for life in reversed(self.lives) if life.status), None)

    @property
    def running(self) -> bool:
        return bool(self.lives) and self.lives[-1].ended_ms is None


class FaultMark(Struct):
    """A fault that struck."""

    at_ms: int
    step: int
    node: str
    action: Action


class Sample(Struct):
    """Where the run stood at one moment."""

    at_ms: int
    step: int
    accepted: int
    rejected: int


Outcome = Literal["running", "finished", "reached", "timeout", "interrupted", "failed"]


class Recording(Struct):
    """A simulation as it was seen: all that the report is made from. Times are wall-clock milliseconds."""

    scenario: Scenario
    run: str
    seed: int
    started_ms: int
    nodes: list[NodeRecord]
    over_ms: int | None = None
    """When the outcome was known; nodes may last a little longer."""
    ended_ms: int | None = None
    outcome: Outcome = "running"
    problem: str = ""
    """Why the simulation could not go on."""
    faults: list[FaultMark] = []
    samples: list[Sample] = []
    left_behind: list[str] = []
    """Processes that outlived the node that started them."""
    notes: list[str] = []
    """What this machine could not do of what the scenario asks, and what was done instead."""
    late_p99_ms: int | None = None
    """How late this machine woke up a thread that only sleeps: 99 % of the times by no more."""
    core_waits_known: bool = False
    """Whether this machine tells for how long a thread waited for a core, which nodes take off their loops' lag."""
    rewards: dict[int, float | None] = {}
    """Mean reward by step; the trainer itself shows its newest steps only."""
    against: list[VerdictRow] = []
    """The first verdicts that did not accept; the trainer itself shows its newest verdicts only."""

    @property
    def trainer(self) -> Details:
        """The trainer's own account; empty until it was read."""
        status = next((node.status for node in self.nodes if node.role == "trainer"), None)
        return status.details if status else Details()

    def evicted(self, node: NodeRecord) -> bool:
        """Whether the ledger has a node evicted."""
        return any(one.peer_id == node.peer_id and one.standing == "evicted" for one in self.trainer.contributors)

    @property
    def step(self) -> int:
        """The newest step that any node knows of."""
        return max((node.status.step or 0 for node in self.nodes if node.status), default=0)

    @property
    def accepted(self) -> int:
        return sum(contributor.accepted for contributor in self.trainer.contributors)

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected submissions by reason, over all contributors."""
        counts: dict[str, int] = {}
        for contributor in self.trainer.contributors:
            for reason, count in contributor.rejected.items():
                counts[reason] = counts.get(reason, 0) + count
        return counts


class Gatherer:
    """Fills a recording from a fleet, one round at a time."""

    def __init__(self, fleet: Fleet, recording: Recording) -> None:
        self.recording = recording
        self._fleet = fleet
        self._records = {record.name: record for record in recording.nodes}
        self._seen_against: set[tuple[str, str]] = set()
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="status")
        self._next_look_s = 0.0
        self._pulse = Pulse()
        self._pulse.start()

    def close(self) -> None:
        self._pulse.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def poll(self) -> None:
        """Read every running node's status and note who started and who ended; takes about `READ_TIMEOUT_S` at most."""
        members = list(self._fleet.members.values())
        statuses = self._pool.map(_read_member, members)
        for member, status in zip(members, statuses, strict=True):
            self._note(member, self._records[member.plan.name], status)
        if time.monotonic() >= self._next_look_s:
            self._look(members)
            self._next_look_s = time.monotonic() + SAMPLE_S
        self._sample()

    def look_behind(self) -> None:
        """Once every node has ended: which processes have not, or had to be made to."""
        directories = {member.plan.name: member.directory for member in self._fleet.members.values()}
        left = [f"{name}: pid {pid}" for name, pids in processes_within(directories).items() for pid in pids]
        self._keep_left_behind([*self._fleet.left_behind, *left])

    def read_final(self) -> None:
        """Take over what nodes wrote about themselves as they ended."""
        for member in self._fleet.members.values():
            record = self._records[member.plan.name]
            status = _read_final(member.data_dir / FINAL_STATUS_FILE)
            if status and record.lives and record.lives[-1].pid == status.pid:
                record.lives[-1].status, record.lives[-1].final = status, True
                extend_timeline(record.timeline, status.timeline)
        self._sample()

    def _note(self, member: Member, record: NodeRecord, status: Status | None) -> None:
        if member.process is None:
            return
        record.cpu_s, record.peak_memory_bytes = member.usage.cpu_s, member.usage.peak_bytes
        if not record.lives or record.lives[-1].pid != member.process.pid:
            record.lives.append(Life(pid=member.process.pid, started_ms=now_ms()))
        life = record.lives[-1]
        if status and status.pid == life.pid:
            life.status = status
            extend_timeline(record.timeline, status.timeline)
        if life.ended_ms is None and (code := member.process.poll()) is not None:
            life.ended_ms, life.exit_code, life.ended_by = now_ms(), code, member.ended_by

    def _look(self, members: list[Member]) -> None:
        """What every process takes of the machine, and whether any has outlived its node."""
        table = ProcessTable()
        for member in members:
            record = self._records[member.plan.name]
            if member.process is None or not record.running:
                continue
            own = table.key(member.process.pid)
            keys = {*member.offspring, *table.descendants(member.process.pid), *([own] if own else [])}
            status = record.lives[-1].status
            tasks = status.details.discovery.loop.tasks if status else 0
            look(table, keys, record.processes, network_pid=member.process.pid, tasks=tasks or None)
        self.recording.late_p99_ms = self._pulse.late_ms(0.99)
        self.recording.core_waits_known = self.recording.core_waits_known or core_wait_s() > 0
        self._look_for_left_over(members)

    def _look_for_left_over(self, members: list[Member]) -> None:
        ended = {
            member.plan.name: member.directory
            for member in members
            if (lives := self._records[member.plan.name].lives)
            and (lives[-1].ended_ms or now_ms()) < now_ms() - LEFT_AFTER_S * 1000
        }
        found = processes_within(ended) if ended else {}
        self._keep_left_behind([f"{name}: pid {pid}" for name, pids in found.items() for pid in pids])

    def _keep_left_behind(self, found: list[str]) -> None:
        left = self.recording.left_behind
        left += [one for one in dict.fromkeys(found) if one not in left][: MAX_LEFT_BEHIND - len(left)]

    def _sample(self) -> None:
        recording = self.recording
        self._keep_against(recording.trainer.verdicts)
        recording.rewards.update(recording.trainer.rewards)
        samples = recording.samples
        samples.append(Sample(now_ms(), recording.step, recording.accepted, sum(recording.rejected.values())))
        if len(samples) > MAX_SAMPLES:
            del samples[1:-1:2]

    def _keep_against(self, verdicts: list[VerdictRow]) -> None:
        for verdict in verdicts:
            key = verdict.submission, verdict.reason
            if verdict.outcome != "accept" and key not in self._seen_against and len(self._seen_against) < MAX_AGAINST:
                self._seen_against.add(key)
                self.recording.against.append(verdict)


def extend_timeline(timeline: list[tuple[int, str, str]], newest: list[tuple[int, str, str]]) -> None:
    """Append what is younger than the end of a node's timeline; the oldest goes when it grows too long."""
    last_ms = timeline[-1][0] if timeline else 0
    timeline.extend(entry for entry in newest if entry[0] > last_ms)
    del timeline[:-MAX_SEGMENTS]


def parse_status(data: bytes) -> Status | None:
    """A status page's content, or None where it has another form."""
    try:
        return msgspec.json.decode(data, type=Status, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("a status cannot be read error=%s", str(error)[:200])
        return None


def now_ms() -> int:
    """Wall-clock time, to lie beside the times in the nodes' own accounts."""
    return time.time_ns() // 1_000_000


def _read_member(member: Member) -> Status | None:
    if not member.running:
        return None
    try:
        url = (member.data_dir / "status.url").read_text(encoding="ascii")[:256].strip()
        return parse_status(_fetch(url, member.inside))
    except (OSError, ValueError, http.client.HTTPException):  # not up yet, stopped, or just ended
        return None


def _fetch(url: str, inside: Callable[[], AbstractContextManager[None]]) -> bytes:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname != "127.0.0.1":
        raise ValueError(f"not a loopback status address: {url!r}")
    deadline = time.monotonic() + READ_TIMEOUT_S
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=READ_TIMEOUT_S)
    try:
        with inside():
            connection.connect()
        connection.request("GET", parts.path)
        return _read_bounded(connection.getresponse(), deadline)
    finally:
        connection.close()


def _read_bounded(response: http.client.HTTPResponse, deadline: float) -> bytes:
    body = bytearray()
    while block := response.read1(1 << 16):
        body += block
        if len(body) > MAX_STATUS_BYTES or time.monotonic() > deadline:
            raise ValueError("a status that is too large or comes too slowly")
    if response.status != 200:
        raise ValueError(f"status code {response.status}")
    return bytes(body)


def _read_final(path: Path) -> Status | None:
    try:
        if path.stat().st_size > MAX_STATUS_BYTES:
            return None
        return parse_status(path.read_bytes())
    except OSError:  # a node that was killed leaves none
        return None


def as_json(value: Any) -> bytes:
    """Any of these structures as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)
