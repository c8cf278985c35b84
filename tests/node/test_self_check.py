"""A contributor asks for its verdict before it sends anything; and what a data directory holds without a network."""

import json
import shutil
from types import SimpleNamespace

import msgspec
import pytest
import trio
from typer.testing import CliRunner

from cli import app
from node.held import held_policy, held_run, newest_policy
from node.inference.outbox import Outbox
from node.run_create import create_run
from node.self_check import check_file
from p2p.shardcast.store import CheckpointStore
from protocol.envelope import open_envelope, seal
from protocol.errors import ConfigError, DataDirError
from protocol.identity import Identity
from protocol.records import Submission
from protocol.rollouts import read_rollouts, write_rollouts

OPERATOR, ALICE = Identity.from_phrase("operator"), Identity.from_phrase("alice")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data directory with a run, its first checkpoint and a file in the outbox, as an inference node leaves it."""
    from submission_kit import make_worker

    data_dir = tmp_path_factory.mktemp("alice")
    validator = Identity.from_phrase("validator").peer_id
    run = create_run("demo", data_dir, identity=OPERATOR, validators=[validator], issued_at_ms=1)
    policy = publish(data_dir, run, step=0)
    publish(data_dir, run, step=1)
    worker = make_worker()
    worker.load(str(run.policy_dir), policy)
    file = data_dir / "rollouts" / "000000-0000.parquet"
    file.parent.mkdir()
    seed = {"run_id": run.manifest.id, "step": 0, "checkpoint": policy, "index": 0}
    manifest = msgspec.msgpack.encode(run.manifest.record)
    found = worker.generate(**seed, contributor=ALICE.peer_id.public_key, manifest=manifest, path=str(file))
    fields = {name: value for name, value in found.items() if name not in ("mean_reward", "could_not_tell", "seconds")}
    record = Submission(**seed, **fields, checkpoint_step=0, software="test", issued_at_ms=1)
    submission = open_envelope(seal(record, ALICE), Submission)
    outbox = Outbox(data_dir / "outbox.sqlite")
    outbox.add(submission, file)
    outbox.close()
    return SimpleNamespace(data_dir=data_dir, run=run, file=file, submission=submission, policy=policy)


def publish(data_dir, run, *, step):
    store = CheckpointStore(data_dir / "checkpoints")
    source = data_dir / f"source-{step}"
    shutil.copytree(run.policy_dir, source)

    async def published():
        return await store.publish(source, identity=OPERATOR, run_id=run.manifest.id, step=step, shard_bytes=1 << 16)

    return trio.run(published).id


def signed_anew(made, tmp_path, rollouts):
    """Another file and the submission that fits it, as envelope."""
    file = tmp_path / "other.parquet"
    sha256, size = write_rollouts(file, rollouts)
    record = msgspec.structs.replace(made.submission.record, sha256=sha256, size=size)
    envelope = tmp_path / "submission"
    envelope.write_bytes(seal(record, ALICE))
    return file, envelope


def test_an_honest_file_would_be_accepted(made):
    found = check_file(made.data_dir, made.file)
    assert (found.outcome, found.step, found.index) == ("accept", 0, 0)
    assert found.checks[0].name == "dtype"
    limits = next(check.limits for check in found.checks if check.name == "sampling")
    assert limits["max_margin"] == made.run.manifest.record.tolerances["float32"].max_margin


def test_a_false_file_would_be_rejected_by_the_same_check(made, tmp_path):
    rollouts = read_rollouts(made.file, max_rollouts=32, max_tokens=256)
    rollouts[0] = msgspec.structs.replace(rollouts[0], reward=rollouts[0].reward + 1)
    found = check_file(made.data_dir, *signed_anew(made, tmp_path, rollouts))
    assert (found.outcome, found.hard) == ("reject", True)
    assert found.reason.startswith("reward: ")


def test_a_file_that_is_no_parquet_or_not_the_signed_one_would_be_rejected(made, tmp_path):
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 nothing")
    envelope = tmp_path / "submission"
    envelope.write_bytes(made.submission.data)
    assert check_file(made.data_dir, broken, envelope).reason.startswith("file: ")


def test_the_command_line_gives_the_verdict_as_its_exit_code(made, tmp_path):
    here = ["--data-dir", str(made.data_dir)]
    accepted = CliRunner().invoke(app, ["validate", "--self", str(made.file), *here, "--json"])
    assert (accepted.exit_code, json.loads(accepted.output)["outcome"]) == (0, "accept")
    rollouts = read_rollouts(made.file, max_rollouts=32, max_tokens=256)[::-1]
    file, envelope = signed_anew(made, tmp_path, rollouts)
    rejected = CliRunner().invoke(app, ["validate", "--self", str(file), "--submission", str(envelope), *here])
    assert rejected.exit_code == 1
    assert "reject (hard: it would evict this node): schema: " in " ".join(rejected.output.split())


def test_what_is_missing_is_named(made, tmp_path):
    with pytest.raises(ConfigError, match="no rollout file"):
        check_file(made.data_dir, tmp_path / "none.parquet")
    stranger = tmp_path / "stranger.parquet"
    stranger.write_bytes(b"x")
    with pytest.raises(DataDirError, match="has no submission of"):
        check_file(made.data_dir, stranger)
    record = msgspec.structs.replace(made.submission.record, checkpoint=b"x" * 32)
    envelope = tmp_path / "submission"
    envelope.write_bytes(seal(record, ALICE))
    with pytest.raises(DataDirError, match="any more"):
        check_file(made.data_dir, made.file, envelope)


def test_a_data_directory_s_run_and_policies(made, tmp_path):
    run = held_run(made.data_dir, str(made.run.address))
    assert run.id == made.run.manifest.id
    assert newest_policy(made.data_dir, run.id).step == 1
    assert held_policy(made.data_dir, run.id, made.policy).step == 0
    assert held_policy(made.data_dir, b"x" * 32, made.policy) is None
    with pytest.raises(ConfigError, match="belongs to the run"):
        held_run(made.data_dir, f"{ALICE.peer_id}/demo")
    with pytest.raises(DataDirError, match="knows no run"):
        held_run(tmp_path)
    with pytest.raises(DataDirError, match="no policy"):
        newest_policy(tmp_path, run.id)


def test_an_operator_s_first_policy_is_used_before_any_checkpoint(tmp_path):
    run = create_run("demo", tmp_path, identity=OPERATOR, validators=[ALICE.peer_id], issued_at_ms=1)
    assert newest_policy(tmp_path, run.manifest.id).path == run.policy_dir
