"""Verdicts on their way to relays: none is lost to a relay's bad moment, and none holds up the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from disk_kit import full_disk
from factories import make_submission, make_verdict
from relay_world import ALICE, CAROL, MANIFEST, Relay, loopback, serving

from node.relay_client import RelayClient
from node.validator.docket import Docket
from node.validator.posting import MAX_REFUSED, Poster
from protocol.envelope import Signed, open_envelope
from protocol.errors import RefusedError
from protocol.records import Verdict


@pytest.fixture
def docket(tmp_path: Path) -> Iterator[Docket]:
    docket = Docket(tmp_path / "docket.sqlite")
    yield docket
    docket.close()


def judge(docket: Docket, count: int) -> list[Signed[Verdict]]:
    """Verdicts on so many submissions, in the docket."""
    verdicts = [make_verdict(make_submission(ALICE, MANIFEST.id, index=index)) for index in range(count)]
    for verdict in verdicts:
        docket.add(verdict)
    return verdicts


class Swarm:
    """Relays, and no more."""

    def __init__(self, *clients: Any) -> None:
        self.clients = clients


class Choosy:
    """A relay that says a code to every verdict, or to some; notes what it took, and how often it said no."""

    peer_id = CAROL.peer_id

    def __init__(self, code: str, *refused: int) -> None:
        self.code, self.refused = code, set(refused)
        self.took: list[bytes] = []
        self.said_no = 0

    async def post_verdict(self, envelope: bytes) -> None:
        await trio.lowlevel.checkpoint()
        verdict = open_envelope(envelope, Verdict)
        if len(self.took) + self.said_no in self.refused:
            self.said_no += 1
            raise RefusedError("not this one", code=self.code)
        self.took.append(verdict.id)


def poster(docket: Docket, *clients: Any) -> Poster:
    swarm: Any = Swarm(*clients)
    return Poster(swarm, docket)


async def test_verdicts_wait_for_a_relay_whose_disk_is_full(docket: Docket, tmp_path: Path) -> None:
    verdicts = judge(docket, 3)
    with trio.fail_after(10):
        async with loopback() as (aio, http), serving(aio, Relay(CAROL, tmp_path / "relay", aio)) as relay:
            relay.meet_trainer()
            client: RelayClient = relay.client(http)
            posting = poster(docket, client)
            with full_disk():
                with pytest.raises(RefusedError) as caught:
                    await client.post_verdict(verdicts[0].data)
                await posting.post()
            assert caught.value.code == "disk-full"
            assert relay.store.stats().verdicts == 0
            await posting.post()
            assert all(relay.store.has(verdict.id) for verdict in verdicts)
            assert docket.unposted(CAROL.peer_id) == []


@pytest.mark.parametrize("code", ["disk-full", "unauthorized", "too-many-requests"])
async def test_a_relay_that_takes_nothing_now_is_asked_once_a_round(docket: Docket, code: str) -> None:
    verdicts, relay = judge(docket, 3), Choosy(code, 0)
    posting = poster(docket, relay)
    with trio.fail_after(5):
        await posting.post()
        assert (relay.took, relay.said_no) == ([], 1)
        await posting.post()
    assert relay.took == [verdict.id for verdict in verdicts]


@pytest.mark.parametrize("code", ["internal", "http-502", "timeout", "brand-new"])
async def test_what_a_relay_may_take_later_is_offered_again(docket: Docket, code: str) -> None:
    """A code of a later release is one of these: to ask in vain costs less than a verdict that nobody hears."""
    verdicts, relay = judge(docket, 3), Choosy(code, 0)
    posting = poster(docket, relay)
    with trio.fail_after(5):
        await posting.post()
        assert relay.took == [verdict.id for verdict in verdicts[1:]]
        await posting.post()
    assert relay.took == [verdict.id for verdict in (*verdicts[1:], verdicts[0])]
    assert relay.said_no == 1


@pytest.mark.parametrize("code", ["already-judged", "malformed", "wrong-run"])
async def test_what_a_relay_never_takes_is_not_offered_again(docket: Docket, code: str) -> None:
    judge(docket, 3)
    relay = Choosy(code, 0, 3)
    posting = poster(docket, relay)
    with trio.fail_after(5):
        await posting.post()
        await posting.post()
    assert (len(relay.took), relay.said_no) == (2, 1)


class Stubborn(Choosy):
    """Refuses some verdicts for ever, with a code that nobody knows."""

    def __init__(self, *never: bytes) -> None:
        super().__init__("brand-new")
        self.never = never

    async def post_verdict(self, envelope: bytes) -> None:
        verdict = open_envelope(envelope, Verdict).id
        if verdict in self.never:
            self.said_no += 1
            raise RefusedError("never", code=self.code)
        await super().post_verdict(envelope)


async def test_verdicts_that_are_always_refused_hold_up_no_others(docket: Docket) -> None:
    """By a code that may pass, for all that is known; a round asks for some of them."""
    verdicts = judge(docket, 12)
    never = [*range(9), 10]
    relay = Stubborn(*(verdicts[one].id for one in never))
    posting = poster(docket, relay)
    with trio.fail_after(5):
        for rounds in range(1, 4):
            await posting.post()
            assert relay.said_no <= MAX_REFUSED * rounds
        assert relay.took == [verdicts[9].id, verdicts[11].id]
        before = relay.said_no
        await posting.post()
    assert relay.said_no == before + MAX_REFUSED, "from the oldest on again"
    assert [envelope for _, envelope in docket.unposted(CAROL.peer_id)] == [verdicts[one].data for one in never]


class Slow(Choosy):
    """While it takes a verdict, the validator comes to another one about the same submission."""

    def __init__(self, docket: Docket, decision: Signed[Verdict]) -> None:
        super().__init__("")
        self.docket, self.decision = docket, decision

    async def post_verdict(self, envelope: bytes) -> None:
        await super().post_verdict(envelope)
        self.docket.add(self.decision)


async def test_a_decision_that_comes_while_its_forerunner_travels_is_posted_as_well(docket: Docket) -> None:
    submission = make_submission(ALICE, MANIFEST.id)
    waiting, decision = make_verdict(submission, outcome="undecided", reason="policy: gone"), make_verdict(submission)
    docket.add(waiting)
    relay = Slow(docket, decision)
    posting = poster(docket, relay)
    with trio.fail_after(5):
        await posting.post()
        await posting.post()
    assert relay.took == [waiting.id, decision.id]
    assert docket.unposted(CAROL.peer_id) == []
