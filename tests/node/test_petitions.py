"""Admissions, appeals and quorums on their way into the trainer's ledger, in whatever order relays tell of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from factories import (
    OPERATOR,
    VALIDATOR,
    make_admission,
    make_answer,
    make_appeal,
    make_invite,
    make_manifest,
    make_submission,
    make_verdict,
)

from node.feeds import Feeds
from node.ledger.log import LedgerLog
from node.relay_client import FeedItem
from node.trainer.collector import Collector
from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import AdmissionSpec, Eviction, Manifest, Reinstatement

RUN = b"r" * 32
ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")
CARL, DAVE = Identity.from_phrase("carl"), Identity.from_phrase("dave")
THREE = tuple(who.peer_id.public_key for who in (VALIDATOR, CARL, DAVE))


class FakeRelay:
    def __init__(self) -> None:
        self.peer_id = Identity.from_phrase("relay").peer_id

    async def file(self, submission: Signed[Any], path: Path) -> None:
        await trio.lowlevel.checkpoint()
        path.write_bytes(b"rollouts")


class FakeFeeds:
    def __init__(self) -> None:
        self.relay, self.silent = FakeRelay(), frozenset[Any]()
        self._send, self._receive = trio.open_memory_channel[FeedItem](100)
        self.taken = 0

    def say(self, *records: Signed[Any]) -> None:
        for number, signed in enumerate(records):
            self._send.send_nowait(FeedItem(seq=number + 1, signed=signed))

    async def next(self) -> tuple[FakeRelay, FeedItem]:
        return self.relay, await self._receive.receive()

    def done(self, relay: FakeRelay, item: FeedItem) -> None:
        self.taken += 1


class World:
    """A trainer's collector and its ledger."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.feeds = FakeFeeds()
        self.ledger = LedgerLog(directory / "ledger", LedgerState(RUN, manifest))
        self.collector = Collector(OPERATOR, self.ledger, cast(Feeds, self.feeds), directory / "rollouts")

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    def standing(self, who: Identity) -> str:
        return self.state.contributors[who.peer_id].standing

    def kinds(self) -> list[str]:
        from protocol.envelope import kind_of

        return [kind_of(entry) for entry in self.ledger.entries(0, 99)]

    async def hear(self, *records: Signed[Any]) -> None:
        wanted = self.feeds.taken + len(records)
        self.feeds.say(*records)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.collector.run)
                while self.feeds.taken < wanted:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                nursery.cancel_scope.cancel()


def worlds(tmp_path: Path, **manifest: Any) -> World:
    return World(tmp_path, make_manifest(**manifest))


def hard(submission: Signed[Any], by: Identity) -> Signed[Any]:
    return make_verdict(submission, by=by, outcome="reject", hard=True, reason="seed: made up")


# Admission.


async def test_work_waits_for_its_author_to_be_admitted(tmp_path: Path) -> None:
    """A relay that let in a key which the ledger does not know yet."""
    world = worlds(tmp_path, admission=AdmissionSpec(work_bits=1))
    work = make_submission(ALICE, RUN)
    await world.hear(work, make_verdict(work))
    assert world.state.length == 0
    assert world.collector.pending(0) == 0
    await world.hear(make_admission(ALICE, RUN, bits=1))
    assert world.kinds() == ["admission", "submission", "verdict"]


async def test_second_key_with_one_invite_stays_outside(tmp_path: Path) -> None:
    """Two relays, each of which has seen one of two keys that share an invite."""
    world = worlds(tmp_path, admission=AdmissionSpec(kind="invite"))
    invite = make_invite(RUN).data
    await world.hear(make_admission(ALICE, RUN, invite=invite), make_admission(BOB, RUN, invite=invite))
    assert (world.state.admitted(ALICE.peer_id), world.state.admitted(BOB.peer_id)) == (True, False)


async def test_admission_without_its_work_is_not_written_down(tmp_path: Path) -> None:
    """A relay that checks no proofs."""
    world = worlds(tmp_path, admission=AdmissionSpec(work_bits=24))
    await world.hear(make_admission(ALICE, RUN))
    assert world.state.length == 0


# Quorums.


@pytest.mark.parametrize("liar_first", [True, False])
async def test_lone_validator_evicts_nobody(tmp_path: Path, liar_first: bool) -> None:
    """A dishonest validator rejects an honest node's work as hard as it can; a third is called and settles it."""
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(ALICE, RUN)
    lie, truth = hard(work, VALIDATOR), make_verdict(work, by=CARL)
    await world.hear(work, *((lie, truth) if liar_first else (truth, lie)))
    assert world.state.submissions[work.id].state == "disputed"
    await world.hear(make_verdict(work, by=DAVE))
    assert world.state.submissions[work.id].state == "accepted"
    assert world.standing(ALICE) == "active"
    assert Eviction.KIND not in world.kinds()


async def test_lone_validator_lets_no_cheat_through(tmp_path: Path) -> None:
    """A dishonest validator accepts the work of a friend."""
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(BOB, RUN)
    await world.hear(work, make_verdict(work, by=VALIDATOR), hard(work, CARL), hard(work, DAVE))
    assert world.standing(BOB) == "evicted"
    assert world.state.usable(0) == []


async def test_verdict_beyond_the_quorum_stays_free_for_an_appeal(tmp_path: Path) -> None:
    """All three judged at once: the third must still be one that has not judged, as far as the ledger knows."""
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(BOB, RUN)
    await world.hear(hard(work, VALIDATOR), hard(work, CARL), hard(work, DAVE), work)
    assert len(world.state.submissions[work.id].verdicts) == 2


# Appeals.


@pytest.mark.parametrize("answer_first", [True, False])
async def test_granted_appeal_takes_the_eviction_back(tmp_path: Path, answer_first: bool) -> None:
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(ALICE, RUN)
    verdict = hard(work, CARL)
    await world.hear(work, hard(work, VALIDATOR), verdict)
    assert world.standing(ALICE) == "evicted"
    appeal = make_appeal(ALICE, verdict)
    answer = make_answer(work, appeal, by=DAVE)
    await world.hear(*((answer, appeal) if answer_first else (appeal, answer)))
    assert world.standing(ALICE) == "active"
    assert world.kinds()[-3:] == ["appeal", "verdict", Reinstatement.KIND]
    assert world.state.contributors[ALICE.peer_id].credits == work.record.output_tokens


async def test_refused_appeal_changes_nothing_but_the_next_ones_date(tmp_path: Path) -> None:
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(ALICE, RUN)
    verdict = hard(work, CARL)
    await world.hear(work, hard(work, VALIDATOR), verdict)
    appeal = make_appeal(ALICE, verdict)
    refusal = make_answer(work, appeal, by=DAVE, outcome="reject", hard=True, reason="seed: made up")
    await world.hear(appeal, appeal, refusal)
    assert world.standing(ALICE) == "evicted"
    assert world.kinds().count("appeal") == 1
    assert world.state.contributors[ALICE.peer_id].next_appeal > 0
    assert world.collector.has_all()


async def test_answer_by_who_judged_before_is_no_answer(tmp_path: Path) -> None:
    """A validator grants an appeal against its own verdict, or a friend's who is no validator."""
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(ALICE, RUN)
    verdict = hard(work, CARL)
    await world.hear(work, hard(work, VALIDATOR), verdict)
    appeal = make_appeal(ALICE, verdict)
    await world.hear(appeal, make_answer(work, appeal, by=CARL))
    assert world.state.open_appeals() == [appeal.id]
    assert not world.collector.has_all()
    assert world.standing(ALICE) == "evicted"
