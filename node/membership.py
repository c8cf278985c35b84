"""What relays and other nodes say to each other about who takes part: answers, and how long silence may last.

The records are in protocol.membership; what a relay answers here is nobody's proof of anything, only quicker than
replaying the ledger. Whoever wants proof has the ledger.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

BEAT_S: Final = 10.0
"""Between a node's heartbeats."""
ACTIVE_S: Final = 45.0
"""A node that was silent for longer is not active; speaking again makes it so."""
MAX_ASKED: Final = 64
"""Most submissions that are asked about at once."""
MAX_APPEALS_SHOWN: Final = 16
MAX_REJECTIONS_SHOWN: Final = 16
"""Of one submission; more than judge it in any run but the strangest."""
MAX_ACTIVE_SHOWN: Final = 500

Id = Annotated[bytes, Meta(min_length=32, max_length=32)]


class AppealRow(msgspec.Struct, frozen=True):
    """What a relay's copy of the ledger says of one appeal."""

    appeal: Id
    submission: Id
    state: Literal["open", "granted", "refused", "undecided"]
    answer: Annotated[bytes, Meta(max_length=32)]
    """The verdict that decided it; empty while none has."""
    accepts: int
    rejects: int
    needed: int
    """So many validators must say the same."""
    once_more: bool
    """Whether it ended undecided, and the same verdict may be appealed against again."""


class SubmissionRow(msgspec.Struct, frozen=True):
    """And of one submission: its state, the step whose batch it is in, and the verdicts that reject it."""

    submission: Id
    state: Literal["pending", "disputed", "accepted", "rejected", "undecided"]
    used_in: int | None
    rejections: Annotated[tuple[Id, ...], Meta(max_length=MAX_REJECTIONS_SHOWN)] = ()
    """Ids, in ledger order, of what may be appealed against; empty unless it is rejected."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one key stands by the ledger that a relay has."""

    ledger_length: int
    trained: int
    """Steps that are trained."""
    admitted: bool
    standing: Literal["active", "evicted"]
    reason: Annotated[str, Meta(max_length=1024)] = ""
    evicted_for: Annotated[bytes, Meta(max_length=32)] = b""
    """The submission whose rejection evicted it."""
    mature: int = 0
    maturing: int = 0
    forfeited: int = 0
    next_appeal: int = 0
    """Steps that must be trained before it may appeal again."""
    appeals: Annotated[tuple[AppealRow, ...], Meta(max_length=MAX_APPEALS_SHOWN)] = ()
    """The newest last."""
    submissions: Annotated[tuple[SubmissionRow, ...], Meta(max_length=MAX_ASKED)] = ()
    """Those that were asked about, as far as the ledger has them."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request for one's standing."""

    submissions: Annotated[tuple[Id, ...], Meta(max_length=MAX_ASKED)] = ()


class BeatAnswer(msgspec.Struct, frozen=True):
    """A relay's answer to a heartbeat: its clock, and how many nodes it hears."""

    now_ms: int
    active: int
