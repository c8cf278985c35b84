"""Patches between versions of a checkpoint: every way in which a sparse update is known to have gone wrong elsewhere.

The tests named `test_case_N_…` are failures that other systems met: see docs/protocol.md, Patches.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio
from aiohttp import web
from patch_world import Network, Oracle, Trainer, hold, obtain, refuse
from shardcast_world import TRAINER, contents, on_patches

from p2p.shardcast.balance import Balancer
from p2p.shardcast.patch_client import MAX_IN_VAIN, PatchClient
from p2p.shardcast.patches import NO_PATCH, PatchStore, read_shard
from p2p.shardcast.store import CheckpointStore
from protocol.errors import ChecksumError, MalformedError, RefusedError, RelayError


async def test_a_client_one_step_behind_gets_small_patches(trainer: Trainer, node: CheckpointStore) -> None:
    await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    client = PatchClient(node)
    source = Oracle(trainer.patches, target.id)
    with node.begin(target) as partial:
        assert partial is not None
        with client.towards(partial) as patching:
            came = await obtain(patching, partial, source)
    assert came["whole"] == []
    assert len(came["patched"]) == 5
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))
    assert client.savings.patched_bytes * 20 < target.record.total_bytes


async def test_a_client_far_behind_gets_one_patch_a_shard_which_is_smaller_than_all_steps(
    trainer: Trainer, node: CheckpointStore
) -> None:
    """Squash: from v1 straight to v5, with values that went there and back again."""
    await trainer.publish(1)
    for step in (2, 3, 4, 5):
        trainer.model.move(by=1 if step % 2 else 0xFFFF).move(first=step, every=991)
        target = await trainer.publish(step)
    single = 0
    for step in (2, 3, 4, 5):
        for index in range(len(target.record.shards)):
            pair = trainer.patches.pair(trainer.versions[step].id, trainer.versions[step - 1].id, index)
            with trainer.patches.make(pair) as file:
                single += len(file.read())
    await hold(trainer, node, 1)
    client = PatchClient(node)
    source = Oracle(trainer.patches, target.id)
    with node.begin(target) as partial:
        assert partial is not None
        with client.towards(partial) as patching:
            came = await obtain(patching, partial, source)
    assert len(source.asked) == len(came["patched"])
    assert client.savings.patched_bytes * 3 < single
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))


# ------------------------------------------------------------------------------------------- what went wrong elsewhere


async def test_case_1_who_has_nothing_gets_every_tensor_also_those_that_no_step_touched(
    trainer: Trainer, node: CheckpointStore
) -> None:
    """An anchor that was built from changed tensors only lacked the others."""
    await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    client = PatchClient(node)
    source = Oracle(trainer.patches, target.id)
    with node.begin(target) as partial:
        assert partial is not None
        with client.towards(partial) as patching:
            assert patching.base is None
            came = await obtain(patching, partial, source, throughput=1e6)
        trainer.give(target, partial, *came["whole"])
    assert came["patched"]
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))


async def test_case_2_the_version_stays_when_a_patch_is_wrong(trainer: Trainer, node: CheckpointStore) -> None:
    """A version counter advanced although the update had failed; the sender never sent those positions again."""
    first = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    before = contents(node.local_dir(first.id))
    liar = Oracle(trainer.patches, target.id, tamper=lambda _, data: data[:-1] + bytes([data[-1] ^ 1]))
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            with pytest.raises((ChecksumError, MalformedError)):
                await patching.fetch(0, "relay", liar.ask, throughput=None)
            assert partial.missing() == list(range(len(target.record.shards)))
            assert await patching.fetch(0, "relay", liar.ask, throughput=None) is None  # whole from now on
    assert node.complete() == [(1, first.id)]
    assert contents(node.local_dir(first.id)) == before
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            assert patching.base is not None
            assert patching.base.id == first.id
            assert (await obtain(patching, partial, Oracle(trainer.patches, target.id)))["whole"] == []
    await node.install(target.id)
    assert [step for step, _ in node.complete()] == [1, 2]


async def test_case_3_a_step_that_changed_nothing_is_a_version_and_costs_nothing(
    trainer: Trainer, node: CheckpointStore
) -> None:
    """An empty update was taken for a signal, or not taken for an update."""
    await trainer.publish(1)
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    client = PatchClient(node)
    source = Oracle(trainer.patches, target.id)
    with node.begin(target) as partial:
        assert partial is not None
        with client.towards(partial) as patching:
            came = await obtain(patching, partial, source)
    assert came["copied"] == list(range(len(target.record.shards)))
    assert source.asked == []
    assert client.savings.saved_bytes == target.record.total_bytes
    await node.install(target.id)
    assert [step for step, _ in node.complete()] == [1, 2]


async def test_case_4_a_change_of_the_high_byte_alone_arrives(trainer: Trainer, node: CheckpointStore) -> None:
    """A detector compared low bytes only."""
    await trainer.publish(1)
    trainer.model.move(by=0x100)
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            assert (await obtain(patching, partial, Oracle(trainer.patches, target.id)))["whole"] == []
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))


async def test_case_5_savings_are_told_of_the_whole_checkpoint(trainer: Trainer, node: CheckpointStore) -> None:
    """Sparsity was given relative to the tensors that had changed."""
    await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    client = PatchClient(node)
    with node.begin(target) as partial:
        assert partial is not None
        with client.towards(partial) as patching:
            await obtain(patching, partial, Oracle(trainer.patches, target.id))
    assert client.savings.patched_bytes + client.savings.saved_bytes == target.record.total_bytes


async def test_case_6_a_base_that_the_relay_has_pruned_is_never_replaced_by_another(
    trainer: Trainer, node: CheckpointStore, tmp_path: Path
) -> None:
    """After pruning, deltas were replayed on a base that they were not made for."""
    for step in (1, 2, 3):
        trainer.model.move(first=step)
        await trainer.publish(step)
    relay = CheckpointStore(tmp_path / "relay")
    await hold(trainer, relay, 2, 3)
    await hold(trainer, node, 1)
    target = trainer.versions[3]
    source = Oracle(PatchStore(relay, tmp_path / "relay-patches"), target.id)
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            came = await obtain(patching, partial, source)
        assert came["patched"] == []
        trainer.give(target, partial, *came["whole"])
    assert len(source.asked) == MAX_IN_VAIN
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))


async def test_case_6_a_restarted_trainer_patches_from_what_it_published(
    trainer: Trainer, node: CheckpointStore, tmp_path: Path
) -> None:
    """A restarted sender started from other bytes than those that its receivers held."""
    await trainer.publish(1)
    await hold(trainer, node, 1)
    trainer.store = CheckpointStore(tmp_path / "trainer")
    trainer.patches = PatchStore(trainer.store, tmp_path / "trainer-patches")
    trainer.model.move()
    target = await trainer.publish(2)
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            assert (await obtain(patching, partial, Oracle(trainer.patches, target.id)))["whole"] == []
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))


async def test_case_7_many_who_ask_at_once_get_one_whole_patch(trainer: Trainer, tmp_path: Path) -> None:
    """Races between makers of directories and renamers of half-written files."""
    base = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)

    def make() -> bytes:
        with trainer.patches.make(trainer.patches.pair(target.id, base.id, 0)) as file:
            return file.read()

    with ThreadPoolExecutor(8) as threads:
        made = {future.result() for future in [threads.submit(make) for _ in range(40)]}
    assert len(made) == 1
    assert len(list((tmp_path / "trainer-patches").iterdir())) == 1


async def test_case_7_what_an_earlier_process_left_in_the_cache_is_not_served(trainer: Trainer, tmp_path: Path) -> None:
    """A file that a crash left half-written was taken for whole."""
    base = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    with trainer.patches.make(trainer.patches.pair(target.id, base.id, 0)) as file:
        good = file.read()
    (left,) = (tmp_path / "trainer-patches").iterdir()
    left.write_bytes(good[:50])
    patches = PatchStore(trainer.store, tmp_path / "trainer-patches")
    pair = patches.pair(target.id, base.id, 0)
    assert patches.cached(pair) is None
    with patches.make(pair) as file:
        assert file.read() == good


async def test_case_8_a_damaged_base_is_found_before_a_patch_is_applied_and_nobody_is_blamed(
    trainer: Trainer, node: CheckpointStore
) -> None:
    """Checksums held on the wire while what was updated was not what the sender believed."""
    first = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    directory = node.local_dir(first.id)
    assert directory is not None
    with (directory / "model-1.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xfe\xfd")
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            came = await obtain(patching, partial, Oracle(trainer.patches, target.id))
        assert came["whole"] == [0]
        trainer.give(target, partial, 0)
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))


@pytest.mark.parametrize("which", [1, 2])
async def test_case_8_a_relay_with_a_damaged_copy_says_so_instead_of_spreading_it(
    trainer: Trainer, tmp_path: Path, which: int
) -> None:
    base = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    relay = CheckpointStore(tmp_path / "relay")
    await hold(trainer, relay, 1, 2)
    directory = relay.local_dir(trainer.versions[which].id)
    assert directory is not None
    with (directory / "model-1.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xfe\xfd")
    patches = PatchStore(relay, tmp_path / "relay-patches")
    with pytest.raises(RefusedError, match="damaged") as refused:
        patches.make(patches.pair(target.id, base.id, 0))
    assert refused.value.code == NO_PATCH


async def test_case_9_scalars_empty_tensors_other_types_and_odd_places(trainer: Trainer, node: CheckpointStore) -> None:
    """Widths, types and shapes at the edges; the codec's own edges are in tests/protocol/test_patch.py."""
    await trainer.publish(1)
    model = trainer.model
    model.scalar[0] ^= 0x8000
    model.float32[::50] += 1e-7
    model.untouched[[0, -1]] = 0x7FC1  # NaN
    model.large[[0, -1]] = 0x0000
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            assert (await obtain(patching, partial, Oracle(trainer.patches, target.id)))["whole"] == []
    assert contents(await node.install(target.id)) == contents(trainer.store.local_dir(target.id))


