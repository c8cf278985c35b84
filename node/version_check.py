"""`intellect-node version --check`: is there a newer release, or a newer protocol, in this node's run?

Asks nobody but the run's relays, what they report of themselves (unsigned: a relay may say anything, so several are
asked and each is named). What adverts said that this node remembers counts too.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import trio
from rich.console import Console
from rich.text import Text

from node.clock import now_ms
from node.dht_show import joined
from node.logs import printable
from node.relay_client import RelayClient
from node.version import PROTOCOL, SOFTWARE
from p2p.bridge import AioThread
from p2p.contacts import Contact, Contacts
from p2p.discovery import P2PNode
from p2p.http import HttpClient
from protocol.envelope import Signed
from protocol.errors import NodeError
from protocol.identity import Identity
from protocol.records import RelayAdvert
from protocol.run import RunAddress

ASK_S: Final = 6.0
MAX_INFO_BYTES: Final = 4096
_log = logging.getLogger(__name__)

_RELEASE: Final = re.compile(r"intellect-node/([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})")


class Reported(msgspec.Struct, frozen=True):
    """What one relay says of itself; `protocol` 0: it did not answer."""

    peer_id: str
    software: str
    protocol: int
    clock_ahead_s: float | None = None
    """Of this computer's, by the answer's Date header, which counts whole seconds."""


class VersionCheck(msgspec.Struct, frozen=True):
    """This program beside what relays report."""

    software: str
    protocol: int
    relays: list[Reported]
    outcome: Literal["newest", "newer release", "newer protocol", "nobody asked"]

    @property
    def exit_code(self) -> int:
        return {"newest": 0, "newer release": 1, "nobody asked": 1, "newer protocol": 3}[self.outcome]


def check_version(data_dir: Path, *, bootstrap: Sequence[str], timeout_s: float) -> VersionCheck:
    """Ask the relays of a directory's run. Raises NodeError when nobody could be asked about them."""
    from node.held import held_run

    run = None
    if bootstrap:
        manifest = held_run(data_dir)
        run = str(RunAddress(manifest.author, manifest.record.name))

    async def ask(node: P2PNode, address: RunAddress, left_s: float) -> dict[str, Any]:
        adverts = await node.find_relays(timeout_s=left_s)
        return {"relays": await ask_relays(adverts, address)}

    return conclude(joined(data_dir, run, bootstrap, ask, timeout_s=timeout_s)["relays"])


def conclude(relays: Sequence[Reported]) -> VersionCheck:
    """What the reports come to."""
    outcome: Literal["newest", "newer release", "newer protocol", "nobody asked"] = "newest"
    if not relays:
        outcome = "nobody asked"
    elif any(each.protocol > PROTOCOL for each in relays):
        outcome = "newer protocol"
    elif any(release(each.software) > release(SOFTWARE) for each in relays):
        outcome = "newer release"
    return VersionCheck(SOFTWARE, PROTOCOL, list(relays), outcome)


def release(software: str) -> tuple[int, ...]:
    """The numbers of a release, for comparing; of other programs none."""
    match = _RELEASE.match(software)
    return tuple(map(int, match.groups())) if match else ()


async def ask_relays(adverts: Sequence[Signed[RelayAdvert]], address: RunAddress) -> list[Reported]:
    """What each relay reports of itself, within ASK_S; those that do not answer are among them."""
    contacts = Contacts(Identity(os.urandom(32)), address.digest)  # `info` is open to all
    found: list[Reported] = []
    async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:

        async def ask(advert: Signed[RelayAdvert]) -> None:
            contact = contacts.of(advert)
            client = RelayClient(http, contact.url, peer_id=advert.author, run=address, contact=contact)
            reported = Reported(str(advert.author), advert.record.software, 0)
            try:
                with trio.move_on_after(ASK_S):
                    info = await client.info()
                    ahead_s = await _clock_ahead_s(http, contact)
                    reported = Reported(str(advert.author), info.software[:64], info.protocol, ahead_s)
            except NodeError as error:
                _log.info("relay=%s error=%r", advert.author.short, error.message)
            found.append(reported)

        for advert in adverts:
            nursery.start_soon(ask, advert)
    return sorted(found, key=lambda each: each.peer_id)


async def _clock_ahead_s(http: HttpClient, contact: Contact) -> float | None:
    """How far a relay's clock is ahead of this one's; None where it does not tell."""
    response = await http.get(f"{contact.url}/v1/info", timeout_s=ASK_S, max_bytes=MAX_INFO_BYTES, contact=contact)
    try:
        said = parsedate_to_datetime(response.headers.get("Date", ""))
    except ValueError:
        return None
    return said.timestamp() - now_ms() / 1000


def print_check(found: VersionCheck) -> None:
    console = Console()
    lines = [f"this program  {found.software}, protocol {found.protocol}"]
    for each in found.relays:
        spoken = f"protocol {each.protocol}" if each.protocol else "does not answer"
        lines.append(f"relay {each.peer_id}  {each.software}, {spoken}")
    for line in [*lines, _advice(found)]:
        console.print(Text(printable(line)), soft_wrap=True)


def _advice(found: VersionCheck) -> str:
    upgrade = "pip install --upgrade intellect-node, then start the node again"
    return {
        "newest": "no relay has a newer one",
        "newer release": f"newer release seen; next: {upgrade}",
        "newer protocol": f"relays speak a newer protocol, which this program does not; next: {upgrade}",
        "nobody asked": "no relay was found; next: intellect-node doctor",
    }[found.outcome]
