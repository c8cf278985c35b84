"""`intellect-node audit` and `intellect-node ledger …`: where the ledger comes from, and how what it says is shown.

Texts in it come from others: they are shown escaped and never as markup.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.ledger.audit import Report, ValidatorRow
from node.ledger.blame import Breach
from node.ledger.inspect import audit_material, replayed
from node.ledger.material import CHECKPOINTS, LEDGER, MANIFEST, Material, find_material, has_ledger
from node.ledger.rows import CONTRIBUTOR_COLUMNS, SUBMISSION_COLUMNS, as_csv, flat, leaderboard, run_row, submissions_of
from node.ledger.segments import SegmentWriter, read_segments
from node.ledger.tables import print_contributors, print_kept, print_submissions
from node.ledger.witness import DIRECTORY as FORKS
from node.ledger.witness import HEAD_FILE
from node.logs import printable
from node.receipts import summary
from protocol.atomic import write_atomically
from protocol.envelope import Signed
from protocol.errors import AuditError, ConfigError, DataDirError, NodeError
from protocol.forks import MAX_PROOF_BYTES, Fork, open_proof
from protocol.identity import PeerId
from protocol.records import Head

MAX_SHOWN: Final = 20
_UNITS: Final = {"tokens": "output tokens", "flops": "million operations"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Where:
    """Where to take a ledger from: a directory, or the relays of a run."""

    data_dir: Path
    given: Path | None = None
    run: str | None = None
    bootstrap: Sequence[str] = ()
    timeout_s: float = 30.0
    processes: int | None = None

    @property
    def has_own(self) -> bool:
        """Whether a ledger lies in the data directory, or is named by a directory of its own."""
        return self.given is not None or has_ledger(self.data_dir)

    @property
    def is_fetched(self) -> bool:
        """Whether it comes from relays."""
        return self.given is None and (bool(self.bootstrap) or self.run is not None or not has_ledger(self.data_dir))

    @contextmanager
    def material(self, say: Say) -> Iterator[Material]:
        """Raises NodeError where there is none. What was fetched lasts as long as the block."""
        if self.given is not None:
            yield find_material(self.given, self.run)
        elif not self.is_fetched:
            yield find_material(self.data_dir)
        else:
            with tempfile.TemporaryDirectory(prefix="intellect-ledger-") as directory:
                self._fetch(Path(directory), say)
                yield find_material(Path(directory))

    def _fetch(self, out: Path, say: Say) -> None:
        from node.ledger.fetch import fetch_ledger

        fetch_ledger(
            out, data_dir=self.data_dir, run=self.run, bootstrap=self.bootstrap, timeout_s=self.timeout_s, say=say
        )


# Audit.


def audit(where: Where, *, samples: int, say: Say) -> Report:
    """Replay and check everything. Raises AuditError where that cannot be done."""
    try:
        with where.material(say) as material:
            if where.is_fetched:
                material = _keep_proofs(material, Path(), say)
            return audit_material(material, say=say, processes=where.processes, samples=samples)
    except AuditError:
        raise
    except NodeError as error:
        raise AuditError(f"the audit could not be made: {error.message}", hint=error.hint) from error


def _keep_proofs(material: Material, to: Path, say: Say) -> Material:
    """Proofs of a fork outlive what was fetched."""
    for path, _ in material.forks():
        kept = to / path.name
        write_atomically(kept, path.read_bytes())
        say(f"the trainer has signed two ledgers; the proof is in {kept}: intellect-node audit --fork {kept}")
    return replace(material, proofs=to)


def print_report(report: Report) -> None:
    console = Console()
    run = report.run
    _lines(
        console,
        f"run {run['run']}, {run['run_id'][:16]}",
        f"ledger {run['entries']} entries, tip {run['tip'][:16]}; "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(report.entries.items())),
        f"steps {run['steps_committed']} committed and {run['steps_trained']} trained of {run['steps_total']}, "
        f"by trainer {report.trainer}",
        f"credits {run['credits']} {_UNITS[run['credit_unit']]} of accepted work, {run['mature']} of them mature; "
        f"{report.forfeited} forfeited",
    )
    if report.appeals:
        said = ", ".join(f"{count} {state}" for state, count in sorted(report.appeals.items()))
        _lines(console, f"appeals {said}")
    print_contributors(console, report.contributors[:MAX_SHOWN])
    console.print(_validators(report.validators))
    for row in report.rechecked:
        said = row.get("skipped") or f"here {row['here']} {row['reason']}"
        _lines(console, f"again {row['submission'][:12]}: ledger {row['ledger']}; {said}")
    for note in report.notes:
        _lines(console, f"note: {note}")
    _print_breaches(console, report)


def _print_breaches(console: Console, report: Report) -> None:
    for breach in [breach for breach in report.breaches if breach.follows is None][:MAX_SHOWN]:
        place = "" if breach.entry is None else f" at entry {breach.entry}"
        console.print(
            Text.assemble(("breach ", "bold red"), printable(f"{breach.kind}{place}: {_who(breach)}{breach.what}"))
        )
    total = sum(report.breaches_by_kind.values())
    if total > MAX_SHOWN:
        _lines(console, f"… {total - MAX_SHOWN} more; --json has the first thousand")
    if report.following:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.following.items()))
        _lines(console, f"refused after those, which may only follow from them and is nobody's: {kinds}")
    verdict = {
        "clean": ("clean: no breach", "bold green"),
        "unconfirmed": ("no breach, but nothing here shows that this is all: see the notes", "bold yellow"),
        "breaches": (f"{total} breaches", "bold red"),
    }[report.outcome]
    console.print(Text.assemble(verdict, f", {report.seconds:.1f} s" if report.seconds else ""))


def _who(breach: Breach) -> str:
    return f"{breach.who}: " if breach.who else ""


def _validators(rows: Sequence[ValidatorRow]) -> Table:
    table = Table(box=None)
    table.add_column("validator", overflow="fold", min_width=20)
    for name in ("accept", "reject", "undecided", "overruled", "hard", "in full"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row.accept, row.reject, row.undecided, row.overruled, row.hard, row.in_full)
        table.add_row(row.peer_id, *map(str, figures))
    return table


# Forks.


def open_fork(path: Path) -> Fork:
    """Check a fork's proof. Raises AuditError when it is none."""
    try:
        with path.open("rb") as file:
            return open_proof(file.read(MAX_PROOF_BYTES + 1))
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error.strerror}") from error
    except NodeError as error:
        raise AuditError(f"{path} proves nothing: {error.message}") from error


