"""CheckpointClient against relays on loopback: honest, lying, hanging, dying, late, and absent."""

import asyncio
import hashlib

import pytest
import trio
from aiohttp import web
from shardcast_world import (
    ALICE,
    BOB,
    CAROL,
    RULES,
    RUN_ID,
    TRAINER,
    begin_answer,
    contents,
    make_policy,
    on_shards,
    publish,
    shard_bytes_of,
)

from p2p.http import error_response
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.envelope import seal
from protocol.errors import DataDirError, MalformedError, RelayError, WrongAuthorError, WrongRunError
from protocol.identity import Identity
from protocol.records import CheckpointFile, CheckpointManifest

MALLORY = Identity.from_phrase("mallory")


async def test_a_checkpoint_comes_from_two_relays_and_is_complete(world):
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        await world.relay(ALICE)
        await world.relay(BOB)
        assert await world.client().download(manifest.id, step=1) == manifest
        directory = world.node.local_dir(manifest.id)
        assert contents(directory) == contents(world.policy)
        total = manifest.record.total_bytes
        assert total + len(manifest.data) < sum(world.bytes.values()) < total + len(manifest.data) + 8192
        assert max(world.progress) == (total, total)
        assert len(world.progress) == 8
        assert world.misdeeds == []


async def test_a_checkpoint_that_is_here_is_not_fetched_again(world):
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        assert await world.client(store=world.trainer).download(manifest.id) == manifest


async def test_a_flipped_byte_is_refetched_elsewhere_and_its_relay_is_named(world, caplog):
    """Bob's relay changes one byte of every shard that it serves."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)

        async def flip(request, index):
            body = bytearray(shard_bytes_of(world.trainer, manifest.id, index))
            body[len(body) // 2] ^= 1
            return web.Response(body=bytes(body))

        await world.relay(BOB, on_shards(flip))
        client = world.client(connections=2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.download, manifest.id)
            await world.until(lambda: bool(world.misdeeds))
            await world.relay(ALICE)
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)
        assert {peer for peer, _ in world.misdeeds} == {BOB}
        assert "shard" in world.misdeeds[0][1]
        assert f"relay={BOB.short} misdeed" in caplog.text
        assert ALICE.short not in caplog.text


async def test_a_hanging_relay_is_left_for_another(world):
    """Bob's relay sends half a shard and then nothing, for ever."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        hung = []

        async def hang(request, index):
            body = shard_bytes_of(world.trainer, manifest.id, index)
            await begin_answer(request, body, sent=len(body) // 2)
            hung.append(index)
            world.notify()
            await asyncio.sleep(3600)

        await world.relay(BOB, on_shards(hang))
        await world.rescued(manifest, lambda: bool(hung), patience_s=20)
        assert world.misdeeds == []


async def test_a_relay_that_dies_midway_does_not_end_the_download(world):
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        served = []

        async def die_after_two(request, index):
            served.append(index)
            if len(served) > 2:
                world.notify()
                request.transport.abort()
                return web.Response()

        await world.relay(BOB, on_shards(die_after_two))
        await world.rescued(manifest, lambda: len(served) >= 3, connections=1, patience_s=20)
        assert world.misdeeds == []


async def test_a_download_goes_on_where_a_killed_one_stopped(world, tmp_path):
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        with world.node.begin(manifest) as partial:
            for index in (0, 1, 2, 6):
                partial.write_shard(index, shard_bytes_of(world.trainer, manifest.id, index))
        asked = []

        async def note(request, index):
            asked.append(index)

        await world.relay(ALICE, on_shards(note))
        reopened = CheckpointStore(tmp_path / "node")
        await world.client(store=reopened).download(manifest.id)
        assert sorted(asked) == [3, 4, 5, 7]
        assert contents(reopened.local_dir(manifest.id)) == contents(world.policy)


async def test_a_cancelled_download_keeps_what_is_verified(world):
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        asked, stopped = [], []

        async def stop_at_five(request, index):
            asked.append(index)
            if len(asked) == 5:
                stopped.append(index)
                world.notify()
                await asyncio.sleep(3600)

        await world.relay(ALICE, on_shards(stop_at_five))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.client(connections=1, progress_timeout_s=10).download, manifest.id)
            await world.until(lambda: bool(stopped))
            nursery.cancel_scope.cancel()
        assert world.node.local_dir(manifest.id) is None
        with world.node.begin(manifest) as partial:
            assert partial.missing() == sorted(set(range(8)) - set(asked[:4]))


