"""The audit: a run that kept the rules is clean, and whatever breaks one is named with who did it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import (
    OPERATOR,
    RELAY,
    VALIDATOR,
    make_admission,
    make_answer,
    make_appeal,
    make_batch,
    make_eviction,
    make_head,
    make_invite,
    make_manifest,
    make_reinstatement,
    make_submission,
    make_trained,
    make_verdict,
    receipt_of,
    sealed,
)
from typer.testing import CliRunner

from bench.synthetic_ledger import entries as synthetic
from bench.synthetic_ledger import head_over, manifest
from cli import app
from node.ledger.audit import Audit, Report
from node.ledger.inspect import audit_material, replayed
from node.ledger.material import find_material
from node.ledger.memory import HOT_STEPS, audit_memory
from node.ledger.scratch import Scratch, ScratchMap
from node.ledger.segments import SegmentWriter
from node.ledger.signatures import Checked
from protocol.draw import beacon_of, check_rate, is_drawn
from protocol.envelope import Signed, seal
from protocol.errors import AuditError, BootstrapError, IdentityError
from protocol.identity import Identity
from protocol.ledger import LedgerMemory, LedgerState, next_tip, open_entry
from protocol.records import AdmissionSpec, BatchSpec, CheckpointFile, CheckpointManifest, Draw, Head, Manifest
from protocol.rollouts import Rollout, write_rollouts
from protocol.work import work_holds

ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")
MANIFEST = sealed(make_manifest(), OPERATOR)
RUN = MANIFEST.id


def export(
    directory: Path, entries: Sequence[bytes], run: Signed[Manifest] = MANIFEST, head: Signed[Head] | None = None
) -> Path:
    """A directory as `ledger export` writes it."""
    (directory / "ledger").mkdir(parents=True)
    with closing(SegmentWriter(directory / "ledger", start=run.id)) as writer:
        left = list(entries)
        while left:
            left = left[len(writer.append(left)) :]
    (directory / "manifest").write_bytes(run.data)
    if head is not None:
        (directory / "head").write_bytes(head.data)
    return directory


def audited(directory: Path, *, processes: int = 0) -> Report:
    return audit_material(find_material(directory), say=lambda _: None, processes=processes)


def audited_again(directory: Path, *, samples: int) -> Report:
    return audit_material(find_material(directory), say=lambda _: None, samples=samples)


def head_at(entries: Sequence[bytes], *, run_id: bytes = RUN, **changes: Any) -> Signed[Head]:
    tip = run_id
    for entry in entries:
        tip = next_tip(tip, open_entry(entry, signature_checked=True).id)
    return make_head(run_id, 9, ledger_length=len(entries), ledger_tip=tip, **changes)


def honest() -> list[bytes]:
    """Two contributors, two steps; bob is caught with the last one."""
    work = [make_submission(who, RUN, index=index) for index in (0, 1) for who in (ALICE, BOB)]
    bad = make_verdict(work[3], outcome="reject", hard=True, reason="toploc: another model")
    entries = [data for one in work[:3] for data in (one.data, make_verdict(one).data)]
    entries += [make_batch(RUN, 0, work[:2]), make_trained(RUN, 0)]
    return [*entries, work[3].data, bad.data, make_eviction(bad)]


def test_a_run_that_kept_the_rules_is_clean(tmp_path: Path) -> None:
    report = audited(export(tmp_path / "run", honest(), head=head_at(honest())))
    assert (report.clean, report.breaches, report.run["entries"]) == (True, [], 11)
    alice, bob = report.contributors
    assert (alice["peer_id"], alice["credits"], alice["accepted"]) == (str(ALICE.peer_id), 80, 2)
    assert (bob["standing"], bob["credits"], bob["rejected"]) == ("evicted", 0, {"toploc": 1})
    assert (report.forfeited, report.validators[0].accept, report.validators[0].hard) == (40, 3, 1)
    assert any("lineage" in note for note in report.notes)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LedgerState]:
    """Some steps of many contributors, most of them checked by draw; and what a node makes of it."""
    run = manifest()
    state = LedgerState(run.id, run.record, signatures_checked=True)
    entries = list(synthetic(1500))
    for entry in entries:
        state.apply(entry)
    return export(tmp_path_factory.mktemp("long") / "run", entries, run, head_over(state, 1 << 40)), state


@pytest.mark.parametrize("processes", [0, 1])
def test_an_audit_is_the_state_that_nodes_have(long_run: tuple[Path, LedgerState], processes: int) -> None:
    directory, state = long_run
    report = audited(directory, processes=processes)
    assert (report.clean, report.run["entries"], report.run["tip"]) == (True, state.length, state.tip.hex())
    assert report.run["evicted"] == len(state.evicted) == 1
    assert {one["peer_id"]: one["credits"] for one in report.contributors} == {
        str(peer): one.credits for peer, one in state.contributors.items()
    }
    assert sum(row.in_full for row in report.validators) < sum(row.accept for row in report.validators)


def little_memory(monkeypatch: pytest.MonkeyPatch, *, hot: int, at_once: int) -> None:
    """Let audits keep almost everything on the disk."""
    monkeypatch.setattr("node.ledger.inspect.audit_memory", partial(audit_memory, hot=hot, at_once=at_once))


def test_flat_memory_gives_the_same_rows(long_run: tuple[Path, LedgerState], monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost everything lies on the disk while it is replayed."""
    little_memory(monkeypatch, hot=40, at_once=30)
    directory, state = long_run
    with replayed(find_material(directory), say=lambda _: None, processes=0) as (found, notes):
        assert (notes, found.breaches.found, found.state.tip) == ([], [], state.tip)
        rows = [(key, one.state, one.used_in, one.place) for key, one in found.state.submissions.items()]
        assert rows == [(key, one.state, one.used_in, one.place) for key, one in state.submissions.items()]
        assert found.state.shelf.usable(99) == state.shelf.usable(99)


