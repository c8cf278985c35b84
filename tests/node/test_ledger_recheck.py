"""An audit judges work again, with the policy and the file at hand: honest verdicts stand, a false one is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from factories import make_admission, make_verdict, sealed
from test_ledger_audit import audited_again, export

from node.run_create import create_run
from p2p.shardcast.store import CheckpointStore
from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.records import Submission
from protocol.rollouts import read_rollouts, write_rollouts

pytestmark = pytest.mark.long

OPERATOR, ALICE, VALIDATOR = (Identity.from_phrase(name) for name in ("operator", "alice", "validator"))


def publish(directory: Path, run: Any) -> bytes:
    shutil.copytree(run.policy_dir, directory / "source")

    async def published() -> Any:
        store = CheckpointStore(directory / "checkpoints")
        return await store.publish(
            directory / "source", identity=OPERATOR, run_id=run.manifest.id, step=0, shard_bytes=1 << 16
        )

    return trio.run(published).id


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run, its first checkpoint, an honest file, and one in which a reward was raised."""
    from submission_kit import make_worker

    directory = tmp_path_factory.mktemp("run")
    run = create_run("demo", directory, identity=OPERATOR, validators=[VALIDATOR.peer_id], issued_at_ms=1)
    policy = publish(directory, run)
    worker = make_worker()
    worker.load(str(run.policy_dir), policy)
    made = {}
    for index in (0, 1):
        file = directory / f"file-{index}"
        seed = {"run_id": run.manifest.id, "step": 0, "checkpoint": policy, "index": index}
        manifest = msgspec.msgpack.encode(run.manifest.record)
        found = worker.generate(**seed, contributor=ALICE.peer_id.public_key, manifest=manifest, path=str(file))
        fields = {name: value for name, value in found.items() if name in Submission.__struct_fields__}
        made[file] = Submission(**{**fields, **seed}, checkpoint_step=0, software="test", issued_at_ms=1)
    false = directory / "file-1"
    rows = read_rollouts(false, max_rollouts=run.manifest.record.rollouts_per_submission, max_tokens=256)
    raised = [msgspec.structs.replace(row, reward=row.reward + 1) if at == 0 else row for at, row in enumerate(rows)]
    sha256, size = write_rollouts(false, raised)
    made[false] = msgspec.structs.replace(made[false], sha256=sha256, size=size)
    works = {path: sealed(record, ALICE) for path, record in made.items()}
    return {"directory": directory, "run": run.manifest, "works": works}


def hand_over(world: dict[str, Any], directory: Path, verdicts: list[Signed[Any]]) -> Path:
    works = list(world["works"].items())
    entries = [data for (_, work), verdict in zip(works, verdicts, strict=True) for data in (work.data, verdict.data)]
    run = world["run"]
    joined = make_admission(ALICE, run.id, bits=run.record.admission.work_bits)
    export(directory, [joined.data, *entries], run)
    shutil.copytree(world["directory"] / "checkpoints", directory / "checkpoints")
    (directory / "files").mkdir()
    for path, work in works:
        shutil.copy(path, directory / "files" / f"{work.id.hex()}.parquet")
    return directory


def test_honest_verdicts_stand(world: dict[str, Any], tmp_path: Path) -> None:
    good, bad = world["works"].values()
    rejected = make_verdict(bad, by=VALIDATOR, outcome="reject", hard=True, reason="rewards: 1 of them differ")
    report = audited_again(hand_over(world, tmp_path / "run", [make_verdict(good, by=VALIDATOR), rejected]), samples=9)
    assert (report.breaches, len(report.rechecked)) == ([], 2)


def test_false_verdicts_are_named(world: dict[str, Any], tmp_path: Path) -> None:
    """A validator accepts a friend's raised reward, and rejects a stranger's honest work."""
    good, bad = world["works"].values()
    rejected = make_verdict(good, by=VALIDATOR, outcome="reject", hard=True, reason="toploc: another model")
    report = audited_again(hand_over(world, tmp_path / "run", [rejected, make_verdict(bad, by=VALIDATOR)]), samples=9)
    assert report.breaches_by_kind == {"verdict": 2}
    assert {one.who for one in report.breaches} == {str(VALIDATOR.peer_id)}
    assert any("here: reject reward" in one.what for one in report.breaches), report.breaches
