"""CheckpointStore: publishing, resuming, installing, serving, pruning."""

import hashlib
import itertools
import os
import struct

import msgspec
import pytest
import trio
from disk_kit import full_disk
from shardcast_world import (
    RUN_ID,
    SHARD_BYTES,
    TRAINER,
    contents,
    make_policy,
    publish,
    shard_bytes_of,
)

from p2p.shardcast.entries import MANIFEST
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import content_digest
from protocol.envelope import open_envelope, seal
from protocol.errors import ChecksumError, DataDirError, MalformedError, ModelError, RefusedError
from protocol.records import CheckpointFile, CheckpointManifest


@pytest.fixture
async def published(tmp_path):
    """A trainer's store with one checkpoint, and its manifest."""
    store = CheckpointStore(tmp_path / "trainer")
    return store, await publish(store, make_policy(tmp_path / "policy"))


def copy_shards(trainer, manifest, partial, shards):
    for index in shards:
        partial.write_shard(index, shard_bytes_of(trainer, manifest.id, index))


async def test_publishing_keeps_the_files_in_place_and_copies_nothing(published, tmp_path):
    store, manifest = published
    directory = store.local_dir(manifest.id)
    assert directory.name == f"step-000001-{manifest.id.hex()[:8]}"
    assert contents(directory) == contents(tmp_path / "policy")
    assert (directory / "config.json").samefile(tmp_path / "policy" / "config.json")
    assert len(manifest.record.shards) == 8
    stream = b"".join(body for _, body in sorted(contents(directory).items()))
    assert b"".join(shard_bytes_of(store, manifest.id, index) for index in range(8)) == stream


async def test_publishing_again_changes_nothing(published, tmp_path):
    store, manifest = published
    assert await publish(store, tmp_path / "policy") == manifest
    again = CheckpointStore(tmp_path / "trainer")
    assert await publish(again, tmp_path / "policy") == manifest
    assert again.complete() == [(1, manifest.id)]


async def test_a_policy_that_finds_no_room_is_published_later(tmp_path):
    """Its files are links, so that the manifest is what does not fit."""
    store, policy = CheckpointStore(tmp_path / "trainer"), make_policy(tmp_path / "policy")
    with full_disk(), pytest.raises(DataDirError, match="step 1 cannot be published"):
        await publish(store, policy)
    assert store.complete() == []
    manifest = await publish(store, policy)
    assert CheckpointStore(tmp_path / "trainer").complete() == [(1, manifest.id)]


@pytest.mark.parametrize("names", [[], ["empty"], ["a b", "x"], ["x", "X"]])
async def test_what_is_no_policy_is_not_published(tmp_path, names):
    source = tmp_path / "policy"
    source.mkdir()
    for name in names:
        (source / name).write_bytes(b"" if name == "empty" else b"weights")
    store = CheckpointStore(tmp_path / "trainer")
    with pytest.raises(ModelError):
        await publish(store, source)
    assert list((tmp_path / "trainer").iterdir()) == []


async def test_a_download_is_resumed_after_a_kill_without_its_verified_shards(published, tmp_path):
    trainer, manifest = published
    with CheckpointStore(tmp_path / "node").begin(manifest) as partial:
        copy_shards(trainer, manifest, partial, [5, 0, 7])
        half = partial.sink(2)
        half.write(b"not verified")
    reopened = CheckpointStore(tmp_path / "node")  # as after kill −9: nothing of the first store was closed
    assert reopened.complete() == []
    assert reopened.local_dir(manifest.id) is None
    with reopened.begin(manifest) as partial:
        assert partial.missing() == [1, 2, 3, 4, 6]
        assert not partial.has(0)
        partial.recheck()
        assert partial.missing() == [1, 2, 3, 4, 6]
        assert partial.has(0)
        assert partial.verified_bytes == 2 * SHARD_BYTES + manifest.record.total_bytes - 7 * SHARD_BYTES
        copy_shards(trainer, manifest, partial, partial.missing())
        directory = await reopened.install(manifest.id)
    assert contents(directory) == contents(trainer.local_dir(manifest.id))
    assert CheckpointStore(tmp_path / "node").complete() == [(1, manifest.id)]


