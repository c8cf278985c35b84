"""A simple model of the ledger: plain facts, from which states and balances are worked out anew each time.

It keeps who judged what and in which order things happened, and no running totals, so that it can be read against the
rules in docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.records import Appeal, Submission, Verdict

TOTAL_STEPS = 4


@dataclass
class Work:
    """A submission."""

    signed: Signed[Submission]
    said: list[tuple[str, str, bool]] = field(default_factory=list)
    """Votes that count for the quorum, in order: judge, outcome, hard."""
    decided: set[str] = field(default_factory=set)
    """Who accepted or rejected it, be it in answer to an appeal."""
    unsure: set[tuple[str, bytes]] = field(default_factory=set)
    """Who could not tell, and on which appeal; on none where nobody had appealed."""
    rejections: list[Signed[Verdict]] = field(default_factory=list)
    answered_hard: int = 0
    used: bool = False
    settled_step: int | None = None
    granted: bool = False

    def state(self, quorum: int) -> str:
        """Accepted on appeal; else the first of accept and reject to reach the quorum; else what is missing."""
        if self.granted:
            return "accepted"
        seen: list[str] = []
        state = "pending"
        for _, outcome, _ in self.said:
            seen.append(outcome)
            if seen.count("accept") >= quorum:
                return "accepted"
            if seen.count("reject") >= quorum:
                return "rejected"
            if "accept" in seen and "reject" in seen:
                state = "disputed"
            elif outcome == "undecided":
                state = "undecided"
        return state

    def may_say(self, judge: str, outcome: str, appeal: bytes = b"") -> bool:
        """One decision of each judge; that it cannot tell, once each time that it is asked, and before it decides."""
        return judge not in self.decided and not (outcome == "undecided" and (judge, appeal) in self.unsure)

    def hard_votes(self) -> int:
        return self.answered_hard + sum(hard for _, _, hard in self.said)


@dataclass
class Case:
    """An appeal."""

    signed: Signed[Appeal]
    work: Work
    state: str = "open"
    answer: Signed[Verdict] | None = None
    ended_step: int = 0

    def nobody_can_tell(self, judges: set[str]) -> bool:
        """Whether all who have not decided have answered that they cannot."""
        return all((judge, self.signed.id) in self.work.unsure for judge in judges - self.work.decided)


@dataclass
class Model:
    quorum: int
    maturity: int
    listed: set[Identity]
    """Who may be admitted; nobody has to be where it is empty."""
    work: dict[bytes, Work] = field(default_factory=dict)
    cases: dict[bytes, Case] = field(default_factory=dict)
    admitted: set[Identity] = field(default_factory=set)
    evicted_for: dict[Identity, Work] = field(default_factory=dict)
    grounds: dict[Identity, list[Work]] = field(default_factory=dict)
    """Quorums of hard verdicts since the contributor was last evicted."""
    wait_until: dict[Identity, int] = field(default_factory=dict)
    story: list[tuple[str, Identity, int, int]] = field(default_factory=list)
    """What happened to credits: what, to whom, when by trained steps, how much."""
    batches: int = 0
    trained: int = 0

    def may_work(self, who: Identity) -> bool:
        return (not self.listed or who in self.admitted) and who not in self.evicted_for

    def appeal_fits(self, who: Identity, work: Work, verdict: Signed[Verdict], judges: int) -> bool:
        """Each of the conditions that docs/protocol.md names."""
        before = [case for case in self.cases.values() if case.signed.record.verdict == verdict.id]
        since = max([work.settled_step or 0, *(case.ended_step for case in before)])
        return (
            work.signed.author == who.peer_id
            and work.state(self.quorum) == "rejected"
            and verdict in work.rejections
            and [case.state for case in before] in ([], ["undecided"])
            and not any(case.state == "open" and case.signed.author == who.peer_id for case in self.cases.values())
            and self.trained - since <= self.maturity
            and self.trained >= self.wait_until.get(who, 0)
            and len(work.decided) < judges
        )

    def balance(self, who: Identity) -> tuple[int, int, int]:
        """Mature, maturing and forfeited, from the whole story."""
        held: list[tuple[int, int]] = []
        taken: list[tuple[int, int]] = []
        evicted = False
        for what, whom, step, amount in self.story:
            if whom is not who:
                continue
            if what == "accepted":
                (taken if evicted else held).append((step + self.maturity, amount))
            elif what == "evicted":
                evicted = True
                taken += [lot for lot in held if not self._is_mature(lot, step)]
                held = [lot for lot in held if self._is_mature(lot, step)]
            else:
                evicted = False
                held, taken = held + taken, []
        mature = sum(amount for due, amount in held if self._is_mature((due, amount), self.trained))
        return mature, sum(amount for _, amount in held) - mature, sum(amount for _, amount in taken)

    def _is_mature(self, lot: tuple[int, int], trained: int) -> bool:
        return lot[0] <= trained or trained >= TOTAL_STEPS

    def earned(self) -> int:
        return sum(
            work.signed.record.output_tokens for work in self.work.values() if work.state(self.quorum) == "accepted"
        )
