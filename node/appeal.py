"""`intellect-node appeal`: ask for other validators' judgement, and say how far that is.

Works beside a running node and after one that was evicted: with the directory's key, through the relays that it knows.
The appeal is kept in the directory, so the same command again goes on with it instead of making a second one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from node.clock import now_ms
from node.datadir import make_directory
from node.dht_show import joined
from node.inference.outbox import Outbox
from node.inference.standing import answers_text
from node.logs import printable
from node.membership import MAX_ASKED, AppealRow
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm, remembered_manifest
from node.verdict_show import find_verdicts
from p2p.bridge import AioThread
from p2p.contacts import Contacts
from p2p.discovery import P2PNode
from p2p.http import HttpClient
from protocol.atomic import write_atomically
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import ConfigError, DataDirError, NodeError, ProtocolError, RefusedError, RelayError
from protocol.identity import Identity, PeerId
from protocol.records import Appeal, Manifest, Verdict
from protocol.run import RunAddress

APPEALS: Final = "appeals"
POLL_S: Final = 2.0
FIND_S: Final = 30.0
TOO_OLD: Final = "bad-clock"
"""How relays refuse what was signed more than a day ago."""
MAX_PAGES: Final = 64
"""Of a feed that is searched for what validators said."""
OUTBOX: Final = "outbox.sqlite"

Say = Callable[[str], None]


def find_rejections(data_dir: Path, what: str) -> list[Signed[Verdict]]:
    """Verdicts that reject a submission of this node, by its id or first digits; with `last` the newest of them all.

    Raises ConfigError or DataDirError.
    """
    if not (data_dir / OUTBOX).is_file():
        raise DataDirError(f"{data_dir} is no contributor's directory", hint="give the contributor's --data-dir")
    if what == "last":
        with closing(Outbox(data_dir / OUTBOX)) as outbox:
            rejections = outbox.rejections(MAX_ASKED)
    else:
        found = [one.verdict for one in find_verdicts(what, data_dir)]
        rejections = [one for one in found if one.record.outcome == "reject" and not one.record.appeal]
    if not rejections:
        raise ConfigError(
            "there is no rejection to appeal against" if what == "last" else f"no verdict here rejects {what}",
            hint="intellect-node verdict show last",
        )
    return rejections


def appeal(
    data_dir: Path,
    identity: Identity,
    rejections: Sequence[Signed[Verdict]],
    *,
    reason: str,
    bootstrap: Sequence[str],
    wait_s: float,
    say: Say,
) -> dict[str, Any]:
    """Appeal against the one of these that evicted this key, or the newest that counts, and wait for the answer.

    Raises RefusedError where none can be appealed against, RelayError where nobody could be asked.
    """
    manifest = remembered_manifest(data_dir / "swarm.cache")
    if manifest is None:
        raise DataDirError(f"{data_dir} remembers no run", hint="give the data directory of the contributor's node")

    async def ask(node: P2PNode, address: RunAddress, left_s: float) -> dict[str, Any]:
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            swarm = _swarm(node, address, manifest, http, identity)
            await nursery.start(swarm.run)
            await _meet(swarm, left_s)
            rejection = await _choose(swarm.clients, rejections, identity.peer_id)
            petition = _kept(data_dir, identity, rejection, reason)
            kept = data_dir / APPEALS / rejection.id.hex()
            try:
                await _hand_in(swarm, petition, say)
            except RefusedError as error:
                if error.code == TOO_OLD:  # signed long ago and never taken: the next one is a new one
                    kept.unlink(missing_ok=True)
                raise
            found = await _follow(swarm, petition, evicts=rejection.record.hard, wait_s=wait_s, say=say)
            if found["state"] == "undecided":
                for why in await _reasons(swarm.clients, identity.peer_id, petition):
                    say(why)
            if found["state"] == "undecided" and found["once_more"]:
                kept.unlink(missing_ok=True)  # the next one is another appeal
            nursery.cancel_scope.cancel()
        return found

    run = str(RunAddress(manifest.author, manifest.record.name))
    return joined(data_dir, run, bootstrap, ask, timeout_s=FIND_S)


async def _choose(
    clients: Sequence[RelayClient], rejections: Sequence[Signed[Verdict]], own: PeerId
) -> Signed[Verdict]:
    """What came after an eviction is in no ledger, and nobody appeals against it; nor against a verdict that is none of
    the ledger's, as a validator may sign several."""
    asked = list(dict.fromkeys(one.record.submission for one in rejections))[:MAX_ASKED]
    for client in clients:
        try:
            standing = await client.standing(asked)
            named = {one for row in standing.submissions if row.submission in asked for one in row.rejections}
            counting = [one for one in rejections if one.id in named] or await _fetch(client, named, own)
        except (RelayError, ProtocolError):
            continue
        evicting = [one for one in counting if one.record.submission == standing.evicted_for]
        if counting:
            return next(iter([*evicting, *counting]))
    return rejections[0]


async def _fetch(client: RelayClient, named: Collection[bytes], own: PeerId) -> list[Signed[Verdict]]:
    """Verdicts of a relay's feed about this key's work, by their ids."""
    if not named:
        return []
    said = [one async for one in _said(client, own)]
    return [one for one in said if one.id in named and one.record.outcome == "reject"]


