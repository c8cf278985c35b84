"""The ledger, the relays' promises and the logs, read from the places where nodes leave them."""

import dataclasses
import hashlib
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from factories import (
    OPERATOR,
    RELAY,
    VALIDATOR,
    make_batch,
    make_manifest,
    make_submission,
    make_trained,
    make_verdict,
    receipt_of,
    sealed,
)
from oracle_world import judgement, make_evidence

from node.inference.outbox import Outbox
from node.ledger.segments import SegmentWriter
from node.relay.store import RelayStore
from node.validator.docket import Docket
from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.records import Submission
from simnet.oracles.books import Account, Books, Copy, StepSeen, read_books
from simnet.oracles.logs import read_checkpoints
from simnet.oracles.promises import Promise
from simnet.report import build_report

ALICE = Identity.from_phrase("alice")
CONTENT = b"rollouts" * 10
MANIFEST = sealed(make_manifest(), OPERATOR)
RUN = MANIFEST.id
FILES = [make_submission(ALICE, RUN, index=index, size=len(CONTENT)) for index in range(2)]
VERDICT = make_verdict(FILES[0], by=VALIDATOR, issued_at_ms=20)
ENTRIES = [FILES[0].data, FILES[1].data, VERDICT.data, make_batch(RUN, 0, FILES[:1]), make_trained(RUN, 0)]


def data_dir(directory: Path, entries: list[bytes]) -> Path:
    """What a node leaves: the manifest and a ledger."""
    (directory / "ledger").mkdir(parents=True)
    with closing(SegmentWriter(directory / "ledger", start=RUN)) as writer:
        writer.append(entries)
    (directory / "manifest").write_bytes(MANIFEST.data)
    return directory


def test_a_ledger_is_read_as_plain_values(tmp_path):
    books = read_books({"trainer-0": data_dir(tmp_path, ENTRIES)}, trainer="trainer-0")
    assert (books.problem, books.breaches, books.entries) == ("", [], 5)
    first, second = books.submissions
    assert (first.state, first.used_in, first.judged_ms, first.contributor) == ("accepted", 0, 20, str(ALICE.peer_id))
    assert (second.state, second.used_in, second.judged_ms) == ("pending", None, None)
    assert books.steps == [StepSeen(0, [FILES[0].id.hex()], 3, 4, due_ms=20, entries=5)]
    assert [(one.peer_id, one.accepted) for one in books.accounts] == [(str(ALICE.peer_id), 1)]
    assert isinstance(books.accounts[0], Account)


def test_judged_is_when_the_vote_was_signed_that_settled_it(tmp_path, monkeypatch):
    """The quorum's last vote for what came of it, in the ledger's order: no other one, and none to the contrary."""
    judges = [VALIDATOR, *(Identity.from_phrase(name) for name in ("v2", "v3", "v4"))]
    keys = tuple(one.peer_id.public_key for one in judges)
    manifest = sealed(make_manifest(validators=keys, quorum=2), OPERATOR)
    monkeypatch.setattr("test_oracle_books.MANIFEST", manifest)
    monkeypatch.setattr("test_oracle_books.RUN", manifest.id)
    one, other = (make_submission(ALICE, manifest.id, index=at) for at in range(2))
    said = [("reject", 90), ("accept", 10), ("accept", 30)]
    votes = [
        make_verdict(one, by=by, outcome=what, issued_at_ms=at).data
        for by, (what, at) in zip(judges, said, strict=False)
    ]
    half = make_verdict(other, by=VALIDATOR, issued_at_ms=70).data
    books = read_books({"trainer-0": data_dir(tmp_path, [one.data, *votes, other.data, half])}, trainer="trainer-0")
    assert books.breaches == []
    assert [(seen.state, seen.judged_ms) for seen in books.submissions] == [("accepted", 30), ("pending", None)]


def test_a_copy_agrees_as_long_as_it_is_the_beginning_of_the_trainers(tmp_path):
    """Attack: the trainer gives one relay another history."""
    directories = {
        "trainer-0": data_dir(tmp_path / "t", ENTRIES),
        "relay-0": data_dir(tmp_path / "r", ENTRIES[:3]),
        "relay-1": data_dir(tmp_path / "s", [ENTRIES[1], ENTRIES[0]]),
        "inference-0": tmp_path / "none",
    }
    assert read_books(directories, trainer="trainer-0").copies == [
        Copy("relay-0", 3, agrees=True),
        Copy("relay-1", 2, agrees=False),
    ]


