"""What relays and disks can do to a download, one by one; each has one clear outcome."""

import asyncio
import errno
import sys
from pathlib import Path

import msgspec
import pytest
import trio
from aiohttp import web
from disk_kit import full_disk
from shardcast_world import (
    ALICE,
    BOB,
    CAROL,
    RULES,
    TRAINER,
    begin_answer,
    contents,
    make_policy,
    on_shards,
    publish,
    shard_bytes_of,
    tensor_file,
)

from p2p.shardcast import store as store_module
from p2p.shardcast.entries import MANIFEST
from p2p.shardcast.sources import Standing, pack_bits
from p2p.shardcast.store import CheckpointStore
from p2p.shardcast.transfer import Transfer
from protocol.checkpoint import CheckpointRules
from protocol.envelope import open_envelope, seal
from protocol.errors import DataDirError
from protocol.records import CheckpointPart, CheckpointPlan, PlannedFile


@pytest.mark.parametrize("sent", [-1, 1, "offers-less", "offers-more", "chunked"])
async def test_a_relay_that_lies_about_a_shards_length_is_left_for_another(world, sent):
    """Bob's relay sends a byte less or more than was signed, announces so, or does not say how much it will send."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        lied = []

        async def lie(request, index):
            lied.append(index)
            world.notify()
            body = shard_bytes_of(world.trainer, manifest.id, index)
            if sent == "chunked":
                response = web.StreamResponse()
                response.enable_chunked_encoding()
                await response.prepare(request)
                await response.write(body)
                await response.write_eof()
                return response
            if sent == "offers-less":
                return web.Response(body=body[:-1])
            if sent == "offers-more":
                return web.Response(body=body + b"x")
            response = await begin_answer(request, body)
            request.transport.write((body + b"x")[: len(body) + sent])
            request.transport.close()
            return response

        await world.relay(BOB, on_shards(lie))
        await world.rescued(manifest, lambda: bool(lied), patience_s=20)


async def test_a_relay_that_hangs_at_99_percent_costs_one_progress_timeout(world):
    """Bob's relay keeps the last byte of every shard to itself."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        hung = []

        async def hang(request, index):
            body = shard_bytes_of(world.trainer, manifest.id, index)
            await begin_answer(request, body, sent=-1)
            hung.append(index)
            world.notify()
            await asyncio.sleep(3600)

        await world.relay(BOB, on_shards(hang))
        await world.rescued(manifest, lambda: bool(hung), patience_s=20)
        assert world.misdeeds == []


async def test_a_trickle_is_left_for_a_relay_that_is_quicker(world, tmp_path, monkeypatch):
    """Bob's relay sends 10 KB a second, so that its shards would take minutes and no progress timeout ever fires."""
    monkeypatch.setattr("p2p.shardcast.transfer.STEAL_AFTER_S", 0.3)
    monkeypatch.setattr("p2p.shardcast.transfer.STEAL_UNKNOWN_AFTER_S", 0.3)
    rules = CheckpointRules(RULES.run_id, RULES.trainer, 1 << 20, total_steps=100, max_bytes=1 << 24)
    with trio.fail_after(30):
        (tmp_path / "large").mkdir()
        (tmp_path / "large" / "model.safetensors").write_bytes(tensor_file(4 << 20))
        manifest = await world.trainer.publish(
            tmp_path / "large", identity=TRAINER, run_id=RULES.run_id, step=1, shard_bytes=1 << 20
        )
        began = []

        async def trickle(request, index):
            body = shard_bytes_of(world.trainer, manifest.id, index)
            response = await begin_answer(request, body)
            began.append(index)
            world.notify()
            for start in range(0, len(body), 1024):
                await response.write(body[start : start + 1024])
                await asyncio.sleep(0.1)

        await world.relay(BOB, on_shards(trickle))
        async with trio.open_nursery() as nursery:
            client = world.client(rules=rules, patience_s=20, progress_timeout_s=5.0)
            nursery.start_soon(client.download, manifest.id)
            await world.until(lambda: len(began) >= 4)
            await world.relay(ALICE)
        assert contents(world.node.local_dir(manifest.id)) == contents(tmp_path / "large")
        assert world.misdeeds == []


