"""`intellect-node appeal` at a real relay, from the rejection in a contributor's outbox to the code it ends with."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from cli_kit import Done
from factories import OPERATOR, VALIDATOR, make_answer, make_eviction, make_manifest, make_verdict, sealed
from relay_world import CAROL, Relay, loopback, make_advert, make_head, make_notice, serving, submission_of

from node import appeal
from node.identity import keep_new_identity
from node.inference.outbox import Outbox
from protocol.envelope import Signed
from protocol.errors import RelayError
from protocol.identity import Identity
from protocol.ledger import next_tip, open_entry
from protocol.records import Appeal, Manifest
from protocol.run import RunAddress

ALICE, DAVE = Identity.from_phrase("alice"), Identity.from_phrase("dave")
MANIFEST = sealed(
    make_manifest(validators=tuple(one.peer_id.public_key for one in (VALIDATOR, DAVE))),
    OPERATOR,
)
RunCli = Callable[..., Done]
Ask = Callable[..., Awaitable[Any]]


class Court:
    """A run whose ledger evicted ALICE; its relay, which is up while a command runs, and a validator that answers."""

    def __init__(self, directory: Path, **answer: Any) -> None:
        self.directory, self.answer, self.home = directory, answer, directory / "alice"
        self.work = submission_of(ALICE, b"rollouts", run_id=MANIFEST.id)
        verdict = make_verdict(self.work, outcome="reject", hard=True, reason="seed: not its own prompts")
        self.entries = [self.work.data, verdict.data, make_eviction(verdict)]
        self.answered: list[bytes] = []
        keep_new_identity(ALICE, self.home)
        (self.home / "swarm.cache").write_bytes(msgspec.msgpack.encode((MANIFEST.data, [])))
        outbox = Outbox(self.home / "outbox.sqlite")
        outbox.add(self.work, directory / "rollouts")
        outbox.judged(verdict)
        outbox.close()

    def joined(self, data_dir: Path, run: str, bootstrap: Sequence[str], ask: Ask, *, timeout_s: float) -> Any:
        """In place of the DHT."""
        return trio.run(self._serve, ask)

    async def _serve(self, ask: Ask) -> Any:
        with trio.fail_after(20):
            async with loopback() as (aio, _):
                relay = Relay(CAROL, self.directory / "relay", aio)
                self._meet(relay)
                async with serving(aio, relay), trio.open_nursery() as nursery:
                    nursery.start_soon(self._answer_appeals, relay)
                    found = await ask(FakeNode(relay), RunAddress(MANIFEST.author, MANIFEST.record.name), 10.0)
                    nursery.cancel_scope.cancel()
        return found

    def _meet(self, relay: Relay) -> None:
        if relay.desk.manifest is None:
            head = make_head(run_id=MANIFEST.id, ledger_tip=MANIFEST.id)
            relay.desk.accept_origin(MANIFEST.data, make_notice(CAROL, run_id=MANIFEST.id).data, head.data)
        self._mirror(relay)

    def _mirror(self, relay: Relay) -> None:
        """The trainer's ledger, as far as the relay lacks it."""
        tip = MANIFEST.id
        for entry in self.entries:
            tip = next_tip(tip, open_entry(entry).id)
        head = make_head(2, run_id=MANIFEST.id, ledger_length=len(self.entries), ledger_tip=tip)
        assert relay.desk.ledger is not None
        relay.desk.extend_ledger(self.entries[relay.desk.ledger.state.length :], head)

    async def _answer_appeals(self, relay: Relay) -> None:
        while True:
            for row in relay.store.feed(0, kinds=[Appeal.KIND]):
                petition: Signed[Appeal] = open_entry(row.envelope)
                if petition.id not in self.answered:
                    self.answered.append(petition.id)
                    answer = make_answer(self.work, petition, by=DAVE, **self.answer)
                    relay.desk.accept_verdict(answer.data)
                    self.entries += [petition.data, answer.data]
                    self._mirror(relay)
            await trio.sleep(0.01)


class FakeNode:
    """What the DHT leads to."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def find_relays(self) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [make_advert(self._relay.identity, self._relay.url)]

    async def find_run(self, address: RunAddress) -> Signed[Manifest]:
        await trio.lowlevel.checkpoint()
        return MANIFEST


@pytest.fixture
def at_court(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Court]:
    def made(**answer: Any) -> Court:
        court = Court(tmp_path, **answer)
        monkeypatch.setattr(appeal, "joined", court.joined)
        monkeypatch.setattr(appeal, "POLL_S", 0.05)
        return court

    return made


def test_appeal_that_nobody_could_tell_fails_with_the_reason_and_may_be_filed_once_more(
    run_cli: RunCli, at_court: Callable[..., Court]
) -> None:
    court = at_court(outcome="undecided", reason="file: the rollouts did not come within 300 s\x1b[2J")
    first = run_cli("appeal", "last", "--reason", "float32", "--data-dir", court.home)
    assert first.code == 1
    assert first.out.strip() == f"{court.answered[0].hex()}: undecided"
    assert "it may be filed once more: run the same command again" in first.err
    assert f"validator {DAVE.peer_id.short}: file: the rollouts did not come within 300 s\\x1b[2J" in first.err
    second = run_cli("appeal", "last", "--data-dir", court.home, "--json")
    assert (second.code, len(court.answered)) == (1, 2)
    found = json.loads(second.out)
    assert found == {
        "appeal": court.answered[1].hex(),
        "submission": court.work.id.hex(),
        "state": "undecided",
        "once_more": False,
    }
    assert "could tell, for the second time: the rejection stays" in second.err
    assert "once more" not in second.err
    third = run_cli("appeal", "last", "--data-dir", court.home, "--json")
    assert (third.code, json.loads(third.out)) == (1, found)
    assert len(court.answered) == 2


def test_appeal_that_is_refused_fails(run_cli: RunCli, at_court: Callable[..., Court]) -> None:
    court = at_court(outcome="reject", hard=True, reason="seed: not its own prompts")
    done = run_cli("appeal", "last", "--data-dir", court.home)
    assert (done.code, done.out.strip()) == (1, f"{court.answered[0].hex()}: refused")
    assert "the next appeal has to wait" in done.err


def test_appeal_that_no_relay_took_in_a_day_is_signed_anew(run_cli: RunCli, at_court: Callable[..., Court]) -> None:
    """Kept since a day on which every relay was away: refused for its age, by a command that works the next time."""
    court = at_court(outcome="undecided", reason="internal: x")
    with pytest.MonkeyPatch.context() as yesterday:
        yesterday.setattr(appeal, "now_ms", lambda: 1_700_000_000_000)
        yesterday.setattr(appeal.RelayClient, "post_appeal", away)
        assert run_cli("appeal", "last", "--data-dir", court.home).code == 1
    done = run_cli("appeal", "last", "--data-dir", court.home)
    assert done.code == 1
    assert "hours ago by this relay's clock" in done.err
    assert "or run the command again" in done.err
    assert court.answered == []
    assert run_cli("appeal", "last", "--data-dir", court.home).out.endswith(": undecided\n")


async def away(client: Any, envelope: bytes) -> str:
    await trio.lowlevel.checkpoint()
    raise RelayError("away")
