"""What a contributor has from others as proof of its work: receipts, verdicts and batches in its outbox, for people.

Each of them is an envelope with its author's signature, checked when it came and again here; none needs the network.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from protocol.envelope import open_envelope
from protocol.errors import DataDirError, ProtocolError
from protocol.records import Batch, Receipt, Trained, Verdict

OUTBOX: Final = "outbox.sqlite"
MAX_ROWS: Final = 100_000
_QUERY: Final = (
    "SELECT s.id, s.step, s.idx, s.state, s.receipt, u.step FROM submissions s LEFT JOIN used u ON u.submission = s.id"
    " ORDER BY s.step, s.idx LIMIT ?"
)


def kept_receipts(data_dir: Path) -> list[dict[str, Any]]:
    """For each submission who took, judged and used it, by what is signed; nothing where there is no outbox.

    Raises DataDirError where the outbox cannot be read.
    """
    path = data_dir / OUTBOX
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "used" not in tables:  # of an earlier release, whose node has not run since
                return []
            return [_row(database, *row) for row in database.execute(_QUERY, (MAX_ROWS,)).fetchall()]
    except sqlite3.Error as error:
        raise DataDirError(f"{path} cannot be read: {error}", hint="is it the directory of a contributor?") from error


def summary(rows: list[dict[str, Any]]) -> str:
    """What is kept, in a line; empty without any."""
    if not rows:
        return ""
    relays = sum(bool(row["relay"]) for row in rows)
    verdicts = sum(len(row["validators"]) for row in rows)
    trained = sum(row["trained"] for row in rows)
    return (
        f"kept here, each with its author's signature: {relays} receipts of relays, {verdicts} verdicts, "
        f"{sum(row['used_in'] is not None for row in rows)} places in batches, of which {trained} were trained"
    )


def _row(
    database: sqlite3.Connection, key: bytes, step: int, index: int, state: str, receipt: bytes, used_in: int | None
) -> dict[str, Any]:
    verdicts = database.execute("SELECT envelope FROM verdicts WHERE submission = ?", (key,)).fetchall()
    batch = database.execute("SELECT batch, trained FROM steps WHERE step = ?", (used_in,)).fetchone()
    proves = batch is not None and _batch_holds(key, batch[0])
    return {
        "id": key.hex(),
        "step": step,
        "index": index,
        "state": state,
        "relay": _signer(receipt, Receipt) if receipt else "",
        "validators": [signer for (envelope,) in verdicts if (signer := _signer(envelope, Verdict))],
        "used_in": used_in if proves else None,
        "trained": bool(proves and batch[1] and _signer(batch[1], Trained)),
    }


def _batch_holds(key: bytes, envelope: bytes) -> bool:
    try:
        return key in open_envelope(envelope, Batch).record.submissions
    except ProtocolError:
        return False


def _signer(envelope: bytes, kind: type[Any]) -> str:
    """Who signed it; empty where the signature does not hold."""
    try:
        return str(open_envelope(envelope, kind).author)
    except ProtocolError:
        return ""