def handed_in() -> list[Signed[Submission]]:
    return [
        make_submission(ALICE, RUN, index=at, sha256=hashlib.sha256(CONTENT).digest(), size=len(CONTENT))
        for at in range(2)
    ]


def relay_dir(directory: Path, files: list[Signed[Submission]]) -> Path:
    """What a relay leaves that gave a receipt for each file, and has an accept of the first."""
    store = RelayStore(directory / "relay", max_bytes=1 << 24)
    for one in files:
        with store.upload(one) as upload:
            upload.write(CONTENT)
            upload.keep(lambda one=one: receipt_of(one).data)
    store.add_verdict(make_verdict(files[0], by=VALIDATOR))
    store.close()
    return directory


def outbox_dir(directory: Path, files: list[Signed[Submission]]) -> Path:
    """What their author leaves, who has noted the receipts and no verdict yet."""
    directory.mkdir(parents=True)
    with closing(Outbox(directory / "outbox.sqlite")) as outbox:
        for one in files:
            outbox.add(one, directory / "file")
            outbox.received(one.id, RELAY.peer_id, receipt_of(one))
    return directory


def docket_dir(directory: Path, accepted: Signed[Submission], *, posted_to: Identity) -> Path:
    directory.mkdir(parents=True)
    with closing(Docket(directory / "docket.sqlite")) as docket:
        docket.add(make_verdict(accepted, by=VALIDATOR))
        docket.posted(accepted.id, posted_to.peer_id)
    return directory


def promises_of(tmp_path: Path, **directories: Path) -> list[Promise]:
    return books_of(tmp_path, **directories).promises


def books_of(tmp_path: Path, **directories: Path) -> Books:
    return read_books({"trainer-0": data_dir(tmp_path / "t", ENTRIES), **directories}, trainer="trainer-0")


def test_a_relays_promises_and_what_validators_made_of_them(tmp_path):
    files = handed_in()
    assert promises_of(tmp_path, r=relay_dir(tmp_path / "r", files)) == [
        Promise(files[0].id.hex(), str(ALICE.peer_id), 2, accepts=1),
        Promise(files[1].id.hex(), str(ALICE.peer_id), 2, accepts=0),
    ]


def test_a_relay_that_drops_accepted_work_is_told_by_the_disks_of_others(tmp_path):
    """Attack: a relay gives a receipt, takes the validator's accept, and throws the submission away."""
    files = handed_in()
    relay = relay_dir(tmp_path / "r", files)
    with closing(sqlite3.connect(relay / "relay" / "relay.sqlite")) as database, database:
        database.execute("DELETE FROM feed WHERE id = ? OR kind = 'verdict'", (files[0].id,))
    author = outbox_dir(tmp_path / "a", files)
    validator = docket_dir(tmp_path / "v", files[0], posted_to=RELAY)
    books = books_of(tmp_path, r=relay, a=author, v=validator)
    assert {one.id: (one.accepts, one.dropped) for one in books.promises} == {
        files[0].id.hex(): (1, True),
        files[1].id.hex(): (0, False),
    }
    evidence = make_evidence()
    evidence.recording.nodes[3].peer_id = str(ALICE.peer_id)
    evidence = dataclasses.replace(evidence, books=books)
    found = judgement(evidence, "trained once")
    assert (found.outcome, found.numbers["lost"]) == ("failed", 1)


def test_an_accept_that_no_relay_has_taken_is_no_promise(tmp_path):
    """A validator notes as posted also what a relay refuses, such as one that does not have the submission."""
    files = handed_in()
    author = outbox_dir(tmp_path / "a", files)
    elsewhere = docket_dir(tmp_path / "v", files[0], posted_to=Identity.from_phrase("another relay"))
    assert [one.accepts for one in promises_of(tmp_path, a=author, v=elsewhere)] == [0, 0]


