"""Run by a test: downloads one checkpoint from one relay into a store.

Usage: shardcast_client.py URL DIRECTORY CHECKPOINT
"""

import sys
from functools import partial
from pathlib import Path

import trio

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from shardcast_world import ALICE, RULES  # noqa: E402

from p2p.bridge import AioThread  # noqa: E402
from p2p.http import HttpClient  # noqa: E402
from p2p.shardcast.client import CheckpointClient  # noqa: E402
from p2p.shardcast.sources import Source  # noqa: E402
from p2p.shardcast.store import CheckpointStore  # noqa: E402


async def main(url, directory, checkpoint):
    async with AioThread() as aio, HttpClient(aio) as http:
        store = CheckpointStore(Path(directory))
        client = CheckpointClient(http, store, RULES, partial(list, [Source(ALICE, url)]), connections=2)
        await client.download(bytes.fromhex(checkpoint))


trio.run(main, *sys.argv[1:])
