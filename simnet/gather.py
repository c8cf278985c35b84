"""What the nodes say of themselves, read from their loopback status pages, and what became of it: the recording.

A status is hostile until checked: its size and the time to read it are bounded, and it must have the expected form.
A recording is plain data; the live view and the report are made from it alone.
"""

from __future__ import annotations

import http.client
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from simnet.fleet import Fleet, Member
from simnet.scenario import Action, Scenario

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 1.0
MAX_STATUS_BYTES = 8 * 2**20
MAX_SAMPLES = 1000
MAX_SEGMENTS = 20_000
MAX_AGAINST = 200
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


class Details(Struct):
    """What the roles add; each fills its own."""

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

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def poll(self) -> None:
        """Read every running node's status and note who started and who ended; takes about `READ_TIMEOUT_S` at most."""
        members = list(self._fleet.members.values())
        statuses = self._pool.map(_read_member, members)
        for member, status in zip(members, statuses, strict=True):
            self._note(member, self._records[member.plan.name], status)
        self._sample()

    def read_final(self) -> None:
        """Take over what nodes wrote about themselves as they ended."""
        for member in self._fleet.members.values():
            record = self._records[member.plan.name]
            status = _read_final(member.data_dir / FINAL_STATUS_FILE)
            if status and record.lives and record.lives[-1].pid == status.pid:
                record.lives[-1].status = status
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

    def _sample(self) -> None:
        recording = self.recording
        self._keep_against(recording.trainer.verdicts)
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
        return parse_status(_fetch(url))
    except (OSError, ValueError, http.client.HTTPException):  # not up yet, stopped, or just ended
        return None


def _fetch(url: str) -> bytes:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname != "127.0.0.1":
        raise ValueError(f"not a loopback status address: {url!r}")
    deadline = time.monotonic() + READ_TIMEOUT_S
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=READ_TIMEOUT_S)
    try:
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
