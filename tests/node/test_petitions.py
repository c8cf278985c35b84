"""Admissions, appeals and quorums on their way into the trainer's ledger, in whatever order relays tell of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from collector_world import ALICE, BOB, CARL, DAVE, RUN, THREE, hard, worlds
from factories import (
    VALIDATOR,
    make_admission,
    make_answer,
    make_appeal,
    make_invite,
    make_submission,
    make_verdict,
    sealed,
)

from protocol.identity import Identity
from protocol.records import AdmissionSpec, Draw, Eviction, Reinstatement

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
    assert world.state.shelf.usable(0) == []


@pytest.mark.parametrize(
    "lie",
    [
        {"contributor": BOB.peer_id.public_key},
        {"step": 2},
        {"draw": Draw(drawn=False, rate=0.25, why="not drawn", beacon=b"", receipt=b"")},
    ],
    ids=["contributor", "step", "draw"],
)
async def test_verdict_that_the_ledger_refuses_takes_no_other_with_it(tmp_path: Path, lie: dict[str, Any]) -> None:
    """A validator signs what no ledger takes about a submission, so that nobody's verdict on it is counted."""
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(ALICE, RUN)
    await world.hear(work, make_verdict(work, **lie), make_verdict(work, by=CARL), make_verdict(work, by=DAVE))
    assert world.state.submissions[work.id].state == "accepted"
    assert world.kinds() == ["submission", "verdict", "verdict"]


async def test_verdicts_about_nothing_fill_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validator signs verdicts about submissions that do not exist, for ever."""
    monkeypatch.setattr("node.trainer.collector.MAX_CASES", 5)
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work, other = make_submission(ALICE, RUN), make_submission(BOB, RUN)
    verdict = make_verdict(work).record
    ids = [bytes([number]) * 32 for number in range(20)]
    made_up = [sealed(msgspec.structs.replace(verdict, submission=key), VALIDATOR) for key in ids]
    await world.hear(other, *made_up, work, make_verdict(work, by=CARL), make_verdict(work, by=DAVE))
    assert world.state.submissions[work.id].state == "accepted"
    assert len(world.collector._cases) <= 5
    await world.hear(make_verdict(other, by=CARL), make_verdict(other, by=DAVE))
    assert world.state.submissions[other.id].state == "accepted"


async def test_verdict_beyond_the_quorum_stays_free_for_an_appeal(tmp_path: Path) -> None:
    """All three judged at once: the third must still be one that has not judged, as far as the ledger knows."""
    world = worlds(tmp_path, validators=THREE, quorum=2)
    work = make_submission(BOB, RUN)
    await world.hear(hard(work, VALIDATOR), hard(work, CARL), hard(work, DAVE), work)
    assert len(world.state.submissions[work.id].verdicts) == 2


# Appeals.

EVE, FAY = Identity.from_phrase("eve"), Identity.from_phrase("fay")
FIVE = (*THREE, *(one.peer_id.public_key for one in (EVE, FAY)))


@pytest.mark.parametrize(
    ("liar", "others", "standing"), [("reject", "accept", "active"), ("accept", "reject", "evicted")]
)
async def test_one_liar_decides_no_appeal(tmp_path: Path, liar: str, others: str, standing: str) -> None:
    """A dishonest validator answers first: it refuses whoever was wronged, or grants the appeal of a friend."""
    world = worlds(tmp_path, validators=FIVE, quorum=2)
    work = make_submission(ALICE, RUN)
    verdict = hard(work, CARL)
    await world.hear(work, hard(work, VALIDATOR), verdict)
    appeal = make_appeal(ALICE, verdict)
    await world.hear(appeal, make_answer(work, appeal, by=DAVE, outcome=liar))
    assert (world.standing(ALICE), world.state.open_appeals()) == ("evicted", [appeal.id])
    assert not world.collector.has_all()
    await world.hear(*(make_answer(work, appeal, by=judge, outcome=others) for judge in (EVE, FAY)))
    assert (world.standing(ALICE), world.state.open_appeals()) == (standing, [])
    assert (Reinstatement.KIND in world.kinds()) == (standing == "active")


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


@pytest.mark.parametrize("answers_first", [True, False])
async def test_work_that_was_accepted_during_an_eviction_is_credited_once_it_is_undone(
    tmp_path: Path, answers_first: bool
) -> None:
    """Two liars evict an honest contributor whose other work is being judged by honest validators."""
    world = worlds(tmp_path, validators=FIVE, quorum=2)
    work, other, third = (make_submission(ALICE, RUN, index=index) for index in range(3))
    verdict = hard(work, CARL)
    await world.hear(other, work, hard(work, VALIDATOR), verdict)
    assert world.standing(ALICE) == "evicted"
    accepts = [make_verdict(one, by=judge) for one in (other, third) for judge in (CARL, DAVE)]
    await world.hear(*accepts, third)
    appeal = make_appeal(ALICE, verdict)
    answers = [make_answer(work, appeal, by=judge) for judge in (DAVE, FAY)]
    await world.hear(*((*answers, appeal) if answers_first else (appeal, *answers)))
    assert world.standing(ALICE) == "active"
    assert [world.state.submissions[one.id].state for one in (work, other, third)] == ["accepted"] * 3
    assert world.state.contributors[ALICE.peer_id].credits == 3 * work.record.output_tokens


async def test_work_of_the_evicted_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lying relay hands on whatever a key signs that was evicted."""
    monkeypatch.setattr("node.trainer.collector.MAX_HELD_EACH", 5)
    world = worlds(tmp_path, validators=THREE, quorum=1)
    bad = make_submission(ALICE, RUN)
    await world.hear(bad, hard(bad, CARL), *(make_submission(ALICE, RUN, index=index) for index in range(1, 20)))
    assert len(world.collector._cases) == 5


