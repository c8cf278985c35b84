"""The relay's copy of the ledger: pulled from the trainer's origin whenever the signed head is longer.

Entries enter the copy only if with them the chain reaches the tip that the head names, so a false origin changes
nothing. While the origin is away the copy stays as it is and is served as before.
"""

from __future__ import annotations

import logging
from typing import Final, TypeVar

import msgspec
import trio

from node.ledger.keeper import FORK, LedgerKeeper
from node.relay.desk import RelayDesk
from p2p.contacts import Contact
from p2p.http import HttpClient
from protocol.envelope import Signed
from protocol.errors import LedgerError, MalformedError, NodeError
from protocol.records import OriginNotice
from protocol.segments import SegmentInfo

log = logging.getLogger(__name__)

PAGE_TIMEOUT_S: Final = 30.0
MAX_PAGE_BYTES: Final = 8 << 20
FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 30.0

T = TypeVar("T")


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
        self._announced = 0
        """The copy's length that the desk knows of."""

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
        desk, head = self._desk, self._desk.head
        if head is None or desk.notice is None or desk.ledger is None:
            return True
        try:
            await LedgerKeeper(desk.ledger, desk.witness).catch_up(_Origin(self._http, desk.notice), head)
        except NodeError as error:  # a relay goes on serving whatever its copy of the ledger meets
            length = desk.ledger.state.length
            log.warning("ledger length=%d wanted=%d error=%r", length, head.record.ledger_length, error.message)
            return isinstance(error, LedgerError) and error.rule == FORK
        finally:
            self._announce(desk.ledger.state.length)
        return True

    def _announce(self, length: int) -> None:
        """Entries that the disk did not take count as well: they are the trainer's, and say who is evicted."""
        if length > self._announced:
            self._announced = length
            self._desk.ledger_extended()
            log.debug("ledger length=%d", length)


class _Origin:
    """The trainer's origin as a node.ledger.pull.LedgerSource."""

    name: Final = "the trainer's origin"

    def __init__(self, http: HttpClient, notice: Signed[OriginNotice]) -> None:
        self._http = http
        self._contact = origin_contact(notice)

    async def ledger_entries(self, start: int) -> list[bytes]:
        return _decode(await self._get(f"/v1/ledger?from={start}"), list[bytes])

    async def ledger_segments(self, first: int) -> list[SegmentInfo]:
        return _decode(await self._get(f"/v1/ledger/segments?from={first}"), list[SegmentInfo])

    async def ledger_segment(self, info: SegmentInfo) -> bytes:
        return await self._get(f"/v1/ledger/segments/{info.sha256.hex()}")

    async def _get(self, path: str) -> bytes:
        url = f"{self._contact.url}{path}"
        response = await self._http.get(url, timeout_s=PAGE_TIMEOUT_S, max_bytes=MAX_PAGE_BYTES, contact=self._contact)
        return response.body


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise MalformedError(f"the trainer's origin sent no part of a ledger: {str(error)[:200]}") from error
