"""What a validator could not tell and may tell later: judged again by itself, seldom, and only while that can matter.

Contributors take turns: whoever's files or policies do not come waits for them beside the others, not before them.
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
from node.ledger.memory import looked_at
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
MAX_BUSY: Final = 4
"""Looks that are worked on at once, of as many contributors."""
MAX_BEGUN: Final = 32
"""The same with those that wait for a policy, or for the engine."""


class SecondLooks:
    """The undecided submissions that wait to be judged again; one at a time of each contributor is."""

    def __init__(
        self, docket: Docket, ledger: LedgerState, bench: Bench, *, clock_ms: Callable[[], int] = now_ms
    ) -> None:
        self._docket = docket
        self._ledger = ledger
        self._bench = bench
        self._clock_ms = clock_ms
        self._looks = {look.submission: look for look in docket.looks()}
        self._begun: dict[bytes, Case] = {}
        """Looks that have begun and not ended; one of a contributor."""
        self._turns: dict[PeerId, int] = {}
        """When a contributor had its last turn, of those with something to look at; the lowest number is next."""
        self._turn = 0

    def expect(self, case: Case, findings: Findings) -> None:
        """A verdict is signed; where it is undecided and the cause may pass, there is going to be another one."""
        author = case.submission.author
        if findings.outcome != "undecided" or not findings.passing or case.appeal or case.again:
            return
        others = sum(look.contributor == author for look in self._looks.values())
        if len(self._looks) < MAX_WAITING and others < MAX_OF_CONTRIBUTOR:
            self._keep(Look(case.submission.id, author, 0, self._after(0), findings.reason[:200]))

    def startable(self, relays: Iterable[PeerId]) -> Iterator[Case]:
        """The cases to work on now, each counted as busy when it is given out."""
        self._begin(list(relays))
        free = MAX_BUSY - sum(case.busy for case in self._begun.values())
        for case in sorted(self._begun.values(), key=lambda case: self._last_turn(case.submission.author)):
            if free > 0 and not case.busy and case.due <= time.monotonic():
                free -= 1
                self._turn += 1
                self._turns[case.submission.author] = self._turn
                case.busy = True
                yield case

    def concluded(self, case: Case, findings: Findings) -> None:
        """A look has ended: with a decision, or with another wait, or without hope."""
        self._begun.pop(case.submission.id, None)
        look = self._looks[case.submission.id]
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

    def _begin(self, relays: list[PeerId]) -> None:
        """Begin what is due, of contributors that have nothing under way: first whoever had no turn for longest."""
        now_ms, under_way = self._clock_ms(), {case.submission.author for case in self._begun.values()}
        waiting = {look.contributor for look in self._looks.values()}
        self._turns = {peer: turn for peer, turn in self._turns.items() if peer in waiting}
        due = [one for one in self._looks.values() if one.due_ms <= now_ms] if relays else []
        for look in sorted(due, key=lambda one: (self._last_turn(one.contributor), one.due_ms)):
            if len(self._begun) >= MAX_BEGUN:
                return
            if look.contributor in under_way:
                continue
            case = self._case_of(look, relays)
            if case is None:
                self._drop(look)
                continue
            self._keep(replace(look, looks=look.looks + 1, due_ms=self._after(look.looks + 1)))
            self._begun[look.submission] = case
            under_way.add(look.contributor)

    def _last_turn(self, contributor: PeerId) -> int:
        return self._turns.get(contributor, 0)

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
        known, contributor = looked_at(self._ledger.submissions, submission), self._ledger.contributors.get(author)
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
