"""What an oracle works with, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from simnet.gather import NodeRecord, Recording
from simnet.oracles.books import Books, SubmissionSeen
from simnet.oracles.logs import CheckpointSeen

JudgementOutcome = Literal["passed", "failed", "could not tell"]
Figure = float | int | str


class Judgement(Struct, frozen=True):
    """One oracle's word, and the numbers that it rests on."""

    name: str
    outcome: JudgementOutcome
    finding: str
    """A sentence for people."""
    numbers: Mapping[str, Figure] = {}


@dataclass(frozen=True)
class Evidence:
    """All that is known of a simulation after its end."""

    recording: Recording
    books: Books | None = None
    """The ledger; None where there is none to read."""
    checkpoints: list[CheckpointSeen] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the run came to its own end, so that nothing was cut off on its way."""
        return self.recording.outcome == "finished"

    @property
    def honest(self) -> dict[str, NodeRecord]:
        """Honest contributors by peer id."""
        return {node.peer_id: node for node in self.recording.nodes if node.role == "inference" and not node.cheat}

    @property
    def cheats(self) -> dict[str, NodeRecord]:
        """Contributors that cheat."""
        return {node.peer_id: node for node in self.recording.nodes if node.role == "inference" and node.cheat}

    def name_of(self, peer_id: str) -> str:
        """A node's name in the scenario, or the end of a stranger's peer id."""
        return next((node.name for node in self.recording.nodes if node.peer_id == peer_id), peer_id[-8:])

    def in_batches(self) -> list[SubmissionSeen]:
        """Every submission that a batch names, as often as it is named."""
        if self.books is None:
            return []
        known = {one.id: one for one in self.books.submissions}
        return [known[key] for step in self.books.steps for key in step.submissions if key in known]


def no_books(name: str, evidence: Evidence) -> Judgement:
    """What to say where the ledger is needed and cannot be had: a failure, if a step was seen that it should hold."""
    steps = evidence.recording.step
    if evidence.books is None:
        return Judgement(name, "could not tell", "The trainer's ledger was not read.")
    finding = f"The trainer's ledger cannot be read: {evidence.books.problem}"
    if steps < 1:
        return Judgement(name, "could not tell", finding)
    return Judgement(name, "failed", f"Nodes saw step {steps}. {finding}", {"steps seen": steps})


def listed(names: list[str], *, limit: int = 4) -> str:
    """A few of some names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