def test_scratch_map_behaves_as_a_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch(tmp_path, at_once=2)
    made: ScratchMap[int, list[int]] = ScratchMap(
        scratch, "made", msgspec.msgpack.encode, msgspec.msgpack.decode, hot=3
    )
    plain: dict[int, list[int]] = {}
    for place, number in enumerate((5, 1, 2, 9, 1, 4, 7, 5, 3)):
        for one in (made, plain):
            one.setdefault(number, []).append(place)
        scratch.settle()
    del made[9], plain[9]
    assert (list(made), list(made.items()), len(made)) == (list(plain), list(plain.items()), len(plain))
    assert 9 not in made
    assert made.get(9) is None
    scratch.close()


def test_tips_on_disk_are_those_that_were_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.ledger.scratch.TIPS_AT_ONCE", 3)
    scratch, memory = audit_memory(tmp_path)
    tips, plain = memory.tips, LedgerMemory().tips
    for number in range(8):
        for each in (tips, plain):
            each.add(bytes([number]) * 32)
        assert [tips[at] for at in range(number + 1)] == [plain[at] for at in range(number + 1)]
    scratch.close()


def test_replay_keeps_few_steps_in_memory(tmp_path: Path) -> None:
    """A batch names a thousand submissions, and a run has thousands of steps."""
    scratch, memory = audit_memory(tmp_path, at_once=4)
    committed = memory.committed
    for step in range(200):
        committed[step] = open_entry(make_batch(RUN, step, [make_submission(ALICE, RUN)])).record
        memory.settle()
    assert [committed[step].step for step in (0, 150, 199)] == [0, 150, 199]
    assert len(committed._hot) <= HOT_STEPS + 4  # type: ignore[attr-defined]
    scratch.close()


# Breaches.


def swapped(entries: list[bytes]) -> list[bytes]:
    return [entries[2], entries[1], entries[0], *entries[3:]]


def forged(entries: list[bytes]) -> list[bytes]:
    entry = bytearray(entries[4])
    entry[-1] ^= 1
    return [*entries[:4], bytes(entry), *entries[5:]]


def by_a_stranger(entries: list[bytes]) -> list[bytes]:
    work = make_submission(ALICE, RUN, index=2)
    return [*entries, work.data, make_verdict(work, by=BOB).data]


def of_another_run(entries: list[bytes]) -> list[bytes]:
    return [*entries, make_submission(ALICE, b"x" * 32, index=2).data]


def evicted_for_nothing(entries: list[bytes]) -> list[bytes]:
    soft = open_entry(entries[1])
    return [*entries, make_eviction(soft)]


def trained_on_rejected(entries: list[bytes]) -> list[bytes]:
    return [*entries, make_batch(RUN, 1, [open_entry(entries[8])])]


def other_lineage(entries: list[bytes]) -> list[bytes]:
    """Work of another policy than the one that the trainer's step gave is trained on."""
    work = make_submission(ALICE, RUN, step=1, checkpoint_step=1, checkpoint=b"z" * 32)
    return [*entries, work.data, make_verdict(work).data, make_batch(RUN, 1, [work])]


def too_many_tokens(entries: list[bytes]) -> list[bytes]:
    """A contributor and its validator would have a fortune credited."""
    work = make_submission(ALICE, RUN, index=2, output_tokens=10**12)
    return [*entries, work.data, make_verdict(work).data]


def of_a_step_to_come(entries: list[bytes]) -> list[bytes]:
    work = make_submission(ALICE, RUN, step=99)
    return [*entries, work.data, make_verdict(work).data]


def saved_work(entries: list[bytes]) -> list[bytes]:
    """A validator accepts without the checks that the beacon asks for."""
    work = make_submission(ALICE, RUN, index=2)
    beacon = make_head(RUN, 2, ledger_length=0)
    draw = Draw(drawn=False, rate=1.0, why="not drawn", beacon=beacon.data, receipt=receipt_of(work).data)
    return [*entries, work.data, make_verdict(work, draw=draw).data]


def forged_receipt(entries: list[bytes]) -> list[bytes]:
    work = make_submission(ALICE, RUN, index=2)
    receipt = bytearray(receipt_of(work, by=RELAY).data)
    receipt[-1] ^= 1
    draw = Draw(drawn=True, rate=1.0, why="newcomer", beacon=b"", receipt=bytes(receipt))
    return [*entries, work.data, make_verdict(work, draw=draw).data]


def drawn_by_no_beacon(entries: list[bytes]) -> list[bytes]:
    """A validator checks one contributor more than the rest, and says that the beacon drew it."""
    beacon = make_head(RUN, 2, ledger_length=len(entries), ledger_tip=head_at(entries).record.ledger_tip)
    tries = (make_submission(ALICE, RUN, index=2, sha256=bytes([n]) * 32) for n in range(99))
    work = next(one for one in tries if not is_drawn(beacon_of(beacon), one.id, rate=0.5))
    draw = Draw(drawn=True, rate=0.5, why="drawn", beacon=beacon.data, receipt=receipt_of(work).data)
    return [*entries, work.data, make_verdict(work, draw=draw).data]


def other_ledger_in_a_beacon(entries: list[bytes]) -> list[bytes]:
    """A head that drew names a ledger which is not this one: the trainer has rewritten it since."""
    work = make_submission(ALICE, RUN, index=2)
    beacon = make_head(RUN, 2, ledger_length=2, ledger_tip=b"t" * 32)
    draw = Draw(drawn=True, rate=1.0, why="drawn", beacon=beacon.data, receipt=receipt_of(work).data)
    return [*entries, work.data, make_verdict(work, draw=draw).data]


BREACHES: list[tuple[Callable[[list[bytes]], list[bytes]], str, Identity | None]] = [
    (swapped, "unknown-submission", OPERATOR),
    (forged, "signature", None),
    (by_a_stranger, "wrong-author", BOB),
    (of_another_run, "wrong-run", ALICE),
    (evicted_for_nothing, "no-ground", OPERATOR),
    (trained_on_rejected, "unusable", OPERATOR),
    (other_lineage, "unusable", OPERATOR),
    (too_many_tokens, "over-tokens", ALICE),
    (of_a_step_to_come, "future", OPERATOR),
    (saved_work, "draw", VALIDATOR),
    (forged_receipt, "signature", VALIDATOR),
    (drawn_by_no_beacon, "draw", VALIDATOR),
    (other_ledger_in_a_beacon, "fork", OPERATOR),
]


