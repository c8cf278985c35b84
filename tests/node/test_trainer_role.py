"""The trainer refuses to go on from a data directory that is not the newest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from disk_kit import full_disk
from factories import OPERATOR, make_manifest, make_submission, make_verdict, sealed

from node.ledger.log import LedgerLog
from node.status import StatusBoard
from node.trainer.monitor import Monitor
from node.trainer.role import BEAT_S, TrainerParts, TrainerRole
from protocol.envelope import Signed, open_envelope
from protocol.errors import DataDirError
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import CheckpointFile, CheckpointManifest, Head
from trainer.metrics import MetricsLog

MANIFEST = sealed(make_manifest(), OPERATOR)


class FakeCompute:
    """Has a training state of some step."""

    def __init__(self, step: int) -> None:
        self.step = step

    async def call(self, method: str, **_: Any) -> dict[str, Any]:
        return {"step": self.step, "policy_dir": "/nowhere"}


class FakeStore:
    async def publish(self, source: Path, *, step: int, run_id: bytes, **_: Any) -> Signed[CheckpointManifest]:
        file = CheckpointFile(name="model.safetensors", size=1, sha256=b"f" * 32)
        record = CheckpointManifest(
            run_id=run_id,
            step=step,
            issued_at_ms=1,
            shard_bytes=4096,
            files=(file,),
            shards=(b"s" * 32,),
            sha256=b"w" * 32,
        )
        return sealed(record, OPERATOR)


class FakeRelay:
    """Holds the head that it was given last."""

    def __init__(self, *, ledger_length: int, ledger_tip: bytes) -> None:
        self.peer_id, self.url = Identity.from_phrase("relay").peer_id, "https://relay.example"
        self.introduced, self.told = trio.Event(), trio.Event()
        self.heads: list[Head] = []
        self._head = Head(
            run_id=MANIFEST.id,
            sequence=5,
            previous_sequence=4,
            issued_at_ms=1,
            step=3,
            collecting=True,
            checkpoint_step=3,
            checkpoint=b"c" * 32,
            oldest_checkpoint_step=2,
            ledger_length=ledger_length,
            ledger_tip=ledger_tip,
            finished=False,
        )

    async def head(self) -> Signed[Head]:
        return sealed(self._head, OPERATOR)

    async def post_origin(self, *_: bytes) -> int:
        self.introduced.set()
        return 5

    async def post_head(self, head: bytes) -> int:
        self.heads.append(open_envelope(head, Head).record)
        self.told.set()
        return 5


class FakeCollector:
    def catch_up(self) -> None:
        pass

    async def run(self) -> None:
        await trio.sleep_forever()

    async def wait_changed(self) -> None:
        await trio.sleep_forever()

    def pending(self, step: int) -> int:
        return 0

    def drop_stale(self, step: int) -> int:
        return 0


class FakeSwarm:
    def __init__(self, *relays: FakeRelay) -> None:
        self.clients = list(relays)


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerLog:
    ledger = LedgerLog(tmp_path / "ledger", LedgerState(MANIFEST.id, MANIFEST.record))
    submission = make_submission(Identity.from_phrase("alice"), MANIFEST.id)
    ledger.append([submission.data, make_verdict(submission).data])
    return ledger


def trainer(
    ledger: LedgerLog,
    directory: Path,
    *,
    step: int,
    relay: FakeRelay | None = None,
    board: StatusBoard | None = None,
    collector: FakeCollector | None = None,
) -> TrainerRole:
    board = board or StatusBoard(role="trainer", peer_id=OPERATOR.peer_id, run="test")
    parts: Any = {
        "identity": OPERATOR,
        "manifest": MANIFEST,
        "swarm": FakeSwarm(*([relay] if relay else [])),
        "store": FakeStore(),
        "ledger": ledger,
        "collector": collector or FakeCollector(),
        "compute": FakeCompute(step),
        "reader": None,
        "monitor": Monitor(MetricsLog(directory / "training.jsonl"), board),
        "board": board,
    }
    parts |= {"origin_url": "https://trainer.example", "origin_fingerprint": b"f" * 32}
    parts |= {"origin_token": lambda relay: "t" * 32, "discovery_state": lambda: "connected"}
    return TrainerRole(TrainerParts(**parts))


@pytest.mark.parametrize("step", [2, 7])
async def test_training_state_of_another_time_than_the_ledger_is_refused(
    ledger: LedgerLog, tmp_path: Path, step: int
) -> None:
    """The ledger was lost or put back alone: training on would sign a second history."""
    with (
        trio.fail_after(5),
        pytest.raises(DataDirError, match=f"checkpoint {step}, but the ledger has 0 trained steps"),
    ):
        await trainer(ledger, tmp_path, step=step).run()


async def test_old_copy_of_the_data_directory_is_refused(ledger: LedgerLog, tmp_path: Path) -> None:
    """A back-up was put back while a relay holds a newer head of the same trainer: a fork of the ledger."""
    relay = FakeRelay(ledger_length=9, ledger_tip=b"n" * 32)
    with trio.fail_after(5), pytest.raises(ExceptionGroup) as caught:
        await trainer(ledger, tmp_path, step=0, relay=relay).run()
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, DataDirError)
    assert "holds a head of this trainer with 9 ledger entries" in str(error)
    assert not relay.introduced.is_set()


async def test_rewritten_ledger_is_refused(ledger: LedgerLog, tmp_path: Path) -> None:
    relay = FakeRelay(ledger_length=1, ledger_tip=b"x" * 32)
    with trio.fail_after(5), pytest.raises(ExceptionGroup):
        await trainer(ledger, tmp_path, step=0, relay=relay).run()


async def test_relay_with_an_earlier_head_is_no_hindrance(ledger: LedgerLog, tmp_path: Path) -> None:
    tip = ledger.state.tip_at(1)
    assert tip is not None
    relay = FakeRelay(ledger_length=1, ledger_tip=tip)
    role = trainer(ledger, tmp_path, step=0, relay=relay)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(role.run)
            await relay.introduced.wait()
            nursery.cancel_scope.cancel()


async def test_trainer_keeps_the_head_that_it_signed_last(ledger: LedgerLog, tmp_path: Path) -> None:
    """An audit of its directory then shows that the ledger there is complete."""
    role = trainer(ledger, tmp_path, step=0, relay=(relay := FakeRelay(ledger_length=0, ledger_tip=MANIFEST.id)))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(role.run)
            await relay.told.wait()
            nursery.cancel_scope.cancel()
    head = open_envelope((ledger.path / "head").read_bytes(), Head).require_author(OPERATOR.peer_id)
    assert (head.record.ledger_length, head.record.ledger_tip) == (2, ledger.state.tip)


class CollectorOnAFullDisk(FakeCollector):
    """Enters work that the disk refuses. The node's end then waits for a thread, such as one that hashes a policy."""

    def __init__(self, ledger: LedgerLog, relay: FakeRelay) -> None:
        self.ledger, self.relay = ledger, relay

    async def run(self) -> None:
        await self.relay.told.wait()
        submission = make_submission(Identity.from_phrase("bob"), MANIFEST.id)
        with full_disk():
            try:
                self.ledger.append([submission.data, make_verdict(submission).data])
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(3 * BEAT_S)