@pytest.mark.parametrize("cause", ["a full disk", "a power cut"])
async def test_a_manifest_that_is_not_whole_costs_no_shard(published, tmp_path, cause):
    trainer, manifest = published
    plan, store = trainer.newest_plan(0), CheckpointStore(tmp_path / "node")
    with store.begin(plan) as partial:
        store.learn(plan.id, trainer.progress(plan.id).parts[0])
        count = len(trainer.progress(plan.id).parts[0].record.shards)
        copy_shards(trainer, manifest, partial, range(count))
    if cause == "a full disk":
        with full_disk(), pytest.raises(OSError, match="too large"):
            store.close(manifest)
    else:
        store.close(manifest)
        (partial.directory / MANIFEST).write_bytes(b"")
    with CheckpointStore(tmp_path / "node").begin(manifest) as partial:
        assert partial.missing() == list(range(count, 8))
        copy_shards(trainer, manifest, partial, partial.missing())


async def test_a_truncated_partial_file_is_noticed_at_the_restart(published, tmp_path):
    trainer, manifest = published
    with CheckpointStore(tmp_path / "node").begin(manifest) as partial:
        copy_shards(trainer, manifest, partial, range(4))
        os.truncate(partial.directory / "model-1.safetensors", 5000)
    with CheckpointStore(tmp_path / "node").begin(manifest) as partial:
        assert partial.missing() == list(range(8))


async def test_a_shard_counts_only_when_its_hash_holds(published, tmp_path):
    """A relay's shard has one flipped byte, or is short, or is another shard."""
    trainer, manifest = published
    good = shard_bytes_of(trainer, manifest.id, 3)
    with CheckpointStore(tmp_path / "node").begin(manifest) as partial:
        for bad in (bytes([good[0] ^ 1]) + good[1:], good[:-1], b"", shard_bytes_of(trainer, manifest.id, 4)):
            with pytest.raises(ChecksumError, match="shard 3"):
                partial.write_shard(3, bad)
        assert not partial.has(3)
        partial.write_shard(3, good)
        assert partial.has(3)


async def test_a_closed_sink_writes_no_more(published, tmp_path):
    """A fetch that was given up goes on writing while another relay's bytes are already there."""
    trainer, manifest = published
    store = CheckpointStore(tmp_path / "node")
    with store.begin(manifest) as partial:
        late = partial.sink(0)
        late.close()
        partial.write_shard(0, shard_bytes_of(trainer, manifest.id, 0))
        late.write(b"late and wrong")
        with pytest.raises(ChecksumError, match="given up"):
            late.commit(bytes(32))
        copy_shards(trainer, manifest, partial, partial.missing())
        assert contents(await store.install(manifest.id)) == contents(tmp_path / "policy")


async def test_damage_on_this_disk_is_found_at_the_restart(published, tmp_path):
    """A power cut, or a failing disk, leaves other bytes than those that were verified."""
    trainer, manifest = published
    with CheckpointStore(tmp_path / "node").begin(manifest) as partial:
        copy_shards(trainer, manifest, partial, range(8))
        with (partial.directory / "model-2.safetensors").open("r+b") as file:
            file.write(b"damage")
    store = CheckpointStore(tmp_path / "node")
    with store.begin(manifest) as partial:
        assert not partial.is_whole
        with pytest.raises(ModelError, match="lacks 8 shards"):
            await store.install(manifest.id)
        partial.recheck()
        assert partial.missing() == [4]
        copy_shards(trainer, manifest, partial, [4])
        await store.install(manifest.id)
    assert store.complete() == [(1, manifest.id)]


