"""The validator role: judge every submission that a relay announces, sign what was measured, tell every relay.

Fetching and waiting are here; reading hostile files and running the checks are the children's work
(node.compute.reader, node.validator.compute). Whatever goes wrong on this side is `undecided`, which costs nobody.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio

from node.clock import now_ms
from node.compute.process import ComputeProcess
from node.compute.reader import RolloutReader
from node.feeds import Feeds
from node.policies import Policies
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from node.validator.docket import Docket
from node.version import SOFTWARE
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import ChecksumError, ComputeError, MalformedError, ProtocolError, RefusedError, RelayError
from protocol.identity import Identity
from protocol.records import CheckResult, Submission, Verdict

log = logging.getLogger(__name__)

POLICY_DEADLINE_S = 10.0
READ_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
JUDGE_TIMEOUT_S = 1800.0
POST_RETRY_S = 2.0
REOPEN_S = 5.0


class Findings(msgspec.Struct):
    """What the compute process says of a submission; becomes a verdict once signed."""

    outcome: Literal["accept", "reject", "undecided"]
    hard: bool
    reason: str
    checks: list[CheckResult] = []
    mean_reward: float = 0.0
    output_tokens: int = 0
    engine: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class ValidatorParts:
    """What the role is built from; node.app makes and starts them."""

    identity: Identity
    swarm: Swarm
    policies: Policies
    compute: ComputeProcess
    reader: RolloutReader
    docket: Docket
    feeds: Feeds
    board: StatusBoard
    work_dir: Path


class ValidatorRole:
    """A validator's node. `run` ends when the run is finished."""

    def __init__(self, parts: ValidatorParts) -> None:
        self._p = parts
        self._manifest = parts.swarm.manifest
        self._limits = {
            "max_rollouts": self._manifest.record.rollouts_per_submission,
            "max_tokens": self._manifest.record.model.max_model_len,
        }
        self._loaded: set[bytes] = set()
        self._loaded_restarts = 0
        self._new_verdict = trio.Event()
        self._seconds = 0.0

    async def run(self) -> None:
        self._p.work_dir.mkdir(parents=True, exist_ok=True)
        self._show()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._judge_loop)
            nursery.start_soon(self._post_loop)
            await self._p.swarm.wait_finished()
            self._p.board.state("finished", "the run is finished")
            nursery.cancel_scope.cancel()

    async def leave(self, deadline_s: float) -> None:
        """Post what is judged, within a deadline. The rest stays in the docket for the next start."""
        self._p.board.state("stopping", "posting the last verdicts")
        with trio.move_on_after(deadline_s):
            await self._post_everywhere()

    async def _judge_loop(self) -> None:
        while True:
            self._p.board.waiting("submissions at the relays")
            with trio.move_on_after(REOPEN_S) as idle:
                client, item = await self._p.feeds.next()
            if idle.cancelled_caught:
                await self._reopen()
                continue
            if isinstance(item.signed.record, Submission) and not self._p.docket.judged(item.signed.id):
                self._p.docket.open(item.signed, client.peer_id)
                await self._consider(client, item.signed)
            self._p.feeds.done(client, item)

    async def _reopen(self) -> None:
        """Try again what could not be fetched: its relay may have come back."""
        for relay, submission in self._p.docket.opened():
            client = next((one for one in self._p.swarm.clients if one.peer_id == relay), None)
            if client is not None:
                await self._consider(client, submission)

    async def _consider(self, client: RelayClient, submission: Signed[Submission]) -> None:
        record = submission.record
        if self._p.docket.judged(submission.id):
            return
        self._p.board.working(f"judging submission {record.index} of step {record.step} by {submission.author.short}")
        began = time.monotonic()
        findings = await self._findings(client, submission)
        if findings is None:
            return
        self._p.docket.add(open_envelope(seal(self._verdict(submission, findings), self._p.identity), Verdict))
        self._seconds += time.monotonic() - began
        log.info(
            "judged step=%d index=%d contributor=%s outcome=%s reason=%r",
            *(record.step, record.index, submission.author.short, findings.outcome, findings.reason),
        )
        self._show()
        self._new_verdict.set()
        self._new_verdict = trio.Event()

    async def _findings(self, client: RelayClient, submission: Signed[Submission]) -> Findings | None:
        """The measured result; None when the file's relay is gone, so that another relay's copy is judged instead."""
        try:
            if not await self._load(submission.record.checkpoint):
                return _undecided(f"no relay had checkpoint {submission.record.checkpoint_step} any more")
            path = await self._fetch(client, submission)
            if path is None:
                return None
            try:
                rollouts = await self._p.reader.read(path, timeout_s=READ_TIMEOUT_S, **self._limits)
            finally:
                path.unlink(missing_ok=True)
            return await self._judge(submission, rollouts)
        except ChecksumError:
            return None
        except MalformedError as error:
            return Findings("reject", True, f"schema: {error.message}"[:1000])
        except ComputeError as error:
            self._loaded.clear()
            return _undecided(f"the validator's engine failed: {error.message[:500]}")

    async def _judge(self, submission: Signed[Submission], rollouts: list[dict[str, Any]]) -> Findings:
        found = await self._p.compute.call(
            "judge",
            timeout_s=JUDGE_TIMEOUT_S,
            submission=msgspec.msgpack.encode(submission.record),
            manifest=msgspec.msgpack.encode(self._manifest.record),
            run_id=self._manifest.id,
            contributor=submission.author.public_key,
            rollouts=rollouts,
        )
        return msgspec.convert(found, Findings)

    async def _load(self, checkpoint: bytes) -> bool:
        if self._loaded_restarts != self._p.compute.restarts:
            self._loaded.clear()
            self._loaded_restarts = self._p.compute.restarts
        if checkpoint in self._loaded:
            return True
        path = await self._p.policies.fetch(checkpoint, deadline_s=POLICY_DEADLINE_S)
        if path is None:
            return False
        keep = self._manifest.record.batch.max_staleness + 2
        answer = await self._p.compute.call(
            "load", timeout_s=LOAD_TIMEOUT_S, checkpoint_dir=str(path), checkpoint_id=checkpoint, keep=keep
        )
        self._loaded = set(answer["held"])
        return True

    async def _fetch(self, client: RelayClient, submission: Signed[Submission]) -> Path | None:
        path = self._p.work_dir / f"{submission.id.hex()}.parquet"
        try:
            await client.file(submission, path)
        except RefusedError as error:
            log.warning("file relay=%s code=%s", client.peer_id.short, error.code)
            return None
        except (RelayError, ProtocolError) as error:
            log.warning("file relay=%s error=%r", client.peer_id.short, error.message)
            self._p.swarm.failed(client.peer_id)
            return None
        return path

    def _verdict(self, submission: Signed[Submission], findings: Findings) -> Verdict:
        head = self._p.swarm.head
        return Verdict(
            run_id=self._manifest.id,
            submission=submission.id,
            contributor=submission.author.public_key,
            step=submission.record.step,
            outcome=findings.outcome,
            hard=findings.hard,
            reason=findings.reason,
            checks=tuple(findings.checks),
            mean_reward=findings.mean_reward,
            engine=findings.engine,
            dtype=findings.dtype,
            software=SOFTWARE,
            head_sequence=head.record.sequence if head else 0,
            issued_at_ms=now_ms(),
        )

    async def _post_loop(self) -> None:
        while True:
            changed = self._new_verdict
            await self._post_everywhere()
            with trio.move_on_after(POST_RETRY_S):
                await changed.wait()

    async def _post_everywhere(self) -> None:
        async with trio.open_nursery() as nursery:
            for client in self._p.swarm.clients:
                nursery.start_soon(self._post_to, client)

    async def _post_to(self, client: RelayClient) -> None:
        for submission, envelope in self._p.docket.unposted(client.peer_id):
            try:
                await client.post_verdict(envelope)
            except RefusedError as error:
                log.warning("post verdict relay=%s code=%s error=%r", client.peer_id.short, error.code, error.message)
                if error.code in ("no-manifest", "busy"):
                    return
            except (RelayError, ProtocolError) as error:
                log.info("post verdict relay=%s error=%r", client.peer_id.short, error.message)
                return
            self._p.docket.posted(submission, client.peer_id)

    def _show(self) -> None:
        outcomes = self._p.docket.outcomes()
        self._p.board.update(accepted=outcomes.get("accept", 0), rejected=self._p.docket.rejections())
        self._p.board.details(judged=sum(outcomes.values()), undecided=outcomes.get("undecided", 0))
        self._p.board.details(seconds=round(self._seconds, 2))


def _undecided(reason: str) -> Findings:
    return Findings("undecided", False, reason)