async def test_case_9_another_layout_is_not_patched(trainer: Trainer, node: CheckpointStore, tmp_path: Path) -> None:
    """A tensor of another shape or type met a delta that was made for the old one."""
    await trainer.publish(1)
    await hold(trainer, node, 1)
    source = trainer.model.write(tmp_path / "other")
    (source / "more.json").write_bytes(b"{}")
    record = trainer.versions[1].record
    target = await trainer.store.publish(
        source, identity=TRAINER, run_id=record.run_id, step=2, shard_bytes=record.shard_bytes
    )
    with pytest.raises(RefusedError, match="same layout") as refused:
        trainer.patches.pair(target.id, trainer.versions[1].id, 0)
    assert refused.value.code == NO_PATCH
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            assert patching.base is None


async def test_case_10_a_node_killed_half_way_serves_the_old_version_and_goes_on(
    trainer: Trainer, node: CheckpointStore, tmp_path: Path
) -> None:
    """An update that failed half-way left an engine with parts of two versions."""
    first = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    source = Oracle(trainer.patches, target.id)
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            for index in (0, 2):
                assert await patching.fetch(index, "relay", source.ask, throughput=None) is not None
    reopened = CheckpointStore(tmp_path / "node")
    assert reopened.complete() == [(1, first.id)]
    assert contents(reopened.local_dir(first.id)) == contents(trainer.store.local_dir(first.id))
    with reopened.begin(target) as partial:
        assert partial is not None
        await trio.to_thread.run_sync(partial.recheck)
        assert not {0, 2} & set(partial.missing())
        with PatchClient(reopened).towards(partial) as patching:
            await obtain(patching, partial, source)
    assert contents(await reopened.install(target.id)) == contents(trainer.store.local_dir(target.id))