def test_an_accept_of_a_stranger_is_no_promise(tmp_path):
    """Attack: a contributor writes verdicts of its own into its outbox."""
    files = handed_in()
    author = outbox_dir(tmp_path / "a", files)
    with closing(Outbox(author / "outbox.sqlite")) as outbox:
        outbox.judged(make_verdict(files[0], by=ALICE))
        outbox.judged(make_verdict(files[1], by=VALIDATOR))
    assert [one.accepts for one in promises_of(tmp_path, a=author)] == [0, 1]


@pytest.mark.parametrize("column", ["envelope", "receipt"])
@pytest.mark.parametrize("value", ["text", 1 << 40])
def test_a_row_of_another_type_is_a_note_and_no_exception(tmp_path, column, value):
    """Attack: a relay's store holds text or numbers where bytes belong; so many zeros would fill the memory."""
    relay = relay_dir(tmp_path / "r", handed_in())
    with closing(sqlite3.connect(relay / "relay" / "relay.sqlite")) as database, database:
        database.execute(f"UPDATE feed SET {column} = ? WHERE kind = 'submission'", (value,))
    books = books_of(tmp_path, r=relay)
    assert books.sources == {"store": [], "outbox": [], "docket": []}
    assert any("the store of r" in note for note in books.notes)


def test_a_manifest_of_another_type_in_a_relays_store_spoils_its_copy_alone(tmp_path):
    """Attack: a relay's own records are text."""
    relay = data_dir(relay_dir(tmp_path / "r", handed_in()), ENTRIES[:1])
    (relay / "manifest").unlink()
    with closing(sqlite3.connect(relay / "relay" / "relay.sqlite")) as database, database:
        database.execute("INSERT INTO documents VALUES ('manifest', 'text')")
    books = books_of(tmp_path, r=relay)
    assert (books.problem, books.copies) == ("", [])
    assert any("the copy of r" in note for note in books.notes)


def test_whose_disks_were_read_to_the_end_is_told(tmp_path):
    files = handed_in()
    books = books_of(
        tmp_path,
        r=relay_dir(tmp_path / "r", files),
        a=outbox_dir(tmp_path / "a", files),
        v=docket_dir(tmp_path / "v", files[0], posted_to=RELAY),
        none=tmp_path / "none",
    )
    assert books.sources == {"store": ["r"], "outbox": ["a"], "docket": ["v"]}
    assert {(one.step, one.checkpoint_step) for one in books.promises} == {(0, 0)}


def test_what_breaks_while_the_ledger_is_read_is_a_problem_and_no_exception(tmp_path, monkeypatch):
    """A report without a ledger is still one, and says that the oracles by the ledger have failed."""
    monkeypatch.setattr("simnet.oracles.books.find_material", lambda _: 1 / 0)
    assert "ZeroDivisionError" in read_books({"trainer-0": tmp_path}, trainer="trainer-0").problem


def test_where_a_relays_store_cannot_be_read_nothing_is_called_dropped(tmp_path):
    (tmp_path / "r" / "relay").mkdir(parents=True)
    (tmp_path / "r" / "relay" / "relay.sqlite").write_bytes(b"no database at all" * 100)
    found = promises_of(tmp_path, r=tmp_path / "r", a=outbox_dir(tmp_path / "a", handed_in()))
    assert [one.dropped for one in found] == [False, False]


def test_batches_are_those_that_the_trainer_signed_also_where_the_rules_refuse_them(tmp_path):
    """Attack: only the trainer breaks the rules; a replay leaves its second use of a submission out."""
    entries = [*ENTRIES, make_batch(RUN, 1, FILES[:1]), make_trained(RUN, 1)]
    directory = data_dir(tmp_path, entries)
    books = read_books({"trainer-0": directory}, trainer="trainer-0")
    assert [step.submissions for step in books.steps] == [[FILES[0].id.hex()]] * 2
    found = judgement(dataclasses.replace(make_evidence(), books=books), "trained once")
    assert (found.outcome, found.numbers["twice"]) == ("failed", 1)


