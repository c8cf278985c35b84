"""One key is one node, for a relay: its heartbeats at other relays, and a look at what its own key advertises.

At home a relay hears only who comes to it, so two nodes with its key meet at others: those that the key chooses
(node.heartbeats.chosen). Where there are no others, a second relay finds the first one's advert, for the DHT has one
for each key, and asks whoever answers there which instance it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

import trio

from node.clock import now_ms
from node.heartbeats import TIMEOUT_S, Presence, Pulse, SecondInstance, chosen
from node.membership import BEAT_S
from node.relay_client import RelayClient
from node.status import StatusBoard
from p2p.contacts import Contacts
from p2p.http import HttpClient
from protocol.envelope import Signed
from protocol.errors import ProtocolError, RelayError
from protocol.identity import PeerId
from protocol.records import RelayAdvert
from protocol.run import RunAddress

log = logging.getLogger(__name__)

SETTLED_S: Final = 60.0
"""Whoever has served for so long does not give way to a newcomer; it only tells."""
OWN_DATA_DIR: Final = (
    "one key is one node: start this one without --data-dir, or with one of its own, for a key of its own; to move a "
    "key, stop the old node first, then `intellect-node id export` there and `intellect-node id import` here"
)


class SoleInstance:
    """`meet` it with every lookup's adverts, `run` it; both raise SecondInstance."""

    def __init__(
        self,
        run: RunAddress,
        peer_id: PeerId,
        *,
        http: HttpClient,
        contacts: Contacts,
        board: StatusBoard,
        instance: str,
        pulse: Callable[[], Pulse | None],
    ) -> None:
        """`instance` is this relay's own, as its `/v1/info` says it; `pulse` gives nothing while the run is unknown."""
        self._run = run
        self._peer_id = peer_id
        self._http = http
        self._contacts = contacts
        self._board = board
        self._instance = instance
        self._pulse = pulse
        self._others: list[RelayClient] = []
        self._began = trio.current_time()
        self._presence = Presence(refusals_level=logging.DEBUG)

    async def meet(self, adverts: Iterable[Signed[RelayAdvert]], *, own_url: str) -> None:
        """Take in where other relays are; ask one that is advertised under this relay's key who it is."""
        valid = [advert for advert in adverts if advert.record.run == self._run.digest]
        valid = [advert for advert in valid if advert.record.valid_until_ms > now_ms()]
        self._others = [self._client(advert) for advert in valid if advert.author != self._peer_id]
        twins = {advert.record.http_url: advert for advert in valid if advert.author == self._peer_id}
        for url in twins.keys() - {own_url}:
            await self._ask(self._client(twins[url]))

    async def run(self) -> None:
        """Speak at other relays for ever."""
        while True:
            pulse = self._pulse()
            if pulse is not None:
                await self._presence.speak(pulse.beat(), chosen(self._others, self._peer_id), hint=OWN_DATA_DIR)
            await trio.sleep(BEAT_S if pulse is not None and self._others else 1.0)

    def _client(self, advert: Signed[RelayAdvert]) -> RelayClient:
        contact = self._contacts.of(advert)
        return RelayClient(self._http, contact.url, peer_id=advert.author, run=self._run, contact=contact)

    async def _ask(self, twin: RelayClient) -> None:
        """An advert outlives its relay, and an address may lead to this very process."""
        try:
            with trio.move_on_after(TIMEOUT_S):
                info = await twin.info()
                if info.peer_id == str(self._peer_id) and info.instance not in ("", self._instance):
                    self._found(twin.url)
        except (RelayError, ProtocolError) as error:
            log.debug("earlier address url=%s error=%r", twin.url, error.message)

    def _found(self, url: str) -> None:
        what = f"another relay works with this relay's key, {self._peer_id.short}, at {url}"
        if trio.current_time() - self._began < SETTLED_S and not self._presence.was_let_in:
            raise SecondInstance(what, hint=OWN_DATA_DIR)
        log.warning("%s; %s", what, OWN_DATA_DIR)
        self._board.details(second_instance=what)
