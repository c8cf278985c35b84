"""Run by a test: broadcasts in this process, which is trainer, relay and client at once. Prints what came of it.

Usage: shardcast_memory.py BYTES. A sparse file of so many bytes, then two versions of a small model, the second by
patches. Prints by how much anonymous memory grew, how much was installed at first, and how much came by patches.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from shardcast_world import ALICE, RULES, TRAINER  # noqa: E402

from p2p.bridge import AioThread  # noqa: E402
from p2p.http import HttpClient, HttpServer  # noqa: E402
from p2p.shardcast.client import CheckpointClient  # noqa: E402
from p2p.shardcast.origin import checkpoint_routes  # noqa: E402
from p2p.shardcast.patch_client import PatchClient  # noqa: E402
from p2p.shardcast.patches import PatchStore, patch_routes  # noqa: E402
from p2p.shardcast.sources import Source  # noqa: E402
from p2p.shardcast.store import CheckpointStore  # noqa: E402
from protocol.checkpoint import CheckpointRules  # noqa: E402

SHARD_BYTES = 16 << 20
MODEL_BYTES = 3 * SHARD_BYTES


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def sparse_file(directory, size):
    directory.mkdir()
    with (directory / "weights.bin").open("wb") as file:
        file.truncate(size)
    return directory


def model(directory, value):
    """A model of bf16 zeros, and a few values in every shard, a little different in every version."""
    directory.mkdir()
    entry = {"dtype": "BF16", "shape": [MODEL_BYTES // 2], "data_offsets": [0, MODEL_BYTES]}
    header = json.dumps({"weight": entry}).encode().ljust(128)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        file.truncate(start + MODEL_BYTES)
        for at in range(start, start + MODEL_BYTES, 1 << 16):
            file.seek(at)
            file.write(value.to_bytes(2, "little"))
    return directory


class Broadcast:
    """A trainer's store, a relay with patches, and a client of it."""

    def __init__(self, root, rules, aio, http, nursery):
        self.root, self.rules, self.aio, self.http, self.nursery = root, rules, aio, http, nursery
        self.stores = [CheckpointStore(root / name) for name in ("trainer", "relay", "client")]
        self.patch_clients = []
        self.news = trio.Event()

    async def open(self):
        upstream = []
        for store, name in zip(self.stores[:2], ("trainer", "relay"), strict=True):
            patches = PatchStore(store, self.root / f"{name}-patches")
            routes = [*checkpoint_routes(store), *patch_routes(patches)]
            server = HttpServer(self.aio, routes, host="127.0.0.1", port=0)
            upstream.append(Source(ALICE, (await self.nursery.start(server.run)).url))
        for store, source in zip(self.stores[1:], upstream, strict=True):
            patches = PatchClient(store)
            self.patch_clients.append(patches)
            client = CheckpointClient(self.http, store, self.rules, partial(list, [source]), patches=patches)
            self.nursery.start_soon(client.follow, lambda _: self.news.set())

    async def send(self, policy, step):
        manifest = await self.stores[0].publish(
            policy, identity=TRAINER, run_id=self.rules.run_id, step=step, shard_bytes=SHARD_BYTES
        )
        while not all(store.local_dir(manifest.id) for store in self.stores):
            await self.news.wait()
            self.news = trio.Event()
        files = self.stores[2].local_dir(manifest.id).glob("[!.]*")
        return sum(path.stat().st_size for path in files)


async def main(size):
    rules = CheckpointRules(RULES.run_id, RULES.trainer, SHARD_BYTES, total_steps=3)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            broadcast = Broadcast(root, rules, aio, http, nursery)
            await broadcast.open()
            before, most = anonymous_bytes(), [0]
            nursery.start_soon(watch, most)
            installed = await broadcast.send(sparse_file(root / "sparse", size), 1)
            await broadcast.send(model(root / "model-1", 0x3C00), 2)
            await broadcast.send(model(root / "model-2", 0x3C01), 3)
            patched = [patches.savings.patched_bytes for patches in broadcast.patch_clients]
            print(most[0] - before, installed, min(patched))
            nursery.cancel_scope.cancel()


async def watch(most):
    while True:
        most[0] = max(most[0], anonymous_bytes())
        await trio.sleep(0.005)


trio.run(main, int(sys.argv[1]))
