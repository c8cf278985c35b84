"""From the trainer through relays to a client while the trainer still hashes, and what the origin has to send."""

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import trio
from shardcast_world import ALICE, BOB, CAROL, QUICK_S, RULES, TRAINER, contents, on_shards, publish

from p2p.contacts import Contact
from p2p.shardcast.fan_out import FanOut, draw_shares
from p2p.shardcast.origin import OriginDoor, checkpoint_routes, origin_routes
from p2p.shardcast.puller import CheckpointPuller
from p2p.shardcast.sources import Source
from p2p.shardcast.store import CheckpointStore
from p2p.tls import load_or_create_certificate
from protocol.identity import Identity

DAVE = Identity.from_phrase("dave").peer_id
NAMES = {ALICE: "alice", BOB: "bob", CAROL: "carol", DAVE: "dave"}


class Tree:
    """An origin with a fan-out, and relays that know each other."""

    def __init__(self, world, *, fan_out):
        self.world = world
        self.door = OriginDoor()
        self.fan_out = FanOut(self.door.holder, fan_out)
        self.served = {}
        self.relays = {}
        self.stores = {}
        self.pullers = {}

    async def open(self):
        self.certificate = load_or_create_certificate(self.world.tmp_path)

        async def count(request, index):
            relay = self.door.holder(request.headers["Authorization"])
            self.served.setdefault(relay, []).append(index)

        routes = origin_routes(self.world.trainer, lambda first, limit: [], fan_out=self.fan_out)
        address = await self.world.serve(routes, self.door.middleware, on_shards(count), certificate=self.certificate)
        self.url = address.url

    async def add(self, peer, *middlewares):
        store = CheckpointStore(self.world.tmp_path / NAMES[peer])
        address = await self.world.serve(checkpoint_routes(store), *middlewares)
        puller = CheckpointPuller(self.world.http, store, progress_timeout_s=QUICK_S)
        contact = Contact(TRAINER.peer_id, self.url, self.certificate.fingerprint, token=self.door.token_for(peer))
        puller.set_origin(contact, rules=RULES)
        self.relays[peer], self.stores[peer], self.pullers[peer] = Source(peer, address.url), store, puller
        for other, each in self.pullers.items():
            each.set_peers([source for name, source in self.relays.items() if name != other])
        store.subscribe(self.world.notify)
        await self.world.nursery.start(puller.run)

    def request_of(self, peer):
        return SimpleNamespace(headers={"Authorization": f"Bearer {self.door.token_for(peer)}"})

    def here(self, peer, *, step):
        """Let the origin hear of a relay, as when all of them waited for the checkpoint."""
        self.fan_out(self.request_of(peer), step, 1)

    def have(self, step):
        return [peer for peer, store in self.stores.items() if any(held == step for held, _ in store.complete())]


async def test_the_origin_sends_each_shard_as_often_as_its_fan_out_and_the_relays_do_the_rest(world):
    with trio.fail_after(30):
        tree = Tree(world, fan_out=1)
        await tree.open()
        for peer in NAMES:
            await tree.add(peer)
            tree.here(peer, step=1)
        manifest = await publish(world.trainer, world.policy)
        await world.until(lambda: len(tree.have(1)) == 4)
        assert sorted(itertools.chain(*tree.served.values())) == list(range(8))
        assert len(tree.served) > 1
        for store in tree.stores.values():
            assert contents(store.local_dir(manifest.id)) == contents(world.policy)


async def test_a_relay_that_dies_is_replaced_by_its_children(world, tmp_path):
    """One relay falls silent after a few shards: those that the origin had for it go to the others instead."""
    shares = draw_shares([ALICE, BOB, CAROL], 8, limit=1)
    dead, *others = sorted(shares, key=lambda peer: shares[peer].bit_count(), reverse=True)
    with trio.fail_after(30):
        tree = Tree(world, fan_out=1)
        tree.fan_out = FanOut(tree.door.holder, 1, lapse_s=1.0)
        await tree.open()
        given = []

        async def fall_silent(request, index):
            given.append(index)
            world.notify()
            if len(given) > 2:
                await asyncio.sleep(3600)

        tree.here(dead, step=1)
        store = CheckpointStore(tmp_path / "dead")
        address = await world.serve(checkpoint_routes(store), on_shards(fall_silent))
        tree.relays[dead] = Source(dead, address.url)
        for peer in others:
            await tree.add(peer)
        manifest = await publish(world.trainer, world.policy)
        with store.begin(manifest) as partial:
            for index in range(4):
                with world.trainer.open_shard(manifest.id, index) as ranges:
                    data = b"".join(read(each) for each in ranges)
                partial.write_shard(index, data)
            await world.until(lambda: len(tree.have(1)) == 2)
        assert dead not in tree.served


def read(part):
    part.file.seek(part.offset)
    return part.file.read(part.length)


async def test_a_client_has_shards_before_the_trainer_has_hashed_the_last(world, monkeypatch):
    """Cut-through from end to end: hashing stops until a client has the first shard through a relay."""
    monkeypatch.setattr("p2p.shardcast.publish.PART_EVERY_S", 0.0)
    with trio.fail_after(30):
        tree = Tree(world, fan_out=1)
        await tree.open()
        await tree.add(ALICE)
        world.relays.append(tree.relays[ALICE])
        token = trio.lowlevel.current_trio_token()

        def hold_back():
            plan = world.trainer.newest_plan(1)
            held = world.trainer.progress(plan.id).held if plan is not None else 0
            if held == 0b1111:
                trio.from_thread.run(world.until, lambda: bool(world.progress), trio_token=token)

        world.trainer.subscribe(hold_back)
        installed = []

        def have(manifest):
            installed.append(manifest)
            world.notify()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.client().follow, have)
            manifest = await publish(world.trainer, world.policy)
            await world.until(lambda: bool(installed))
            nursery.cancel_scope.cancel()
        assert installed == [manifest]
        assert contents(world.node.local_dir(manifest.id)) == contents(world.policy)
        assert await world.client().download(manifest.id, step=1) == manifest


async def test_a_named_checkpoint_takes_over_its_own_announcement_and_no_other(world):
    """The trainer crashed while it announced step 2; what the head then names is fetched without waiting for it."""
    with trio.fail_after(30):
        manifest = await publish(world.trainer, world.policy, step=1)
        stuck = []

        async def never(request, index):
            if request.match_info["checkpoint"] == stuck[0].hex():
                await asyncio.sleep(3600)

        await world.relay(ALICE, on_shards(never))
        plan = world.trainer.newest_plan(1)
        stuck.append(plan.id)
        world.node.subscribe(world.notify)
        client = world.client(progress_timeout_s=20, patience_s=25)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.follow)
            await world.until(lambda: world.node.newest_plan(1) is not None)
            other = await publish(world.trainer, world.policy, step=2)
            await client.download(other.id)
            nursery.cancel_scope.cancel()
        assert (2, other.id) in world.node.complete()
        assert manifest.id != other.id


def test_memory_stays_flat_whatever_the_size():
    """600 MB, then a model and its patches, go through three roles in one process, which grows by less than 100 MB."""
    script = Path(__file__).with_name("shardcast_memory.py")
    done = subprocess.run(
        [sys.executable, str(script), str(600_000_000)], check=True, capture_output=True, text=True, timeout=110
    )
    grown, installed, patched = map(int, done.stdout.split())
    assert installed == 600_000_000
    assert 0 < patched < 100_000
    assert grown < 100_000_000