def describe_fork(fork: Fork) -> dict[str, Any]:
    """A proof as plain values."""
    return {
        "run": str(fork.run),
        "run_id": fork.manifest.id.hex(),
        "trainer": str(fork.trainer),
        "heads": [_head(head) for head in (fork.shorter, fork.longer)],
        "tip_in_the_longer": fork.base.hex(),
        "entries_between": fork.between,
    }


def _head(head: Signed[Head]) -> dict[str, Any]:
    record = head.record
    return {
        "sequence": record.sequence, "issued_at_ms": record.issued_at_ms, "step": record.step,
        "ledger_length": record.ledger_length, "ledger_tip": record.ledger_tip.hex(),
    }  # fmt: skip


def print_fork(fork: Fork) -> None:
    shown = describe_fork(fork)
    lines = [f"run {shown['run']}", f"the trainer {shown['trainer']} signed both:"]
    for head in shown["heads"]:
        lines.append(
            f"  head {head['sequence']}, step {head['step']}: {head['ledger_length']} entries, tip {head['ledger_tip']}"
        )
    if fork.between:
        lines.append(
            f"  the last {fork.between} entries of the longer lead to its head from tip "
            f"{shown['tip_in_the_longer']}: it does not continue the shorter"
        )
    lines.append("so this trainer's key has signed two ledgers; which is the right one, a proof cannot say")
    _lines(Console(), *lines)


# Ledger.


def show(where: Where, *, limit: int | None, say: Say) -> dict[str, Any]:
    """The run, its leaderboard and its validators."""
    with where.material(say) as material, replayed(material, say=say, processes=where.processes) as (found, notes):
        rows = leaderboard(found.state, limit=limit)
        return {
            "run": run_row(found.state, material.run),
            "contributors": rows,
            "validators": msgspec.to_builtins(found.validators),
            "notes": _with_breaches(found, notes),
        }


def mine(where: Where, peer: PeerId, *, say: Say) -> dict[str, Any]:
    """One contributor's standing and every submission of its."""
    with where.material(say) as material, replayed(material, say=say, processes=where.processes) as (found, notes):
        ranked = next((row for row in leaderboard(found.state) if row["peer_id"] == str(peer)), None)
        return {
            "run": run_row(found.state, material.run),
            "contributor": ranked,
            "submissions": list(submissions_of(found.state, peer)),
            "notes": _with_breaches(found, notes),
        }


