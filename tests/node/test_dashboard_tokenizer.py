"""The run's tokenizer for whoever holds no policy."""

import hashlib

import msgspec
import trio
from dashboard_kit import write_tokenizer
from factories import OPERATOR, make_manifest, sealed
from relay_world import CAROL, loopback, make_head, serving_routes

from node.dashboard import tokenizer
from p2p.shardcast.origin import checkpoint_routes
from p2p.shardcast.sources import Source
from p2p.shardcast.store import CheckpointStore

SHARD_BYTES = 4096


class Swarm:
    def __init__(self, manifest, urls, head):
        self.manifest, self._urls, self._head = manifest, urls, head

    def sources(self):
        return [Source(CAROL.peer_id, url) for url in self._urls]

    async def wait_head(self, after):
        return self._head


async def published(directory):
    """A checkpoint in which the tokenizer lies across shards, behind another file; its store and run."""
    policy = write_tokenizer(directory / "policy")
    (policy / "a.json").write_bytes(b"{}" + b" " * 3900)
    digest = hashlib.sha256((policy / "tokenizer.json").read_bytes()).digest()
    model = msgspec.structs.replace(make_manifest().model, tokenizer=digest)
    run = sealed(make_manifest(model=model, shard_bytes=SHARD_BYTES), OPERATOR)
    store = CheckpointStore(directory / "store")
    made = await store.publish(policy, identity=OPERATOR, run_id=run.id, step=0, shard_bytes=SHARD_BYTES)
    return store, run, made


async def test_it_is_fetched_once_and_checked_against_the_runs_manifest(tmp_path):
    """Attack: the first relay has another file under that name."""
    with trio.fail_after(30):
        async with loopback() as (aio, http):
            store, run, made = await published(tmp_path)
            other = msgspec.structs.replace(run.record.model, tokenizer=bytes(32))
            head = make_head(checkpoint=made.id)
            (tmp_path / "kept").mkdir()
            async with serving_routes(aio, checkpoint_routes(store), tls=False) as url:
                wrong = Swarm(sealed(make_manifest(model=other), OPERATOR), [url], head)
                assert await tokenizer.from_relays(wrong, http, tmp_path / "kept")() is None
                swarm = Swarm(run, ["http://127.0.0.1:9", url], head)
                assert await tokenizer.from_relays(swarm, http, tmp_path / "kept")() == tmp_path / "kept"
            kept, original = tmp_path / "kept" / "tokenizer.json", tmp_path / "policy" / "tokenizer.json"
            assert kept.read_bytes() == original.read_bytes()
            assert await tokenizer.from_relays(Swarm(run, [], head), http, tmp_path / "kept")() == tmp_path / "kept"


async def test_a_policy_on_this_disk_is_enough(tmp_path):
    with trio.fail_after(30):
        assert await tokenizer.of_newest_policy(CheckpointStore(tmp_path / "empty"))() is None
        store, _, made = await published(tmp_path)
        assert await tokenizer.of_newest_policy(store)() == store.local_dir(made.id)