async def test_two_checkpoints_at_once_are_both_had(world, tmp_path):
    """While one download is under way the next checkpoint is announced and named."""
    with trio.fail_after(30):
        first = await publish(world.trainer, world.policy, step=1)
        second = await publish(world.trainer, make_policy(tmp_path / "next", tag=2), step=2)
        await world.relay(ALICE)
        await world.relay(BOB)
        client = world.client()
        async with trio.open_nursery() as nursery:
            for manifest in (first, second, first):
                nursery.start_soon(client.download, manifest.id)
        assert [step for step, _ in world.node.complete()] == [1, 2]
        assert contents(world.node.local_dir(first.id)) == contents(world.policy)
        assert contents(world.node.local_dir(second.id)) == contents(tmp_path / "next")


async def test_a_disk_that_is_full_halfway_is_said_and_the_download_goes_on_later(world, monkeypatch):
    """Something else fills the disk; when there is room again, what was verified is still there."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        await world.relay(ALICE)
        real, written = store_module.PartialCheckpoint.sink, []

        def sink(partial, index):
            made = real(partial, index)
            if len(written) >= 4 and not room:
                made.write = no_room
            written.append(index)
            return made

        def no_room(data):
            raise OSError(errno.ENOSPC, "No space left on device")

        room = []
        monkeypatch.setattr(store_module.PartialCheckpoint, "sink", sink)
        client = world.client(connections=1)
        with pytest.raises(DataDirError, match="No space left"):
            await client.download(manifest.id)
        with world.node.begin(manifest) as partial:
            assert partial.count == 4
        room.append(True)
        before = sum(world.bytes.values())
        await client.download(manifest.id)
        assert sum(world.bytes.values()) - before < manifest.record.total_bytes
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)


@pytest.mark.parametrize("early", [True, False])
async def test_a_disk_without_room_for_the_manifest_is_this_nodes_fault(world, tmp_path, monkeypatch, early):
    """A download that its plan began is closed by the manifest, whose file does not fit any more."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        plan = world.trainer.newest_plan(1)
        real, refused = store_module.replace_whole, []

        def replace_whole(path, data, **options):
            if path.name == MANIFEST and path.is_relative_to(tmp_path / "node") and not refused:
                refused.append(path)
                world.notify()
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(path, data, **options)

        monkeypatch.setattr(store_module, "replace_whole", replace_whole)
        client = world.client()
        if early:
            standing = msgspec.msgpack.encode(Standing(8, [], manifest.data, pack_bits(255, 8)))
            await world.impostor(BOB, {"next": plan.data, "{checkpoint}/standing": standing})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.follow)
                await world.until(lambda: bool(refused))
                nursery.cancel_scope.cancel()
            await world.relay(ALICE)
        else:
            await world.relay(ALICE)
            with world.node.begin(plan):
                pass
            with pytest.raises(DataDirError, match="No space left"):
                await client.download(manifest.id)
        await client.download(manifest.id)
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)
        assert world.misdeeds == []


async def test_a_full_disk_that_comes_out_of_a_nursery_is_named_as_well(world, monkeypatch):
    """Whichever task of a download meets it first: a relay lives on."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        await world.relay(ALICE)

        async def no_room(transfer):
            raise OSError(errno.ENOSPC, "No space left on device")

        async def broken(transfer):
            raise ZeroDivisionError

        client = world.client()
        monkeypatch.setattr(Transfer, "_watch_attempts", no_room)
        with pytest.raises(DataDirError, match="No space left"):
            await client.download(manifest.id)
        monkeypatch.setattr(Transfer, "_watch_attempts", broken)
        with pytest.RaisesGroup(ZeroDivisionError):
            await client.download(manifest.id)


async def test_a_file_that_may_not_grow_is_this_nodes_fault(world, tmp_path):
    """The operating system refuses to make the files as large as the checkpoint needs them."""
    rules = CheckpointRules(RULES.run_id, RULES.trainer, 1 << 20, total_steps=100, max_bytes=1 << 30)
    with trio.fail_after(30):
        (tmp_path / "large").mkdir()
        (tmp_path / "large" / "model.safetensors").write_bytes(tensor_file(8 << 20))
        manifest = await world.trainer.publish(
            tmp_path / "large", identity=TRAINER, run_id=RULES.run_id, step=1, shard_bytes=1 << 20
        )
        await world.relay(ALICE)
        with full_disk(room=4 << 20), pytest.raises(DataDirError, match="cannot be written"):
            await world.client(rules=rules).download(manifest.id)
        await world.client(rules=rules).download(manifest.id)
        assert contents(world.node.local_dir(manifest.id)) == contents(tmp_path / "large")
        assert world.misdeeds == []


async def test_an_old_plan_in_place_of_the_next_names_its_relay(world, tmp_path):
    """Bob's relay announces the checkpoint before last again."""
    with trio.fail_after(20):
        await publish(world.trainer, world.policy, step=1)
        old = world.trainer.newest_plan(1)
        newer = await publish(world.trainer, make_policy(tmp_path / "next", tag=2), step=2)

        await world.impostor(BOB, {"next": old.data})
        with world.node.begin(newer) as partial:
            for index in range(8):
                partial.write_shard(index, shard_bytes_of(world.trainer, newer.id, index))
            await world.node.install(newer.id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.client().follow)
            await world.until(lambda: bool(world.misdeeds))
            nursery.cancel_scope.cancel()
        assert world.misdeeds[0] == (BOB, "next checkpoint: a plan of step 1, when one from 3 on was asked for")
        assert [step for step, _ in world.node.complete()] == [2]


