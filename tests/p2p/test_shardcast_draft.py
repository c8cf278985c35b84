"""Checkpoints that are signed in parts: how parts must fit, and what is served before the manifest is there."""

import msgspec
import pytest
from shardcast_world import (
    RULES,
    RUN_ID,
    SHARD_BYTES,
    TRAINER,
    contents,
    make_policy,
    publish,
    shard_bytes_of,
)

from p2p.shardcast.draft import Draft
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import content_digest
from protocol.envelope import open_envelope, seal
from protocol.errors import MalformedError, RefusedError, WrongAuthorError, WrongRunError
from protocol.identity import Identity
from protocol.records import CheckpointManifest, CheckpointPart, CheckpointPlan, PlannedFile

MALLORY = Identity.from_phrase("mallory")


def plan(files=(("a", SHARD_BYTES * 3 + 5),), *, identity=TRAINER, **changes):
    record = CheckpointPlan(
        run_id=RUN_ID,
        step=1,
        issued_at_ms=1,
        shard_bytes=SHARD_BYTES,
        files=tuple(PlannedFile(name=name, size=size) for name, size in files),
    )
    return open_envelope(seal(msgspec.structs.replace(record, **changes), identity), CheckpointPlan)


def part(of, number, first, *shards, identity=TRAINER):
    record = CheckpointPart(plan=of.id, number=number, first_shard=first, shards=tuple(bytes([s]) * 32 for s in shards))
    return open_envelope(seal(record, identity), CheckpointPart)


def test_parts_that_follow_each_other_are_taken():
    announced = plan()
    draft = Draft(announced)
    assert draft.add_part(part(announced, 0, 0, 1)) == range(1)
    assert draft.add_part(part(announced, 1, 1, 2, 3, 4)) == range(1, 4)
    assert draft.hashes == [bytes([n]) * 32 for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("number", "first", "shards", "match"),
    [
        (1, 1, [2], "part 1 .* where part 0 is next"),
        (0, 1, [2], "leave a gap after shard 0"),
        (0, 0, [1, 2, 3, 4, 5], "reaches to shard 5 of 4"),
    ],
)
def test_missing_and_surplus_shards_are_refused_by_name(number, first, shards, match):
    """A part skips shards, comes twice, or speaks of shards that the plan does not have."""
    announced = plan()
    with pytest.raises(MalformedError, match=match):
        Draft(announced).add_part(part(announced, number, first, *shards))


def test_overlapping_shards_are_refused_by_name():
    """A second part says other hashes for shards that the first one has named."""
    announced = plan()
    draft = Draft(announced)
    draft.add_part(part(announced, 0, 0, 1, 2))
    with pytest.raises(MalformedError, match="overlap with shard 2"):
        draft.add_part(part(announced, 1, 1, 9))


@pytest.mark.parametrize(
    ("announced", "error"),
    [
        (plan(identity=MALLORY), WrongAuthorError),
        (plan(run_id=b"x" * 32), WrongRunError),
        (plan(step=101), MalformedError),
        (plan(shard_bytes=8192), MalformedError),
        (plan(files=(("a", 0),)), MalformedError),
        (plan(files=(("a", 2**53),)), MalformedError),
        (plan(files=(("a", 9), ("A", 9))), MalformedError),
    ],
)
def test_a_plan_against_the_runs_rules_is_refused(announced, error):
    """Another signer, another run, a step beyond the run's end, absurd sizes, names that clash."""
    with pytest.raises(error):
        RULES.check_plan(announced)


def test_a_part_of_another_signer_or_plan_is_refused():
    announced = plan()
    RULES.check_part(part(announced, 0, 0, 1), announced.id)
    with pytest.raises(WrongAuthorError):
        RULES.check_part(part(announced, 0, 0, 1, identity=MALLORY), announced.id)
    with pytest.raises(MalformedError, match="a part of plan"):
        RULES.check_part(part(plan(step=2), 0, 0, 1), announced.id)