async def test_a_complete_checkpoint_that_the_disk_damaged_is_removed_when_it_is_looked_at(published, tmp_path):
    """Between two runs of a node its disk changes a byte, so that an engine would load what nobody signed."""
    _, manifest = published
    assert await CheckpointStore(tmp_path / "trainer").verify(manifest.id)
    assert not await CheckpointStore(tmp_path / "trainer").verify(bytes(32))
    store = CheckpointStore(tmp_path / "trainer")
    with (store.local_dir(manifest.id) / "model-2.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    assert not await store.verify(manifest.id)
    assert store.complete() == []
    assert list((tmp_path / "trainer").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (struct.pack("<Q", 1 << 60) + bytes(92), "header of 1152921504606846976 bytes"),
        (struct.pack("<Q", 93) + bytes(92), "header of 93 bytes"),
        (struct.pack("<Q", 92) + b"[" * 92, "does not decode"),
        (
            struct.pack("<Q", 92) + b'{"../../x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.ljust(92),
            "unsafe tensor",
        ),
        (struct.pack("<Q", 92) + b'{"w":{"dtype":"U8","shape":[9],"data_offsets":[0,0]}}'.ljust(92), "takes 0 bytes"),
    ],
)
async def test_a_hostile_tensor_file_is_refused_before_anything_opens_it(tmp_path, body, match):
    """With the trainer's stolen key, a checkpoint's safetensors header asks for more memory than there is, or lies."""
    record = manifest_of("model.safetensors", body)
    signed = open_envelope(seal(record, TRAINER), CheckpointManifest)
    store = CheckpointStore(tmp_path / "node")
    with store.begin(signed) as partial:
        partial.write_shard(0, body)
        with pytest.raises(MalformedError, match=match):
            await store.install(signed.id)
    assert store.complete() == []
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(body)
    with pytest.raises(ModelError, match="cannot be published"):
        await publish(store, tmp_path / "policy")


async def test_a_files_hash_is_over_the_hashes_of_its_pieces(published, tmp_path):
    """Computed here from the file alone and where it begins in the byte stream."""
    _, manifest = published
    start = 0
    for file in manifest.record.files:
        body = (tmp_path / "policy" / file.name).read_bytes()
        first = SHARD_BYTES - start % SHARD_BYTES
        cuts = [0, *range(first, len(body), SHARD_BYTES), len(body)]
        pieces = [hashlib.sha256(body[low:high]).digest() for low, high in itertools.pairwise(cuts) if low < high]
        assert file.sha256 == hashlib.sha256(b"".join(pieces)).digest()
        start += len(body)
    assert [file.size for file in manifest.record.files] == [0, 300, 17_000, 12_288, 2]


@pytest.mark.parametrize("index", range(5))
async def test_a_checkpoint_with_a_wrong_file_hash_is_not_installed(published, tmp_path, index):
    """The trainer's signed record is at odds with itself: its shards are right, and one of its files is another."""
    trainer, manifest = published
    files = list(manifest.record.files)
    files[index] = msgspec.structs.replace(files[index], sha256=bytes(32))
    record = msgspec.structs.replace(manifest.record, files=tuple(files))
    signed = open_envelope(seal(record, TRAINER), CheckpointManifest)
    store = CheckpointStore(tmp_path / "node")
    with store.begin(signed) as partial:
        copy_shards(trainer, manifest, partial, range(8))
        with pytest.raises(MalformedError, match=f"{files[index].name} .* another hash than was signed"):
            await store.install(signed.id)
    assert store.complete() == []


def manifest_of(name, body):
    digest = hashlib.sha256(body).digest()
    return CheckpointManifest(
        run_id=RUN_ID,
        step=1,
        issued_at_ms=1,
        shard_bytes=SHARD_BYTES,
        files=(CheckpointFile(name=name, size=len(body), sha256=content_digest([digest])),),
        shards=(digest,),
        sha256=content_digest([digest]),
    )


async def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path):
    """A signed manifest promises a petabyte."""
    record = CheckpointManifest(
        run_id=RUN_ID,
        step=1,
        issued_at_ms=1,
        shard_bytes=1 << 40,
        files=(CheckpointFile(name="model.safetensors", size=1 << 50, sha256=bytes(32)),),
        shards=(bytes(32),) * 1024,
        sha256=bytes(32),
    )
    store = CheckpointStore(tmp_path / "node")
    with pytest.raises(DataDirError, match="needs 1125899906842624 bytes"):
        store.begin(open_envelope(seal(record, TRAINER), CheckpointManifest)).__enter__()
    assert list((tmp_path / "node").iterdir()) == []


async def test_shards_of_a_download_are_served_as_soon_as_they_are_verified(published, tmp_path):
    trainer, manifest = published
    store = CheckpointStore(tmp_path / "node")
    with store.begin(manifest) as partial:
        with pytest.raises(RefusedError) as caught:
            shard_bytes_of(store, manifest.id, 0)
        assert caught.value.code == "not-yet"
        copy_shards(trainer, manifest, partial, [0])
        assert shard_bytes_of(store, manifest.id, 0) == shard_bytes_of(trainer, manifest.id, 0)
    for checkpoint, index in ((manifest.id, 8), (bytes(32), 0)):
        with pytest.raises(RefusedError) as caught:
            shard_bytes_of(store, checkpoint, index)
        assert caught.value.code == "not-found"