@pytest.mark.parametrize(("breaks", "kind", "who"), BREACHES, ids=lambda each: getattr(each, "__name__", None))
def test_breach_is_named_with_who_did_it(
    tmp_path: Path, breaks: Callable[[list[bytes]], list[bytes]], kind: str, who: Identity | None
) -> None:
    entries = breaks(honest())
    report = audited(export(tmp_path / "run", entries, head=head_at(entries)))
    assert kind in report.breaches_by_kind
    assert report.run["entries"] == len(entries), "the audit goes on after it"
    assert (kind, str(who.peer_id) if who else "") in {(one.kind, one.who) for one in report.breaches}


def test_garbage_ends_the_chain(tmp_path: Path) -> None:
    report = audited(export(tmp_path / "run", [*honest()[:3], b"garbage", *honest()[3:]]))
    assert ("chain", 3) in {(one.kind, one.entry) for one in report.breaches}


def test_truncated_ledger_is_named(tmp_path: Path) -> None:
    """A relay's disk lost the end of a segment; or somebody shows an audit only the beginning."""
    directory = export(tmp_path / "run", honest()[:5], head=head_at(honest()))
    report = audited(directory)
    assert (report.breaches_by_kind, report.breaches[0].who) == ({"truncated": 1}, "")
    assert "or this copy is damaged" in report.breaches[0].what
    cut = export(tmp_path / "cut", honest(), head=head_at(honest()))
    path = cut / "ledger" / "segment-00000000"
    path.write_bytes(path.read_bytes()[:-7])
    assert audited(cut).breaches_by_kind == {"truncated": 1}


def test_ledger_of_another_head_is_no_word_of_the_trainer(tmp_path: Path) -> None:
    """Somebody has changed the copy, and shows it beside the trainer's true head."""
    head = make_head(RUN, 9, ledger_length=11, ledger_tip=b"t" * 32)
    report = audited(export(tmp_path / "run", honest(), head=head))
    assert (report.breaches_by_kind, report.breaches[0].who) == ({"chain": 1}, "")


def test_checkpoints_at_hand_are_those_of_the_ledger(tmp_path: Path) -> None:
    def held(content: bytes) -> Signed[CheckpointManifest]:
        file = CheckpointFile(name="model.safetensors", size=10, sha256=b"f" * 32)
        record = CheckpointManifest(
            run_id=RUN, step=1, issued_at_ms=1, shard_bytes=4096, files=(file,), shards=(b"s" * 32,), sha256=content
        )
        return sealed(record, OPERATOR)

    good, other = held(b"1" * 32), held(b"2" * 32)
    entries = honest()
    record = msgspec.structs.replace(open_entry(make_trained(RUN, 0)).record, checkpoint=good.id)
    entries[7] = seal(record, OPERATOR)
    strange = sealed(other.record, BOB)
    for name, checkpoint, clean in (("same", good, True), ("other", other, False), ("strange", strange, True)):
        directory = export(tmp_path / name, entries, head=head_at(entries))
        (directory / "checkpoints").mkdir()
        (directory / "checkpoints" / checkpoint.id.hex()).write_bytes(checkpoint.data)
        report = audited(directory)
        assert (report.clean, report.breaches_by_kind) == (clean, {} if clean else {"lineage": 1})
        said = any("not signed, and that say nothing: 1" in note for note in report.notes)
        assert said == (checkpoint is strange), "anybody can put a manifest into a directory"


def test_balance_that_the_verdicts_do_not_give_is_a_breach() -> None:
    """The rules and the audit's own books must agree; here the rules were wrong."""
    audit = Audit(MANIFEST)
    for number, data in enumerate(honest()):
        audit.take(Checked(number, data, open_entry(data), None))
    audit.state.contributors[ALICE.peer_id].balance.mature += 1
    audit.finish()
    assert audit.breaches.counts == {"balance": 1}


def test_credits_that_moved_from_one_to_another_are_a_breach() -> None:
    """The sum is right, and two contributors have what the verdicts do not give them."""
    audit = Audit(MANIFEST)
    entries = honest()[:8]
    for number, data in enumerate(entries):
        audit.take(Checked(number, data, open_entry(data), None))
    alice, bob = (audit.state.contributors[who.peer_id].balance for who in (ALICE, BOB))
    amount = 7
    alice.mature, bob.mature = alice.mature - amount, bob.mature + amount
    audit.finish()
    assert {(one.kind, one.who) for one in audit.breaches.found} == {
        ("balance", str(ALICE.peer_id)),
        ("balance", str(BOB.peer_id)),
    }


# Whether it is all.


def test_a_copy_that_is_cut_off_beside_a_head_of_somebody_else_is_not_clean(tmp_path: Path) -> None:
    """Anybody can cut off a copy and sign a head for what is left, in a key of his own."""
    entries = honest()[:5]
    for name, head in (
        ("strange", head_at(entries, by=BOB)),
        ("none", None),
        ("shorter", head_at(entries[:3])),
    ):
        directory = export(tmp_path / name, entries, head=head)
        report = audited(directory)
        assert (report.clean, report.outcome) == (True, "unconfirmed")
        assert report.confirmed == (3 if name == "shorter" else None)
        assert any("complete up to entry 5 as far as this copy shows" in note for note in report.notes)
        assert any("heads at hand that the trainer has not signed" in note for note in report.notes) == (
            name == "strange"
        )
        done = run_cli("audit", "--from", directory, "--json")
        assert (done.exit_code, json.loads(done.stdout)["outcome"]) == (3, "unconfirmed")
        said = run_cli("audit", "--from", directory).stdout
        assert "nothing here shows that this is all" in said
        assert "clean" not in said
    report = audited(export(tmp_path / "whole", entries, head=head_at(entries)))
    assert (report.outcome, report.confirmed) == ("clean", 5)
    empty = export(tmp_path / "empty", [])
    (empty / "ledger" / "segment-00000000").touch()
    assert audited(empty).outcome == "unconfirmed"


