"""The ledger's rules against a simple model of them, whatever order entries come in.

The ledger keeps running totals, the model (ledger_model) works everything out anew. They must agree after every entry,
a refused entry must have a name, and a replay must end where the ledger is.
"""

from __future__ import annotations

from factories import (
    OPERATOR,
    make_admission,
    make_appeal,
    make_batch,
    make_eviction,
    make_manifest,
    make_reinstatement,
    make_submission,
    make_trained,
    make_verdict,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_model import TOTAL_STEPS, Case, Model, Work

from protocol.duties import Duty
from protocol.envelope import Signed, seal
from protocol.errors import LedgerError
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip
from protocol.records import AdmissionSpec, BatchSpec, CreditSpec, Eviction, Reinstatement, Submission, Verdict

RUN = b"r" * 32
PEOPLE = [Identity.from_phrase(name) for name in ("alice", "bob", "carol")]
JUDGES = [Identity.from_phrase(name) for name in ("erin", "frank", "grace", "heidi", "ivan")]
MAX_STALENESS = 1
CAP = 4
OUTCOMES = ["accept", "accept", "accept", "reject", "hard", "undecided"]


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        quorum=st.sampled_from([1, 1, 2, 2, 3]),
        maturity=st.integers(0, 2),
        listed=st.sampled_from([0, 0, 0, 3]),
        first=st.lists(
            st.tuples(st.sampled_from(PEOPLE[:2]), st.sampled_from(["accept", "hard", "hard", "reject"])),
            min_size=6,
            max_size=8,
        ),
    )
    def begin(self, quorum: int, maturity: int, listed: int, first: list[tuple[Identity, str]]) -> None:
        keys = tuple(who.peer_id.public_key for who in PEOPLE[:listed])
        self.manifest = make_manifest(
            validators=tuple(judge.peer_id.public_key for judge in JUDGES),
            quorum=quorum,
            admission=AdmissionSpec(kind="allow-list" if keys else "open", allowed=keys),
            credits=CreditSpec(maturity_steps=maturity),
            batch=BatchSpec(rollouts_per_step=8, max_staleness=MAX_STALENESS, total_steps=TOTAL_STEPS),
        )
        self.model = Model(quorum, maturity, set(PEOPLE[:listed]))
        self.state = LedgerState(RUN, self.manifest)
        self.taken: list[bytes] = []
        self.tip = RUN
        self.made = 0
        for who in PEOPLE[:listed]:
            self.join(who)
        for who, outcome in first:
            work = self._hand_in(who, 0, 0)
            for judge in JUDGES[:quorum] if work else ():
                self._vote(work, judge, outcome)

    # Entries, by rules that know what the ledger must say to them.

    @rule(who=st.sampled_from(PEOPLE))
    def join(self, who: Identity) -> None:
        fits = who in self.model.listed and who not in self.model.admitted
        if self._offer(make_admission(who, RUN).data, allowed=fits):
            self.model.admitted.add(who)

    @rule(
        who=st.sampled_from(PEOPLE),
        step=st.integers(0, 3),
        skip=st.sampled_from([0, 0, 0, 0, 0, 1]),
        excess=st.sampled_from([0, 0, 0, 0, 1, 10**12]),
    )
    def submit(self, who: Identity, step: int, skip: int, excess: int) -> None:
        """Tokens are as many as fit, or more: 4 rollouts, each of which has room for the model's 256."""
        self._hand_in(who, step, skip, excess=excess)

    def _hand_in(
        self, who: Identity, step: int, skip: int, *, excess: int = 0, sha256: bytes | None = None
    ) -> Work | None:
        mine = [work.signed.record for work in self.model.work.values() if work.signed.author == who.peer_id]
        index = sum(record.step == step for record in mine) + skip
        signed = self._submission(who, step, index, tokens=4 * 256 + excess if excess else None, sha256=sha256)
        again = any(record.sha256 == sha256 for record in mine)
        fits = self.model.may_work(who) and self.model.is_open(step) and not (skip or excess or again) and index < CAP
        if self._offer(signed.data, allowed=fits):
            return self.model.work.setdefault(signed.id, Work(signed))
        self._offer(make_verdict(signed, by=JUDGES[0]).data, allowed=False)
        return None

    @precondition(lambda self: self.model.work)
    @rule(data=st.data(), thief=st.sampled_from(PEOPLE))
    def submit_again(self, data: st.DataObject, thief: Identity) -> None:
        """The same once more; its file once more, which only another may sign for: what it is worth, validators say."""
        signed = self._any(data).signed
        self._offer(signed.data, allowed=False)
        self._hand_in(thief, 2, 0, sha256=signed.record.sha256)

    @precondition(lambda self: self.model.work)
    @rule(data=st.data(), judges=st.permutations(JUDGES), count=st.integers(1, 3), outcome=st.sampled_from(OUTCOMES))
    def judge(self, data: st.DataObject, judges: list[Identity], count: int, outcome: str) -> None:
        """One or more say the same; those who decided before are refused, and all once the work is settled."""
        work = self._any(data)
        for judge in judges[:count]:
            self._vote(work, judge, outcome)

    def _vote(self, work: Work, judge: Identity, outcome: str) -> None:
        verdict = self._verdict(work, judge, outcome)
        before = work.state(self.model.quorum)
        fits = before not in ("accepted", "rejected") and work.may_say(judge.peer_id.short, outcome)
        if self._offer(verdict.data, allowed=fits):
            work.said.append((judge.peer_id.short, verdict.record.outcome, verdict.record.hard))
            self._judged(work, judge, verdict)
            self._settled(work, before)
            who = self._author(work)
            caught = work.state(self.model.quorum) == "rejected" and work.hard_votes() >= self.model.quorum
            if caught and who not in self.model.evicted_for:
                self.model.grounds.setdefault(who, []).append(work)

    @precondition(lambda self: any(work.rejections for work in self.model.work.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self._evict(*self._any_rejection(data))

    def _evict(self, work: Work, verdict: Signed[Verdict]) -> None:
        who = self._author(work)
        just = work.state(self.model.quorum) == "rejected" and work.hard_votes() >= self.model.quorum
        just = just and verdict.record.hard and not verdict.record.appeal and who not in self.model.evicted_for
        if self._offer(make_eviction(verdict), allowed=just):
            self.model.evicted_for[who] = work
            self.model.grounds.pop(who, None)
            self.model.story.append(("evicted", who, self.model.trained, 0))

    @precondition(lambda self: any(work.rejections for work in self.model.work.values()))
    @rule(data=st.data(), stranger=st.sampled_from([False, False, False, True]))
    def appeal(self, data: st.DataObject, stranger: bool) -> None:
        work, verdict = self._any_rejection(data)
        self._appeal(data.draw(st.sampled_from(PEOPLE)) if stranger else self._author(work), work, verdict)

    def _appeal(self, who: Identity, work: Work, verdict: Signed[Verdict]) -> Case | None:
        signed = make_appeal(who, verdict, issued_at_ms=self._number())
        if self._offer(signed.data, allowed=self.model.appeal_fits(who, work, verdict, len(JUDGES))):
            return self.model.cases.setdefault(signed.id, Case(signed, work, self.model.trained))
        return None

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data(), judge=st.sampled_from(JUDGES), outcome=st.sampled_from(OUTCOMES))
    def answer(self, data: st.DataObject, judge: Identity, outcome: str) -> None:
        self._answer(self.model.cases[data.draw(st.sampled_from(list(self.model.cases)))], judge, outcome)

    def _answer(self, case: Case, judge: Identity, outcome: str) -> None:
        work = case.work
        verdict = self._verdict(work, judge, outcome, appeal=case.signed.id)
        fits = case.state == "open" and work.may_say(judge.peer_id.short, outcome, case.signed.id)
        if not self._offer(verdict.data, allowed=fits):
            return
        self._judged(work, judge, verdict)
        if verdict.record.outcome != "undecided":
            work.answers.append(verdict.record.outcome)
        case.state = case.answered(self.model.quorum, {one.peer_id.short for one in JUDGES})
        if case.state != "open":
            case.ended_step = self.model.trained
            case.answer = verdict if case.state != "undecided" else None
        if case.state == "granted":
            work.granted = True
            self._settled(work, "rejected")
        elif case.state == "refused":
            self.model.wait_until[self._author(work)] = self.model.trained + max(1, self.model.maturity)

    @precondition(lambda self: any(case.answer for case in self.model.cases.values()))
    @rule(data=st.data())
    def reinstate(self, data: st.DataObject) -> None:
        self._reinstate(data.draw(st.sampled_from([case for case in self.model.cases.values() if case.answer])))

    def _reinstate(self, case: Case) -> None:
        assert case.answer is not None
        who = self._author(case.work)
        just = case.state == "granted" and self.model.evicted_for.get(who) is case.work
        due = ("reinstatement", who.peer_id, case.signed.id, case.answer.id)
        owed = [(duty.kind, duty.contributor, duty.appeal, duty.verdict) for duty in self.state.owed()]
        assert (due in owed) == just
        entry = make_reinstatement(case.answer, case.signed, issued_at_ms=self._number())
        if self._offer(entry.data, allowed=just):
            del self.model.evicted_for[who]
            self.model.story.append(("reinstated", who, self.model.trained, 0))

    @precondition(lambda self: any(work.rejections for work in self.model.work.values()))
    @rule(
        data=st.data(),
        outcomes=st.lists(st.sampled_from(["accept", "accept", "reject", "undecided"]), min_size=1, max_size=4),
        comes_back=st.booleans(),
    )
    def go_to_court(self, data: st.DataObject, outcomes: list[str], comes_back: bool) -> None:
        """The whole way, as far as it leads: answers that agree, or contradict each other, or tell nothing."""
        work, verdict = self._any_rejection(data)
        self._evict(work, verdict)
        case = self._appeal(self._author(work), work, verdict)
        if case is not None:
            free = [one for one in JUDGES if one.peer_id.short not in work.decided]
            for judge, outcome in zip(free, outcomes, strict=False):
                self._answer(case, judge, outcome)
            if comes_back and case.answer:
                self._reinstate(case)

    @precondition(lambda self: any(work.rejections for work in self.model.work.values()))
    @rule(data=st.data(), again=st.booleans())
    def nobody_can_tell(self, data: st.DataObject, again: bool) -> None:
        """An appeal that all who are left cannot answer, filed once more, and then never again."""
        work, verdict = self._any_rejection(data)
        for _ in range(3 if again else 1):
            case = self._appeal(self._author(work), work, verdict)
            for judge in JUDGES if case else ():
                self._answer(case, judge, "undecided")

    @precondition(lambda self: any(work.rejections for work in self.model.work.values()))
    @rule(data=st.data(), steps=st.integers(1, 3))
    def nobody_answers(self, data: st.DataObject, steps: int) -> None:
        """An appeal is open while steps are trained; then its author turns to the next rejection, if time allows."""
        work, verdict = self._any_rejection(data)
        self._appeal(self._author(work), work, verdict)
        for _ in range(steps):
            self.one_more_step(PEOPLE[2])
        for other in list(self.model.work.values()):
            if other.rejections and self._author(other) is self._author(work):
                self._appeal(self._author(other), other, other.rejections[0])

    @rule(who=st.sampled_from(PEOPLE))
    def one_more_step(self, who: Identity) -> None:
        """Whatever it takes: work by somebody, its verdicts, the batch, the training."""
        step = self.model.batches
        if not self.model.may_work(who) or step > TOTAL_STEPS:
            return
        work = self._hand_in(who, step, 0)
        for judge in JUDGES[: self.model.quorum] if work else ():
            self._vote(work, judge, "accept")
        self.train_on(0, 0)
        if self.model.trained < self.model.batches:
            self.finish_training(0)

    @rule(keep=st.integers(0, 4), ahead=st.sampled_from([0, 0, 0, 1]))
    def train_on(self, keep: int, ahead: int) -> None:
        step = self.model.batches + ahead
        usable = self.state.shelf.usable(step)[: keep or None]
        chosen = [self.model.work[key].signed for key in usable]
        if chosen and self._offer(make_batch(RUN, step, chosen), allowed=not ahead):
            self.model.batches += 1
            for key in usable:
                self.model.work[key].used = True

    @precondition(lambda self: self.model.work)
    @rule(data=st.data())
    def train_on_any(self, data: st.DataObject) -> None:
        """Whatever is not usable is refused, alone or among others."""
        work = self._any(data)
        usable = self.state.shelf.usable(self.model.batches)
        assert (work.signed.id in usable) == self._is_usable(work)
        if work.signed.id not in usable:
            others = [self.model.work[key].signed for key in usable[:1]]
            self._offer(make_batch(RUN, self.model.batches, [*others, work.signed]), allowed=False)

    @precondition(lambda self: self.model.batches)
    @rule(ahead=st.sampled_from([0, 0, 0, 1]))
    def finish_training(self, ahead: int) -> None:
        step = self.model.trained + ahead
        if self._offer(make_trained(RUN, step), allowed=not ahead and step < self.model.batches):
            self.model.one_step_trained()

    # What must hold always.

    @invariant()
    def chain_and_counts(self) -> None:
        if not hasattr(self, "state"):
            return
        assert (self.state.length, self.state.tip) == (len(self.taken), self.tip)
        assert (len(self.state.batches), len(self.state.trained)) == (self.model.batches, self.model.trained)
        assert {key: case.state for key, case in self.state.appeals.items()} == {
            key: case.state for key, case in self.model.cases.items()
        }
        waiting = [key for key, case in self.model.cases.items() if case.state == "open"]
        assert self.state.open_appeals() == waiting

    @invariant()
    def states_and_balances(self) -> None:
        if not hasattr(self, "state"):
            return
        for key, work in self.model.work.items():
            assert self.state.submissions[key].state == work.state(self.model.quorum)
            assert (self.state.submissions[key].used_in is not None) == work.used
        for who in PEOPLE:
            known = self.state.contributors.get(who.peer_id)
            balance = (known.balance.mature, known.balance.maturing, known.balance.forfeited) if known else (0, 0, 0)
            assert balance == self.model.balance(who)
            assert bool(known and known.standing == "evicted") == (who in self.model.evicted_for)
        assert OPERATOR.peer_id not in self.state.contributors

    @invariant()
    def what_the_trainer_owes(self) -> None:
        """Who is evicted already is not to be evicted for more; what was overturned asks for nothing."""
        if not hasattr(self, "state"):
            return
        standing = {
            who.peer_id: [work.signed.id for work in works if not work.granted]
            for who, works in self.model.grounds.items()
        }
        due = {peer: works[0] for peer, works in standing.items() if works}
        owed = {duty.contributor: duty.submission for duty in self.state.owed() if duty.kind == "eviction"}
        assert owed == due

    @invariant()
    def balances_conserve(self) -> None:
        if not hasattr(self, "state"):
            return
        balances = [one.balance for one in self.state.contributors.values()]
        assert sum(one.credits + one.forfeited for one in balances) == self.model.earned()

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        replay = LedgerState(RUN, self.manifest)
        for entry in self.taken:
            replay.apply(entry)
        assert (replay.tip, replay.contributors, replay.submissions, replay.appeals) == (
            self.state.tip,
            self.state.contributors,
            self.state.submissions,
            self.state.appeals,
        )
        assert replay.shelf.usable(self.model.batches) == self.state.shelf.usable(self.model.batches)
        assert replay.owed() == self.state.owed()
        for duty in replay.owed():
            replay.apply(made_of(duty))
        assert replay.owed() == []

    # What rules share.

    def _any(self, data: st.DataObject) -> Work:
        return self.model.work[data.draw(st.sampled_from(list(self.model.work)))]

    def _any_rejection(self, data: st.DataObject) -> tuple[Work, Signed[Verdict]]:
        rejections = [(work, one) for work in self.model.work.values() for one in work.rejections]
        rejections.sort(key=lambda each: each[0].state(self.model.quorum) != "rejected")
        return rejections[data.draw(st.integers(0, len(rejections) - 1))]

    def _author(self, work: Work) -> Identity:
        return next(one for one in PEOPLE if one.peer_id == work.signed.author)

    def _judged(self, work: Work, judge: Identity, verdict: Signed[Verdict]) -> None:
        if verdict.record.outcome == "undecided":
            work.unsure.add((judge.peer_id.short, verdict.record.appeal))
        else:
            work.decided.add(judge.peer_id.short)
        if verdict.record.outcome == "reject":
            work.rejections.append(verdict)

    def _settled(self, work: Work, before: str) -> None:
        now = work.state(self.model.quorum)
        if now == before or now not in ("accepted", "rejected"):
            return
        work.settled_step = self.model.trained
        if now == "accepted":
            amount = work.signed.record.output_tokens
            self.model.story.append(("accepted", self._author(work), self.model.trained, amount))

    def _is_usable(self, work: Work) -> bool:
        policy = work.signed.record.checkpoint_step
        return (
            work.state(self.model.quorum) == "accepted"
            and not work.granted
            and not work.used
            and self._author(work) not in self.model.evicted_for
            and self.model.batches - MAX_STALENESS <= policy <= self.model.batches
        )

    def _number(self) -> int:
        self.made += 1
        return self.made

    def _submission(
        self, who: Identity, step: int, index: int, *, tokens: int | None = None, sha256: bytes | None = None
    ) -> Signed[Submission]:
        number = self._number()
        return make_submission(
            who, RUN, step=step, index=index, checkpoint_step=step, sha256=sha256 or number.to_bytes(32, "big"),
            output_tokens=tokens or 10 + number,
        )  # fmt: skip

    def _verdict(self, work: Work, judge: Identity, outcome: str, *, appeal: bytes = b"") -> Signed[Verdict]:
        hard = outcome == "hard"
        said = "reject" if hard else outcome
        return make_verdict(work.signed, by=judge, outcome=said, hard=hard, reason="seed: x", appeal=appeal)

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


def made_of(duty: Duty) -> bytes:
    """The entry that pays a duty."""
    names = {"run_id": RUN, "contributor": duty.contributor.public_key, "verdict": duty.verdict, "reason": "due"}
    if duty.kind == "eviction":
        return seal(Eviction(**names, issued_at_ms=5), OPERATOR)
    return seal(Reinstatement(**names, appeal=duty.appeal, issued_at_ms=7), OPERATOR)


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
