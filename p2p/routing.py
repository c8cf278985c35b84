"""The routing table: DHT servers that have answered, in buckets by their distance from this node.

Kademlia, section 2.2, with three rules against whoever has many identities: old contacts stay, one neighbourhood (/24,
/64) fills neither a bucket nor the table, and nobody enters by being named. A contact that fails twice in a row leaves.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import trio

from p2p.addresses import Scope, neighbourhood, scope_of_ip

BUCKET_SIZE: Final = 20
MAX_PER_NEIGHBOURHOOD_IN_BUCKET: Final = 2
MAX_PER_NEIGHBOURHOOD: Final = 10
MAX_FAILURES: Final = 2
_KEY_BITS: Final = 256


@dataclass
class Contact:
    """A DHT server that has answered, where, and since when it has been silent."""

    peer_id: Any
    addresses: tuple[Any, ...]
    area: str | None
    """Its neighbourhood; None where many nodes of one owner are to be expected (loopback, private networks)."""
    key: int
    seen_at: float
    failures: int = 0


class RoutingTable:
    """Contacts by the length of the prefix that their hashed ids share with this node's."""

    def __init__(self, own: Any, *, clock: Callable[[], float] = trio.current_time) -> None:
        self._own, self._own_key, self._clock = own, key_of(own), clock
        self._buckets: dict[int, dict[Any, Contact]] = {}
        self._areas: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __contains__(self, peer_id: object) -> bool:
        return self.get(peer_id) is not None

    def __iter__(self) -> Iterator[Contact]:
        for bucket in list(self._buckets.values()):
            yield from list(bucket.values())

    def get(self, peer_id: Any) -> Contact | None:
        return self._bucket(key_of(peer_id)).get(peer_id)

    def closest(self, target: int, count: int) -> list[Contact]:
        """Contacts nearest to a key, nearest first."""
        return heapq.nsmallest(count, self, key=lambda contact: contact.key ^ target)

    def answered(self, peer_id: Any, addresses: tuple[Any, ...], ip: str | None) -> bool:
        """Take in a peer that has answered at an IP address, or note that it did again; return whether it is new."""
        contact = self.get(peer_id)
        if contact is not None:
            contact.seen_at, contact.failures = self._clock(), 0
            contact.addresses = addresses or contact.addresses
            return False
        area = neighbourhood(ip) if ip is not None and scope_of_ip(ip) == Scope.GLOBAL else None
        made = Contact(peer_id, addresses, area, key_of(peer_id), self._clock())
        if not addresses or peer_id == self._own or not self._has_room(made):
            return False
        self._buckets.setdefault(self._index(made.key), {})[peer_id] = made
        if area is not None:
            self._areas[area] += 1
        return True

    def failed(self, peer_id: Any) -> None:
        """Note that a peer did not answer; the second time in a row it leaves."""
        contact = self.get(peer_id)
        if contact is not None:
            contact.failures += 1
            if contact.failures >= MAX_FAILURES:
                self.remove(peer_id)

    def remove(self, peer_id: Any) -> None:
        removed = self._bucket(key_of(peer_id)).pop(peer_id, None)
        if removed is not None and removed.area is not None:
            self._areas[removed.area] -= 1

    def silent_for(self, seconds: float) -> list[Contact]:
        """Contacts that have said nothing for so long, the most silent first."""
        since = self._clock() - seconds
        return sorted((each for each in self if each.seen_at <= since), key=lambda each: each.seen_at)

    def _has_room(self, new: Contact) -> bool:
        bucket = self._bucket(new.key)
        if new.area is not None:
            beside = sum(each.area == new.area for each in bucket.values())
            if beside >= MAX_PER_NEIGHBOURHOOD_IN_BUCKET or self._areas[new.area] >= MAX_PER_NEIGHBOURHOOD:
                return False
        if len(bucket) < BUCKET_SIZE:
            return True
        failing = [each.peer_id for each in bucket.values() if each.failures]
        if failing:
            self.remove(failing[0])
        return bool(failing)

    def _bucket(self, key: int) -> dict[Any, Contact]:
        return self._buckets.get(self._index(key), {})

    def _index(self, key: int) -> int:
        return _KEY_BITS - (key ^ self._own_key).bit_length()


def key_of(peer_id: Any) -> int:
    """Where a peer lies in the key space."""
    return target_of(peer_id.to_bytes())


def target_of(key: bytes) -> int:
    """Where the value of a key belongs."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")