@pytest.mark.parametrize("lie", ["shards", "bits", "garbage", "part", "manifest"])
async def test_a_lie_about_a_checkpoints_standing_names_its_relay(world, tmp_path, lie):
    """Bob's relay says there are other shards, answers nonsense, or gives a part or manifest that does not fit."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        other = await publish(world.trainer, make_policy(tmp_path / "other", tag=3), step=2)
        plan = world.trainer.newest_plan(2)
        announced = CheckpointPlan(
            run_id=RULES.run_id,
            step=1,
            issued_at_ms=9,
            shard_bytes=RULES.shard_bytes,
            files=tuple(PlannedFile(name=file.name, size=file.size) for file in manifest.record.files),
        )
        signed = open_envelope(seal(announced, TRAINER), CheckpointPlan)
        honest = Standing(8, [], manifest.data, pack_bits(255, 8))
        part = CheckpointPart(plan=plan.id, number=0, first_shard=0, shards=other.record.shards[:1])
        bodies = {
            "shards": msgspec.structs.replace(honest, shards=9),
            "bits": msgspec.structs.replace(honest, held=b"\xff\xff"),
            "garbage": "nonsense",
            "part": msgspec.structs.replace(honest, parts=[seal(part, TRAINER)], manifest=b""),
            "manifest": msgspec.structs.replace(honest, manifest=other.data),
        }

        answers = {"next": signed.data, "{checkpoint}/standing": msgspec.msgpack.encode(bodies[lie])}
        await world.impostor(BOB, answers)
        async with trio.open_nursery() as nursery:
            client = world.client()
            nursery.start_soon(client.follow)
            await world.until(lambda: bool(world.misdeeds))
            await world.relay(ALICE)
            await client.download(manifest.id)
            nursery.cancel_scope.cancel()
        assert {peer for peer, _ in world.misdeeds} == {BOB}
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)


async def test_a_dead_relay_is_not_waited_for(world, tmp_path):
    """Carol's relay is switched off between two shards; her clients go to Alice's."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        relay = CheckpointStore(tmp_path / "carol")
        served = []

        async def die(request, index):
            served.append(index)
            world.notify()
            if len(served) > 2:
                request.transport.abort()
                await asyncio.sleep(3600)

        with relay.begin(manifest) as partial:
            for index in range(8):
                partial.write_shard(index, shard_bytes_of(world.trainer, manifest.id, index))
        await world.relay(CAROL, on_shards(die), store=relay)
        await world.rescued(manifest, lambda: len(served) > 2, patience_s=20)
        assert world.misdeeds == []


async def test_a_process_that_is_killed_fetches_no_whole_shard_again(world, tmp_path):
    """`kill -9` in the middle of two shards; the next process goes on with what was verified."""
    script = Path(__file__).with_name("shardcast_client.py")
    with trio.fail_after(60):
        manifest = await publish(world.trainer, world.policy)
        asked, killed = [], []

        async def stall(request, index):
            asked.append(index)
            world.notify()
            if len(asked) > 5 and not killed:
                await begin_answer(request, shard_bytes_of(world.trainer, manifest.id, index), sent=100)
                await asyncio.sleep(3600)

        await world.relay(ALICE, on_shards(stall))
        command = [sys.executable, str(script), world.relays[0].url, str(tmp_path / "node"), manifest.id.hex()]
        first = await trio.lowlevel.open_process(command)
        await world.until(lambda: len(asked) >= 7)
        first.kill()
        await first.wait()
        killed.append(first.pid)
        before = set(asked[:5])
        await trio.run_process(command)
        assert sorted(set(asked)) == list(range(8))
        assert {index for index in before if asked.count(index) > 1} == set()
        node = CheckpointStore(tmp_path / "node")
        assert contents(node.local_dir(manifest.id)) == contents(world.policy)