async def _said(client: RelayClient, own: PeerId) -> AsyncIterator[Signed[Verdict]]:
    after = 0
    for _ in range(MAX_PAGES):
        items = await client.feed(after, kinds=[Verdict.KIND], about=own)
        for one in items:
            yield one.signed
        if not items:
            return
        after = items[-1].seq


def _kept(data_dir: Path, identity: Identity, rejection: Signed[Verdict], reason: str) -> Signed[Appeal]:
    """The appeal against a verdict: the one that was signed before, or a new one, which is kept."""
    path = data_dir / APPEALS / rejection.id.hex()
    try:
        return open_envelope(path.read_bytes(), Appeal)
    except FileNotFoundError:
        make_directory(path.parent)
    record = Appeal(
        run_id=rejection.record.run_id,
        submission=rejection.record.submission,
        verdict=rejection.id,
        reason=reason,
        issued_at_ms=now_ms(),
    )
    envelope = seal(record, identity)
    write_atomically(path, envelope)
    return open_envelope(envelope, Appeal)


def _swarm(
    node: P2PNode, address: RunAddress, manifest: Signed[Manifest], http: HttpClient, identity: Identity
) -> Swarm:
    return Swarm(
        address,
        http,
        contacts=Contacts(identity, address.digest),
        find_relays=node.find_relays,
        find_manifest=partial(node.find_run, address),
        board=StatusBoard(role="appeal", peer_id=identity.peer_id, run=str(address)),
        manifest=manifest,
        follow_head=False,
    )


async def _meet(swarm: Swarm, find_s: float) -> None:
    with trio.move_on_after(find_s):
        while not swarm.clients:  # noqa: ASYNC110
            await trio.sleep(0.2)
    if not swarm.clients:
        raise RelayError("no relay of the run was found", hint="check --bootstrap and this computer's network")


async def _follow(swarm: Swarm, petition: Signed[Appeal], *, evicts: bool, wait_s: float, say: Say) -> dict[str, Any]:
    stage = _Stage("taken")
    with trio.move_on_after(wait_s):
        while stage.name not in ("refused", "reinstated", "granted", "undecided"):
            await trio.sleep(POLL_S)
            latest = await _stage(swarm.clients, petition, evicts=evicts)
            if latest != stage:
                say(latest.text)
            stage = latest
    return {
        "appeal": petition.id.hex(), "submission": petition.record.submission.hex(), "state": stage.name, **stage.found
    }  # fmt: skip


@dataclass(frozen=True)
class _Stage:
    """How far an appeal is, with its row once it is in the ledger."""

    name: str
    row: AppealRow | None = None

    @property
    def text(self) -> str:
        given_up = self.name == "undecided" and self.row is not None and not self.row.once_more
        said = SAID["given up" if given_up else self.name]
        return f"{said} ({answers_text(self.row)})" if self.row is not None else said

    @property
    def found(self) -> dict[str, Any]:
        """What the command says of the answers."""
        if (row := self.row) is None:
            return {}
        answers = {"answers": {"accept": row.accepts, "reject": row.rejects, "needed": row.needed}}
        return answers | ({"once_more": row.once_more} if self.name == "undecided" else {})


SAID: Final = {
    "taken": "a relay has it; the trainer writes it into the ledger",
    "open": "it is in the ledger, and waits for validators that have not judged the submission",
    "granted": "granted: other validators accept the submission, and it earns its credits",
    "returning": "granted; the trainer takes the eviction back",
    "reinstated": "granted, and the eviction is taken back with what it took: start the node again",
    "refused": "refused: other validators reject it too; the next appeal has to wait",
    "undecided": "too few validators that were left agree; it may be filed once more: run the same command again",
    "given up": "too few validators that were left agree, and it cannot be filed again: the rejection stays",
}


async def _hand_in(swarm: Swarm, petition: Signed[Appeal], say: Say) -> None:
    """To every relay, so that one that stays silent cannot lose it. Raises the refusal where none takes it."""
    problem: NodeError | None = None
    taken = 0
    for client in swarm.clients:
        try:
            await client.post_appeal(petition.data)
            taken += 1
        except (RefusedError, RelayError, ProtocolError) as error:
            problem = error
    if problem is not None and not taken:
        raise problem
    about = petition.record.submission.hex()[:12]
    say(f"{taken} {'relay has' if taken == 1 else 'relays have'} the appeal about {about}")


async def _reasons(clients: Sequence[RelayClient], own: PeerId, petition: Signed[Appeal]) -> list[str]:
    """What those who could not tell say of it, from the newest verdicts of the first relay that answers."""
    for client in clients:
        try:
            answers = [one async for one in _said(client, own) if one.record.appeal == petition.id]
        except (RelayError, ProtocolError):
            continue
        return [f"validator {one.author.short}: {printable(one.record.reason)}" for one in answers]
    return []


async def _stage(clients: Sequence[RelayClient], petition: Signed[Appeal], *, evicts: bool) -> _Stage:
    """How far an appeal is, by the first relay that answers. `evicts`: it is against a hard rejection."""
    for client in clients:
        try:
            standing = await client.standing()
        except (RelayError, ProtocolError):
            continue
        row = next((row for row in standing.appeals if row.appeal == petition.id), None)
        if row is None or row.state != "granted" or not evicts:
            return _Stage("taken" if row is None else row.state, row)
        returning = standing.standing == "evicted" and standing.evicted_for == petition.record.submission
        return _Stage("returning" if returning else "reinstated", row)
    return _Stage("taken")