async def test_case_10_the_same_version_again_is_nothing_to_do(trainer: Trainer, node: CheckpointStore) -> None:
    target = await trainer.publish(1)
    await hold(trainer, node, 1)
    with node.begin(target) as partial:
        assert partial is None


# ------------------------------------------------------------------------------------------------------------ fetching


async def test_whose_shard_is_on_its_way_is_asked_again(trainer: Trainer, node: CheckpointStore) -> None:
    """A relay that is still pulling the new version must not make its clients fetch it whole."""
    await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    early = Oracle(trainer.patches, target.id, tamper=refuse("not-yet"))
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            for _ in range(20):
                with pytest.raises(RefusedError):
                    await patching.fetch(0, "relay", early.ask, throughput=None)
            ready = Oracle(trainer.patches, target.id)
            assert await patching.fetch(0, "relay", ready.ask, throughput=None) is not None


async def test_a_shard_whose_patch_cannot_be_fetched_comes_whole(trainer: Trainer, node: CheckpointStore) -> None:
    """Attack: a relay that lets every request for a patch time out."""
    await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)

    async def silence(_: str, __: int) -> bytes:
        raise RelayError("it went silent")

    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            for _ in range(2):
                with pytest.raises(RelayError, match="silent"):
                    await patching.fetch(0, "relay", silence, throughput=None)
            assert await patching.fetch(0, "relay", silence, throughput=None) is None


