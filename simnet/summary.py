"""What a simulation's report holds: plain structures, written as `report.json`."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from simnet.gather import EvaluationSeen, FaultMark, Outcome
from simnet.hops import Hop, Throughput
from simnet.oracles import Judgement
from simnet.oracles.books import Judge
from simnet.waits import Wait

FORMAT: Final = 2
"""Of report.json; another one is another number."""


class Expectation(Struct, frozen=True):
    """One line of `[expect]`, judged."""

    name: str
    goal: str
    value: str
    met: bool


class Traffic(Struct):
    """Bytes that a relay took in and gave out."""

    bytes_in: int
    bytes_out: int


class Downloads(Struct):
    """How policies came to the nodes that download them, all of these together."""

    patched_bytes: int
    """Received as patches between two checkpoints, or packed."""
    full_bytes: int
    """Received as whole shards."""
    saved_bytes: int
    """What the patches stood for, beyond their own size."""


class NodeSummary(Struct):
    """One node at the end."""

    name: str
    role: str
    peer_id: str
    state: str
    cheat: str | None
    standing: str | None
    """In the ledger; nothing for a node that never handed anything in."""
    accepted: int
    rejected: dict[str, int]
    refused: dict[str, int]
    """What relays did not take from it, such as rollouts that came too late: nobody judged them."""
    starts: int
    cpu_s: float
    """Of all its processes; the last moments of each are missed."""
    peak_memory_mb: int
    """Of all its processes together; pages that several share count for each."""
    exit_code: int | None
    log: str


class Report(Struct):
    """What came of a simulation."""

    format: int
    scenario: str
    title: str
    run: str
    seed: int
    outcome: Outcome
    problem: str
    passed: bool
    """Come to its end, every expectation met, and no oracle failed."""
    started_ms: int
    wall_s: float
    """From the first node's start until the outcome was known."""
    steps: int
    total_steps: int | None
    reward: list[float | None]
    """Mean reward of each trained step."""
    evaluations: list[EvaluationSeen]
    """pass@k of policies on held-out prompts, by the number of steps they were trained for."""
    evaluation_rises: bool | None
    """Whether pass@1 of the last one lies above the first one's, and their 95 % intervals apart."""
    reward_last_tenth: float | None
    reward_gain: float | None
    """Last tenth against first tenth."""
    accepted: int
    rejected: dict[str, int]
    accepted_per_honest: int | None
    """Of the honest contributor that had the fewest accepted."""
    honest_rejected: int
    cheats: int
    cheats_evicted: int
    cheats_accepted: int
    trainer_wait_fraction: float | None
    """Of the time that it waited for rollouts or trained, by its own account; its start and its end are neither."""
    bytes_by_relay: dict[str, Traffic]
    weights_from_relays_only: bool | None
    """Nothing where no node downloaded anything."""
    downloads: Downloads
    unexpected_exits: list[str]
    nodes: list[NodeSummary]
    faults: list[FaultMark]
    expectations: list[Expectation]
    oracles: list[Judgement]
    throughput: Throughput
    hops: list[Hop]
    waits: list[Wait]
    machine_late_p99_ms: int | None
    """How late this machine woke up a thread that only sleeps."""
    notes: list[str] = []
    """What this machine or user could not do of what the scenario asks, and what of the nodes' disks cannot be read."""
    judges: dict[str, Judge] = {}
    """Validators by name: their votes in the ledger."""
    faults_planned: int = 0
    faults_struck: int = 0
    """Of those that were planned; `faults` also has what undid them."""
    liars_overruled: bool | None = None
    """Whether votes of all validators that lie, and of no others, were overruled; nothing where none counted."""

    @property
    def failed_oracles(self) -> int:
        return sum(one.outcome == "failed" for one in self.oracles)
