"""A contributor that its run turns away: it ends with the reason, or waits while its appeal is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import trio
from factories import make_submission, make_verdict

from node.inference import eviction
from node.inference.eviction import Evicted, EvictionWatch
from node.inference.outbox import Outbox
from node.inference.standing import StandingWatch, appeals_text
from node.membership import AppealRow, Standing
from node.status import StatusBoard
from node.swarm import Swarm
from protocol.identity import Identity

ALICE = Identity.from_phrase("alice")
RUN = b"r" * 32
WORK = make_submission(ALICE, RUN)


class FakeSwarm:
    """Turned away from the start, and let in again once it is forgotten."""

    def __init__(self) -> None:
        self.forgotten = trio.Event()

    async def wait_evicted(self) -> str:
        await trio.lowlevel.checkpoint()
        if self.forgotten.is_set():
            await trio.sleep_forever()
        return "alice is evicted"

    def forget_eviction(self) -> None:
        self.forgotten.set()


class FakeStanding:
    """Answers one after another; the last one ever after."""

    def __init__(self, *answers: Standing | None) -> None:
        self.answers = list(answers)

    async def ask(self) -> Standing | None:
        await trio.lowlevel.checkpoint()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def evicted(state: Any = None) -> Standing:
    row = AppealRow(
        b"a" * 32, WORK.id, state, b"", accepts=1, rejects=0, needed=2, once_more=state == "undecided"
    )  # fmt: skip
    return Standing(
        ledger_length=9,
        trained=1,
        admitted=True,
        standing="evicted",
        evicted_for=WORK.id,
        appeals=(row,) if state else (),
    )


BACK = Standing(ledger_length=9, trained=1, admitted=True, standing="active")


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    outbox.add(WORK, tmp_path / "file")
    outbox.judged(make_verdict(WORK, outcome="reject", hard=True, reason="seed: made up"))
    return outbox


def watching(outbox: Outbox, *answers: Standing | None) -> tuple[EvictionWatch, FakeSwarm, StatusBoard]:
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run="test")
    swarm = FakeSwarm()
    standing = cast(StandingWatch, FakeStanding(*answers))
    return EvictionWatch(cast(Swarm, swarm), outbox, board, standing), swarm, board


@pytest.mark.parametrize("answer", [None, evicted(), evicted("refused")])
async def test_who_has_no_open_appeal_ends_and_is_told_how_to_make_one(outbox: Outbox, answer: Standing | None) -> None:
    watch, _, board = watching(outbox, answer)
    with trio.fail_after(5), pytest.raises(Evicted) as caught:
        await watch.run()
    assert "intellect-node appeal last" in caught.value.hint
    assert board.brief()["state"] == "evicted"


async def test_who_has_appealed_waits_and_comes_back(outbox: Outbox, autojump_clock: Any) -> None:
    watch, swarm, board = watching(outbox, evicted("open"), evicted("granted"), BACK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(eviction.POLL_S / 2)
        assert board.brief()["activity"] == "alice is evicted; its appeal waits for other validators"
        with trio.fail_after(60):
            await swarm.forgotten.wait()
        nursery.cancel_scope.cancel()
    assert board.brief()["state"] == "waiting"


async def test_the_verdict_is_waited_for_as_the_ground_of_an_appeal(tmp_path: Path, autojump_clock: Any) -> None:
    empty = Outbox(tmp_path / "other.sqlite")
    watch, _, _ = watching(empty, evicted())
    began = trio.current_time()
    with pytest.raises(Evicted):
        await watch.run()
    assert trio.current_time() - began == pytest.approx(eviction.GROUND_S, abs=0.5)


def test_appeals_are_told_in_words() -> None:
    assert appeals_text(()) == ""
    waits = "is in the ledger and waits for other validators (1 of 2 accept, 0 of 2 reject)"
    assert appeals_text(evicted("open").appeals).endswith(waits)
    assert appeals_text(evicted("undecided").appeals).endswith("0 of 2 reject), and may be filed once more")