def _with_breaches(found: Any, notes: Sequence[str]) -> list[str]:
    count = sum(found.breaches.counts.values())
    said = [f"{count} entries are not as they should be: `intellect-node audit` names them"] if count else []
    return [*notes, *said]


def print_show(found: Mapping[str, Any]) -> None:
    console = Console()
    run = found["run"]
    _lines(
        console,
        f"run {run['run']}: {run['entries']} entries, {run['submissions']} submissions, "
        f"{run['steps_trained']} of {run['steps_total']} steps trained",
    )
    print_contributors(console, found["contributors"])
    console.print(_validators(msgspec.convert(found["validators"], list[ValidatorRow])))
    _lines(console, *(f"note: {note}" for note in found["notes"]))


def print_mine(found: Mapping[str, Any], peer: PeerId) -> None:
    console = Console()
    one = found["contributor"]
    if one is None:
        _lines(console, f"{peer} is not in the ledger of {found['run']['run']}")
        return
    row = flat(one)
    _lines(
        console,
        f"{peer}: {row['standing']}{', ' + row['reason'] if row['reason'] else ''}",
        f"{row['credits']} credits, {row['mature']} mature and {row['maturing']} maturing, rank {row['rank']} of "
        f"{found['run']['contributors']}; {row['forfeited']} forfeited; {row['accepted']} accepted, "
        f"{row['rejected']} rejected{' (' + row['reasons'] + ')' if row['reasons'] else ''}",
    )
    print_submissions(console, found["submissions"])
    _lines(console, *(f"note: {note}" for note in found["notes"]))


def kept_alone(kept: Sequence[Mapping[str, Any]], error: NodeError) -> dict[str, Any]:
    """As `mine`, where no ledger is at hand: what the contributor's own node has kept."""
    note = f"no ledger is at hand ({error.message}): this is what relays, validators and the trainer signed for it"
    return {"run": None, "contributor": None, "submissions": [], "notes": [note], "kept": list(kept)}


def print_kept_alone(found: Mapping[str, Any]) -> None:
    console = Console()
    print_kept(console, found["kept"])
    _lines(console, summary(found["kept"]), *(f"note: {note}" for note in found["notes"]))


def print_csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], write: Callable[[str], object]) -> None:
    for line in as_csv(columns, rows):
        write(line)


# Export.


def export(where: Where, out: Path, *, say: Say) -> dict[str, Any]:
    """Write a directory that `audit --from` takes, and tables of it. Raises ConfigError when it is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty", hint="name a new directory")
    with _new_directory(out), where.material(say) as material:
        _export_records(material, out)
        with replayed(material, say=say, processes=where.processes) as (found, notes):
            _write_lines(out / "contributors.csv", as_csv(CONTRIBUTOR_COLUMNS, map(flat, leaderboard(found.state))))
            _write_lines(out / "submissions.csv", as_csv(SUBMISSION_COLUMNS, submissions_of(found.state)))
            run = run_row(found.state, material.run)
            write_atomically(out / "run.json", json.dumps(run, indent=1).encode())
            return {"out": str(out), "run": run, "notes": _with_breaches(found, notes)}


@contextmanager
def _new_directory(out: Path) -> Iterator[None]:
    """Made for the block; when that fails, what it wrote goes again."""
    was_there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataDirError(f"{out} cannot be made: {error.strerror}") from error
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        if was_there:
            out.mkdir(exist_ok=True)
        raise


def _export_records(material: Material, out: Path) -> None:
    write_atomically(out / MANIFEST, material.manifest.data)
    for head in sorted(material.heads, key=lambda one: one.record.sequence)[-1:]:
        write_atomically(out / HEAD_FILE, head.data)
    (out / CHECKPOINTS).mkdir()
    for checkpoint in material.checkpoints():
        write_atomically(out / CHECKPOINTS / checkpoint.id.hex(), checkpoint.data)
    for path, _ in material.forks():
        (out / FORKS).mkdir(exist_ok=True)
        write_atomically(out / FORKS / path.name, path.read_bytes())
    (out / LEDGER).mkdir()
    with closing(SegmentWriter(out / LEDGER, start=material.manifest.id)) as writer:
        for segment in read_segments(material.ledger):
            left = list(segment.entries)
            while left:
                left = left[len(writer.append(left)) :]


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            for line in lines:
                file.write(f"{line}\r\n")
    except OSError as error:
        raise DataDirError(f"{path} cannot be written: {error.strerror}", hint=f"df -h {path.parent}") from error


def _lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)
