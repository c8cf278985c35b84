"""What an audit works with, found in a directory: manifest, ledger, heads, checkpoint manifests, rollout files.

A data directory of any role will do, while its node runs or after, and what `ledger export` wrote. Nothing is changed,
and no lock is taken.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from node.held import SWARM_CACHE
from node.ledger.segments import PREFIX
from node.ledger.witness import DIRECTORY as FORKS
from node.ledger.witness import HEAD_FILE
from node.run_show import load_run
from node.swarm import remembered_manifest
from p2p.shardcast.entries import MANIFEST as CHECKPOINT_MANIFEST
from protocol.envelope import Record, Signed, open_envelope
from protocol.errors import ConfigError, DataDirError, ProtocolError
from protocol.forks import MAX_PROOF_BYTES, Fork, open_proof
from protocol.records import CheckpointManifest, Head, Manifest
from protocol.run import RunAddress

LEDGER: Final = "ledger"
MANIFEST: Final = "manifest"
CHECKPOINTS: Final = "checkpoints"
RELAY_STORE: Final = Path("relay", "relay.sqlite")
_FILES: Final = ((Path("relay", "submissions"), ""), (Path("rollouts"), ".parquet"), (Path("files"), ".parquet"))
"""Where roles keep submissions' files, and how their names end."""

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Material:
    """A run's records in one directory."""

    directory: Path
    manifest: Signed[Manifest]
    heads: tuple[Signed[Head], ...]
    strange_heads: int = 0
    """Heads in it that the run's trainer has not signed."""
    proofs: Path | None = None
    """Where proofs of forks lie, if not in the directory's own place for them."""

    @property
    def ledger(self) -> Path:
        return self.directory / LEDGER

    @property
    def run(self) -> RunAddress:
        return RunAddress(self.manifest.author, self.manifest.record.name)

    def checkpoints(self) -> Iterator[Signed[CheckpointManifest]]:
        """Manifests of checkpoints that are at hand, of this run."""
        for path in sorted((self.directory / CHECKPOINTS).glob("*")):
            found = _opened(path / CHECKPOINT_MANIFEST if path.is_dir() else path, CheckpointManifest)
            if found is not None and found.record.run_id == self.manifest.id:
                yield found

    def forks(self) -> Iterator[tuple[Path, Fork]]:
        """Proofs that its trainer has signed two ledgers: a node's, or those found while fetching."""
        for path in sorted((self.proofs or self.directory / FORKS).glob("fork-*")):
            try:
                with path.open("rb") as file:
                    fork = open_proof(file.read(MAX_PROOF_BYTES + 1))
            except (OSError, ProtocolError):
                continue  # half written, or no proof
            if fork.manifest.id == self.manifest.id:
                yield path, fork

    def files(self) -> Iterator[tuple[bytes, Path]]:
        """Submissions whose rollout files are at hand."""
        for place, suffix in _FILES:
            for path in sorted((self.directory / place).glob(f"*{suffix}")):
                name = path.name.removesuffix(suffix)
                if len(name) == 64 and all(digit in "0123456789abcdef" for digit in name):
                    yield bytes.fromhex(name), path


def has_ledger(directory: Path) -> bool:
    """Whether there is a ledger in it, of this or an earlier version."""
    path = directory / LEDGER
    return path.is_file() or any(path.glob(f"{PREFIX}*"))


def find_material(directory: Path, run: str | None = None) -> Material:
    """Raises DataDirError when there is no manifest or no ledger, ConfigError when it is another run's."""
    manifest = _manifest(directory)
    if manifest is None:
        raise DataDirError(
            f"{directory} knows no run",
            hint="give the data directory of a node, or what `intellect-node ledger export` wrote",
        )
    address = RunAddress(manifest.author, manifest.record.name)
    if run is not None and str(RunAddress.parse(run)) != str(address):
        raise ConfigError(f"{directory} belongs to the run {address}, not to {run}", hint="give its directory")
    if not has_ledger(directory):
        raise DataDirError(
            f"{directory} has no copy of the ledger",
            hint=f"have it fetched: --run {address} --bootstrap <multiaddr of a relay>",
        )
    heads = [_opened(directory / LEDGER / HEAD_FILE, Head), _opened(directory / HEAD_FILE, Head)]
    heads.append(_document(directory, "head", lambda data: open_envelope(data, Head)))
    found = [head for head in heads if head and head.record.run_id == manifest.id]
    signed = tuple(head for head in found if head.author == manifest.record.trainer_id)
    return Material(directory, manifest, signed, strange_heads=len(found) - len(signed))


def _manifest(directory: Path) -> Signed[Manifest] | None:
    if (directory / "run" / "manifest").exists():
        return load_run(directory)
    return (
        _opened(directory / MANIFEST, Manifest)
        or remembered_manifest(directory / SWARM_CACHE)
        or _document(directory, "manifest", lambda data: open_envelope(data, Manifest))
    )


def _opened(path: Path, kind: type[R]) -> Signed[R] | None:
    try:
        with path.open("rb") as file:
            return open_envelope(file.read(kind.MAX_BYTES + 2048), kind)
    except (OSError, ProtocolError):
        return None  # not here, or half written by a node that runs


def _document(directory: Path, name: str, opens: Callable[[bytes], Signed[R]]) -> Signed[R] | None:
    """One of a relay's own records."""
    path = directory / RELAY_STORE
    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT envelope FROM documents WHERE name = ?", (name,)).fetchone()
        return opens(bytes(row[0])) if row else None
    except (sqlite3.Error, ProtocolError) as error:
        raise DataDirError(f"the relay's store {path} cannot be read: {error}") from error
