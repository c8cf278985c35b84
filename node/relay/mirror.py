"""The relay's copy of the ledger: pulled from the trainer's origin whenever the signed head is longer.

Entries enter the copy only if with them the chain reaches the tip that the head names, so a false origin changes
nothing. While the origin is away the copy stays as it is and is served as before.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec
import trio

from node.relay.desk import RelayDesk
from p2p.contacts import Contact
from p2p.http import HttpClient
from protocol.envelope import Signed
from protocol.errors import MalformedError, NodeError, RelayError
from protocol.records import Head, OriginNotice

log = logging.getLogger(__name__)

PAGE_TIMEOUT_S: Final = 30.0
MAX_PAGE_BYTES: Final = 8 << 20
MAX_PULL_BYTES: Final = 512 << 20
"""Entries in memory at once while catching up; about a quarter of a million submissions with their verdicts."""
FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 30.0


def origin_contact(notice: Signed[OriginNotice]) -> Contact:
    """The trainer's origin, as a notice that was checked describes it."""
    record = notice.record
    return Contact(notice.author, record.http_url, record.tls_fingerprint, token=record.token)


class LedgerMirror:
    """Runs in a nursery beside the desk; `wake` it when head or origin may have changed."""

    def __init__(self, http: HttpClient, desk: RelayDesk) -> None:
        self._http = http
        self._desk = desk
        self._news = trio.Event()

    def wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep up with the head, for ever; what goes wrong is logged and tried again later."""
        task_status.started()
        retry_s = FIRST_RETRY_S
        while True:
            news = self._news
            if await self._keep_up():
                retry_s = FIRST_RETRY_S
                await news.wait()
                continue
            await trio.sleep(retry_s)
            retry_s = min(LONGEST_RETRY_S, 2 * retry_s)

    async def _keep_up(self) -> bool:
        """Whether there is nothing more to pull for the head that is known now."""
        head, notice, ledger = self._desk.head, self._desk.notice, self._desk.ledger
        if head is None or notice is None or ledger is None:
            return True
        start = ledger.state.length
        if start >= head.record.ledger_length:
            return True
        try:
            entries = await self._pull(notice, start, head)
            await trio.to_thread.run_sync(self._desk.extend_ledger, entries, head)
        except NodeError as error:  # a relay goes on serving whatever its copy of the ledger meets
            log.warning("ledger length=%d wanted=%d error=%r", start, head.record.ledger_length, error.message)
            return False
        log.debug("ledger length=%d", head.record.ledger_length)
        return True

    async def _pull(self, notice: Signed[OriginNotice], start: int, head: Signed[Head]) -> list[bytes]:
        wanted = head.record.ledger_length - start
        origin = origin_contact(notice)
        entries: list[bytes] = []
        total = 0
        while len(entries) < wanted:
            page = await self._page(origin, start + len(entries))
            if not page:
                raise RelayError("the trainer's origin has fewer ledger entries than its head says")
            entries += page
            total += sum(map(len, page))
            if total > MAX_PULL_BYTES:
                raise NodeError(
                    f"the ledger from entry {start} on does not fit in {MAX_PULL_BYTES >> 20} MiB",
                    hint="copy the ledger file of another relay of this run into this relay's data directory",
                )
        return entries[:wanted]

    async def _page(self, origin: Contact, start: int) -> list[bytes]:
        response = await self._http.get(
            f"{origin.url}/v1/ledger?from={start}", timeout_s=PAGE_TIMEOUT_S, max_bytes=MAX_PAGE_BYTES, contact=origin
        )
        try:
            return msgspec.msgpack.decode(response.body, type=list[bytes])
        except msgspec.MsgspecError as error:
            raise MalformedError(f"the trainer's origin sent no list of ledger entries: {str(error)[:200]}") from error
