"""What a node's dashboard can show beside its status board; each role fills in what it has while it is put together.

A contributor and a mere onlooker have no ledger until somebody looks: following it costs a signature check an entry, so
`wanted` is set when the page is first opened. Rollout files are the relay's own, or fetched from the relays, one at a
time, and deleted after they were read.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from node.dashboard.tokenizer import FindTokenizer
from node.inference.outbox import Outbox
from node.ledger.follow import LedgerFollower
from node.relay.store import RelayStore
from node.swarm import Swarm
from protocol.envelope import Signed
from protocol.errors import ProtocolError, RelayError
from protocol.ledger import LedgerState, LedgerSubmission
from protocol.records import Submission
from protocol.run import RunAddress

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 60.0

Obtain = Callable[[bytes, LedgerSubmission], AbstractAsyncContextManager[Path]]
"""Has a submission's file on disk within the block. Raises RelayError or DataDirError; runs in trio."""


class Sources:
    """Where the dashboard finds things. Filled in from trio's thread; read from any."""

    def __init__(self, run: RunAddress) -> None:
        self.run = run
        self.ledger: Callable[[], LedgerState | None] = lambda: None
        self.obtain: Obtain | None = None
        self.tokenizer: FindTokenizer = _no_tokenizer
        self.wanted = trio.Event()
        """Somebody has opened the page."""

    async def follow(self, make: Callable[[], LedgerFollower]) -> None:
        """Follow the ledger from the moment when somebody looks; the copy on disk is replayed in a thread."""
        await self.wanted.wait()
        follower = await trio.to_thread.run_sync(make)
        log.info("dashboard opened: following the ledger from entry %d", follower.state.length)
        self.ledger = lambda: follower.state
        await follower.run()


async def _no_tokenizer() -> Path | None:
    return None


def from_relay_store(store: RelayStore) -> Obtain:
    """A relay's own files."""

    @asynccontextmanager
    async def obtain(key: bytes, submission: LedgerSubmission) -> AsyncIterator[Path]:
        with await trio.to_thread.run_sync(store.open_file, key) as file:
            yield Path(file.name)

    return obtain


def from_relays(swarm: Swarm, directory: Path, *, own: Outbox | None = None) -> Obtain:
    """This node's own files where it has them, else whichever relay still has one, by way of `directory`."""
    for leftover in directory.glob("*.parquet"):
        leftover.unlink()

    @asynccontextmanager
    async def obtain(key: bytes, submission: LedgerSubmission) -> AsyncIterator[Path]:
        kept = own.file(key) if own is not None else None
        if kept is not None and kept.is_file():
            yield kept
            return
        path = directory / f"{key.hex()}.parquet"
        try:
            await _fetch(swarm, path, Signed(submission.record, submission.author, key, b""))
            yield path
        finally:
            path.unlink(missing_ok=True)

    return obtain


async def _fetch(swarm: Swarm, path: Path, submission: Signed[Submission]) -> None:
    """The author, hash and size that the ledger names are checked as the bytes come."""
    answers = []
    for client in swarm.clients:
        try:
            return await client.file(submission, path, timeout_s=FETCH_TIMEOUT_S)
        except (RelayError, ProtocolError) as error:
            answers.append(f"{client.peer_id.short}: {error.message}")
    raise RelayError(
        f"no relay gives this file: {'; '.join(answers)[:500] or 'none is known'}",
        hint="relays delete the files of steps that are long trained; a newer submission can be read",
    )
