"""What an audit does with files at hand: the silent bits of batches, and a sample of verdicts judged again.

Files are read in the memory-limited child that validators use, verdicts are made by a validator's own compute process,
with the policies of the data directory. What only a validator knows at the time (others' answers, a node's whole
history, lateness) is not judged again, and said so.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from node.compute.process import ComputeProcess
from node.compute.reader import RolloutReader
from node.held import HeldPolicy, held_policy
from node.ledger.audit import Audit
from node.ledger.material import Material
from node.trainer.gather import silent_groups_of
from protocol.batches import silent_groups
from protocol.errors import ComputeError, MalformedError, ModelError
from protocol.identity import PeerId
from protocol.ledger import LedgerSubmission
from protocol.records import Manifest, Submission

READ_TIMEOUT_S: Final = 60.0
LOAD_TIMEOUT_S: Final = 600.0
JUDGE_TIMEOUT_S: Final = 1800.0
_NOT_ALONE: Final = frozenset({"duplicate", "history", "policy", "late", "internal"})
"""Reasons of verdicts that need more than the file, the policy and the manifest."""


@dataclass(frozen=True)
class AtHand:
    """A submission of the ledger and its file."""

    key: bytes
    one: LedgerSubmission
    path: Path


def files_at_hand(audit: Audit, material: Material) -> list[AtHand]:
    """Submissions of the ledger whose files lie in the directory, in ledger order; only those as signed."""
    found = []
    for key, path in material.files():
        one = audit.state.submissions.get(key)
        if one is not None and _is_as_signed(path, one.record):
            found.append(AtHand(key, one, path))
    return sorted(found, key=lambda each: each.one.place)


def sample(files: Sequence[AtHand], count: int, *, tip: bytes) -> list[AtHand]:
    """So many of them, chosen by the ledger's tip: the same for everybody with the same ledger and files."""
    return sorted(files, key=lambda each: hashlib.sha256(tip + each.key).digest())[:count]


def _stands_alone(one: LedgerSubmission) -> bool:
    """Whether it was settled by what its file shows."""
    reasons = {
        said.record.reason.partition(":")[0] for said in one.verdicts.values() if said.record.outcome == "reject"
    }
    return one.state == "accepted" or (one.state == "rejected" and not reasons & _NOT_ALONE)


def recheck(audit: Audit, material: Material, *, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Breaches go to the audit; what was judged again, and notes on what could not be, are returned."""
    files = files_at_hand(audit, material)  # in this thread: SQLite answers no other
    if not files:
        return [], ["no rollout file of the ledger is at hand: silent groups and verdicts are taken as they are"]
    return trio.run(_recheck, audit, material, files, count)


async def _recheck(
    audit: Audit, material: Material, files: Sequence[AtHand], count: int
) -> tuple[list[dict[str, Any]], list[str]]:
    with tempfile.TemporaryDirectory(prefix="intellect-recheck-") as scratch:
        async with _Bench(Path(scratch), material.manifest.record).open() as bench:
            notes = await _check_silent(audit, files, bench)
            policies = _policies(material, files)
            can = [each for each in files if each.one.record.checkpoint in policies and _stands_alone(each.one)]
            chosen = sample(can, count, tip=audit.state.tip)
            again = [await _judge_again(audit, each, bench, policies[each.one.record.checkpoint]) for each in chosen]
    if count:
        notes.append(f"{len(again)} verdicts made again; files and policies at hand would do for {len(can)}")
    return again, notes


def _policies(material: Material, files: Sequence[AtHand]) -> dict[bytes, HeldPolicy]:
    """Those that submissions at hand were made with, as far as they are here."""
    wanted = {each.one.record.checkpoint for each in files}
    found = {checkpoint: held_policy(material.directory, material.manifest.id, checkpoint) for checkpoint in wanted}
    return {checkpoint: policy for checkpoint, policy in found.items() if policy is not None}


class _Bench:
    """The reader, and the judge once one is needed."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        log_path = directory / "recheck.log"
        self._manifest = manifest
        self._reader = RolloutReader(log_path=log_path)
        self._judge = ComputeProcess("node.validator.compute", name="recheck", log_path=log_path)
        self._nursery: trio.Nursery | None = None
        self._judging = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[_Bench]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._reader.run)
            self._nursery = nursery
            yield self
            nursery.cancel_scope.cancel()

    async def rows(self, path: Path) -> list[dict[str, Any]]:
        """Raises MalformedError, ComputeError."""
        return await self._reader.read(
            path,
            timeout_s=READ_TIMEOUT_S,
            max_rollouts=self._manifest.rollouts_per_submission,
            max_tokens=self._manifest.model.max_model_len,
        )

    async def judge(self, each: AtHand, policy: HeldPolicy, *, run_id: bytes) -> dict[str, Any]:
        """What a validator finds. Raises MalformedError, ComputeError, ModelError."""
        if not self._judging and self._nursery is not None:
            await self._nursery.start(self._judge.run)
            self._judging = True
        record = each.one.record
        await self._judge.call(
            "load", timeout_s=LOAD_TIMEOUT_S, checkpoint_dir=str(policy.path), checkpoint_id=record.checkpoint
        )
        found: dict[str, Any] = await self._judge.call(
            "judge",
            timeout_s=JUDGE_TIMEOUT_S,
            submission=msgspec.msgpack.encode(record),
            manifest=msgspec.msgpack.encode(self._manifest),
            run_id=run_id,
            contributor=each.one.author.public_key,
            rollouts=await self.rows(each.path),
        )
        return found


