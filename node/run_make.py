"""`run create` as the command line means it: the operator's key, the directory, the run; all of them or nothing.

A key is written only when nothing else can fail any more, so that a wrong recipe leaves none that nobody backs up.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from node.homes import KEY_FILE, NEW, default_home, homes_root, named_home, say_about, settle
from node.identity import keep_new_identity, load_identity
from node.run_create import CreatedRun, create_run, require_validators
from protocol.errors import ConfigError, MalformedError
from protocol.identity import KEY_BYTES, Identity, PeerId
from protocol.run import RunAddress
from trainer.recipe import load_recipe

_log = logging.getLogger(__name__)

ROLE: Final = "trainer"


@dataclass(frozen=True)
class RunOrder:
    """What an operator asked for."""

    recipe: str
    validators: Sequence[PeerId]
    name: str | None = None
    data_dir: Path | None = None


@dataclass(frozen=True)
class MadeRun:
    """A run and where its trainer's state lies."""

    run: CreatedRun
    home: Path


def make_run(order: RunOrder, *, issued_at_ms: int, passphrase: str, environ: Mapping[str, str]) -> MadeRun:
    """Make the run, its directory and, where there is none, the operator's key. Raises NodeError and leaves nothing."""
    require_validators(order.validators)
    name = order.name or load_recipe(order.recipe).name
    given = named_home(order.data_dir, environ)
    found = _key_in(given or homes_root(environ) / NEW, passphrase)
    identity = found or Identity(secrets.token_bytes(KEY_BYTES))
    address = _address(identity.peer_id, name)
    home = given or default_home(ROLE, address, environ)
    with _nothing_left(home, moved_from=homes_root(environ) / NEW if found and not given else None):
        settle(home, environ)
        made = create_run(
            order.recipe,
            home,
            identity=identity,
            validators=order.validators,
            issued_at_ms=issued_at_ms,
            name=name,
            keep_key=partial(keep_new_identity, identity, home, passphrase=passphrase) if found is None else _nothing,
        )
        say_about(home, role=ROLE, run=str(made.address))
    return MadeRun(made, home)


def _nothing() -> None:
    """A key that was there stays as it is."""


def _key_in(directory: Path, passphrase: str) -> Identity | None:
    path = directory / KEY_FILE
    return load_identity(path, passphrase=passphrase) if path.exists() or path.is_symlink() else None


def _address(operator: PeerId, name: str) -> RunAddress:
    try:
        return RunAddress.parse(f"{operator}/{name}")
    except MalformedError as error:
        raise ConfigError(
            f"{name[:80]!r} is no name for a run", hint="give --name small letters, digits, dots and dashes, at most 64"
        ) from error


@contextmanager
def _nothing_left(home: Path, *, moved_from: Path | None) -> Iterator[None]:
    """Undo what was begun in a directory that was not there before."""
    existed = home.exists()
    try:
        yield
    except BaseException:
        if moved_from is not None and home.exists() and not moved_from.exists():
            shutil.rmtree(home / "run", ignore_errors=True)
            home.rename(moved_from)
        elif not existed:
            shutil.rmtree(home, ignore_errors=True)
        raise
