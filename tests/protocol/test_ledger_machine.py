"""The ledger's rules against a simple model of them, whatever order entries come in.

The model keeps plain facts (who judged what, what was trained) and works out states and balances anew from them; the
ledger keeps running totals. They must agree after every entry, and a replay must end where the ledger is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from factories import OPERATOR, make_batch, make_eviction, make_manifest, make_submission, make_trained, make_verdict
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.envelope import Signed
from protocol.errors import LedgerError
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip
from protocol.records import Submission, Verdict

RUN = b"r" * 32
PEOPLE = [Identity.from_phrase(name) for name in ("alice", "bob", "carol")]
JUDGES = [Identity.from_phrase(name) for name in ("erin", "frank", "grace")]
MAX_STALENESS = 1
CAP = 4
OUTCOMES = ["accept", "accept", "accept", "reject", "hard", "undecided"]


@dataclass
class Work:
    """A submission as the model has it."""

    signed: Signed[Submission]
    votes: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """By judge: outcome, and whether it is hard."""
    order: list[str] = field(default_factory=list)
    used: bool = False

    def settled(self, quorum: int) -> str:
        """The first of accept and reject that reached the quorum, or the last that was said."""
        counts = {"accept": 0, "reject": 0, "undecided": 0}
        state = "pending"
        for outcome in self.order:
            counts[outcome] += 1
            if counts["accept"] >= quorum:
                return "accepted"
            if counts["reject"] >= quorum:
                return "rejected"
            state = "undecided" if outcome == "undecided" else state
        return state

    def hard_votes(self) -> int:
        return sum(hard for _, hard in self.votes.values())


class LedgerMachine(RuleBasedStateMachine):
    @initialize(quorum=st.integers(1, 2), first=st.lists(st.sampled_from(PEOPLE), min_size=4, max_size=8))
    def begin(self, quorum: int, first: list[Identity]) -> None:
        keys = tuple(judge.peer_id.public_key for judge in JUDGES)
        self.manifest = make_manifest(validators=keys, quorum=quorum)
        self.quorum = quorum
        self.state = LedgerState(RUN, self.manifest)
        self.taken: list[bytes] = []
        self.tip = RUN
        self.work: dict[bytes, Work] = {}
        self.evicted: set[Identity] = set()
        self.hard: list[Signed[Verdict]] = []
        self.batches = self.trained = self.made = 0
        for who in first:
            self._hand_in(who, 0, 0)

    # Entries, by rules that know what the ledger must say to them.

    @rule(who=st.sampled_from(PEOPLE), step=st.integers(0, 2), skip=st.sampled_from([0, 0, 0, 0, 0, 1]))
    def submit(self, who: Identity, step: int, skip: int) -> None:
        self._hand_in(who, step, skip)

    def _hand_in(self, who: Identity, step: int, skip: int) -> None:
        mine = [work.signed.record for work in self.work.values() if work.signed.author == who.peer_id]
        index = sum(record.step == step for record in mine) + skip
        signed = self._submission(who, step, index)
        fits = who not in self.evicted and not skip and index < CAP
        if self._offer(signed.data, allowed=fits):
            self.work[signed.id] = Work(signed)
        else:
            self._offer(make_verdict(signed, by=JUDGES[0]).data, allowed=False)

    @rule(data=st.data(), thief=st.sampled_from(PEOPLE))
    def submit_again(self, data: st.DataObject, thief: Identity) -> None:
        """The same once more, or the file of another."""
        signed = self._any(data).signed
        copy = make_submission(thief, RUN, step=2, index=0, checkpoint_step=2, sha256=signed.record.sha256)
        self._offer(signed.data, allowed=False)
        self._offer(copy.data, allowed=False)

    @rule(data=st.data(), judges=st.permutations(JUDGES), count=st.integers(1, 3), outcome=st.sampled_from(OUTCOMES))
    def judge(self, data: st.DataObject, judges: list[Identity], count: int, outcome: str) -> None:
        """One or more say the same; those who said something before are refused."""
        work = self._any(data)
        for judge in judges[:count]:
            hard, name = outcome == "hard", judge.peer_id.short
            said = "reject" if hard else outcome
            verdict = make_verdict(work.signed, by=judge, outcome=said, hard=hard, reason="seed: x")
            if self._offer(verdict.data, allowed=name not in work.votes):
                work.votes[name] = (said, hard)
                work.order.append(said)
                self.hard += [verdict] if hard else []

    @precondition(lambda self: self.hard)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        verdict = data.draw(st.sampled_from(self.hard))
        work = self.work[verdict.record.submission]
        who = next(one for one in PEOPLE if one.peer_id.public_key == verdict.record.contributor)
        just = work.settled(self.quorum) == "rejected" and work.hard_votes() >= self.quorum
        if self._offer(make_eviction(verdict), allowed=just and who not in self.evicted):
            self.evicted.add(who)

    @rule(keep=st.integers(0, 4), ahead=st.sampled_from([0, 0, 0, 1]))
    def train_on(self, keep: int, ahead: int) -> None:
        usable = self.state.usable(self.batches + ahead)[: keep or None]
        chosen = [self.work[key].signed for key in usable]
        if chosen and self._offer(make_batch(RUN, self.batches + ahead, chosen), allowed=not ahead):
            self.batches += 1
            for key in usable:
                self.work[key].used = True

    @rule(data=st.data())
    def train_on_any(self, data: st.DataObject) -> None:
        """Whatever is not usable is refused, alone or among others."""
        work = self._any(data)
        usable = self.state.usable(self.batches)
        assert (work.signed.id in usable) == self._is_usable(work)
        if work.signed.id not in usable:
            others = [self.work[key].signed for key in usable[:1]]
            self._offer(make_batch(RUN, self.batches, [*others, work.signed]), allowed=False)

    @precondition(lambda self: self.batches)
    @rule(ahead=st.sampled_from([0, 0, 1]))
    def finish_training(self, ahead: int) -> None:
        step = self.trained + ahead
        if self._offer(make_trained(RUN, step), allowed=not ahead and step < self.batches):
            self.trained += 1

    # What must hold always.

    @invariant()
    def chain_and_counts(self) -> None:
        if not hasattr(self, "state"):
            return
        assert (self.state.length, self.state.tip) == (len(self.taken), self.tip)
        assert (len(self.state.batches), len(self.state.trained)) == (self.batches, self.trained)

    @invariant()
    def states_and_balances(self) -> None:
        if not hasattr(self, "state"):
            return
        for key, work in self.work.items():
            assert self.state.submissions[key].state == work.settled(self.quorum)
            assert (self.state.submissions[key].used_in is not None) == work.used
        for who in PEOPLE:
            known = self.state.contributors.get(who.peer_id)
            assert (known.credits if known else 0) == self._credits(who)
            assert bool(known and known.standing == "evicted") == (who in self.evicted)
        assert OPERATOR.peer_id not in self.state.contributors

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        replay = LedgerState(RUN, self.manifest)
        for entry in self.taken:
            replay.apply(entry)
        assert (replay.tip, replay.contributors, replay.submissions) == (
            self.state.tip,
            self.state.contributors,
            self.state.submissions,
        )
        assert replay.usable(self.batches) == self.state.usable(self.batches)

    def _any(self, data: st.DataObject) -> Work:
        return self.work[data.draw(st.sampled_from(list(self.work)))]

    def _credits(self, who: Identity) -> int:
        if who in self.evicted:
            return 0
        mine = [work for work in self.work.values() if work.signed.author == who.peer_id]
        return sum(work.signed.record.output_tokens for work in mine if work.settled(self.quorum) == "accepted")

    def _is_usable(self, work: Work) -> bool:
        policy = work.signed.record.checkpoint_step
        return (
            work.settled(self.quorum) == "accepted"
            and not work.used
            and all(work.signed.author != who.peer_id for who in self.evicted)
            and self.batches - MAX_STALENESS <= policy <= self.batches
        )

    def _submission(self, who: Identity, step: int, index: int) -> Signed[Submission]:
        self.made += 1
        return make_submission(
            who, RUN, step=step, index=index, checkpoint_step=step, sha256=self.made.to_bytes(32, "big"),
            output_tokens=10 + self.made,
        )  # fmt: skip

    def _offer(self, entry: bytes, *, allowed: bool) -> bool:
        """Have the ledger take an entry that it must take, or refuse one by name that it must not."""
        signed, refused_by = None, ""
        try:
            signed = self.state.apply(entry)
        except LedgerError as error:
            refused_by = error.rule
        if signed is None:
            assert refused_by
            assert not allowed, f"refused by {refused_by}"
            return False
        assert allowed, f"a {signed.record.KIND} was taken that no rule allows"
        self.taken.append(entry)
        self.tip = next_tip(self.tip, signed.id)
        return True


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
