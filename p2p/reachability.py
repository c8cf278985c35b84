"""Whether this node can be reached from outside: ask a peer to dial back, on a new connection, and say what it found.

The library's own check (AutoNAT) answers over the connection that is there already, so it always succeeds. Here the
peer dials the asker's DHT port with a key of its own, and asks its HTTP server for `/v1/info`. It dials no address but
the one that the asker is connected from, a few times a minute, so it cannot be used to look into other networks.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
import trio
from libp2p.peer.peerstore import PeerStoreError
from libp2p.request_response import BytesCodec, RequestResponse, RequestResponseConfig
from msgspec import Meta
from multiaddr import Multiaddr

from p2p.addresses import ip_of, is_dialable, remote_ip, with_port
from p2p.guard import Guard, Pace
from p2p.host import DialError, build_host, dial, resolved, running
from p2p.patches import guard_of
from p2p.text import cut
from protocol.identity import Identity

log = logging.getLogger(__name__)

PROTOCOL: Final = "/intellect/dial-back/1.0.0"
MAX_MESSAGE_BYTES: Final = 4096
DIAL_TIMEOUT_S: Final = 5.0
ASK_TIMEOUT_S: Final = 20.0
MAX_DIALS_AT_ONCE: Final = 4
PAUSE_PER_PEER_S: Final = 15.0
MAX_ASKERS: Final = 256
MAX_INFO_BYTES: Final = 4096
CHECK_EVERY_S: Final = 600.0
CHECK_AGAIN_S: Final = 30.0
FIRST_CHECK_S: Final = 5.0
PEERS_TO_ASK: Final = 3
ELSEWHERE: Final = "its URL leads to"
"""How a finding begins when a proxy stands before the HTTP server: nobody may dial that, so it is not judged."""

Text = Annotated[str, Meta(max_length=512)]


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """What to dial: a multiaddr of the DHT port, and a URL of the HTTP server; empty texts are left out."""

    multiaddr: Annotated[str, Meta(max_length=256)] = ""
    url: Annotated[str, Meta(max_length=256)] = ""


class Finding(msgspec.Struct, forbid_unknown_fields=True):
    """What dialling back came to: empty when it worked, else why not. `seen_as` is where the asker comes from."""

    seen_as: Annotated[str, Meta(max_length=64)]
    dht: Text = ""
    http: Text = ""
    refused: Text = ""


@dataclass(frozen=True)
class Reachability:
    """What peers found when they dialled this node."""

    asked: int = 0
    dht: bool | None = None
    http: bool | None = None
    problem: str = ""
    hint: str = ""

    def __str__(self) -> str:
        if not self.asked:
            return "not checked from outside yet: no other relay to ask"
        if not self.problem:
            return f"reachable: {self.asked} other relays dialled it"
        return f"{self.problem}; {self.hint}"


class DialBack:
    """Answers and asks. `attach` begins to answer."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._rpc = RequestResponse(host)
        self._busy = trio.CapacityLimiter(MAX_DIALS_AT_ONCE)
        self._asked: dict[Any, float] = {}

    def attach(self) -> None:
        config = RequestResponseConfig(
            timeout=ASK_TIMEOUT_S,
            max_request_size=MAX_MESSAGE_BYTES,
            max_response_size=MAX_MESSAGE_BYTES,
            max_concurrent_inbound=2 * MAX_DIALS_AT_ONCE,
        )
        self._rpc.set_handler(PROTOCOL, handler=self._answer, codec=BytesCodec(), config=config)

    def others(self) -> list[Any]:
        """Connected peers that can be asked, whether or not this node could dial them itself."""
        store = self._host.get_peerstore()
        return [peer for peer in self._host.get_connected_peers() if PROTOCOL in _protocols_of(store, peer)]

    async def ask(self, peer_id: Any, question: Question) -> Finding | None:
        """What one peer found; None if it could not be asked."""
        try:
            with trio.fail_after(ASK_TIMEOUT_S):
                answer = await self._rpc.send_request(
                    peer_id, [PROTOCOL], msgspec.msgpack.encode(question), codec=BytesCodec()
                )
            finding = msgspec.msgpack.decode(answer, type=Finding)
        except Exception as error:  # whatever libp2p raises for what a peer does
            log.debug("dial_back_failed peer=%s error=%s", peer_id, cut(repr(error)))
            return None
        return None if finding.refused else finding

    async def _answer(self, request: bytes, context: Any) -> bytes:
        """Dial the asker, at the address it comes from and nowhere else."""
        peer_id = context.peer_id
        ip = self._ip_of(peer_id)
        question = msgspec.msgpack.decode(request, type=Question)
        if ip is None or not self._may_ask(peer_id):
            return msgspec.msgpack.encode(Finding(seen_as=ip or "", refused="asked too often"))
        finding = Finding(seen_as=ip)
        async with self._busy:
            if question.multiaddr:
                finding.dht = await self._dial(peer_id, question.multiaddr, ip)
            if question.url:
                finding.http = await _fetch(question.url, ip, str(peer_id))
        return msgspec.msgpack.encode(finding)

    def _ip_of(self, peer_id: Any) -> str | None:
        connections = self._host.get_network().get_connections(peer_id)
        return remote_ip(connections[0]) if connections else None

    def _may_ask(self, peer_id: Any) -> bool:
        now = trio.current_time()
        self._asked = {peer: at for peer, at in self._asked.items() if now - at < PAUSE_PER_PEER_S}
        if peer_id in self._asked or len(self._asked) >= MAX_ASKERS:
            return False
        self._asked[peer_id] = now
        return True

    async def _dial(self, peer_id: Any, text: str, ip: str) -> str:
        try:
            address = Multiaddr(text)
            if not is_dialable(address):
                return "that is no address of a TCP port"
            address = await resolved(address)
        except DialError as error:
            return cut(str(error))[:500]
        except Exception as error:  # multiaddr raises whatever its codecs raise
            return f"that is no address: {cut(str(error))[:200]}"
        if ip_of(address) != ip:
            return f"its address is told as {ip_of(address)}, but it comes from {ip}"
        return await try_to_dial(peer_id, [address], guard_of(self._host).dials)