# The end of the run.


@pytest.mark.parametrize("lie", ["reject", "undecided"])
async def test_the_end_waits_for_the_validator_that_is_called_after_a_liar(tmp_path: Path, lie: str) -> None:
    """A validator that says the first thing about honest work, and nothing true, keeps it from its credits."""
    world = worlds(tmp_path, validators=FIVE, quorum=2)
    work = make_submission(ALICE, RUN)
    await world.hear(work, make_verdict(work, by=EVE, outcome=lie, reason="seed: made up"))
    assert not world.collector.has_all()
    await world.hear(make_verdict(work, by=CARL))
    assert not world.collector.has_all()
    await world.hear(make_verdict(work, by=DAVE))
    assert world.state.submissions[work.id].state == "accepted"
    assert world.collector.has_all()


async def test_the_end_waits_for_no_quorum_that_cannot_be(tmp_path: Path) -> None:
    world = worlds(tmp_path, validators=THREE[:2], quorum=2)
    work = make_submission(ALICE, RUN)
    await world.hear(work, make_verdict(work, by=VALIDATOR))
    assert not world.collector.has_all()
    await world.hear(make_verdict(work, by=CARL, outcome="reject", reason="seed: x"))
    assert world.collector.has_all()


async def test_the_end_waits_for_no_relay_for_ever(tmp_path: Path) -> None:
    world = worlds(tmp_path)
    world.feeds.silent = frozenset({world.feeds.relay.peer_id})
    assert (world.collector.has_all(), world.collector.has_all(but_silent=True)) == (False, True)


async def test_answers_to_appeals_that_do_not_exist_stand_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One validator switches appeals off: it answers more that do not exist than the trainer keeps answers for."""
    monkeypatch.setattr("node.trainer.petitions.MAX_WAITING_EACH", 8)
    world = worlds(tmp_path, validators=FIVE, quorum=2)
    work = make_submission(ALICE, RUN)
    verdict = hard(work, CARL)
    await world.hear(work, hard(work, VALIDATOR), verdict)
    lie = make_verdict(make_submission(BOB, RUN), by=EVE).record
    lies = [msgspec.structs.replace(lie, appeal=bytes([number]) * 32) for number in range(1, 20)]
    appeal = make_appeal(ALICE, verdict)
    early, late = (make_answer(work, appeal, by=judge) for judge in (DAVE, FAY))
    stranger = [sealed(lie, Identity.from_phrase(f"stranger {number}")) for number in range(3)]
    await world.hear(early, *(sealed(one, EVE) for one in lies), *stranger, appeal, late)
    assert (world.standing(ALICE), world.state.open_appeals()) == ("active", [])
    waiting = world.collector._petitions._waiting
    assert {peer: len(own) for peer, own in waiting.items()} == {DAVE.peer_id: 0, EVE.peer_id: 8}


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