@pytest.mark.parametrize("name", ["segment-99999999", "segment-\u0663", "segment-3", "segment-000000000"])
def test_stray_files_among_segments(tmp_path: Path, name: str) -> None:
    """Names that no node writes are no segments; one that is a segment's, and no segment's turn, is named."""
    directory = export(tmp_path / "run", honest(), head=head_at(honest()))
    (directory / "ledger" / name).write_bytes(b"x")
    report = audited(directory)
    if name == "segment-99999999":
        assert (report.breaches_by_kind, report.run["entries"]) == ({"truncated": 1}, 11)
        assert "segment-00000001 is damaged at entry 11: it is missing, and segment-99999999 is" in (
            report.breaches[0].what
        )
    else:
        assert report.breaches == []


def test_a_segment_that_is_a_directory_says_what_to_look_at(tmp_path: Path) -> None:
    directory = export(tmp_path / "run", honest(), head=head_at(honest()))
    path = directory / "ledger" / "segment-00000000"
    path.unlink()
    path.mkdir()
    done = run_cli("audit", "--from", directory)
    assert isinstance(done.exception, AuditError)
    assert f"ls -ld {path}" in done.exception.hint


def test_a_directory_without_a_key_is_not_somebody_elses(tmp_path: Path) -> None:
    done = run_cli("ledger", "mine", "--data-dir", tmp_path)
    assert isinstance(done.exception, IdentityError)
    assert "there is no key file" in done.exception.message
    assert "owner" not in done.exception.hint


# Nobody is accused by a consequence.


def tampered(directory: Path, change: Callable[[bytearray], None]) -> Report:
    """An honest run's directory after something was changed in its ledger's file."""
    path = directory / "ledger" / "segment-00000000"
    whole = path.read_bytes()
    data = bytearray(whole)
    change(data)
    path.write_bytes(data)
    try:
        return audited(directory)
    finally:
        path.write_bytes(whole)


def accusations(report: Report) -> list[Any]:
    return [one for one in report.breaches if one.who]


