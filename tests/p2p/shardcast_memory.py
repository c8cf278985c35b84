"""Run by a test: a broadcast of a sparse file in this process. Prints by how much anonymous memory grew, and what came.

Usage: shardcast_memory.py BYTES
"""

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
from p2p.shardcast.sources import Source  # noqa: E402
from p2p.shardcast.store import CheckpointStore  # noqa: E402
from protocol.checkpoint import CheckpointRules  # noqa: E402

SHARD_BYTES = 16 << 20


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


async def main(size):
    rules = CheckpointRules(RULES.run_id, RULES.trainer, SHARD_BYTES, total_steps=1)
    with tempfile.TemporaryDirectory() as root:
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            stores = [CheckpointStore(Path(root) / name) for name in ("trainer", "relay", "client")]
            upstream = []
            for store in stores[:2]:
                server = HttpServer(aio, checkpoint_routes(store), host="127.0.0.1", port=0)
                upstream.append(Source(ALICE, (await nursery.start(server.run)).url))
            policy = Path(root) / "policy"
            policy.mkdir()
            with (policy / "weights.bin").open("wb") as file:
                file.truncate(size)
            before, most = anonymous_bytes(), [0]
            nursery.start_soon(watch, most)
            ended = trio.Event()
            for store, source in zip(stores[1:], upstream, strict=True):
                client = CheckpointClient(http, store, rules, partial(list, [source]))
                last = store is stores[2]
                nursery.start_soon(client.follow, lambda _, last=last: ended.set() if last else None)
            manifest = await stores[0].publish(
                policy, identity=TRAINER, run_id=rules.run_id, step=1, shard_bytes=SHARD_BYTES
            )
            await ended.wait()
            installed = sum(path.stat().st_size for path in stores[2].local_dir(manifest.id).glob("*.bin"))
            print(most[0] - before, installed)
            nursery.cancel_scope.cancel()


async def watch(most):
    while True:
        most[0] = max(most[0], anonymous_bytes())
        await trio.sleep(0.02)


trio.run(main, int(sys.argv[1]))
