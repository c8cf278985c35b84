"""CheckpointPuller: relays pull from the trainer's origin and from each other, and serve what they have so far."""

import asyncio

import trio
from aiohttp import web
from shardcast_world import (
    CAROL,
    QUICK_S,
    RULES,
    TRAINER,
    contents,
    make_policy,
    on_shards,
    publish,
    shard_bytes_of,
)

from p2p.contacts import Contact
from p2p.shardcast.fan_out import FanOut
from p2p.shardcast.origin import OriginDoor, origin_routes
from p2p.shardcast.puller import CheckpointPuller
from p2p.shardcast.store import CheckpointStore
from p2p.tls import load_or_create_certificate


async def open_origin(world, *middlewares, fan_out=None):
    """The trainer's origin over TLS; gives a function that makes a relay's way in."""
    door = OriginDoor()
    certificate = load_or_create_certificate(world.tmp_path)
    limit = FanOut(door.holder, fan_out, lapse_s=1.0) if fan_out else None
    routes = origin_routes(world.trainer, lambda first, limit: [], fan_out=limit)
    address = await world.serve(routes, door.middleware, *middlewares, certificate=certificate)

    def way_in(relay=CAROL, token=None):
        return Contact(TRAINER.peer_id, address.url, certificate.fingerprint, token=token or door.token_for(relay))

    return way_in


def make_puller(world, store, **more):
    return CheckpointPuller(world.http, store, progress_timeout_s=QUICK_S, **{"patience_s": 1.0, **more})


async def wait_for(world, store, checkpoint):
    """A client's download through the relay ends when the relay has everything."""
    await world.relay(CAROL, store=store)
    return await world.client(patience_s=20).download(checkpoint)


async def test_a_relay_pulls_with_its_token_and_serves_on_the_way(world, tmp_path):
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        relay = CheckpointStore(tmp_path / "relay")
        puller = make_puller(world, relay)
        await world.nursery.start(puller.run)
        way_in = await open_origin(world)
        puller.want(manifest.id)
        puller.set_origin(way_in(), rules=RULES)
        await wait_for(world, relay, manifest.id)
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)


async def test_a_client_is_served_while_the_relay_still_pulls(world, tmp_path):
    """Cut-through: the origin holds back its last shards until a client has the first ones from the relay."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        relay = CheckpointStore(tmp_path / "relay")
        enough = await world.aio.run(make_event)

        async def hold_back(request, index):
            if index >= 4:
                await enough.wait()

        way_in = await open_origin(world, on_shards(hold_back))
        puller = CheckpointPuller(world.http, relay, progress_timeout_s=15)
        await world.nursery.start(puller.run)
        puller.set_origin(way_in(), rules=RULES)
        puller.want(manifest.id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, world, relay, manifest.id)
            await world.until(lambda: len(world.progress) >= 4)
            assert relay.complete() == []
            world.aio.call_soon(enough.set)
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)


async def make_event():
    return asyncio.Event()


async def test_an_origin_that_moved_is_followed(world, tmp_path):
    """The trainer restarts elsewhere with new tokens: the next notice is enough."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        relay = CheckpointStore(tmp_path / "relay")
        puller = make_puller(world, relay)
        await world.nursery.start(puller.run)
        way_in = await open_origin(world)
        puller.set_origin(Contact(TRAINER.peer_id, "https://127.0.0.1:1", bytes(32), token="lost"), rules=RULES)
        puller.want(manifest.id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, world, relay, manifest.id)
            puller.set_origin(way_in(token="a-token-of-the-past"), rules=RULES)
            puller.set_origin(way_in(), rules=RULES)
        assert [step for step, _ in world.node.complete()] == [1]


async def test_a_checkpoint_that_the_origin_lacks_does_not_block_the_next(world, tmp_path):
    with trio.fail_after(30):
        old = await publish(world.trainer, make_policy(tmp_path / "old", tag=5), step=0)
        manifest = await publish(world.trainer, world.policy)
        relay = CheckpointStore(tmp_path / "relay")
        puller = make_puller(world, relay)
        way_in = await open_origin(world)
        puller.set_origin(way_in(), rules=RULES)
        for checkpoint in (manifest.id, old.id, bytes(32)):
            puller.want(checkpoint)
        await world.nursery.start(puller.run)
        await wait_for(world, relay, manifest.id)
        assert (1, manifest.id) in relay.complete()


async def test_the_origin_that_sends_wrong_bytes_does_not_stop_the_relay(world, tmp_path):
    """A broken proxy before the origin gives zeros instead of one shard."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy)
        relay = CheckpointStore(tmp_path / "relay")
        broken = [True]
        received = []

        async def flip(request, index):
            if broken and index == 3:
                broken.clear()
                return web.Response(body=bytes(len(shard_bytes_of(world.trainer, manifest.id, index))))

        way_in = await open_origin(world, on_shards(flip))
        puller = make_puller(world, relay, on_bytes=lambda peer, count: received.append(count))
        await world.nursery.start(puller.run)
        puller.set_origin(way_in(), rules=RULES)
        puller.want(manifest.id)
        await wait_for(world, relay, manifest.id)
        assert sum(received) >= manifest.record.total_bytes