def test_a_batch_beyond_the_staleness_fails_though_the_replay_refuses_it(tmp_path):
    """Attack: the trainer trains on what is older than the manifest allows."""
    late = make_manifest().batch.max_staleness + 1
    entries = [FILES[0].data, VERDICT.data]
    for step in range(late):
        entries += [make_batch(RUN, step, []), make_trained(RUN, step)]
    entries += [make_batch(RUN, late, FILES[:1]), make_trained(RUN, late)]
    books = read_books({"trainer-0": data_dir(tmp_path, entries)}, trainer="trainer-0")
    found = judgement(dataclasses.replace(make_evidence(), books=books), "staleness")
    assert (found.outcome, found.numbers["outside"]) == ("failed", 1)


def test_a_store_that_is_none_is_noted(tmp_path):
    (tmp_path / "r" / "relay").mkdir(parents=True)
    (tmp_path / "r" / "relay" / "relay.sqlite").write_bytes(b"no database at all" * 100)
    books = read_books({"trainer-0": data_dir(tmp_path / "t", ENTRIES), "relay-0": tmp_path / "r"}, trainer="trainer-0")
    assert books.promises == []
    assert any("relay-0" in note for note in books.notes)


def test_what_could_not_be_read_is_in_the_report():
    evidence = make_evidence()
    evidence.books.notes = ["the store of relay-0 cannot be read: torn"]
    evidence.recording.notes = ["no packets are lost"]
    assert build_report(evidence.recording, evidence).notes == ["no packets are lost", *evidence.books.notes]


def test_no_ledger_is_a_problem_and_no_exception(tmp_path):
    assert "knows no run" in read_books({"trainer-0": tmp_path}, trainer="trainer-0").problem


def test_a_damaged_ledger_is_what_the_audit_finds(tmp_path):
    directory = data_dir(tmp_path, ENTRIES)
    segment = next((directory / "ledger").glob("segment-*"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(bytes(data))
    assert read_books({"trainer-0": directory}, trainer="trainer-0").breaches


def line(second: int, text: str) -> str:
    at = datetime(2026, 1, 1, 0, 0, second, 250_000, tzinfo=UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.250Z info {text}\n"


def at_ms(second: int) -> int:
    return round(datetime(2026, 1, 1, 0, 0, second, 250_000, tzinfo=UTC).timestamp() * 1000)


def test_a_checkpoints_way_is_read_from_the_logs(tmp_path):
    logs = {
        "trainer-0": (
            "trainer",
            line(1, "p2p.shardcast.store published step=0 id=ab bytes=9 shards=1")
            + line(5, "p2p.shardcast.store published step=1 id=ab bytes=9 shards=1"),
        ),
        "relay-0": ("relay", "noise\n" + line(2, "p2p.shardcast.puller pulled step=0 bytes=9")),
        "inference-0": (
            "inference",
            line(3, "node.policies checkpoint step=0 bytes=9 held")
            + line(4, "node.policies checkpoint step=0 bytes=9 held")
            + line(4, "node.policies checkpoint step=7 bytes=9 held"),
        ),
    }
    for name, (_, text) in logs.items():
        (tmp_path / name).write_text(text)
    first, second = read_checkpoints({name: (role, tmp_path / name) for name, (role, _) in logs.items()})
    assert (first.published_ms, first.at_relays, first.held) == (
        at_ms(1), {"relay-0": at_ms(2)}, {"inference-0": at_ms(3)},
    )  # fmt: skip
    assert (second.step, second.at_relays, second.held) == (1, {}, {})


def test_an_inference_node_cannot_pose_as_the_trainer_in_its_log(tmp_path):
    """Attack: a node writes the trainer's lines into its own log."""
    (tmp_path / "log").write_text(line(1, "p2p.shardcast.store published step=0 id=ab bytes=9 shards=1"))
    assert read_checkpoints({"cheat-0": ("inference", tmp_path / "log")}) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("p2p/shardcast/store.py", '"published step=%d id=%s'),
        ("p2p/shardcast/puller.py", '"pulled step=%d bytes=%d"'),
        ("node/policies.py", '"checkpoint step=%d bytes=%d held"'),
    ],
)
def test_the_lines_that_are_looked_for_are_those_that_nodes_write(path, text):
    assert text in (Path(__file__).parents[2] / path).read_text()