def _protocols_of(store: Any, peer_id: Any) -> list[str]:
    try:
        return list(store.get_protocols(peer_id))
    except PeerStoreError:
        return []


async def try_to_dial(peer_id: Any, addresses: Sequence[Any], dials: Pace) -> str:
    """Dial a peer from a host of its own, with a key made for it, at the node's pace.

    Empty when its handshake proves it, else why not.
    """
    host = build_host(Identity(os.urandom(32)), guard=Guard(dials=dials))
    async with running(host, []):
        try:
            await dial(host, peer_id, addresses, timeout_s=DIAL_TIMEOUT_S)
        except DialError as error:
            return cut(str(error))[:500]
    return ""


async def can_be_dialled(peer_id: Any, addresses: Sequence[Any], *, dials: Pace) -> bool:
    """Whether a peer answers at one of its addresses on a connection of its own."""
    return bool(addresses) and not await try_to_dial(peer_id, addresses, dials)


async def _fetch(url: str, ip: str, peer_id: str) -> str:
    """Ask a relay's HTTP server who it is; empty when it names the peer, else why not."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "that is no http URL"
    try:
        with trio.fail_after(DIAL_TIMEOUT_S):
            if (seen := await _address_of(parts.hostname, port)) != ip:
                return f"{ELSEWHERE} {seen}, and {peer_id} comes from {ip}"
            body = await _get(parts.hostname, ip, port, tls=parts.scheme == "https")
    except trio.TooSlowError:
        return f"{url} did not answer within {DIAL_TIMEOUT_S:g} s"
    except (OSError, trio.BrokenResourceError, ssl.SSLError, DialError) as error:
        return f"{url}: {cut(str(error))[:200]}"
    return "" if peer_id.encode() in body else f"{url} is answered by something else"


async def _address_of(name: str, port: int) -> str | None:
    try:
        return ip_of(with_port(name, port))
    except Exception:  # not an IP address, so a name
        return ip_of(await resolved(Multiaddr(f"/dns/{name}/tcp/{port}")))


async def _get(name: str, ip: str, port: int, *, tls: bool) -> bytes:
    """At most MAX_INFO_BYTES of an answer. The certificate is not checked: who is there is what is asked."""
    stream: Any = await trio.open_tcp_stream(ip, port)
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        stream = trio.SSLStream(stream, context, server_hostname=name, https_compatible=True)
    async with stream:
        shown = f"[{name}]" if ":" in name else name
        await stream.send_all(
            f"GET /v1/info HTTP/1.1\r\nHost: {shown}:{port}\r\nConnection: close\r\n\r\n".encode("ascii", "replace")
        )
        received = b""
        while len(received) < MAX_INFO_BYTES and (data := await stream.receive_some(MAX_INFO_BYTES)):
            received += data
    return received[:MAX_INFO_BYTES]


def conclude(findings: Sequence[Finding], question: Question) -> Reachability:
    """What several findings say together: one peer that got through is enough."""
    if not findings:
        return Reachability()
    dht = any(not each.dht for each in findings) if question.multiaddr else None
    answers = [each for each in findings if not each.http.startswith(ELSEWHERE)]
    http = any(not each.http for each in answers) if question.url and answers else None
    if dht is not False and http is not False:
        return Reachability(len(findings), dht, http)
    first = findings[0]
    what = [why for worked, why in ((dht, first.dht), (http, first.http)) if worked is False]
    problem = f"others cannot reach this relay ({'; '.join(what)})"
    return Reachability(len(findings), dht, http, problem, _hint(first, question))


def _hint(finding: Finding, question: Question) -> str:
    if "comes from" in finding.dht:
        return (
            f"it is seen as {finding.seen_as}: announce that address with --announce and --public-url, "
            "or start this relay where the announced one is"
        )
    ports = [str(_port(question))] if finding.dht else []
    ports += [str(urlsplit(question.url).port or 80)] if finding.http else []
    return (
        f"open TCP port {' and '.join(ports)} in this computer's firewall (`ufw allow {ports[0]}/tcp`) "
        "and forward it in the router"
    )


def _port(question: Question) -> int:
    return int(Multiaddr(question.multiaddr).value_for_protocol("tcp"))


def until_next(result: Reachability) -> float:
    """Seconds until the next check: often while nobody could get through."""
    return CHECK_EVERY_S if result.asked and not result.problem else CHECK_AGAIN_S


__all__ = ["PROTOCOL", "DialBack", "Finding", "Question", "Reachability", "can_be_dialled", "conclude"]
