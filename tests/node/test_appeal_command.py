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
from factories import (
    OPERATOR,
    VALIDATOR,
    make_answer,
    make_eviction,
    make_manifest,
    make_reinstatement,
    make_verdict,
    sealed,
)
from relay_world import CAROL, Relay, loopback, make_advert, make_head, make_notice, serving, submission_of

from node import appeal
from node.identity import keep_new_identity
from node.inference.outbox import Outbox
from protocol.envelope import Signed, open_envelope
from protocol.errors import RelayError
from protocol.identity import Identity
from protocol.ledger import next_tip, open_entry
from protocol.records import Appeal, Manifest, Verdict
from protocol.run import RunAddress

ALICE, DAVE, EVE, FAY, GIL = (Identity.from_phrase(name) for name in ("alice", "dave", "eve", "fay", "gil"))
JUDGES = (VALIDATOR, GIL)
OTHERS = (DAVE, EVE, FAY)


def manifest_of(validators: Sequence[Identity], quorum: int) -> Signed[Manifest]:
    keys = tuple(one.peer_id.public_key for one in validators)
    return sealed(make_manifest(validators=keys, quorum=quorum), OPERATOR)


RunCli = Callable[..., Done]
Ask = Callable[..., Awaitable[Any]]


class Court:
    """A run whose ledger evicted ALICE; its relay, which is up while a command runs, and validators that answer."""

    def __init__(self, directory: Path, *outcomes: str, **answer: Any) -> None:
        """One of two validators judges, and the other answers; with several outcomes two of five, and the others."""
        self.directory, self.answer, self.home = directory, answer, directory / "alice"
        self.outcomes = outcomes
        quorum = min(2, len(outcomes))
        self.manifest = manifest_of((*JUDGES[:quorum], *OTHERS[: len(outcomes)]), quorum)
        self.work = submission_of(ALICE, b"rollouts", run_id=self.manifest.id)
        said = {"outcome": "reject", "hard": True, "reason": "seed: not its own prompts"}
        verdicts = [make_verdict(self.work, by=judge, **said) for judge in JUDGES[:quorum]]
        self.entries = [self.work.data, *(one.data for one in verdicts), make_eviction(verdicts[0])]
        self.answered: list[bytes] = []
        self.unseen: list[bytes] = []
        """Verdicts that the relay's feed has, and the contributor's outbox does not."""
        keep_new_identity(ALICE, self.home)
        (self.home / "swarm.cache").write_bytes(msgspec.msgpack.encode((self.manifest.data, [])))
        outbox = Outbox(self.home / "outbox.sqlite")
        outbox.add(self.work, directory / "rollouts")
        for verdict in verdicts:
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
                    found = await ask(
                        FakeNode(relay, self.manifest),
                        RunAddress(self.manifest.author, self.manifest.record.name),
                        10.0,
                    )
                    nursery.cancel_scope.cancel()
        return found

    def _meet(self, relay: Relay) -> None:
        if relay.desk.manifest is None:
            head = make_head(run_id=self.manifest.id, ledger_tip=self.manifest.id)
            relay.desk.accept_origin(self.manifest.data, make_notice(CAROL, run_id=self.manifest.id).data, head.data)
        self._mirror(relay)
        for verdict in self.unseen:
            relay.store.add_verdict(open_envelope(verdict, Verdict))

    def _mirror(self, relay: Relay) -> None:
        """The trainer's ledger, as far as the relay lacks it."""
        tip = self.manifest.id
        for entry in self.entries:
            tip = next_tip(tip, open_entry(entry).id)
        head = make_head(2, run_id=self.manifest.id, ledger_length=len(self.entries), ledger_tip=tip)
        assert relay.desk.ledger is not None
        relay.desk.extend_ledger(self.entries[relay.desk.ledger.state.length :], head)

    async def _answer_appeals(self, relay: Relay) -> None:
        while True:
            for row in relay.store.feed(0, kinds=[Appeal.KIND]):
                petition: Signed[Appeal] = open_entry(row.envelope)
                if petition.id not in self.answered:
                    self.answered.append(petition.id)
                    self.entries.append(petition.data)
                    self._answer(relay, petition)
                    self._mirror(relay)
            await trio.sleep(0.01)

    def _answer(self, relay: Relay, petition: Signed[Appeal]) -> None:
        for judge, outcome in zip(OTHERS, self.outcomes, strict=False):
            answer = make_answer(self.work, petition, by=judge, outcome=outcome, **self.answer)
            relay.desk.accept_verdict(answer.data)
            self.entries.append(answer.data)
        if self.outcomes[-1] == "accept":
            self.entries.append(make_reinstatement(answer, petition).data)


