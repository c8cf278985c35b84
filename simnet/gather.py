"""What is gathered of a simulation: what the nodes say of themselves, and what became of them. The recording.

Plain data, filled by simnet.gatherer; the live view and the report are made from it alone.
"""

from __future__ import annotations

import signal
import time
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from simnet.sampling import ProcessSeen
from simnet.scenario import Action, Scenario

SILENT_MS = 10_000


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
    steps_trained: int | None = None
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
    status_at_ms: int | None = None
    """When that was; None before the first one."""
    first_status_at_ms: int | None = None
    """When the first one was read: then its programs were loaded, and it began to work with others."""
    final: bool = False
    """Whether the status is what the node wrote as it ended."""
    refused_ms: dict[str, int] = {}
    """When each count of what was refused of it was last seen to grow, by the reason."""
    silences: list[tuple[int, int]] = []
    """From when until when it ran and gave no status, where that was for `SILENT_MS` or longer."""

    @property
    def had_to_be_killed(self) -> bool:
        """Whether it would not end when the simulation was over and asked it to, twice."""
        return self.ended_by == "close" and self.exit_code == -signal.SIGKILL


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
    seconds: float | None = None
    """By how much a clock is ahead from then on; None where it goes back to what it was at the start."""
    sync_ms: float | None = None
    """How much longer each write takes to become durable."""


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
    faults_planned: int = 0
    faults_struck: int = 0
    """Of those that were planned; what undid one is not counted."""
    samples: list[Sample] = []
    """Spread evenly over the simulation, whatever its length."""
    rises: list[tuple[int, int]] = []
    """When any node was first seen at a newer step, and at which one: no time is lost here as samples are thinned."""
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
    def closed_ms(self) -> int:
        """When the run was over; what nodes do after its outcome is known is no part of it."""
        return self.over_ms or self.ended_ms or self.started_ms

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


def now_ms() -> int:
    """Wall-clock time, to lie beside the times in the nodes' own accounts."""
    return time.time_ns() // 1_000_000


def as_json(value: Any) -> bytes:
    """Any of these structures as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)
