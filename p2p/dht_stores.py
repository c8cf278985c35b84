"""What a DHT server holds in memory: values and providers, bounded and expiring.

They stand where libp2p's own stores would, and offer the methods that its request handler calls.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, Final

from p2p import patches
from p2p.dht_records import Clock, RecordValidator, is_relays_key
from protocol.identity import PeerId

MAX_VALUES: Final = 2048
MAX_PROVIDER_KEYS: Final = 64
MAX_PROVIDERS: Final = 64
PROVIDER_LIFETIME_S: Final = 900.0


@dataclass(frozen=True)
class _Value:
    record: Any
    valid_until_s: float


class ValueStore:
    """Values that a DHT server holds: at most MAX_VALUES, none past its end, the node's own never evicted.

    libp2p's own store keeps 50 000 values for a day each and evicts the oldest first. Here, when full, a value of
    another run gives way before one of `run_digest`, so that strangers cannot push out a relay's run.
    """

    def __init__(self, validator: RecordValidator, *, run_digest: str, own: PeerId, clock: Clock = time.time) -> None:
        self._validator = validator
        self._run = f"/{run_digest}/".encode()
        self._own = f"/{own}".encode()
        self._clock = clock
        self._values: dict[bytes, _Value] = {}

    def get(self, key: bytes) -> Any | None:
        """The libp2p record under a key, if it is still valid."""
        held = self._values.get(key)
        if held is None or held.valid_until_s <= self._clock():
            self.remove(key)
            return None
        return held.record

    def put_record(self, key: bytes, record: Any) -> None:
        """Store a record. Raises ProtocolError if it breaks the rules."""
        signed = self._validator.open(key.decode("ascii", "replace"), record.value)
        if key not in self._values and len(self._values) >= MAX_VALUES:
            self._make_room()
        self._values[key] = _Value(record, signed.record.valid_until_ms / 1000)

    def remove(self, key: bytes) -> bool:
        return self._values.pop(key, None) is not None

    def cleanup_expired(self) -> int:
        """Drop what is past its end; return how many."""
        now = self._clock()
        expired = [key for key, held in self._values.items() if held.valid_until_s <= now]
        for key in expired:
            del self._values[key]
        return len(expired)

    def size(self) -> int:
        return len(self._values)

    def _make_room(self) -> None:
        if self.cleanup_expired():
            return
        foreign = [key for key in self._values if self._run not in key]
        others = foreign or [key for key in self._values if not key.endswith(self._own)]
        del self._values[random.choice(others)]


class ProviderStore:
    """Who relays for which run: bounded, expiring, the node's own runs never evicted.

    libp2p's own store takes any key, keeps a dead provider for 48 h, and refuses all others once 20 have come.
    """

    def __init__(self, *, own_key: bytes, own: Any, clock: Clock = time.time) -> None:
        self._own_key, self._own, self._clock = own_key, own, clock
        self._providers: dict[bytes, dict[Any, tuple[Any, float]]] = {}

    def add_provider(self, key: bytes, provider: Any) -> None:
        """Note a provider of a key of this DHT; anything else is dropped."""
        if not is_relays_key(key) or len(provider.addrs) > patches.MAX_ADDRESSES_PER_PEER:
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