def test_one_bit_in_a_copy_accuses_nobody(tmp_path: Path) -> None:
    """Somebody changes one bit of a directory to have another one blamed: in frames, keys, texts, signatures.

    With the true head beside it, and with a head that stands for nothing but the beginning.
    """
    for name, entries, run in (("honest", honest(), MANIFEST), ("wronged", wronged(), INVITING)):
        head = head_at(entries, run_id=run.id)
        directory = export(tmp_path / name, entries, run, head)
        size = (directory / "ledger" / "segment-00000000").stat().st_size
        for place in range(0, size, size // 40):

            def flip(data: bytearray, place: int = place) -> None:
                data[place] ^= 1 << place % 8

            report = tampered(directory, flip)
            assert not report.clean, (name, place)
            assert accusations(report) == [], (name, place)


def moved(entries: list[bytes], *, what: str) -> list[bytes]:
    """Entries whose signatures hold, left out, twice there, or in another order."""
    at = len(entries) // 3
    left_out = [*entries[:at], *entries[at + 1 :]]
    return {"left-out": left_out, "twice": [*entries, entries[at]], "last": [*left_out, entries[at]]}[what]


@pytest.mark.parametrize("what", ["left-out", "twice", "last"])
def test_a_copy_in_another_order_accuses_nobody(tmp_path: Path, what: str) -> None:
    """Whoever keeps a copy leaves entries out, and shows it beside a head of before, beside the true one, or alone."""
    for number, entries in enumerate((honest(), wronged())):
        run = (MANIFEST, INVITING)[number]
        heads = (None, head_at(entries[:2], run_id=run.id), head_at(entries, run_id=run.id))
        for at, head in enumerate(heads):
            report = audited(export(tmp_path / f"{number}-{at}", moved(entries, what=what), run, head))
            assert not report.clean
            assert accusations(report) == []


def test_the_trainer_answers_for_the_order_that_it_signed(tmp_path: Path) -> None:
    """It takes an old entry a second time, which is named; what is refused for that alone is nobody's."""
    entries = [*honest(), honest()[0]]
    report = audited(export(tmp_path / "again", entries, head=head_at(entries)))
    assert [(one.kind, one.who, one.entry) for one in report.breaches] == [("duplicate", str(OPERATOR.peer_id), 11)]
    early = [entries[1], entries[0], *entries[2:11]]
    report = audited(export(tmp_path / "early", early, head=head_at(early)))
    first, *others = report.breaches
    assert (first.kind, first.who, first.entry, first.follows) == ("unknown-submission", str(OPERATOR.peer_id), 0, None)
    assert [(one.who, one.follows) for one in others] == [("", 0)] * len(others)
    assert others
    assert report.breaches_by_kind == {"unknown-submission": 1}
    assert report.following["unusable"] == 1


def test_two_ledgers_convict_the_trainer_only_together(tmp_path: Path) -> None:
    """The head of another ledger alone may stand beside a changed copy; with one of this ledger it is proof."""
    other = make_head(RUN, 8, ledger_length=5, ledger_tip=b"t" * 32)
    audit = Audit(MANIFEST)
    for number, data in enumerate(honest()):
        audit.take(Checked(number, data, open_entry(data), None))
    audit.finish(heads=[other, head_at(honest())])
    assert [(one.kind, one.who) for one in audit.breaches.found] == [("fork", str(OPERATOR.peer_id))]


def test_a_forged_head_in_a_verdict_is_no_word_of_the_trainer(tmp_path: Path) -> None:
    """A validator makes up a head of another ledger and policy, in the trainer's name, to have it blamed."""
    work = make_submission(ALICE, RUN, index=2)
    beacon = make_head(RUN, 2, ledger_length=2, ledger_tip=b"t" * 32, checkpoint=b"z" * 32).data
    draw = Draw(drawn=True, rate=1.0, why="drawn", beacon=beacon[:-1] + b"\0", receipt=receipt_of(work).data)
    entries = [*honest(), work.data, make_verdict(work, draw=draw).data]
    report = audited(export(tmp_path / "run", entries, head=head_at(entries)))
    assert {(one.kind, one.who) for one in report.breaches} == {("signature", str(VALIDATOR.peer_id))}


def honest_draws(run: Signed[Manifest]) -> tuple[list[bytes], list[bytes]]:
    """A contributor with a record; and its next works with verdicts by the draw, one drawn and one not."""
    before = [
        data
        for index in range(4)
        for work in [make_submission(ALICE, run.id, index=index)]
        for data in (work.data, make_verdict(work).data)
    ]
    beacon = head_at(before, run_id=run.id)
    state = LedgerState(run.id, run.record)
    for entry in before:
        state.apply(entry)
    rate = check_rate(state.record(ALICE.peer_id, state.length), run.record.checks)
    assert rate < 1
    after: list[bytes] = []
    for index, drawn in enumerate((True, False)):
        tries = (make_submission(ALICE, run.id, step=1, index=index, sha256=bytes([index, n]) * 16) for n in range(99))
        work = next(one for one in tries if is_drawn(beacon_of(beacon), one.id, rate=rate) == drawn)
        receipt = receipt_of(work, head_sequence=beacon.record.previous_sequence).data
        draw = Draw(drawn=drawn, rate=rate, why="by lot", beacon=beacon.data, receipt=receipt)
        after += [work.data, make_verdict(work, draw=draw).data]
    return before, after


def test_draws_by_a_ledger_that_the_trainer_rewrote_accuse_no_validator(tmp_path: Path) -> None:
    """The trainer puts another's work in the place of some and signs that: honest rates are no longer this ledger's."""
    before, after = honest_draws(MANIFEST)
    entries = [*before, *after]
    assert audited(export(tmp_path / "honest", entries, head=head_at(entries))).outcome == "clean"
    other = make_submission(BOB, RUN)
    rewritten = [*before[:-2], other.data, make_verdict(other).data, *after]
    report = audited(export(tmp_path / "rewritten", rewritten, head=head_at(rewritten)))
    assert {(one.kind, one.who) for one in accusations(report)} == {("fork", str(OPERATOR.peer_id))}
    assert report.breaches_by_kind["fork"] == 1


def test_a_head_of_more_entries_than_came_before_it_is_another_ledgers(tmp_path: Path) -> None:
    """The trainer signs a head of a longer ledger for a validator that it shares with."""
    work = make_submission(ALICE, RUN, index=2)
    beacon = make_head(RUN, 2, ledger_length=13, ledger_tip=b"t" * 32)
    draw = Draw(drawn=False, rate=0.25, why="by lot", beacon=beacon.data, receipt=receipt_of(work).data)
    entries = [*honest(), work.data, make_verdict(work, draw=draw).data]
    report = audited(export(tmp_path / "run", entries, head=head_at(entries)))
    assert {(one.kind, one.who) for one in report.breaches} == {("draw", ""), ("fork", str(OPERATOR.peer_id))}


def test_heads_in_verdicts_that_are_refused_tell_of_a_fork_as_well(tmp_path: Path) -> None:
    """The trainer leaves out what a verdict is about, and changes what was before: its heads are still its word."""
    before, after = honest_draws(MANIFEST)
    other = make_submission(BOB, RUN)
    entries = [*before[:-2], other.data, make_verdict(other).data, after[1]]
    report = audited(export(tmp_path / "run", entries, head=head_at(entries)))
    assert {(one.kind, one.who) for one in accusations(report)} == {
        ("unknown-submission", str(OPERATOR.peer_id)),
        ("fork", str(OPERATOR.peer_id)),
    }


def test_a_trained_entry_with_a_false_checkpoint_accuses_no_contributor(tmp_path: Path) -> None:
    """The trainer would have it seem that honest work names another policy than it should."""
    real, false = b"c" * 32, b"z" * 32
    first, second = make_submission(ALICE, RUN), make_submission(BOB, RUN)
    work = make_submission(ALICE, RUN, step=1, checkpoint_step=1, checkpoint=real)
    trained = msgspec.structs.replace(open_entry(make_trained(RUN, 0)).record, checkpoint=false)
    entries = [data for one in (first, second) for data in (one.data, make_verdict(one).data)]
    entries += [make_batch(RUN, 0, [first, second]), seal(trained, OPERATOR)]
    entries += [work.data, make_verdict(work).data, make_batch(RUN, 1, [work])]
    head = head_at(entries, checkpoint_step=1, checkpoint=real)
    report = audited(export(tmp_path / "run", entries, head=head))
    assert {(one.kind, one.who) for one in report.breaches} == {
        ("unusable", str(OPERATOR.peer_id)),
        ("lineage", str(OPERATOR.peer_id)),
    }


def test_the_trainer_answers_for_two_policies_of_one_step_in_its_batches(tmp_path: Path) -> None:
    """Which one is right is not shown before its own word; it trained on both, and contributors name what they got."""
    work = make_submission(ALICE, RUN, checkpoint=b"z" * 32)
    entries = [work.data, make_verdict(work).data]
    other = make_submission(BOB, RUN)
    entries += [other.data, make_verdict(other).data, make_batch(RUN, 0, [work, other])]
    report = audited(export(tmp_path / "run", entries, head=head_at(entries, checkpoint=other.record.checkpoint)))
    assert [(one.kind, one.who) for one in report.breaches] == [("lineage", str(OPERATOR.peer_id))]
    report = audited(export(tmp_path / "alone", entries))
    assert [(one.kind, one.who) for one in report.breaches] == [("lineage", str(OPERATOR.peer_id))]


# Admissions, appeals and reinstatements.

ERIN, FRANK, CAROL = (Identity.from_phrase(name) for name in ("erin", "frank", "carol"))
INVITING = sealed(
    make_manifest(
        validators=(ERIN.peer_id.public_key, FRANK.peer_id.public_key),
        admission=AdmissionSpec(kind="invite", work_bits=1),
    ),
    OPERATOR,
)


def admission(who: Identity, number: int, **changes: Any) -> bytes:
    invite = make_invite(INVITING.id, number).data
    return make_admission(who, INVITING.id, **({"bits": 1, "invite": invite} | changes)).data


def wronged() -> list[bytes]:
    """Alice is evicted by erin, appeals, is judged by frank and comes back, with work that is mature by then."""
    run = INVITING.id
    work = [make_submission(ALICE, run, index=index) for index in (0, 1)]
    bad = make_verdict(work[1], by=ERIN, outcome="reject", hard=True, reason="toploc: another model")
    appeal = make_appeal(ALICE, bad)
    answer = make_answer(work[1], appeal, by=FRANK)
    others = [make_submission(BOB, run, index=index) for index in (0, 1)]
    entries = [admission(ALICE, 0), admission(BOB, 1), work[0].data, make_verdict(work[0], by=ERIN).data]
    entries += [work[1].data, bad.data, make_eviction(bad), appeal.data]
    entries += [data for one in others for data in (one.data, make_verdict(one, by=ERIN).data)]
    entries += [make_batch(run, 0, others), make_trained(run, 0)]
    return [*entries, answer.data, make_reinstatement(answer, appeal).data]


@pytest.mark.parametrize("processes", [0, 1])
def test_who_was_wronged_and_came_back_is_no_breach(tmp_path: Path, processes: int) -> None:
    entries = wronged()
    report = audited(export(tmp_path / "run", entries, INVITING), processes=processes)
    assert (report.clean, report.breaches, report.appeals) == (True, [], {"granted": 1})
    alice = next(row for row in report.contributors if row["peer_id"] == str(ALICE.peer_id))
    assert (alice["standing"], alice["mature"], alice["maturing"], alice["restored"]) == ("active", 0, 80, 80)
    assert (report.entries["admission"], report.entries["reinstatement"], report.forfeited) == (2, 1, 0)


def of_judge(report: Report, who: Identity) -> tuple[int, int]:
    return next((row.verdicts, row.overruled) for row in report.validators if row.peer_id == str(who.peer_id))


def test_validators_are_overruled_by_appeals_that_are_granted(tmp_path: Path) -> None:
    report = audited(export(tmp_path / "run", wronged(), INVITING))
    assert (of_judge(report, ERIN), of_judge(report, FRANK)) == ((4, 1), (1, 0))
    earlier = audited(export(tmp_path / "earlier", wronged()[:-2], INVITING))
    assert of_judge(earlier, ERIN) == (4, 0)


def test_validators_are_overruled_by_a_quorum_and_righted_by_an_appeal() -> None:
    """Alice is wronged by two of four, against the third; the fourth grants her appeal. Bob's work nobody settles."""
    judges = [ERIN, FRANK, VALIDATOR, BOB]
    keys = tuple(one.peer_id.public_key for one in judges)
    run = sealed(make_manifest(validators=keys, quorum=2), OPERATOR)
    work, open_yet = make_submission(ALICE, run.id), make_submission(BOB, run.id)
    lies = [make_verdict(work, by=one, outcome="reject", hard=True, reason="seed: x") for one in (ERIN, FRANK)]
    appeal = make_appeal(ALICE, lies[0])
    entries = [work, lies[0], make_verdict(work, by=VALIDATOR), lies[1], appeal, make_answer(work, appeal, by=BOB)]
    entries += [open_yet, make_verdict(open_yet, by=ERIN, outcome="reject"), make_verdict(open_yet, by=FRANK)]

    def overruled(count: int) -> list[int]:
        audit = Audit(run)
        for number, entry in enumerate(entries[:count]):
            audit.take(Checked(number, entry.data, entry, None))
        return [row.overruled for row in audit.validators]

    assert overruled(3) == [0, 0, 0, 0]
    assert overruled(4) == overruled(5) == [0, 0, 1, 0]
    assert overruled(6) == overruled(9) == [1, 1, 0, 0]


def test_who_granted_what_the_others_refuse_is_overruled() -> None:
    """A friend of a cheat's among five, of whom two must agree, answers its appeal."""
    judges = [ERIN, FRANK, VALIDATOR, BOB, CAROL]
    run = sealed(make_manifest(validators=tuple(one.peer_id.public_key for one in judges), quorum=2), OPERATOR)
    work = make_submission(ALICE, run.id)
    caught = [make_verdict(work, by=one, outcome="reject", hard=True, reason="seed: x") for one in (ERIN, FRANK)]
    appeal = make_appeal(ALICE, caught[0])
    lie = make_answer(work, appeal, by=VALIDATOR)
    entries = [work, *caught, appeal, lie]
    entries += [make_answer(work, appeal, by=one, outcome="reject", reason="seed: x") for one in (BOB, CAROL)]
    audit = Audit(run)
    for number, entry in enumerate(entries):
        assert [row.overruled for row in audit.validators] == [0] * 5
        audit.take(Checked(number, entry.data, entry, None))
    assert [row.overruled for row in audit.validators] == [0, 0, 1, 0, 0]


def test_forfeits_that_stand_are_reported(tmp_path: Path) -> None:
    report = audited(export(tmp_path / "run", wronged()[:-1], INVITING))
    assert (report.clean, report.forfeited) == (True, 80)


# What the trainer leaves out.


def silent_steps(first: int, count: int) -> list[bytes]:
    """Steps that are trained without a word about anybody."""
    steps = range(first, first + count)
    work = {
        step: [make_submission(BOB, RUN, step=step, checkpoint_step=step, index=at) for at in (0, 1)] for step in steps
    }
    return [
        data
        for step in steps
        for data in (
            *(each for one in work[step] for each in (one.data, make_verdict(one).data)),
            make_batch(RUN, step, work[step]),
            make_trained(RUN, step),
        )
    ]


def caught() -> list[bytes]:
    work = make_submission(ALICE, RUN)
    return [work.data, make_verdict(work, outcome="reject", hard=True, reason="toploc: another model").data]


def spared(entries: list[bytes], steps: int) -> Report:
    audit = Audit(MANIFEST)
    entries = [*entries, *silent_steps(0, steps)]
    for number, data in enumerate(entries):
        audit.take(Checked(number, data, open_entry(data), None))
    audit.finish(heads=[head_at(entries)])
    return audit.report()


def test_a_friend_whom_the_trainer_does_not_evict_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer leaves out the eviction that a quorum of hard verdicts asks for."""
    early, late = spared(caught(), 1), spared(caught(), 2)
    assert early.clean
    assert any("eviction-due" in note for note in early.notes)
    assert late.breaches_by_kind == {"eviction-due": 1}
    assert (late.breaches[0].who, late.breaches[0].entry) == (str(OPERATOR.peer_id), 1)
    done = spared([*caught(), make_eviction(open_entry(caught()[1]))], 2)
    assert (done.clean, [note for note in done.notes if "due" in note]) == (True, [])
    monkeypatch.setattr("node.ledger.duties.GRACE_ENTRIES", 5)
    assert spared(caught(), 1).breaches_by_kind == {"eviction-due": 1}


def test_a_hard_answer_to_an_appeal_asks_for_no_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever appeals risks nothing but time, and the trainer is not blamed for that."""
    monkeypatch.setattr("node.ledger.duties.GRACE_ENTRIES", 0)
    work = make_submission(ALICE, INVITING.id)
    soft = make_verdict(work, by=ERIN, outcome="reject", reason="reward: another one")
    appeal = make_appeal(ALICE, soft)
    answer = make_answer(work, appeal, by=FRANK, outcome="reject", hard=True, reason="toploc: another model")
    entries = [admission(ALICE, 0), work.data, soft.data, appeal.data, answer.data]
    report = audited(export(tmp_path / "run", entries, INVITING))
    assert (report.breaches, report.appeals) == ([], {"refused": 1})


@pytest.mark.parametrize("finished", [False, True])
def test_nothing_may_be_left_out_of_a_run_that_is_over(tmp_path: Path, finished: bool) -> None:
    entries = caught()
    report = audited(export(tmp_path / "run", entries, head=head_at(entries, finished=finished)))
    assert report.breaches_by_kind == ({"eviction-due": 1} if finished else {})


def test_who_was_wronged_and_stays_evicted_is_a_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The appeal was granted, and the trainer keeps the contributor out."""
    early = audited(export(tmp_path / "early", wronged()[:-1], INVITING))
    assert any("reinstatement-due" in note for note in early.notes)
    work = make_submission(BOB, INVITING.id, index=2)
    entries = [*wronged()[:-1], work.data, make_verdict(work, by=ERIN).data]
    monkeypatch.setattr("node.ledger.duties.GRACE_ENTRIES", 2)
    report = audited(export(tmp_path / "late", entries, INVITING, head_at(entries, run_id=INVITING.id)))
    assert report.breaches_by_kind == {"reinstatement-due": 1}
    assert (report.breaches[0].who, report.breaches[0].entry) == (str(OPERATOR.peer_id), 14)
    assert audited(export(tmp_path / "done", [*wronged(), *entries[-2:]], INVITING)).clean


def test_flat_memory_keeps_what_appeals_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little_memory(monkeypatch, hot=1, at_once=1)
    assert audited(export(tmp_path / "run", wronged(), INVITING)).clean


def forged_invite() -> bytes:
    return make_admission(ALICE, INVITING.id, bits=1, invite=make_invite(INVITING.id).data[:-1] + b"\0").data


def no_work() -> bytes:
    tries = (number.to_bytes(8, "big") for number in range(99))
    return next(nonce for nonce in tries if not work_holds(ALICE.peer_id, INVITING.id, nonce, bits=1))


@pytest.mark.parametrize(
    ("number", "entry", "kind"),
    [
        (0, forged_invite(), "signature"),
        (0, admission(ALICE, 0, nonce=no_work()), "work"),
        (0, admission(ALICE, 0, invite=make_invite(INVITING.id, by=BOB).data), "invite"),
        (1, admission(BOB, 0), "invite-spent"),
        (13, make_reinstatement(make_verdict(make_submission(ALICE, INVITING.id), by=ERIN), make_appeal(
            ALICE, make_verdict(make_submission(ALICE, INVITING.id), by=ERIN))).data, "no-ground"),
    ],
    ids=["forged-invite", "no-work", "invite-by-another", "spent", "reinstated-for-nothing"],
)  # fmt: skip
def test_false_memberships_are_breaches(tmp_path: Path, number: int, entry: bytes, kind: str) -> None:
    """A trainer takes in friends that the rules keep out."""
    entries = wronged()
    entries[number] = entry
    report = audited(export(tmp_path / "run", entries, INVITING))
    assert report.breaches[0].kind == kind
    assert report.breaches[0].entry == number


# Silent groups.


def rollout_file(path: Path, rewards: Sequence[float]) -> tuple[bytes, int]:
    rows = [
        Rollout(
            prompt_index=at // 2, member=at % 2, prompt_ids=[1], output_ids=[2], logprobs=[0.0], reward=reward,
            finish_reason="stop", proofs=[b"p"], turns=[],
        )
        for at, reward in enumerate(rewards)
    ]  # fmt: skip
    return write_rollouts(path, rows)


@pytest.mark.parametrize(("silent", "clean"), [(b"\x01", True), (b"\x02", False)])
def test_silent_groups_are_compared_with_files_at_hand(tmp_path: Path, silent: bytes, clean: bool) -> None:
    """A trainer leaves out groups that it does not like, and says that they taught nothing."""
    spec = BatchSpec(rollouts_per_step=2, max_staleness=1, total_steps=3, signal_only=True)
    run = sealed(make_manifest(batch=spec), OPERATOR)
    sha256, size = rollout_file(tmp_path / "file", [1.0, 1.0, 0.0, 1.0])
    work = make_submission(ALICE, run.id, sha256=sha256, size=size)
    entries = [work.data, make_verdict(work).data, make_batch(run.id, 0, [work], silent=silent)]
    directory = export(tmp_path / "run", entries, run)
    (directory / "files").mkdir()
    shutil.copy(tmp_path / "file", directory / "files" / f"{work.id.hex()}.parquet")
    report = audited(directory)
    assert report.breaches_by_kind == ({} if clean else {"silent": 1})
    assert "silent groups were compared with 1 files" in report.notes


# The command line.


def run_cli(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_exit_codes(tmp_path: Path) -> None:
    good = export(tmp_path / "good", honest(), head=head_at(honest()))
    bad = export(tmp_path / "bad", forged(honest()), head=head_at(honest()))
    assert run_cli("audit", "--from", good).exit_code == 0
    done = run_cli("audit", "--from", bad, "--json")
    assert (done.exit_code, json.loads(done.stdout)["clean"]) == (1, False)
    impossible = run_cli("audit", "--from", tmp_path / "nothing")
    assert isinstance(impossible.exception, AuditError)
    assert impossible.exception.exit_code == 2


def test_fork_proof_on_the_command_line(tmp_path: Path) -> None:
    from protocol.forks import make_proof

    one, other = (make_head(RUN, number, ledger_length=4, ledger_tip=bytes([number]) * 32) for number in (1, 2))
    (tmp_path / "proof").write_bytes(make_proof(MANIFEST, one, other))
    done = run_cli("audit", "--fork", tmp_path / "proof")
    assert done.exit_code == 1
    assert f"the trainer {OPERATOR.peer_id} signed both" in done.stdout
    (tmp_path / "none").write_bytes(b"nothing")
    assert isinstance(run_cli("audit", "--fork", tmp_path / "none").exception, AuditError)


def test_ledger_show_mine_and_export(tmp_path: Path) -> None:
    directory = export(tmp_path / "run", honest(), head=head_at(honest()))
    shown = json.loads(run_cli("ledger", "show", "--from", directory, "--json").stdout)
    assert [row["credits"] for row in shown["contributors"]] == [80, 0]
    assert [(row["accept"], row["reject"], row["overruled"]) for row in shown["validators"]] == [(3, 1, 0)]
    said = run_cli("ledger", "show", "--from", directory).stdout
    assert "overruled" in said
    assert str(VALIDATOR.peer_id)[:20] in said
    table = run_cli("ledger", "show", "--from", directory, "--csv").stdout.splitlines()
    assert table[0] == (
        "rank,peer_id,standing,credits,mature,maturing,forfeited,restored,accepted,rejected,reasons,reason"
    )
    assert table[2].endswith(",evicted,0,0,0,40,0,1,1,toploc 1,toploc: another model")
    mine = json.loads(run_cli("ledger", "mine", "--from", directory, "--peer", ALICE.peer_id, "--json").stdout)
    assert [(row["state"], row["credits"], row["used_in"]) for row in mine["submissions"]] == [
        ("accepted", 40, 0),
        ("accepted", 40, None),
    ]
    assert "rank 1 of 2" in run_cli("ledger", "mine", "--from", directory, "--peer", ALICE.peer_id).stdout
    assert run_cli("ledger", "export", "--from", directory, "--out", tmp_path / "out").exit_code == 0
    assert audited(tmp_path / "out").clean
    assert len((tmp_path / "out" / "submissions.csv").read_text().splitlines()) == 5
    assert run_cli("ledger", "export", "--from", directory, "--out", tmp_path / "out").exit_code == 1


def test_failed_export_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new", tmp_path / "empty"):
        assert run_cli("ledger", "export", "--from", tmp_path / "nowhere", "--out", out).exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("columns", [80, 200])
def test_reasons_are_shown_whole(tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns under the row, for a column of its own would have a word a line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    directory = export(tmp_path / "run", honest(), head=head_at(honest()))
    mine = run_cli("ledger", "mine", "--from", directory, "--peer", BOB.peer_id).stdout.splitlines()
    row = next(at for at, line in enumerate(mine) if "  rejected " in line)
    assert mine[row + (columns == 80)].rstrip().endswith("toploc: another model")
    assert max(map(len, mine[2:])) <= columns
    shown = run_cli("ledger", "show", "--from", directory).stdout
    assert str(ALICE.peer_id) in shown
    assert "toploc: another model" in shown


def test_receipts_are_shown_where_no_ledger_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contributor keeps no ledger, and its run is over: nobody answers."""
    kept = [
        {"id": "ab" * 32, "step": 3, "index": 1, "state": "accepted", "relay": str(RELAY.peer_id),
         "validators": [str(VALIDATOR.peer_id)], "used_in": 3, "trained": True}
    ]  # fmt: skip
    asked: list[float] = []

    def nobody(*_: object, timeout_s: float, **__: object) -> None:
        asked.append(timeout_s)
        raise BootstrapError("nobody could be asked")

    monkeypatch.setattr("node.ledger.fetch.joined", nobody)
    monkeypatch.setattr("node.receipts.kept_receipts", lambda _: kept)
    monkeypatch.setattr("node.commands.ledger._own_peer", lambda _: ALICE.peer_id)
    done = run_cli("ledger", "mine", "--data-dir", tmp_path)
    assert done.exit_code == 0, done.output
    assert "ab" * 6 in done.stdout
    assert done.stdout.count("note: ") == 1
    as_json = json.loads(run_cli("ledger", "mine", "--data-dir", tmp_path, "--json").stdout)
    assert (as_json["kept"], as_json["submissions"], len(as_json["notes"])) == (kept, [], 1)
    assert asked == [5.0, 5.0], "not long, since there is something to show"
    kept.clear()
    assert isinstance(run_cli("ledger", "mine", "--data-dir", tmp_path).exception, BootstrapError)


def test_csv_cells_are_no_formulas() -> None:
    """A contributor's words reach an operator's spreadsheet."""
    from node.ledger.rows import as_csv

    assert list(as_csv(["a", "b"], [{"a": '=HYPERLINK("x")', "b": None}])) == ["a,b", '"\'=HYPERLINK(""x"")",']
