"""The record under a run's address in the DHT: what trainers keep published, and `run publish` puts there."""

from __future__ import annotations

from node.clock import now_ms
from p2p.discovery import VALIDITY_S
from protocol.envelope import Signed, seal
from protocol.identity import Identity
from protocol.records import Manifest, RunPointer


def run_pointer(identity: Identity, manifest: Signed[Manifest], sequence: int) -> bytes:
    """The pointer's envelope, valid from now on for as long as published values are."""
    issued_at_ms = now_ms()
    pointer = RunPointer(
        name=manifest.record.name,
        sequence=sequence,
        issued_at_ms=issued_at_ms,
        valid_until_ms=issued_at_ms + int(VALIDITY_S * 1000),
        manifest=manifest.data,
    )
    return seal(pointer, identity)
