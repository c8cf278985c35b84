"""What a run keeps in the DHT: the keys, and the rules for the values under them.

Two kinds of values, both signed envelopes: a run's pointer under its operator's key and a relay's advert under its own.
A value may lie under a key only if the peer that the key names has signed it, and only in its time. Servers and readers
check the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

from protocol.constants import MAX_CLOCK_SKEW_S, MAX_DHT_VALUE_BYTES
from protocol.envelope import Signed, open_envelope
from protocol.errors import ClockError, MalformedError, ProtocolError, WrongRunError
from protocol.identity import PeerId
from protocol.records import RelayAdvert, RunPointer
from protocol.run import RunAddress

NAMESPACE: Final = "intellect"
DIGEST_BYTES: Final = 20
MAX_KEY_BYTES: Final = 128
"""Servers answer no longer keys."""
MAX_VALIDITY_MS: Final = 3600 * 1000
"""Longest time that a value may claim to be valid for. Bounds how long junk stays."""
_KEY = re.compile(r"/intellect/(run|relay)/([0-9a-f]{40})/([1-9A-HJ-NP-Za-km-z]{40,64})")
_PROVIDER_KEY = re.compile(rb"/intellect/relays/[0-9a-f]{40}")

Clock = Callable[[], float]
"""Seconds since 1970, as time.time gives them."""
Pointing = Signed[RunPointer] | Signed[RelayAdvert]


def run_key(address: RunAddress) -> str:
    """Where a run's pointer lies."""
    return f"/{NAMESPACE}/run/{digest_hex(address)}/{address.operator}"


def relay_key(address: RunAddress, relay: PeerId) -> str:
    """Where a relay's advert for a run lies."""
    return f"/{NAMESPACE}/relay/{digest_hex(address)}/{relay}"


def relays_key(address: RunAddress) -> bytes:
    """Provider key of "who relays for this run"."""
    return f"/{NAMESPACE}/relays/{digest_hex(address)}".encode()


def is_relays_key(key: bytes) -> bool:
    """Whether providers may be noted under a key."""
    return _PROVIDER_KEY.fullmatch(key) is not None


def digest_hex(address: RunAddress) -> str:
    """The part of a run's address that its keys carry."""
    return address.digest[:DIGEST_BYTES].hex()


class RecordValidator:
    """The rules for a value, as libp2p asks for them: `validate` raises, `select` names the best."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock

    def validate(self, key: str, value: bytes) -> None:
        """Raise ProtocolError unless the value may lie under the key now."""
        self.open(key, value)

    def select(self, key: str, values: list[bytes]) -> int:
        """Index of the highest sequence; the last of equals, so that a repeated put is stored again."""
        ranked = [(self._sequence(key, value), index) for index, value in enumerate(values)]
        return max(ranked)[1]

    def _sequence(self, key: str, value: bytes) -> int:
        try:
            return self.open(key, value).record.sequence
        except ProtocolError:
            return -1

    def open(self, key: str, value: bytes) -> Pointing:
        """Check a value against its key and the clock, and return what it says."""
        kind, digest, author = parse_key(key)
        if len(value) > MAX_DHT_VALUE_BYTES:
            raise MalformedError(f"a DHT value of {len(value)} bytes; at most {MAX_DHT_VALUE_BYTES} are allowed")
        signed: Pointing
        signed = self._open_pointer(value, digest, author) if kind == "run" else self._open_advert(value, digest)
        signed.require_author(author)
        self._check_time(signed)
        return signed

    def _open_pointer(self, value: bytes, digest: str, operator: PeerId) -> Signed[RunPointer]:
        signed = open_envelope(value, RunPointer).require_author(operator)
        address = RunAddress(operator, signed.record.name)
        if digest_hex(address) != digest:
            raise WrongRunError(f"a pointer to {address} lies under another run's key")
        address.open_manifest(signed.record.manifest)
        return signed

    def _open_advert(self, value: bytes, digest: str) -> Signed[RelayAdvert]:
        signed = open_envelope(value, RelayAdvert)
        if signed.record.run[:DIGEST_BYTES].hex() != digest:
            raise WrongRunError(f"an advert of {signed.author.short} lies under another run's key")
        return signed

    def _check_time(self, signed: Pointing) -> None:
        record, now_ms = signed.record, int(self._clock() * 1000)
        name = f"the {record.KIND} of {signed.author.short}"
        if record.issued_at_ms > now_ms + MAX_CLOCK_SKEW_S * 1000:
            raise ClockError(
                f"{name} is dated {(record.issued_at_ms - now_ms) / 1000:.0f} s in the future: "
                "its clock is ahead, or this computer's is behind",
                hint="compare this clock: `timedatectl`; set it: `timedatectl set-ntp true`",
            )
        if record.valid_until_ms <= now_ms:
            raise ClockError(f"{name} ended {(now_ms - record.valid_until_ms) / 1000:.0f} s ago")
        if record.valid_until_ms - record.issued_at_ms > MAX_VALIDITY_MS:
            raise MalformedError(f"{name} claims to be valid for more than {MAX_VALIDITY_MS // 1000} s")


def parse_key(key: str) -> tuple[str, str, PeerId]:
    """A key's kind (`run` or `relay`), digest of the run, and author. Raises MalformedError."""
    match = _KEY.fullmatch(key)
    if not match or len(key) > MAX_KEY_BYTES:
        raise MalformedError(f"not a key of this DHT: {key[:160]!r}")
    return match[1], match[2], PeerId.parse(match[3])