@pytest.mark.parametrize("data", [b"", b"IPT1", bytes(200), b"\xff" * 5000])
async def test_bytes_that_are_no_patch_are_a_misdeed(trainer: Trainer, node: CheckpointStore, data: bytes) -> None:
    """Attack: anything instead of a patch."""
    await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    source = Oracle(trainer.patches, target.id, tamper=lambda _, __: data)
    with node.begin(target) as partial:
        assert partial is not None
        with PatchClient(node).towards(partial) as patching:
            with pytest.raises(MalformedError):
                await patching.fetch(0, "relay", source.ask, throughput=None)
            assert partial.missing() == list(range(len(target.record.shards)))


async def test_packed_shards_are_asked_for_on_slow_links_only(trainer: Trainer, node: CheckpointStore) -> None:
    target = await trainer.publish(1)
    source = Oracle(trainer.patches, target.id)
    client = PatchClient(node)
    with node.begin(target) as partial:
        assert partial is not None
        with client.towards(partial) as patching:
            for throughput in (None, 1e9):
                assert await patching.fetch(0, "relay", source.ask, throughput=throughput) is None
            assert source.asked == []
            received = await patching.fetch(0, "relay", source.ask, throughput=1e6)
    assert received is not None
    assert received * 1.3 < target.record.shard_bytes
    assert client.savings.saved_bytes == target.record.shard_bytes - received


async def test_a_relay_serves_the_patch_that_it_was_given(
    trainer: Trainer, node: CheckpointStore, tmp_path: Path
) -> None:
    """Passed on as it is; only a squash costs the relay work."""
    base = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    relay = CheckpointStore(tmp_path / "relay")
    patches = PatchStore(relay, tmp_path / "relay-patches")
    await hold(trainer, relay, 1)
    with relay.begin(target) as partial:
        assert partial is not None
        with PatchClient(relay, keep=patches).towards(partial) as patching:
            await obtain(patching, partial, Oracle(trainer.patches, target.id))
        for index in range(2):  # before the version is complete: shard by shard
            kept = patches.cached(patches.pair(target.id, base.id, index))
            made = trainer.patches.cached(trainer.patches.pair(target.id, base.id, index))
            assert kept is not None
            assert made is not None
            with kept, made:
                assert kept.read() == made.read()


# -------------------------------------------------------------------------------------------------------------- making


async def test_what_cannot_be_patched_is_refused_by_name(trainer: Trainer, node: CheckpointStore) -> None:
    base = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    patches = trainer.patches
    for target_id, base_id, index, code in (
        (b"?" * 32, base.id, 0, "not-found"),
        (target.id, base.id, 99, "not-found"),
        (target.id, b"?" * 32, 0, NO_PATCH),
        (base.id, target.id, 0, NO_PATCH),  # backwards
        (target.id, target.id, 0, NO_PATCH),
    ):
        with pytest.raises(RefusedError) as refused:
            patches.pair(target_id, base_id, index)
        assert refused.value.code == code
    with node.begin(target), pytest.raises(RefusedError) as refused:
        PatchStore(node, trainer.tmp_path / "more").pair(target.id, base.id, 0)
    assert refused.value.code == "not-yet"


