"""Signed envelopes against JSON with a signature: sealed and opened a second, and their sizes.

One process and one core. Both carry the same submission record and the same Ed25519 signature.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec

from bench.harness import Result, rate
from protocol.constants import SIGNATURE_DOMAIN
from protocol.envelope import open_envelope, seal
from protocol.errors import SignatureError
from protocol.identity import SIGNATURE_BYTES, Identity, PeerId
from protocol.records import Submission

SECONDS = 3.0
QUICK_SECONDS = 0.1


def bench(*, quick: bool) -> Result:
    """Seal and open one submission again and again, in both forms."""
    seconds = QUICK_SECONDS if quick else SECONDS
    identity = Identity.from_phrase("bench wire")
    record = _submission()
    envelope, text = seal(record, identity), seal_json(record, identity)
    sealed = rate(lambda: seal(record, identity), seconds=seconds)
    sealed_json = rate(lambda: seal_json(record, identity), seconds=seconds)
    opened = rate(lambda: open_envelope(envelope, Submission), seconds=seconds)
    opened_json = rate(lambda: open_json(text), seconds=seconds)
    result = Result(
        {
            "sealed_per_s": sealed,
            "opened_per_s": opened,
            "json_sealed_per_s": sealed_json,
            "json_opened_per_s": opened_json,
            "seal_ratio": sealed / sealed_json,
            "open_ratio": opened / opened_json,
            "envelope_bytes": len(envelope),
            "json_bytes": len(text),
            "size_ratio": len(text) / len(envelope),
        }
    )
    result.at_least("opened_per_s", 2000)
    result.at_least("open_ratio", 1)
    result.at_least("size_ratio", 1.2)
    return result


def seal_json(record: Submission, identity: Identity) -> bytes:
    """The usual alternative: canonical JSON with binary fields in base64, and the signature over it beside it."""
    payload = json.dumps(_plain(record), sort_keys=True, separators=(",", ":"))
    signature = identity.sign(f"{SIGNATURE_DOMAIN}\0{payload}".encode())
    message = {
        "author": str(identity.peer_id),
        "payload": _plain(record),
        "signature": base64.b64encode(signature).decode(),
    }
    return json.dumps(message, separators=(",", ":")).encode()


def open_json(data: bytes) -> Submission:
    """Check what `seal_json` made, which needs the canonical form again."""
    message = json.loads(data)
    payload = json.dumps(message["payload"], sort_keys=True, separators=(",", ":"))
    signature = base64.b64decode(message["signature"])
    if len(signature) != SIGNATURE_BYTES or not PeerId.parse(message["author"]).verify(
        f"{SIGNATURE_DOMAIN}\0{payload}".encode(), signature
    ):
        raise SignatureError("the signature on a JSON message does not hold")
    return msgspec.convert(message["payload"], Submission)


def _plain(record: Submission) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain


def _submission() -> Submission:
    return Submission(
        run_id=bytes(range(32)),
        step=1234,
        index=7,
        checkpoint_step=1233,
        checkpoint=bytes(range(32, 64)),
        sha256=bytes(range(64, 96)),
        size=1_234_567,
        rollouts=32,
        output_tokens=45_678,
        prompts=bytes(range(96, 128)),
        engine="torch 2.13.0",
        dtype="float32",
        software="intellect-node/0.1.0",
        issued_at_ms=1_700_000_000_000,
    )
