"""What a validator could not tell and may tell later: judged again by itself, seldom, and only while that can matter.

A look is kept on the disk from the `undecided` verdict on, and counted there before it begins: whatever happens in one,
a restart finds the next one due after its wait. Leaves out what passes only with another program or other files: those
verdicts are final.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from node.clock import now_ms
from node.validator.bench import Bench
from node.validator.cases import Case
from node.validator.docket import Docket, Look
from node.validator.findings import Findings
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.records import Submission

FIRST_WAIT_S: Final = 30.0
GROWTH: Final = 3
"""Each wait is so many times the one before: 30 s, 90 s, … 40 minutes."""
MAX_LOOKS: Final = 5
MAX_WAITING: Final = 1024
MAX_OF_CONTRIBUTOR: Final = 16
"""Whoever hands in what nobody can tell, again and again, takes no other's place."""


class SecondLooks:
    """The undecided submissions that wait to be judged again; one at a time is."""

    def __init__(
        self, docket: Docket, ledger: LedgerState, bench: Bench, *, clock_ms: Callable[[], int] = now_ms
    ) -> None:
        self._docket = docket
        self._ledger = ledger
        self._bench = bench
        self._clock_ms = clock_ms
        self._looks = {look.submission: look for look in docket.looks()}
        self._case: Case | None = None

    def expect(self, case: Case, findings: Findings) -> None:
        """A verdict is signed; where it is undecided and the cause may pass, there is going to be another one."""
        author = case.submission.author
        if findings.outcome != "undecided" or not findings.passing or case.appeal or case.again:
            return
        others = sum(look.contributor == author for look in self._looks.values())
        if len(self._looks) < MAX_WAITING and others < MAX_OF_CONTRIBUTOR:
            self._keep(Look(case.submission.id, author, 0, self._after(0), findings.reason[:200]))

    def startable(self, relays: Iterable[PeerId]) -> Iterator[Case]:
        """The case to work on now, if any, counted as busy when it is given out."""
        self._case = self._case or self._due(list(relays))
        if self._case is not None and not self._case.busy and self._case.due <= time.monotonic():
            self._case.busy = True
            yield self._case

    def concluded(self, case: Case, findings: Findings) -> None:
        """A look has ended: with a decision, or with another wait, or without hope."""
        self._case, look = None, self._looks[case.submission.id]
        if findings.outcome != "undecided" or not findings.passing or look.looks >= MAX_LOOKS:
            return self._drop(look)
        self._keep(replace(look, due_ms=self._after(look.looks), reason=findings.reason[:200]))

    def text(self) -> str:
        """When the next look is, and why, for a person; empty without any."""
        if not self._looks:
            return ""
        look = min(self._looks.values(), key=lambda one: one.due_ms)
        at = time.strftime("%H:%M:%S UTC", time.gmtime(look.due_ms / 1000))
        rest = f"; and {len(self._looks) - 1} more" if len(self._looks) > 1 else ""
        return f"will judge {look.submission.hex()[:12]} again at {at}, because {look.reason}{rest}"

    def _due(self, relays: list[PeerId]) -> Case | None:
        if not relays:
            return None
        for look in sorted(self._looks.values(), key=lambda one: one.due_ms):
            if look.due_ms > self._clock_ms():
                return None
            case = self._case_of(look, relays)
            if case is not None:
                self._keep(replace(look, looks=look.looks + 1, due_ms=self._after(look.looks + 1)))
                return case
            self._drop(look)
        return None

    def _case_of(self, look: Look, relays: list[PeerId]) -> Case | None:
        """The case as it was first seen, and drawn as it was; None where judging it has become of no use."""
        opened, verdict = self._docket.seen(look.submission), self._docket.verdict(look.submission)
        if opened is None or verdict is None or verdict.record.outcome != "undecided":
            return None
        if look.looks >= MAX_LOOKS or not self._is_open(opened.submission.author, look.submission):
            return None
        if self._is_past(opened.submission.record) or self._bench.turn(opened, waited_s=0.0) == "never":
            return None
        opened = replace(opened, relays=tuple(relays))
        return Case(opened, time.monotonic(), deque(relays), draw=verdict.record.draw, again=True)

    def _is_open(self, author: PeerId, submission: bytes) -> bool:
        known, contributor = self._ledger.submissions.get(submission), self._ledger.contributors.get(author)
        settled = known is not None and known.state in ("accepted", "rejected")
        return not settled and (contributor is None or contributor.standing != "evicted")

    def _is_past(self, record: Submission) -> bool:
        """Whether the validity window is over, after which relays keep files no longer."""
        manifest = self._ledger.manifest
        window = max(manifest.credits.maturity_steps, manifest.batch.max_staleness)
        return len(self._ledger.trained) - record.step > window

    def _after(self, looks: int) -> int:
        return self._clock_ms() + int(1000 * FIRST_WAIT_S * GROWTH**looks)

    def _keep(self, look: Look) -> None:
        self._looks[look.submission] = look
        self._docket.keep_look(look)

    def _drop(self, look: Look) -> None:
        self._looks.pop(look.submission, None)
        self._docket.drop_look(look.submission)
