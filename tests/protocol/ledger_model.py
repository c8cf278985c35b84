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
    answers: list[str] = field(default_factory=list)
    """Accepts and rejects in answer to appeals."""
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

    def needed(self, quorum: int, judges: int) -> int:
        """So many others must say the same on appeal: a quorum, or all whom the first judges left."""
        first = sum(outcome != "undecided" for _, outcome, _ in self.said)
        return min(quorum, judges - first)

    def may_be_granted(self, quorum: int, judges: int) -> bool:
        left = judges - len(self.decided)
        return left > 0 and self.answers.count("accept") + left >= self.needed(quorum, judges)

    def hard_votes(self) -> int:
        """Answers to appeals are none: they add nothing to the grounds."""
        return sum(hard for _, _, hard in self.said)


@dataclass
class Case:
    """An appeal."""

    signed: Signed[Appeal]
    work: Work
    filed_step: int
    state: str = "open"
    answer: Signed[Verdict] | None = None
    ended_step: int = 0

    def answered(self, quorum: int, judges: set[str]) -> str:
        """What enough agree on; undecided where not even all who have not spoken to it yet could make them enough."""
        needed = self.work.needed(quorum, len(judges))
        silent = [judge for judge in judges - self.work.decided if (judge, self.signed.id) not in self.work.unsure]
        for outcome, state in (("accept", "granted"), ("reject", "refused")):
            if self.work.answers.count(outcome) >= needed:
                return state
        hopes = [self.work.answers.count(outcome) + len(silent) >= needed for outcome in ("accept", "reject")]
        return "open" if any(hopes) else "undecided"


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
    busy: set[tuple[bytes, int]] = field(default_factory=set)
    """Whose appeal was open while which step was trained."""
    story: list[tuple[str, Identity, int, int]] = field(default_factory=list)
    """What happened to credits: what, to whom, when by trained steps, how much."""
    batches: int = 0
    trained: int = 0

    def may_work(self, who: Identity) -> bool:
        return (not self.listed or who in self.admitted) and who not in self.evicted_for

    def is_open(self, step: int) -> bool:
        """Whether a relay may have taken work for a step: one that the ledger is at, or the next one."""
        return step <= self.batches + 1

    def appeal_fits(self, who: Identity, work: Work, verdict: Signed[Verdict], judges: int) -> bool:
        """Each of the conditions that docs/protocol.md names."""
        before = [case for case in self.cases.values() if case.work is work]
        since = max([work.settled_step or 0, *(case.ended_step for case in before)])
        waited = sum((who.peer_id.public_key, step) not in self.busy for step in range(since, self.trained))
        return (
            work.signed.author == who.peer_id
            and work.state(self.quorum) == "rejected"
            and verdict in work.rejections
            and [case.state for case in before] in ([], ["undecided"])
            and not any(case.state == "open" and case.signed.author == who.peer_id for case in self.cases.values())
            and waited <= self.maturity
            and self.trained >= self.wait_until.get(who, 0)
            and work.may_be_granted(self.quorum, judges)
        )

    def one_step_trained(self) -> None:
        """No appeal stays open for longer than the validity window; no other one's time runs while it is."""
        waiting = [case for case in self.cases.values() if case.state == "open"]
        self.busy |= {(case.signed.author.public_key, self.trained) for case in waiting}
        self.trained += 1
        for case in waiting:
            if self.trained == case.filed_step + max(1, self.maturity):
                case.state, case.ended_step = "undecided", self.trained

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
