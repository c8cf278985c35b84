"""What a Kademlia message of this network may hold, and how peers are named in it.

libp2p's protobuf under this network's own protocol id. A peer is named with addresses and, if known, the record in
which it signed them. Who is named is believed in nothing: an address is tried, and the handshake there proves the id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from libp2p.kad_dht.pb.kademlia_pb2 import Message as Message  # for those who must not import libp2p themselves
from libp2p.peer.id import ID

from p2p.addresses import Scope, parse_addresses, scope_of

KAD_PROTOCOL: Final = "/intellect/kad/1.0.0"
MAX_REQUEST_BYTES: Final = 16 * 1024
MAX_ANSWER_BYTES: Final = 256 * 1024
MAX_CLOSER_PEERS: Final = 20
MAX_ADDRESSES: Final = 4
MAX_PEER_ID_BYTES: Final = 64
MAX_PEER_RECORD_BYTES: Final = 2048


@dataclass(frozen=True)
class Known:
    """A peer somebody told us about: unproved until it has answered."""

    peer_id: Any
    addresses: tuple[Any, ...] = ()
    record: bytes = b""
    """A signed peer record, not checked yet."""


def name_peer(proto: Any, peer_id: Any, addresses: Iterable[Any], record: bytes) -> None:
    """Fill in a message's entry for a peer."""
    proto.id = peer_id.to_bytes()
    proto.addrs.extend(address.to_bytes() for address in list(addresses)[:MAX_ADDRESSES])
    if record:
        proto.signedRecord = record


def closer_peers(answer: Any, *, own: Any, teller: Any, scope: Scope) -> list[Known]:
    """Whom an answer names as closer, without this node and the teller."""
    return _named(answer.closerPeers[:MAX_CLOSER_PEERS], {own.to_bytes(), teller.to_bytes()}, scope)


def providers(answer: Any, *, own: Any, scope: Scope, limit: int) -> list[Known]:
    """Whom an answer names as providers; that may be the teller."""
    return _named(answer.providerPeers[:limit], {own.to_bytes()}, scope)


def _named(protos: Iterable[Any], without: set[bytes], scope: Scope) -> list[Known]:
    """Peers with an address that this node may be sent to: none that leads less far than the teller's own.

    So nobody on the internet can have this node try addresses of its private network or of itself.
    """
    found: dict[bytes, Known] = {}
    for proto in protos:
        identity = bytes(proto.id)
        if not 0 < len(identity) <= MAX_PEER_ID_BYTES or identity in without or identity in found:
            continue
        addresses = tuple(each for each in parse_addresses(proto.addrs[:16]) if scope_of(each) >= scope)
        record = bytes(proto.signedRecord) if len(proto.signedRecord) <= MAX_PEER_RECORD_BYTES else b""
        if addresses or record:
            found[identity] = Known(ID(identity), addresses, record)
    return list(found.values())
