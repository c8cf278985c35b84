"""The routes about who takes part: admissions, appeals, heartbeats, standing, and the entries of one training step.

Asyncio code on the HTTP thread; what blocks goes to a worker thread. The rules are in node.relay.petitions and
node.relay.hearts, who may come here at all is the door's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from node.membership import MAX_ACTIVE_SHOWN, Question
from node.relay.desk import RelayDesk
from node.relay.hearts import Hearts
from node.relay.petitions import Petitions
from node.relay.standing import standing_of
from node.relay.store import RelayStore
from p2p.http import msgpack_response, read_body
from p2p.http.params import query_number, whole_number
from protocol.errors import MalformedError, RefusedError
from protocol.identity import PeerId
from protocol.records import Admission, Appeal, Batch, Heartbeat, Trained

MAX_QUESTION_BYTES = 4096


class MembershipRoutes:
    """`peer_of` says whose request it is."""

    def __init__(self, desk: RelayDesk, store: RelayStore, peer_of: Callable[[web.Request], PeerId]) -> None:
        self.hearts = Hearts(desk)
        self._petitions = Petitions(desk, store)
        self._desk = desk
        self._peer_of = peer_of

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/admissions", self._admission),
            web.post("/v1/appeals", self._appeal),
            web.post("/v1/heartbeats", self._heartbeat),
            web.get("/v1/heartbeats", self._active),
            web.post("/v1/standing", self._standing),
            web.get("/v1/ledger/steps/{step}", self._step),
        ]

    async def _admission(self, request: web.Request) -> web.Response:
        body = await read_body(request, max_bytes=Admission.MAX_BYTES + 1024)
        admitted = await asyncio.to_thread(self._petitions.admit, body, self._peer_of(request))
        return msgpack_response({"admitted": admitted})

    async def _appeal(self, request: web.Request) -> web.Response:
        body = await read_body(request, max_bytes=Appeal.MAX_BYTES + 1024)
        state = await asyncio.to_thread(self._petitions.appeal, body, self._peer_of(request))
        return msgpack_response({"state": state})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await read_body(request, max_bytes=Heartbeat.MAX_BYTES + 1024)
        return msgpack_response(self.hearts.hear(body, self._peer_of(request)))

    async def _active(self, request: web.Request) -> web.Response:
        most = query_number(request, "most", default=MAX_ACTIVE_SHOWN, most=MAX_ACTIVE_SHOWN)
        return msgpack_response(self.hearts.active(most))

    async def _standing(self, request: web.Request) -> web.Response:
        body = await read_body(request, max_bytes=MAX_QUESTION_BYTES)
        try:
            question = msgspec.msgpack.decode(body, type=Question)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise MalformedError(f"not a list of submissions: {str(error)[:100]}") from error
        self._desk.require_manifest()
        if self._desk.ledger is None:
            raise RefusedError("this relay has no ledger yet", code="busy", hint="try again soon")
        return msgpack_response(standing_of(self._desk.ledger.state, self._peer_of(request), question.submissions))

    async def _step(self, request: web.Request) -> web.Response:
        """The batch of a step, and that it was trained, if it was: entries of the ledger as they are."""
        step = whole_number(request.match_info["step"], "step")
        batch, trained = await asyncio.to_thread(self._entries_of, step)
        if not batch:
            raise RefusedError(
                f"this relay's ledger has no batch of step {step}", code="not-yet", hint="ask again later"
            )
        return msgpack_response([batch, trained])

    def _entries_of(self, step: int) -> tuple[bytes, bytes]:
        if self._desk.ledger is None:
            return b"", b""
        return self._desk.ledger.of_step(Batch.KIND, step), self._desk.ledger.of_step(Trained.KIND, step)
