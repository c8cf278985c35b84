"""Finding a verdict in a node's data directory, and showing it to a person: what was measured, beside what is allowed.

Looks into a validator's docket, a contributor's outbox and a relay's store, without disturbing a node that runs, or
reads a file that holds a verdict's envelope. Texts in verdicts come from others: they are shown escaped.
"""

from __future__ import annotations

import base64
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from node.logs import printable
from protocol.draw import beacon_of, is_drawn
from protocol.envelope import Signed, open_envelope
from protocol.errors import ConfigError, DataDirError, ProtocolError
from protocol.identity import PeerId
from protocol.records import CheckResult, Head, Receipt, Verdict

LAST: Final = "last"
MIN_DIGITS: Final = 6
MAX_SHOWN: Final = 64


@dataclass(frozen=True)
class _Shelf:
    """Where a role keeps verdicts. Queries take the first and the last id that a prefix covers."""

    name: str
    file: str
    by_submission: str
    newest: str


_SHELVES: Final = (
    _Shelf(
        "the validator's docket",
        "docket.sqlite",
        "SELECT envelope FROM verdicts WHERE submission BETWEEN ? AND ? ORDER BY seq",
        "SELECT envelope FROM verdicts ORDER BY seq DESC LIMIT 1",
    ),
    _Shelf(
        "the contributor's outbox",
        "outbox.sqlite",
        "SELECT envelope FROM verdicts WHERE submission BETWEEN ? AND ? ORDER BY rowid",
        "SELECT envelope FROM verdicts ORDER BY rowid DESC LIMIT 1",
    ),
    _Shelf(
        "the relay's store",
        "relay/relay.sqlite",
        "SELECT envelope FROM feed WHERE kind = 'verdict' AND subject BETWEEN ? AND ? ORDER BY seq",
        "SELECT envelope FROM feed WHERE kind = 'verdict' ORDER BY seq DESC LIMIT 1",
    ),
)


@dataclass(frozen=True)
class Found:
    """A verdict and where it was."""

    verdict: Signed[Verdict]
    place: str


def find_verdicts(what: str, data_dir: Path) -> list[Found]:
    """Verdicts by a file's name, a submission's id or its first digits, or `last`: the newest one of the node.

    Several only where several validators judged one submission. Raises ConfigError, DataDirError or ProtocolError.
    """
    path = Path(what)
    if path.is_file():
        return [Found(open_envelope(_read(path), Verdict), str(path))]
    if what != LAST and not _is_prefix(what):
        raise ConfigError(
            f"{what[:80]!r} is neither a file nor the first {MIN_DIGITS} hexadecimal digits of a submission's id",
            hint="a contributor's log names them (`verdict submission=…`); `verdict show last` shows the newest",
        )
    found = [one for shelf in _SHELVES for one in _look_into(shelf, what, data_dir)]
    if not found:
        raise DataDirError(
            f"no verdict {'at all' if what == LAST else f'about {what}'} in {data_dir}",
            hint="give the data directory of the contributor, of a validator or of a relay with --data-dir",
        )
    return _of_one_submission(what, found)


def describe_verdict(found: Found) -> dict[str, Any]:
    """Everything that a verdict says, as plain JSON values."""
    signed = found.verdict
    shown: dict[str, Any] = msgspec.to_builtins(signed.record)
    shown |= {
        "id": signed.id.hex(),
        "envelope": base64.b64encode(signed.data).decode("ascii"),
        "found_in": found.place,
        "validator": str(signed.author),
        "run_id": signed.record.run_id.hex(),
        "submission": signed.record.submission.hex(),
        "contributor": str(PeerId(signed.record.contributor)),
        "draw": _draw(signed.record),
    }
    return shown


def print_verdict(found: Found) -> None:
    Console().print(render(found))


def render(found: Found) -> Group:
    """A verdict as tables: the outcome and who says so, then each check's numbers beside their limits."""
    return Group(_facts(found), Text(), render_checks(found.verdict.record.checks))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(Verdict.MAX_BYTES + 2048)
    except OSError as error:
        raise DataDirError(f"{path} cannot be read: {error.strerror}") from error


def _is_prefix(what: str) -> bool:
    return MIN_DIGITS <= len(what) <= 64 and all(digit in "0123456789abcdef" for digit in what)