async def test_no_head_names_an_entry_that_the_disk_refused(
    ledger: LedgerLog, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Relays would hold it against the trainer at every later start, as a fork."""
    relay = FakeRelay(ledger_length=0, ledger_tip=MANIFEST.id)
    role = trainer(ledger, tmp_path, step=0, relay=relay, collector=CollectorOnAFullDisk(ledger, relay))
    with trio.fail_after(60), pytest.raises(ExceptionGroup) as caught:
        await role.run()
    assert caught.value.subgroup(DataDirError) is not None
    ledger.close()
    again = LedgerLog(tmp_path / "ledger", LedgerState(MANIFEST.id, MANIFEST.record))
    assert relay.heads
    assert all(again.state.tip_at(head.ledger_length) == head.ledger_tip for head in relay.heads)
    relay.introduced, relay.told = trio.Event(), trio.Event()
    relay._head = relay.heads[-1]
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer(again, tmp_path, step=0, relay=relay).run)
            await relay.introduced.wait()  # once there is room, the run goes on
            nursery.cancel_scope.cancel()


async def test_last_status_is_what_the_ledger_holds(ledger: LedgerLog, tmp_path: Path) -> None:
    """Also of entries that came without a verdict of their own, such as an admission while the run ended."""
    relay = FakeRelay(ledger_length=0, ledger_tip=MANIFEST.id)
    board = StatusBoard(role="trainer", peer_id=OPERATOR.peer_id, run="test")
    role = trainer(ledger, tmp_path, step=0, relay=relay, board=board)
    late = make_submission(bob := Identity.from_phrase("bob"), MANIFEST.id)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(role.run)
            await relay.told.wait()
            await trio.testing.wait_all_tasks_blocked()  # the next beat is seconds away
            ledger.append([late.data, make_verdict(late).data])
            nursery.cancel_scope.cancel()
    shown = {row["peer_id"]: row["credits"] for row in board.detail("contributors")}
    assert shown == {str(peer): one.credits for peer, one in ledger.state.contributors.items()}
    assert str(bob.peer_id) in shown