async def _check_silent(audit: Audit, files: Sequence[AtHand], bench: _Bench) -> list[str]:
    """Whether batches leave out the groups without signal, and no others; as far as files are at hand."""
    manifest = audit.state.manifest
    if not manifest.batch.signal_only:
        return []
    checked = 0
    for each in files:
        if each.one.used_in is None:
            continue
        try:
            found = silent_groups_of(manifest, await bench.rows(each.path))
        except (MalformedError, ComputeError) as error:
            audit.breaches.add("silent", manifest.trainer_id, f"trained on a file that cannot be read: {error.message}")
            continue
        checked += 1
        if found != _said_silent(audit, each):
            name = each.key.hex()[:12]
            what = (
                f"step {each.one.used_in} leaves other groups of submission {name} out than its file has without signal"
            )
            audit.breaches.add("silent", manifest.trainer_id, what, entry=each.one.place)
    return [f"silent groups were compared with {checked} files"]


def _said_silent(audit: Audit, each: AtHand) -> tuple[bool, ...]:
    batch = audit.state.committed[each.one.used_in or 0]
    groups = audit.state.manifest.rollout.prompts_per_submission
    start = batch.submissions.index(each.key) * groups
    return tuple(silent_groups(audit.state.manifest, batch)[start : start + groups])


async def _judge_again(audit: Audit, each: AtHand, bench: _Bench, policy: HeldPolicy) -> dict[str, Any]:
    row: dict[str, Any] = {"submission": each.key.hex(), "contributor": str(each.one.author), "ledger": each.one.state}
    try:
        found = await bench.judge(each, policy, run_id=audit.state.run_id)
    except MalformedError as error:
        found = {"outcome": "reject", "hard": True, "reason": f"schema: {error.message}"}
    except (ComputeError, ModelError) as error:
        return {**row, "skipped": f"it could not be judged here: {error.message[:200]}"}
    _compare(audit, each, found)
    return {**row, "here": found["outcome"], "hard": found["hard"], "reason": found["reason"]}


def _compare(audit: Audit, each: AtHand, found: dict[str, Any]) -> None:
    """A verdict that came out differently is a breach; one that could not be made here is none."""
    state, outcome, name = each.one.state, found["outcome"], each.key.hex()[:12]
    if outcome == "undecided" or {"accept": "accepted", "reject": "rejected"}[outcome] == state:
        return
    who = [peer for peer, one in each.one.verdicts.items() if one.record.outcome[:6] == state[:6]]
    undrawn = state == "accepted" and not any(one.record.draw.drawn for one in each.one.verdicts.values())
    if undrawn:
        what = f"submission {name} was not drawn for the costly checks, and fails here: {found['reason']}"
        audit.breaches.add("undrawn", each.one.author, what, entry=each.one.place)
        return
    for peer in who or list[PeerId | None]([None]):
        what = f"submission {name} is {state} in the ledger; here: {outcome} {found['reason']}"
        audit.breaches.add("verdict", peer, what, entry=each.one.place)


def _is_as_signed(path: Path, record: Submission) -> bool:
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        return digest == record.sha256 and path.stat().st_size == record.size
    except OSError:
        return False