def _look_into(shelf: _Shelf, what: str, data_dir: Path) -> Iterator[Found]:
    path = data_dir / shelf.file
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            if what == LAST:
                rows = database.execute(shelf.newest).fetchall()
            else:
                first, last = bytes.fromhex(what.ljust(64, "0")), bytes.fromhex(what.ljust(64, "f"))
                rows = database.execute(shelf.by_submission, (first, last)).fetchmany(MAX_SHOWN)
    except sqlite3.Error as error:
        raise DataDirError(f"{path} cannot be read: {error}", hint="is it the data directory of a node?") from error
    for (envelope,) in rows:
        yield Found(open_envelope(envelope, Verdict), f"{shelf.name}, {path}")


def _of_one_submission(what: str, found: Sequence[Found]) -> list[Found]:
    if what == LAST:
        return [max(found, key=lambda one: one.verdict.record.issued_at_ms)]
    submissions = sorted({one.verdict.record.submission.hex() for one in found})
    if len(submissions) > 1:
        raise ConfigError(
            f"{what} begins {len(submissions)} submissions: {', '.join(each[:16] for each in submissions[:4])} …",
            hint="give more digits",
        )
    return list({one.verdict.id: one for one in found}.values())


def _facts(found: Found) -> Table:
    record = found.verdict.record
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    outcome = f"{record.outcome}{' (hard: it evicts)' if record.outcome == 'reject' and record.hard else ''}"
    head = f"head {record.head_sequence}"
    rows = {
        "outcome": outcome,
        "reason": record.reason,
        "submission": f"{record.submission.hex()} at step {record.step}",
        "contributor": PeerId(record.contributor),
        "validator": f"{found.verdict.author}, {_time(record.issued_at_ms)}, at {head}",
        "computed with": f"{record.engine} {record.dtype}, {record.software}"
        if record.engine
        else f"no engine, {record.software}",
        "mean reward": f"{record.mean_reward:.4g}",
        "drawn": _draw_text(record),
        "beacon": _beacon_text(record),
        "found in": found.place,
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), _text(value))
    return table


def render_checks(checks: Sequence[CheckResult]) -> Table:
    """Each check's numbers, beside their limits."""
    table = Table("check", "result", "measured", "limit", box=None)
    table.add_column("detail", overflow="fold")
    for check in checks:
        first, *others = _measurements(check) or [("", "")]
        table.add_row(_text(check.name), _result(check.outcome), *map(_text, first), _text(check.detail))
        for measured in others:
            table.add_row("", "", *map(_text, measured), "")
    return table


def _measurements(check: CheckResult) -> list[tuple[str, str]]:
    """Number and limit as text, those with a limit first."""
    names = sorted(check.numbers, key=lambda name: name not in check.limits)
    return [
        (f"{name} {check.numbers[name]:.6g}", f"≤ {check.limits[name]:.6g}" if name in check.limits else "")
        for name in names
    ]


def _result(outcome: str) -> Text:
    return Text(outcome, style={"pass": "green", "fail": "bold red"}.get(outcome, "yellow"))


def _draw(record: Verdict) -> dict[str, Any]:
    """The draw with its evidence opened; `again` is what the beacon gives when the draw is made again."""
    draw = record.draw
    shown: dict[str, Any] = {"drawn": draw.drawn, "rate": draw.rate, "why": draw.why}
    try:
        if draw.receipt:
            receipt = open_envelope(draw.receipt, Receipt)
            shown |= {"relay": str(receipt.author), "receipt_head_sequence": receipt.record.head_sequence}
        if draw.beacon:
            head = open_envelope(draw.beacon, Head)
            shown |= {
                "beacon_sequence": head.record.sequence,
                "beacon_previous_sequence": head.record.previous_sequence,
                "beacon_issued_at_ms": head.record.issued_at_ms,
                "ledger_length": head.record.ledger_length,
                "again": is_drawn(beacon_of(head), record.submission, rate=draw.rate),
            }
    except ProtocolError as error:
        shown["error"] = error.message
    return shown


def _draw_text(record: Verdict) -> str:
    draw = record.draw
    return f"{'yes' if draw.drawn else 'no'}, at a rate of {draw.rate:.3g}: {draw.why}"


def _beacon_text(record: Verdict) -> str:
    shown = _draw(record)
    if "error" in shown:
        return f"cannot be read: {shown['error']}"
    if "beacon_sequence" not in shown:
        return "none: checked in full whatever it would have been"
    again = "draws it" if shown["again"] else "does not draw it"
    after = shown.get("receipt_head_sequence", "?")
    first = f"head {shown['beacon_sequence']}, {_time(shown['beacon_issued_at_ms'])}"
    return f"{first}, the first after the receipt's {after}; drawing again: it {again}"


def _time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(min(at_ms, 1 << 42) / 1000))


def _text(value: Any) -> Text:
    return Text(printable(str(value)))
