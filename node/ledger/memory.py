"""What a ledger's replay remembers, on a disk but for its newest part (protocol.ledger_memory), and how to look at it.

A node's loop writes it; its other threads (dashboard, relay's answers) read by `looked_at` and `newest`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from node.datadir import make_directory
from node.ledger.log import LedgerLog
from node.ledger.scratch import Scratch, ScratchMap, ScratchSet, ScratchTips
from protocol.envelope import Record, Signed
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.ledger_memory import LedgerMemory, LedgerSubmission, SubmissionState
from protocol.records import Batch, Manifest, Submission, Trained, Verdict

AUDIT_HOT: Final = 1536
"""Submissions in memory; more than one entry of the ledger ever changes after it looked at them."""
AUDIT_AT_ONCE: Final = 512
NODE_HOT: Final = 512
"""Entries come about the newest submissions, and so do questions."""
NODE_AT_ONCE: Final = 8
"""Few are written together, so that nobody waits for long."""
REPLAY: Final = "replay"
"""The directory beside the ledger's; whoever deletes it loses nothing."""
HOT_STEPS: Final = 64
"""Batches in memory, each of which names many submissions, and in audits trained steps."""
FASTEST: Final = 1
"""Level of compression: the names of checks are in each verdict."""

R = TypeVar("R", bound=Record)


def audit_memory(
    directory: Path, *, hot: int = AUDIT_HOT, at_once: int = AUDIT_AT_ONCE
) -> tuple[Scratch, LedgerMemory]:
    """For a ledger of any length. Verdicts come back without checks and evidence, which no rule needs.

    Raises DataDirError.
    """
    scratch = Scratch(directory, at_once=at_once)
    encode = partial(encode_submission, slim=True)
    return scratch, _memory(scratch, encode, decode_submission, hot=hot, trained=_by_step(scratch, "trained", Trained))


def node_memory(directory: Path, *, hot: int = NODE_HOT, at_once: int = NODE_AT_ONCE) -> tuple[Scratch, LedgerMemory]:
    """For a node that lives, with all that verdicts say. Trained steps, which charts show, stay in memory.

    Raises DataDirError.
    """
    scratch = Scratch(directory, at_once=at_once)
    return scratch, _memory(scratch, _pack, _unpack, hot=hot, trained={})


def live_ledger(path: Path, manifest: Signed[Manifest], *, mends: bool = False) -> LedgerLog:
    """A node's ledger, opened and replayed. `mends` as for LedgerLog. Raises DataDirError."""
    replay = path.with_name(REPLAY)
    make_directory(replay)
    scratch, memory = node_memory(replay)
    try:
        state = LedgerState(manifest.id, manifest.record, operator=manifest.author, memory=memory)
        return LedgerLog(path, state, mends=mends, scratch=scratch)
    except BaseException:
        scratch.close()
        raise


def looked_at(submissions: Mapping[bytes, LedgerSubmission], key: bytes) -> LedgerSubmission | None:
    """One to read, if it is there: for whoever answers others' questions, which may be about every old submission."""
    try:
        return submissions.look(key) if isinstance(submissions, ScratchMap) else submissions[key]
    except KeyError:
        return None


def newest(submissions: Mapping[bytes, LedgerSubmission], count: int) -> list[bytes]:
    """Ids of the last `count` submissions that came, the newest at the end."""
    return submissions.newest(count) if isinstance(submissions, ScratchMap) else list(submissions)[-count:]


def _memory(
    scratch: Scratch,
    encode: Callable[[LedgerSubmission], bytes],
    decode: Callable[[bytes], LedgerSubmission],
    *,
    hot: int,
    trained: MutableMapping[int, Trained],
) -> LedgerMemory:
    return LedgerMemory(
        submissions=ScratchMap[bytes, LedgerSubmission](scratch, "submissions", encode, decode, hot=hot),
        files=ScratchSet(scratch, "files"),
        committed=_by_step(scratch, "batches", Batch),
        trained=trained,
        tips=ScratchTips(scratch, "tips"),
        settle=scratch.settle,
    )


def _by_step(scratch: Scratch, name: str, kind: type[R]) -> ScratchMap[int, R]:
    """Records of training steps, of which the newest are in memory."""
    decode = msgspec.msgpack.Decoder(kind).decode
    return ScratchMap(scratch, name, msgspec.msgpack.encode, decode, hot=HOT_STEPS)


def _pack(one: LedgerSubmission) -> bytes:
    return zlib.compress(encode_submission(one), FASTEST)


def _unpack(packed: bytes) -> LedgerSubmission:
    return decode_submission(zlib.decompress(packed))


class _Kept(msgspec.Struct, array_like=True):
    record: Submission
    author: bytes
    place: int
    state: SubmissionState
    verdicts: list[tuple[bytes, bytes, Verdict]]
    used_in: int | None
    settled_at: int | None
    settled_step: int | None
    appeal: bytes


_kept = msgspec.msgpack.Decoder(_Kept)


def encode_submission(one: LedgerSubmission, *, slim: bool = False) -> bytes:
    """All of it but signatures; if `slim` without checks and evidence."""
    verdicts = [
        (peer.public_key, signed.id, _slim(signed.record) if slim else signed.record)
        for peer, signed in one.verdicts.items()
    ]
    rest = (one.used_in, one.settled_at, one.settled_step, one.appeal)
    return msgspec.msgpack.encode(_Kept(one.record, one.author.public_key, one.place, one.state, verdicts, *rest))


def decode_submission(data: bytes) -> LedgerSubmission:
    """What `encode_submission` made bytes of."""
    kept = _kept.decode(data)
    verdicts: dict[PeerId, Any] = {
        PeerId(key): Signed(record, PeerId(key), verdict_id, b"") for key, verdict_id, record in kept.verdicts
    }
    rest = (kept.used_in, kept.settled_at, kept.settled_step, kept.appeal)
    return LedgerSubmission(kept.record, PeerId(kept.author), kept.place, kept.state, verdicts, *rest)


def _slim(verdict: Verdict) -> Verdict:
    if not (verdict.checks or verdict.draw.beacon or verdict.draw.receipt):
        return verdict
    draw = msgspec.structs.replace(verdict.draw, beacon=b"", receipt=b"")
    return msgspec.structs.replace(verdict, checks=(), draw=draw)