async def test_the_manifest_has_the_last_word(tmp_path):
    """A trainer that crashed while it announced trains on and publishes other weights of the same size."""
    trainer = CheckpointStore(tmp_path / "trainer")
    manifest = await publish(trainer, make_policy(tmp_path / "policy"))
    files = tuple((file.name, file.size) for file in manifest.record.files)
    announced = plan(files)
    node = CheckpointStore(tmp_path / "node")
    with node.begin(announced) as partial:
        good = shard_bytes_of(trainer, manifest.id, 0)
        record = CheckpointPart(
            plan=announced.id, number=0, first_shard=0, shards=(manifest.record.shards[0], b"z" * 32)
        )
        node.learn(announced.id, open_envelope(seal(record, TRAINER), CheckpointPart))
        partial.write_shard(0, good)
        assert partial.wanted() == 0b10
        assert shard_bytes_of(node, announced.id, 0) == good
        assert not node.draft(announced.id).continues(manifest)
        assert node.close(manifest)
        assert partial.missing() == list(range(1, 8))
    with node.begin(manifest) as again:
        assert again is partial
        for index in again.missing():
            again.write_shard(index, shard_bytes_of(trainer, manifest.id, index))
        assert contents(await node.install(manifest.id)) == contents(tmp_path / "policy")
    assert node.complete() == [(1, manifest.id)]


async def test_an_announced_download_survives_a_kill(tmp_path):
    """Killed before the manifest came: what was verified is verified again when its hashes are known again."""
    trainer = CheckpointStore(tmp_path / "trainer")
    manifest = await publish(trainer, make_policy(tmp_path / "policy"))
    announced = plan(tuple((file.name, file.size) for file in manifest.record.files))
    record = CheckpointPart(plan=announced.id, number=0, first_shard=0, shards=manifest.record.shards[:4])
    signed = open_envelope(seal(record, TRAINER), CheckpointPart)
    node = CheckpointStore(tmp_path / "node")
    with node.begin(announced) as partial:
        node.learn(announced.id, signed)
        for index in (0, 3):
            partial.write_shard(index, shard_bytes_of(trainer, manifest.id, index))
    reopened = CheckpointStore(tmp_path / "node")
    assert reopened.newest_plan(0) == announced
    with reopened.begin(announced) as partial:
        partial.recheck()
        assert (partial.count, partial.wanted()) == (0, 0)
        reopened.learn(announced.id, signed)
        partial.recheck()
        assert (partial.held, partial.wanted()) == (0b1001, 0b0110)


async def test_shards_are_served_while_later_ones_are_still_being_hashed(tmp_path):
    store = CheckpointStore(tmp_path / "trainer")
    seen = []

    def look():
        announced = store.newest_plan(0)
        progress = store.progress(announced.id) if announced is not None else None
        if progress is not None and progress.held and not progress.held >> 7:
            seen.append((progress.held, shard_bytes_of(store, announced.id, 0)))
            with pytest.raises(RefusedError, match="still on its way"):
                shard_bytes_of(store, announced.id, 7)

    store.subscribe(look)
    manifest = await publish(store, make_policy(tmp_path / "policy"))
    assert seen[0] == (1, shard_bytes_of(store, manifest.id, 0))
    announced = store.newest_plan(1)
    assert store.progress(announced.id) == store.progress(manifest.id)
    assert store.manifest(announced.id) == manifest
    assert manifest.record.sha256 == content_digest(manifest.record.shards)
    assert isinstance(manifest.record, CheckpointManifest)
    assert store.newest_plan(2) is None


async def test_a_plan_that_comes_after_its_checkpoint_begins_nothing(tmp_path):
    """The head was quicker than the announcement: the checkpoint is here, and is now known by both names."""
    store = CheckpointStore(tmp_path / "trainer")
    manifest = await publish(store, make_policy(tmp_path / "policy"))
    late = CheckpointStore(tmp_path / "node")
    with late.begin(manifest) as partial:
        for index in range(8):
            partial.write_shard(index, shard_bytes_of(store, manifest.id, index))
        await late.install(manifest.id)
    announced = store.newest_plan(1)
    with late.begin(announced) as partial:
        assert partial is None
    assert late.newest_plan(1) == announced
    assert late.progress(announced.id).held == 255
    assert [path.name[:5] for path in (tmp_path / "node").iterdir()] == ["step-"]
