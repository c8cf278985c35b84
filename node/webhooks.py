"""Telling a person's own service what happened to a node: evicted, stalled and well again, a new checkpoint.

Each event is one POST of JSON to every URL, signed with a shared secret. Calls wait in a short queue for each URL, are
repeated with growing pauses, and given up after a while: a slow or dead service costs the node nothing. Neither URLs,
which often carry a token, nor the secret are logged; answers are not read.

    X-Intellect-Signature: t=<unix seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>">
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import trio

from node.clock import now_ms
from node.health import Health
from node.status import StatusBoard
from p2p.http import HttpClient
from protocol.errors import NodeError

log = logging.getLogger(__name__)

QUEUE_CALLS: Final = 64
ATTEMPTS: Final = 6
FIRST_PAUSE_S: Final = 2.0
MAX_PAUSE_S: Final = 300.0
TIMEOUT_S: Final = 10.0
FINISH_S: Final = 5.0
MAX_TEXT_CHARS: Final = 500
SIGNATURE: Final = "X-Intellect-Signature"


def sign(secret: str, body: bytes, *, at_s: int) -> str:
    """The value of the signature header, for whoever sends and whoever checks."""
    tag = hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at_s},v1={tag}"


class Webhooks:
    """`run` it; `look` is a listener of node.health.HealthWatch. Without URLs it does nothing."""

    def __init__(
        self,
        urls: Sequence[str],
        http: HttpClient,
        board: StatusBoard,
        *,
        secret: str = "",
        clock: Callable[[], int] = now_ms,
        attempts: int = ATTEMPTS,
        first_pause_s: float = FIRST_PAUSE_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._http = http
        self._board = board
        self._secret = secret
        self._clock = clock
        self._attempts = attempts
        self._first_pause_s = first_pause_s
        self._timeout_s = timeout_s
        self._queues = [(url, *trio.open_memory_channel[bytes](QUEUE_CALLS)) for url in urls]
        self._seen: Mapping[str, Any] = {}
        self._stalled = False
        self._under_way = 0
        self._idle = trio.Event()
        self.delivered = 0
        self.dropped = 0

    async def run(self) -> None:
        """Deliver until cancelled."""
        async with trio.open_nursery() as nursery:
            for url, _, calls in self._queues:
                nursery.start_soon(self._deliver_all, url, calls)

    async def finish(self) -> None:
        """Wait, within a deadline, until nothing is under way: for a node that is about to end."""
        with trio.move_on_after(FINISH_S):
            while self._under_way:
                await self._idle.wait()

    def look(self, said: Mapping[str, Any], health: Health) -> None:
        """Find what happened between two looks at the board."""
        before, self._seen = self._seen, said
        if said["state"] == "evicted" != before.get("state"):
            self.post("evicted", said, text=said["activity"])
        if said["checkpoint_step"] not in (None, before.get("checkpoint_step")) and before:
            self.post("checkpoint", said, text=f"checkpoint {said['checkpoint_step']} is here")
        stalls = [reason for reason in health.reasons if reason.startswith("stalled")]
        if bool(stalls) != self._stalled:
            self._stalled = bool(stalls)
            self.post("stalled" if stalls else "recovered", said, text=stalls[0] if stalls else said["activity"])

    def post(self, event: str, said: Mapping[str, Any], *, text: str) -> None:
        """Queue an event for every URL; returns at once. What finds a queue full is dropped and counted."""
        about = {name: said.get(name) for name in ("role", "peer_id", "run", "software", "step", "checkpoint_step")}
        body = msgspec.json.encode({"event": event, "at_ms": self._clock(), "text": text[:MAX_TEXT_CHARS], **about})
        for url, queue, _ in self._queues:
            try:
                queue.send_nowait(body)
                self._under_way += 1
            except trio.WouldBlock:
                self._drop(url, "the queue is full")

    async def _deliver_all(self, url: str, calls: trio.MemoryReceiveChannel[bytes]) -> None:
        async for body in calls:
            try:
                await self._deliver(url, body)
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self._idle.set()
                    self._idle = trio.Event()

    async def _deliver(self, url: str, body: bytes) -> None:
        said = ""
        for attempt in range(self._attempts):
            if attempt:
                pause_s = min(MAX_PAUSE_S, self._first_pause_s * 4 ** (attempt - 1))
                await trio.sleep(pause_s * random.uniform(0.75, 1.25))
            try:
                await self._http.post(url, body, timeout_s=self._timeout_s, headers=self._headers(body))
            except NodeError as error:
                said = error.message.replace(url, host_of(url))
                continue
            self.delivered += 1
            self._show()
            return
        self._drop(url, said)

    def _headers(self, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._secret:
            headers[SIGNATURE] = sign(self._secret, body, at_s=self._clock() // 1000)
        return headers

    def _drop(self, url: str, why: str) -> None:
        self.dropped += 1
        self._show()
        log.warning("webhook host=%s dropped=%d why=%r", host_of(url), self.dropped, why[:200])

    def _show(self) -> None:
        self._board.details(webhooks={"delivered": self.delivered, "dropped": self.dropped})


def host_of(url: str) -> str:
    """The part of a URL that may be shown: paths, queries and user names are often secrets."""
    try:
        return urlsplit(url).hostname or "?"
    except ValueError:
        return "?"
