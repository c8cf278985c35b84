"""A contributor's way into a run: the proof of its key, invites as files, and what relays say of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio
from factories import OPERATOR, make_invite, make_manifest, sealed

from node.admission import entrance
from node.admission.entrance import Entrance, NotAdmitted
from node.admission.invites import create_invites, kept_invite, read_invite
from node.relay_client import RelayClient
from node.swarm import Swarm
from protocol.envelope import Signed, open_envelope
from protocol.errors import ConfigError, RefusedError, RelayError
from protocol.identity import Identity
from protocol.records import Admission, AdmissionSpec, Invite, Manifest
from protocol.work import work_holds

ALICE = Identity.from_phrase("alice")
BITS = 2


class FakeRelay:
    """Says what it is told to, one answer after another, and the last one ever after."""

    def __init__(self, *answers: bool | Exception, name: str = "relay") -> None:
        self.peer_id = Identity.from_phrase(name).peer_id
        self.answers = list(answers)
        self.taken: list[Signed[Admission]] = []

    async def post_admission(self, envelope: bytes) -> bool:
        await trio.lowlevel.checkpoint()
        self.taken.append(open_envelope(envelope, Admission))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeSwarm:
    def __init__(self, *relays: FakeRelay, **admission: Any) -> None:
        spec = AdmissionSpec(**(admission or {"work_bits": BITS}))
        self.manifest: Signed[Manifest] = sealed(make_manifest(admission=spec), OPERATOR)
        self.clients = [cast(RelayClient, relay) for relay in relays]


def entering(directory: Path, swarm: FakeSwarm, **options: Any) -> Entrance:
    return Entrance(ALICE, cast(Swarm, swarm), directory=directory, **options)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "ASK_AGAIN_S", 0.01)


def refusal(rule: str) -> RefusedError:
    return RefusedError("no", code=f"admission-{rule}", hint="ask")


async def test_proof_is_made_and_shown_to_relays_until_the_ledger_has_it(tmp_path: Path) -> None:
    relay = FakeRelay(False, RelayError("away"), True)
    swarm = FakeSwarm(relay)
    door = entering(tmp_path, swarm)
    assert door.waits_for is not None
    with trio.fail_after(20):
        await door.run()
    assert door.waits_for is None
    assert len(relay.taken) == 3
    assert work_holds(ALICE.peer_id, swarm.manifest.id, relay.taken[0].record.nonce, bits=BITS)


async def test_proof_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = FakeRelay(True)
    swarm = FakeSwarm(relay)
    with trio.fail_after(20):
        await entering(tmp_path, swarm).run()
        monkeypatch.setattr(entrance, "find_work", None)
        await entering(tmp_path, swarm).run()
    first, second = relay.taken
    assert first.record.nonce == second.record.nonce


async def test_search_goes_on_where_it_was_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    said: list[str | None] = []

    def search(author: Any, run_id: bytes, *, bits: int, first: int, each: Any) -> bytes:
        begun.append(first)
        if len(begun) == 1:
            each(entrance.SAVE_EVERY)
            raise RuntimeError("killed")
        said.append(door.waits_for)
        return b"n" * 8

    monkeypatch.setattr(entrance, "find_work", search)
    swarm = FakeSwarm(FakeRelay(True), work_bits=7)
    door = entering(tmp_path, swarm)
    with pytest.raises(RuntimeError):
        await door.run()
    door = entering(tmp_path, swarm)
    await door.run()
    assert begun == [0, entrance.SAVE_EVERY]
    assert said == ["proving that this key cost something: 50 % of the tries that it takes on average"]


async def test_another_keys_or_a_damaged_proof_is_made_again(tmp_path: Path) -> None:
    relay = FakeRelay(True)
    swarm = FakeSwarm(relay)
    other = msgspec.msgpack.encode({"run_id": swarm.manifest.id, "key": b"x" * 32, "tries": 5, "nonce": b"n" * 8})
    for content in (b"damaged", other):
        (tmp_path / entrance.WORK_FILE).write_bytes(content)
        with trio.fail_after(20):
            await entering(tmp_path, swarm).run()
    for admission in relay.taken:
        assert work_holds(ALICE.peer_id, swarm.manifest.id, admission.record.nonce, bits=BITS)


async def test_one_relay_that_lies_keeps_nobody_out(tmp_path: Path) -> None:
    liar, honest = FakeRelay(refusal("not-allowed")), FakeRelay(False, False, True, name="honest")
    with trio.fail_after(20):
        await entering(tmp_path, FakeSwarm(liar, honest)).run()


async def test_who_is_refused_everywhere_is_told_why(tmp_path: Path) -> None:
    door = entering(tmp_path, FakeSwarm(FakeRelay(refusal("invite-spent"))))
    with trio.fail_after(20), pytest.raises(NotAdmitted) as caught:
        await door.run()
    assert caught.value.hint == "ask"


async def test_open_run_asks_nothing(tmp_path: Path) -> None:
    relay = FakeRelay(True)
    door = entering(tmp_path, FakeSwarm(relay, kind="open"))
    await door.run()
    assert (door.waits_for, relay.taken) == (None, [])


# Invites.


def operator_dir(tmp_path: Path, manifest: Signed[Manifest]) -> Path:
    (tmp_path / "trainer" / "run").mkdir(parents=True)
    (tmp_path / "trainer" / "run" / "manifest").write_bytes(manifest.data)
    return tmp_path / "trainer"


def test_invites_are_files_that_let_one_node_in_each(tmp_path: Path) -> None:
    manifest = FakeSwarm(kind="invite").manifest
    made = create_invites(operator_dir(tmp_path, manifest), OPERATOR, tmp_path / "out", count=3, days=2, now_ms=1000)
    envelopes = [read_invite(Path(path), manifest) for path in made["files"]]
    tokens = {open_envelope(data, Invite).record.token for data in envelopes}
    assert len(tokens) == 3
    assert made["valid_until_ms"] == 1000 + 2 * 86_400_000
    assert kept_invite(tmp_path, made["files"][1], manifest) == envelopes[1]
    assert kept_invite(tmp_path, "", manifest) == envelopes[1]  # the next start needs it no more


def test_invites_are_made_for_runs_that_ask_for_them_by_their_operator(tmp_path: Path) -> None:
    open_run = operator_dir(tmp_path, FakeSwarm(kind="open").manifest)
    options: dict[str, Any] = {"count": 1, "days": 1.0, "now_ms": 1}
    with pytest.raises(ConfigError, match="asks for no invites"):
        create_invites(open_run, OPERATOR, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match="operator is"):
        create_invites(open_run, ALICE, tmp_path / "out", **options)


def test_what_is_no_invite_is_refused_by_name(tmp_path: Path) -> None:
    """A file cut short in the mail, one of another run, forged by somebody else, or a gigabyte long."""
    import base64

    manifest = FakeSwarm(kind="invite").manifest
    path = tmp_path / "invite.txt"
    for content, said in (
        (b"# only a comment\n", "holds no invite"),
        (base64.b64encode(make_invite(manifest.id).data)[:-9], "holds no invite"),
        (base64.b64encode(make_invite(b"x" * 32).data), "not to this run"),
        (base64.b64encode(make_invite(manifest.id, by=ALICE).data), "not by its operator"),
        (b"x" * 10_000, "larger than"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_invite(path, manifest)