class FakeNode:
    """What the DHT leads to."""

    def __init__(self, relay: Relay, manifest: Signed[Manifest]) -> None:
        self._relay, self._manifest = relay, manifest

    async def find_relays(self) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [make_advert(self._relay.identity, self._relay.url)]

    async def find_run(self, address: RunAddress) -> Signed[Manifest]:
        await trio.lowlevel.checkpoint()
        return self._manifest


@pytest.fixture
def at_court(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Court]:
    def made(*outcomes: str, **answer: Any) -> Court:
        court = Court(tmp_path, *outcomes, **answer)
        monkeypatch.setattr(appeal, "joined", court.joined)
        monkeypatch.setattr(appeal, "POLL_S", 0.05)
        return court

    return made


def test_appeal_that_nobody_could_tell_fails_with_the_reason_and_may_be_filed_once_more(
    run_cli: RunCli, at_court: Callable[..., Court]
) -> None:
    court = at_court("undecided", reason="file: the rollouts did not come within 300 s\x1b[2J")
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
        "answers": {"accept": 0, "reject": 0, "needed": 1},
        "once_more": False,
    }
    assert "cannot be filed again: the rejection stays" in second.err
    assert "once more" not in second.err
    third = run_cli("appeal", "last", "--data-dir", court.home, "--json")
    assert (third.code, json.loads(third.out)) == (1, found)
    assert len(court.answered) == 2


def test_appeal_that_is_refused_fails(run_cli: RunCli, at_court: Callable[..., Court]) -> None:
    court = at_court("reject", hard=True, reason="seed: not its own prompts")
    done = run_cli("appeal", "last", "--data-dir", court.home)
    assert (done.code, done.out.strip()) == (1, f"{court.answered[0].hex()}: refused")
    assert "the next appeal has to wait (0 of 1 accept, 1 of 1 reject)" in done.err


@pytest.mark.parametrize("what", ["last", "its id"])
def test_verdict_that_the_ledger_does_not_have_is_not_appealed_against(
    run_cli: RunCli, at_court: Callable[..., Court], what: str
) -> None:
    """A judge signs two rejections and hands the contributor the one that the trainer never saw; and a validator that
    never judged rejects in answer to an appeal that does not exist."""
    court = at_court("reject", "accept", "accept", reason="")
    outbox = Outbox(court.home / "outbox.sqlite")
    for judge in JUDGES:
        outbox.judged(make_verdict(court.work, by=judge, outcome="reject", hard=True, reason="seed: another one"))
    outbox.judged(make_verdict(court.work, by=DAVE, outcome="reject", hard=True, reason="x: y", appeal=b"q" * 32))
    outbox.close()
    for entry in map(open_entry, court.entries):
        if isinstance(entry.record, Verdict):
            court.unseen.append(entry.data)
    name = what if what == "last" else court.work.id.hex()
    done = run_cli("appeal", name, "--data-dir", court.home, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["state"] == "reinstated"


def test_appeal_that_two_must_grant_outlasts_one_that_refuses(run_cli: RunCli, at_court: Callable[..., Court]) -> None:
    """A dishonest validator is the first of three to answer."""
    court = at_court("reject", "accept", "accept", reason="")
    done = run_cli("appeal", "last", "--data-dir", court.home, "--json")
    assert (done.code, json.loads(done.out)["state"]) == (0, "reinstated")
    assert json.loads(done.out)["answers"] == {"accept": 2, "reject": 1, "needed": 2}
    assert "start the node again (2 of 2 accept, 1 of 2 reject)" in done.err


def test_appeal_on_which_two_disagree_cannot_be_filed_again(run_cli: RunCli, at_court: Callable[..., Court]) -> None:
    court = at_court("accept", "reject", reason="")
    done = run_cli("appeal", "last", "--data-dir", court.home, "--json")
    assert (done.code, json.loads(done.out)["once_more"]) == (1, False)
    assert "cannot be filed again: the rejection stays (1 of 2 accept, 1 of 2 reject)" in done.err


def test_appeal_that_no_relay_took_in_a_day_is_signed_anew(run_cli: RunCli, at_court: Callable[..., Court]) -> None:
    """Kept since a day on which every relay was away: refused for its age, by a command that works the next time."""
    court = at_court("undecided", reason="internal: x")
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