async def test_the_newest_are_kept_and_one_in_use_is_never_removed(tmp_path):
    store = CheckpointStore(tmp_path / "trainer", keep=2)
    first = await publish(store, make_policy(tmp_path / "policy-1"), step=1)
    with store.lease(first.id) as directory:
        for step in (2, 3, 4):
            await publish(store, make_policy(tmp_path / f"policy-{step}", tag=step), step=step)
        assert [step for step, _ in store.complete()] == [1, 3, 4]
        assert contents(directory) == contents(tmp_path / "policy-1")
    with store.open_shard(first.id, 0) as [(file, _, _), *_]:
        assert store.prune() == [1]
        assert file.read(10) == (tmp_path / "policy-1" / "config.json").read_bytes()[:10]
    assert [step for step, _ in store.complete()] == [3, 4]
    assert store.local_dir(first.id) is None
    with pytest.raises(ModelError, match="not on this node"), store.lease(first.id):
        pass
    assert len(list((tmp_path / "trainer").iterdir())) == 2


async def test_an_older_checkpoint_that_was_just_fetched_is_there_to_be_used(published, tmp_path):
    trainer, old = published
    store = CheckpointStore(tmp_path / "node", keep=1)
    await publish(store, make_policy(tmp_path / "newer", tag=9), step=9)
    with store.begin(old) as partial:
        copy_shards(trainer, old, partial, range(8))
        await store.install(old.id)
    assert [step for step, _ in store.complete()] == [1, 9]


async def test_an_older_download_is_cleared_away_when_a_newer_checkpoint_is_there(published, tmp_path):
    trainer, old = published
    store = CheckpointStore(tmp_path / "node")
    with store.begin(old) as partial:
        copy_shards(trainer, old, partial, [0])
    await publish(store, make_policy(tmp_path / "newer", tag=9), step=9)
    assert store.manifest(old.id) is None
    assert [path.name[:5] for path in (tmp_path / "node").iterdir()] == ["step-"]


async def test_leftovers_and_damaged_checkpoints_are_cleared_at_the_start(published, tmp_path):
    store, manifest = published
    root = tmp_path / "trainer"
    (root / ".incoming-000002").mkdir()
    (root / f"partial-{'ab' * 32}").mkdir()
    os.truncate(store.local_dir(manifest.id) / ".manifest", 10)
    again = CheckpointStore(root)
    assert again.complete() == []
    assert list(root.iterdir()) == []


async def test_a_download_that_is_complete_already_is_not_begun(published):
    store, manifest = published
    with store.begin(manifest) as partial:
        assert partial is None
    with trio.fail_after(5):
        assert await store.install(manifest.id) == store.local_dir(manifest.id)


async def test_a_quota_takes_the_oldest_and_never_the_newest_or_one_in_use(published, tmp_path):
    trainer, first = published
    size = sum(file.size for file in first.record.files)
    store = CheckpointStore(tmp_path / "node", keep=9, max_bytes=3 * size + size // 2)
    signed = [first]
    for step in (2, 3, 4, 5):
        signed.append(await publish(trainer, make_policy(tmp_path / f"policy-{step}", tag=step), step=step))

    async def fetch(manifest):
        with store.begin(manifest) as partial:
            copy_shards(trainer, manifest, partial, range(8))
        await store.install(manifest.id)

    for manifest in signed[:3]:
        await fetch(manifest)
    assert [step for step, _ in store.complete()] == [1, 2, 3]
    with store.lease(first.id):
        await fetch(signed[3])
    assert [step for step, _ in store.complete()] == [1, 3, 4]
    assert store.held_bytes <= 3.5 * size
    tight = CheckpointStore(tmp_path / "node", keep=9, max_bytes=2 * size - 1)
    with pytest.raises(DataDirError, match="policies may take") as caught:
        tight.begin(signed[4]).__enter__()
    assert "--policies-quota-bytes" in caught.value.hint
    assert [step for step, _ in tight.complete()] == [4]
