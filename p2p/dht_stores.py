"""What a DHT server holds in memory: values and providers, bounded and expiring.

They stand where libp2p's own stores would, and offer the methods that its request handler calls.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from p2p.dht_records import Clock, RecordValidator, is_relays_key
from protocol.errors import MalformedError, StaleRecordError
from protocol.identity import PeerId

MAX_VALUES: Final = 2048
MAX_VALUES_PER_SENDER: Final = 16
"""An honest node puts its own one or two records; whoever mints keys needs a connection for every so many."""
MAX_ADDRESSES: Final = 16
MAX_PROVIDER_KEYS: Final = 64
MAX_PROVIDERS: Final = 64
PROVIDER_LIFETIME_S: Final = 900.0
_POINTER: Final = b"/intellect/run/"


class FullError(Exception):
    """Raised when a sender has as many values here as one may have."""


@dataclass(frozen=True)
class _Value:
    record: Any
    valid_until_s: float
    sequence: int
    sender: Any


class ValueStore:
    """Values that a DHT server holds: at most MAX_VALUES, none past its end, the node's own never evicted.

    libp2p's own store keeps 50 000 values for a day each and evicts the oldest first. Here, when full, a value of
    another run gives way before one of `run_digest`, so that strangers cannot push out a relay's run; the pointer to
    that run, which its operator alone can sign, stays whatever comes.
    """

    def __init__(self, validator: RecordValidator, *, run_digest: str, own: PeerId, clock: Clock = time.time) -> None:
        self._validator = validator
        self._run = f"/{run_digest}/".encode()
        self._own = f"/{own}".encode()
        self._clock = clock
        self._values: dict[bytes, _Value] = {}
        self._by_sender: Counter[Any] = Counter()

    def get(self, key: bytes) -> Any | None:
        """The libp2p record under a key, if it is still valid."""
        held = self._values.get(key)
        if held is None or held.valid_until_s <= self._clock():
            self.remove(key)
            return None
        return held.record

    def put_record(self, key: bytes, record: Any, *, sender: Any = None) -> None:
        """Store a record for a sender; None is this node. The same value again is stored again.

        Raises ProtocolError if it breaks the rules or is not newer than another that is held, FullError at the
        sender's limit.
        """
        if record.key and record.key != key:
            raise MalformedError("a record under another key than its own")
        signed = self._validator.open(key.decode("ascii", "replace"), record.value)
        held = self._values.get(key)
        if held is not None and signed.record.sequence == held.sequence and held.record.value != record.value:
            raise StaleRecordError(f"another value of sequence {held.sequence} is held")
        if held is not None and signed.record.sequence < held.sequence:
            raise StaleRecordError(f"sequence {signed.record.sequence} is older than {held.sequence}, which is held")
        if sender is not None and (held is None or held.sender != sender):
            self._require_share(sender)
        if held is None and len(self._values) >= MAX_VALUES:
            self._make_room()
        self.remove(key)
        self._values[key] = _Value(record, signed.record.valid_until_ms / 1000, signed.record.sequence, sender)
        self._by_sender[sender] += 1

    def remove(self, key: bytes) -> bool:
        removed = self._values.pop(key, None)
        if removed is None:
            return False
        self._by_sender[removed.sender] -= 1
        if not self._by_sender[removed.sender]:
            del self._by_sender[removed.sender]
        return True

    def cleanup_expired(self) -> int:
        """Drop what is past its end; return how many."""
        now = self._clock()
        expired = [key for key, held in self._values.items() if held.valid_until_s <= now]
        for key in expired:
            self.remove(key)
        return len(expired)

    def size(self) -> int:
        return len(self._values)

    def keys(self) -> list[bytes]:
        return list(self._values)

    def _require_share(self, sender: Any) -> None:
        if self._by_sender[sender] >= MAX_VALUES_PER_SENDER:
            self.cleanup_expired()
        if self._by_sender[sender] >= MAX_VALUES_PER_SENDER:
            raise FullError(f"{sender} has {MAX_VALUES_PER_SENDER} values here")

    def _make_room(self) -> None:
        if self.cleanup_expired():
            return
        foreign = [key for key in self._values if self._run not in key]
        others = foreign or [key for key in self._values if not (key.endswith(self._own) or key.startswith(_POINTER))]
        self.remove(random.choice(others))


class ProviderStore:
    """Who relays for which run: bounded, expiring, the node's own runs never evicted.

    libp2p's own store takes any key, keeps a dead provider for 48 h, and refuses all others once 20 have come.
    """

    def __init__(self, *, own_key: bytes, own: Any, clock: Clock = time.time) -> None:
        self._own_key, self._own, self._clock = own_key, own, clock
        self._providers: dict[bytes, dict[Any, tuple[Any, float]]] = {}

    def add_provider(self, key: bytes, provider: Any) -> None:
        """Note a provider of a key of this DHT; anything else is dropped."""
        if not is_relays_key(key) or len(provider.addrs) > MAX_ADDRESSES:
            return
        if key not in self._providers and len(self._providers) >= MAX_PROVIDER_KEYS:
            del self._providers[random.choice([held for held in self._providers if held != self._own_key])]
        held = self._providers.setdefault(key, {})
        if provider.peer_id not in held and len(held) >= MAX_PROVIDERS:
            del held[random.choice([peer for peer in held if peer != self._own])]
        held[provider.peer_id] = (provider, self._clock() + PROVIDER_LIFETIME_S)

    def get_providers(self, key: bytes) -> list[Any]:
        """Providers of a key as libp2p's PeerInfo."""
        now = self._clock()
        return [provider for provider, until_s in self._providers.get(key, {}).values() if until_s > now]

    def cleanup_expired(self) -> None:
        now = self._clock()
        for key, held in list(self._providers.items()):
            self._providers[key] = {peer: entry for peer, entry in held.items() if entry[1] > now}
            if not self._providers[key]:
                del self._providers[key]

    def size(self) -> int:
        return sum(map(len, self._providers.values()))
