"""The records about who takes part: joining a run, being there, and getting back in.

Admissions, appeals and reinstatements are entries of the ledger. Invites travel inside admissions, and heartbeats are
kept by nobody for long.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from protocol.envelope import Record
from protocol.fields import Count, Digest, Key, Positive, Text


class Admission(Record, frozen=True, kw_only=True):
    """A contributor asks to take part, with what the manifest asks of it. Signed by the contributor."""

    KIND = "admission"
    MAX_BYTES = 2048

    run_id: Digest
    protocol: Positive
    """PROTOCOL_VERSION of its program."""
    software: Annotated[str, Meta(max_length=64)]
    nonce: Annotated[bytes, Meta(min_length=8, max_length=32)]
    """The proof of work (protocol.work); any, where the manifest asks for none."""
    invite: Annotated[bytes, Meta(max_length=1024)]
    """The operator's invite in its envelope; empty where the manifest asks for none."""
    issued_at_ms: Count


class Invite(Record, frozen=True, kw_only=True):
    """One key, whichever comes first, may take part. Signed by the run's operator, who signed its manifest."""

    KIND = "invite"
    MAX_BYTES = 512

    run_id: Digest
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random: what tells it from other invites, and what is spent."""
    valid_until_ms: Count


class Heartbeat(Record, frozen=True, kw_only=True):
    """A node is there; a higher sequence replaces it, and no ledger keeps it. Signed by the node."""

    KIND = "heartbeat"
    MAX_BYTES = 1024

    run_id: Digest
    role: Literal["trainer", "relay", "inference", "validator"]
    instance: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random, kept in the data directory: two of them under one key are two nodes, which may not be."""
    sequence: Positive
    software: Annotated[str, Meta(max_length=64)]
    protocol: Positive
    checkpoint_step: Count | None
    """The policy it holds; None while it holds none."""
    tokens_per_s: Annotated[float, Meta(ge=0, le=1e12)]
    """What it measured of itself; 0 where that says nothing."""
    activity: Annotated[str, Meta(max_length=128)]
    """What it does or waits for, in a few words, for people."""
    issued_at_ms: Count


class Appeal(Record, frozen=True, kw_only=True):
    """A contributor asks for another validator's judgement. Its envelope id names the appeal. Signed by it."""

    KIND = "appeal"
    MAX_BYTES = 5 * 1024

    run_id: Digest
    submission: Digest
    verdict: Digest
    """Id of the rejection that it says is wrong."""
    reason: Text
    issued_at_ms: Count


class Reinstatement(Record, frozen=True, kw_only=True):
    """An evicted contributor is back, with what the eviction took. Signed by the trainer, justified by the answer."""

    KIND = "reinstatement"
    MAX_BYTES = 5 * 1024

    run_id: Digest
    contributor: Key
    appeal: Digest
    verdict: Digest
    """Id of the verdict that answers the appeal and accepts."""
    reason: Text
    issued_at_ms: Count