async def test_cut_through_a_shard_is_had_while_its_relay_is_still_pulling(world, tmp_path):
    """Not yet is no misdeed: the client waits for the relay, and takes each shard as it comes."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        relay = CheckpointStore(tmp_path / "relay")
        await world.relay(CAROL, store=relay)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.client(patience_s=15).download, manifest.id)
            with relay.begin(manifest) as partial:
                for index in range(8):
                    partial.write_shard(index, shard_bytes_of(world.trainer, manifest.id, index))
                    await world.until(lambda wanted=index + 1: len(world.progress) >= wanted)
        assert relay.complete() == []
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)
        assert world.misdeeds == []


async def test_a_checkpoint_that_no_relay_has_is_given_up_with_a_reason(world):
    with trio.fail_after(20):
        with pytest.raises(RelayError, match="no relay is known"):
            await world.client(patience_s=0.2).download(bytes(32))
        await world.relay(ALICE)
        with pytest.raises(RelayError, match="is not here"):
            await world.client(patience_s=1.0).download(bytes(32))
        assert world.misdeeds == []


async def test_shards_that_never_come_are_given_up_and_the_rest_is_kept(world):
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)

        async def refuse(request, index):
            return error_response(429, "busy", "too many requests") if index == 5 else None

        await world.relay(ALICE, on_shards(refuse))
        with pytest.raises(RelayError, match=r"shard 5 .* too many requests"):
            await world.client(patience_s=3.0).download(manifest.id)
        with world.node.begin(manifest) as partial:
            assert partial.missing() == [5]


@pytest.mark.parametrize("lie", ["forged", "replayed", "garbage"])
async def test_another_manifest_than_was_asked_for_names_its_relay(world, tmp_path, lie):
    """A relay answers with Mallory's manifest, with an old one of the trainer's, or with bytes of no meaning."""
    with trio.fail_after(20):
        old = await publish(world.trainer, make_policy(tmp_path / "old", tag=7), step=0)
        manifest = await publish(world.trainer, world.policy)
        bodies = {"forged": seal(manifest.record, MALLORY), "replayed": old.data, "garbage": b"\xc1" * 50}

        await world.impostor(BOB, {"{checkpoint}/manifest": bodies[lie]})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.client().download, manifest.id)
            await world.until(lambda: bool(world.misdeeds))
            await world.relay(ALICE)
        assert [peer for peer, _ in world.misdeeds] == [BOB]
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)


@pytest.mark.parametrize(
    ("rules", "step", "error"),
    [
        (CheckpointRules(RUN_ID, MALLORY.peer_id, 4096, 100, 1 << 20), None, WrongAuthorError),
        (CheckpointRules(b"x" * 32, TRAINER.peer_id, 4096, 100, 1 << 20), None, WrongRunError),
        (CheckpointRules(RUN_ID, TRAINER.peer_id, 8192, 100, 1 << 20), None, MalformedError),
        (CheckpointRules(RUN_ID, TRAINER.peer_id, 4096, 100, 1000), None, MalformedError),
        (RULES, 2, MalformedError),
    ],
)
async def test_a_checkpoint_against_the_runs_rules_is_refused_before_it_takes_space(
    world, tmp_path, rules, step, error
):
    """The id that was announced names a checkpoint of another signer, run, step or size."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        await world.relay(ALICE)
        with pytest.raises(error):
            await world.client(rules=rules).download(manifest.id, step=step)
        assert world.misdeeds == []
        assert list((tmp_path / "node").iterdir()) == []


async def test_a_path_in_a_file_name_writes_nothing_outside(world, tmp_path):
    """With the trainer's stolen key, a manifest names `../escaped` as one of its files."""
    with trio.fail_after(20):
        body = b"x" * 100
        evil = CheckpointManifest(
            run_id=RUN_ID,
            step=1,
            issued_at_ms=1,
            shard_bytes=4096,
            files=(CheckpointFile(name="../escaped", size=100, sha256=hashlib.sha256(body).digest()),),
            shards=(hashlib.sha256(body).digest(),),
            sha256=hashlib.sha256(body).digest(),
        )
        sealed = seal(evil, TRAINER)

        await world.impostor(BOB, {"{checkpoint}/manifest": sealed})
        with pytest.raises(RelayError, match="not a valid checkpoint"):
            await world.client(patience_s=0.5).download(bytes(32))
        assert not (tmp_path / "escaped").exists()


async def test_a_disk_that_cannot_be_written_is_this_nodes_fault(world, tmp_path):
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        await world.relay(ALICE)
        (tmp_path / "node" / f"partial-{manifest.id.hex()}").write_text("in the way")
        with pytest.raises(DataDirError, match="cannot be written"):
            await world.client().download(manifest.id)
        assert world.misdeeds == []


async def test_a_relay_survives_clients_that_leave_midway(world):
    """Clients connect, ask, read a little and vanish."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        await world.relay(ALICE)
        host, port = world.relays[0][1].removeprefix("http://").split(":")
        path = f"/v1/checkpoints/{manifest.id.hex()}/shards/0"
        for _ in range(20):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await stream.receive_some(10)
        await world.client().download(manifest.id)