async def test_a_change_of_everything_is_refused_and_worked_on_once(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = await trainer.publish(1)
    trainer.model.large[:] = trainer.model.large[::-1].copy()
    target = await trainer.publish(2)
    pair = trainer.patches.pair(target.id, base.id, 1)
    for _ in range(2):
        with pytest.raises(RefusedError) as refused:
            trainer.patches.make(pair)
        assert refused.value.code == NO_PATCH
        monkeypatch.setattr("p2p.shardcast.patches.make_patch", None)  # a second time would fail


async def test_the_cache_keeps_what_was_used_last_within_its_bounds(trainer: Trainer, tmp_path: Path) -> None:
    base = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    pairs = [trainer.patches.pair(target.id, base.id, index) for index in range(3)]
    sizes = []
    for pair in pairs:
        with trainer.patches.make(pair) as file:
            sizes.append(len(file.read()))
    small = PatchStore(trainer.store, tmp_path / "small", max_bytes=max(sizes) * 2)
    for pair in (pairs[0], pairs[1], pairs[0], pairs[2]):
        small.make(pair).close()
    held = [(pair, small.cached(pair)) for pair in pairs]
    assert [file is not None for _, file in held] == [True, False, True]
    for _, file in held:
        if file is not None:
            file.close()
    assert sum(path.stat().st_size for path in (tmp_path / "small").iterdir()) <= max(sizes) * 2


async def test_no_room_for_a_patch_is_a_refusal_and_no_failure(trainer: Trainer, tmp_path: Path) -> None:
    base = await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    patches = PatchStore(trainer.store, tmp_path / "tiny", max_bytes=10)
    with pytest.raises(RefusedError, match="no room") as refused:
        patches.make(patches.pair(target.id, base.id, 0))
    assert refused.value.code == NO_PATCH
    assert list((tmp_path / "tiny").iterdir()) == []


async def test_a_shard_is_read_across_files(trainer: Trainer) -> None:
    target = await trainer.publish(1)
    stream = b"".join(contents(trainer.store.local_dir(target.id))[file.name] for file in target.record.files)
    for index in range(len(target.record.shards)):
        at = index * target.record.shard_bytes
        assert read_shard(trainer.store, target.id, index) == stream[at : at + target.record.shard_bytes]


# ---------------------------------------------------------------------------------------------------- over the network


async def two_versions(trainer: Trainer, node: CheckpointStore) -> bytes:
    """The id of version 2, when the node holds version 1."""
    await trainer.publish(1)
    trainer.model.move()
    target = await trainer.publish(2)
    await hold(trainer, node, 1)
    return target.id


async def test_a_download_comes_by_patches(network: Network, trainer: Trainer, node: CheckpointStore) -> None:
    target = await two_versions(trainer, node)
    for name in ("alice", "bob"):
        await network.relay(name)
    patches = PatchClient(node)
    with trio.fail_after(10):
        manifest = await network.client(node, patches=patches).download(target)
    assert contents(node.local_dir(target)) == contents(trainer.store.local_dir(target))
    assert patches.savings.full_bytes == 0
    assert patches.savings.patched_bytes + patches.savings.saved_bytes == manifest.record.total_bytes
    assert network.misdeeds == []


async def test_a_chain_of_relays_passes_patches_on_and_squashes(
    network: Network, trainer: Trainer, node: CheckpointStore, tmp_path: Path
) -> None:
    """The relay goes from v1 to v2 to v3 by patches; a client that missed v2 gets one patch, made by the relay."""
    target = await two_versions(trainer, node)
    trainer.model.move(first=5)
    latest = (await trainer.publish(3)).id
    relay = CheckpointStore(tmp_path / "relay")
    served = PatchStore(relay, tmp_path / "relay-patches")
    await hold(trainer, relay, 1)
    await network.relay("origin")
    with trio.fail_after(10):
        client = network.client(relay, patches=PatchClient(relay, keep=served))
        await client.download(target)
        await client.download(latest)
    network.relays.clear()
    await network.relay("alice", store=relay, patches=served)
    savings = (patches := PatchClient(node)).savings
    with trio.fail_after(10):
        await network.client(node, patches=patches).download(latest)
    assert contents(node.local_dir(latest)) == contents(trainer.store.local_dir(latest))
    assert savings.full_bytes == 0
    assert savings.patched_bytes > 0


async def test_a_relay_that_serves_wrong_patches_is_named_and_the_download_ends_well(
    network: Network, trainer: Trainer, node: CheckpointStore
) -> None:
    """Attack: patches that are well-formed and lead elsewhere; the honest relay beside it is not blamed."""
    target = await two_versions(trainer, node)

    async def poison(request: web.Request) -> web.StreamResponse:
        base, index = bytes.fromhex(request.match_info["base"]), int(request.match_info["shard"])
        with trainer.patches.make(trainer.patches.pair(target, base, index)) as file:
            data = bytearray(file.read())
        data[-1] ^= 1
        return web.Response(body=bytes(data))

    alice = await network.relay("alice", on_patches(poison))
    with trio.fail_after(10):
        with pytest.raises(RelayError):
            await network.client(node, patience_s=0.5).download(target)
        assert [step for step, _ in node.complete()] == [1]  # what it held before, it holds still
        await network.relay("bob")
        await network.client(node).download(target)
    assert {peer for peer, _ in network.misdeeds} == {alice}
    assert contents(node.local_dir(target)) == contents(trainer.store.local_dir(target))


@pytest.mark.parametrize("code", [None, NO_PATCH])
async def test_relays_without_patches_serve_whole_shards_and_are_not_blamed(
    network: Network, trainer: Trainer, node: CheckpointStore, code: str | None
) -> None:
    target = await two_versions(trainer, node)

    async def none(_: web.Request) -> web.StreamResponse:
        raise RefusedError("there is none", code=code or "")

    await network.relay("alice", on_patches(none), has_patches=code is not None)
    patches = PatchClient(node)
    with trio.fail_after(10):
        manifest = await network.client(node, patches=patches).download(target)
    unchanged = manifest.record.total_bytes - patches.savings.full_bytes
    assert patches.savings.saved_bytes == unchanged
    assert patches.savings.patched_bytes == 0
    assert network.misdeeds == []


async def test_a_relay_that_hangs_over_patches_holds_nobody_up(
    network: Network, trainer: Trainer, node: CheckpointStore
) -> None:
    """Attack: the connection stays open and silent whenever a patch is asked for."""
    target = await two_versions(trainer, node)

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise RefusedError("too late", code="busy")

    await network.relay("alice", on_patches(hang))
    await network.relay("bob")
    with trio.fail_after(20):
        await network.client(node).download(target)
    assert contents(node.local_dir(target)) == contents(trainer.store.local_dir(target))


async def test_a_relay_that_fails_at_making_patches_serves_whole_shards(
    network: Network, trainer: Trainer, node: CheckpointStore
) -> None:
    target = await two_versions(trainer, node)

    async def fail(_: web.Request) -> web.StreamResponse:
        raise OSError("the disk")

    await network.relay("alice", on_patches(fail))
    with trio.fail_after(20):
        await network.client(node).download(target)
    assert contents(node.local_dir(target)) == contents(trainer.store.local_dir(target))


async def test_an_answer_longer_than_any_patch_is_cut_off(
    network: Network, trainer: Trainer, node: CheckpointStore
) -> None:
    """Attack: a hundred shards' worth of zeros instead of a patch."""
    target = await two_versions(trainer, node)

    async def flood(_: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(100 * 16384))

    alice = await network.relay("alice", on_patches(flood))
    with trio.fail_after(20):
        await network.client(node).download(target)
    assert network.bytes[alice] < 10 * 16384
    assert contents(node.local_dir(target)) == contents(trainer.store.local_dir(target))


async def test_a_slow_first_download_comes_packed(network: Network, trainer: Trainer, node: CheckpointStore) -> None:
    target = (await trainer.publish(1)).id
    alice = await network.relay("alice")
    balancer = Balancer()
    balancer.succeeded(alice, bytes_count=10**6, seconds=1.0)
    patches = PatchClient(node)
    with trio.fail_after(10):
        await network.client(node, patches=patches, balancer=balancer).download(target)
    assert patches.savings.patched_bytes > 0
    assert contents(node.local_dir(target)) == contents(trainer.store.local_dir(target))


@pytest.mark.parametrize("path", ["patches/zz/0", "patches/00/0", f"patches/{'0' * 64}/-1", f"patches/{'0' * 64}/9e9"])
async def test_requests_that_make_no_sense_are_refused(network: Network, trainer: Trainer, path: str) -> None:
    """Attack: ids and numbers that are none."""
    target = await trainer.publish(1)
    await network.relay("alice")
    with trio.fail_after(10), pytest.raises(RefusedError) as refused:
        await network.http.get(f"{network.relays[0].url}/v1/checkpoints/{target.id.hex()}/{path}")
    assert refused.value.code == "malformed"
