"""The validator role: judge every submission that a relay announces, sign what was measured, tell every relay.

Fetching, waiting and deciding what a submission must go through are here; reading hostile files and running the checks
are the children's work (node.compute.reader, node.validator.screening, node.validator.compute). Cases go on side by
side, so none waits for another's policy, file or beacon. Whatever goes wrong on this side is `undecided`, which costs
nobody.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from node.clock import now_ms
from node.compute.process import ComputeProcess
from node.compute.reader import RolloutReader
from node.feeds import Feeds
from node.ledger.follow import LedgerFollower
from node.policies import Policies
from node.relay_client import FeedItem, RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from node.validator import own_faults
from node.validator.again import SecondLooks
from node.validator.appeals import AppealCases
from node.validator.bench import Bench
from node.validator.cases import Case, Cases
from node.validator.docket import Docket
from node.validator.draws import Draws
from node.validator.duplicates import Answer, AnswerIndex, Likeness, Origin
from node.validator.findings import Findings, NotYet, Screened, undecided, with_limits
from node.validator.own_faults import OWN_FAULTS, NoRoomError, OwnFaults, require_room
from node.validator.policy_fault import policy_fault
from node.validator.posting import Poster
from node.validator.suspicion import Suspicions
from node.version import SOFTWARE
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import ComputeError, DataDirError, MalformedError, ProtocolError, RefusedError, RelayError
from protocol.identity import Identity
from protocol.manifest import max_file_bytes
from protocol.records import Draw, Head, Receipt, Submission, Verdict

log = logging.getLogger(__name__)

POLICY_DEADLINE_S: Final = 600.0
READ_TIMEOUT_S: Final = 60.0
SCREEN_TIMEOUT_S: Final = 300.0
LOAD_TIMEOUT_S: Final = 600.0
JUDGE_TIMEOUT_S: Final = 1800.0
RETRY_S: Final = 0.5
GIVE_UP_S: Final = 300.0
"""A case whose file or policy could not be had for this long is closed as undecided."""
FILES_IN_MEMORY: Final = 3
LOOK_AGAIN_S: Final = 60.0
"""The same where it was closed so before: what has come is there by now. Its file is asked for once, for as long."""
CRASHES_FORGIVEN: Final = 1
"""How often a case is tried again after the process that computed it failed."""


@dataclass(frozen=True)
class ValidatorParts:
    """What the role is built from; node.assembly makes and starts them."""

    identity: Identity
    swarm: Swarm
    policies: Policies
    compute: ComputeProcess
    screening: ComputeProcess
    reader: RolloutReader
    docket: Docket
    answers: AnswerIndex
    suspicions: Suspicions
    ledger: LedgerFollower
    feeds: Feeds
    board: StatusBoard
    work_dir: Path


@dataclass
class _Totals:
    seconds: float = 0.0
    drawn: int = 0
    not_drawn: int = 0
    working_on: list[str] = field(default_factory=list)


class ValidatorRole:
    """A validator's node. `run` ends when the run is finished."""

    def __init__(self, parts: ValidatorParts) -> None:
        self._p = parts
        self._manifest = parts.swarm.manifest
        self._limits = {
            "max_rollouts": self._manifest.record.rollouts_per_submission,
            "max_tokens": self._manifest.record.model.max_model_len,
        }
        self._cases = Cases(parts.docket, time.monotonic)
        self._draws = Draws(parts.ledger.state)
        own = parts.identity.peer_id
        self._bench = Bench(own, parts.ledger.state, self._draws)
        self._appeals = AppealCases(own, parts.ledger.state, parts.docket, self._draws)
        self._again = SecondLooks(parts.docket, parts.ledger.state, self._bench)
        self._loaded: set[bytes] = set()
        self._loaded_restarts = 0
        self._desk = trio.CapacityLimiter(FILES_IN_MEMORY)
        self._second_desk = trio.CapacityLimiter(1)  # second looks take no first one's place
        self._downloads: set[bytes] = set()
        self._own_faults = OwnFaults()
        self._changed = trio.Event()
        self._poster = Poster(parts.swarm, parts.docket)
        self._totals = _Totals()

    async def run(self) -> None:
        self._p.work_dir.mkdir(parents=True, exist_ok=True)
        self._p.swarm.on_head(self._hear)
        if self._p.swarm.head is not None:
            self._draws.hear(self._p.swarm.head)
        self._show()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_loop)
            nursery.start_soon(self._case_loop)
            nursery.start_soon(self._poster.run)
            nursery.start_soon(self._ledger_loop)
            await self._p.swarm.wait_finished()
            self._p.board.state("finished", "the run is finished")
            nursery.cancel_scope.cancel()

    async def leave(self, deadline_s: float) -> None:
        """Post what is judged, within a deadline. The rest stays in the docket for the next start."""
        self._p.board.state("stopping", "posting the last verdicts")
        with trio.move_on_after(deadline_s):
            await self._poster.post()

    # What comes in.

    def _hear(self, head: Signed[Head]) -> None:
        self._draws.hear(head)
        self._news()

    def _news(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _ledger_loop(self) -> None:
        while True:
            await self._p.ledger.wait_changed()
            self._news()

    async def _take_loop(self) -> None:
        """Open a case for every submission as soon as it is seen: what was seen before its beacon can be drawn."""
        while True:
            client, item = await self._p.feeds.next()
            while not self._taken(item):
                await self._own_faults.wait(self._p.board)
            self._p.feeds.done(client, item)

    def _taken(self, item: FeedItem) -> bool:
        try:
            self._take(item)
        except DataDirError as error:
            log.warning("submission not noted, own fault error=%r", error.message)
            self._own_faults.met(error)
            return False
        return True

    def _take(self, item: FeedItem) -> None:
        submission, receipt = item.signed, item.receipt
        if isinstance(submission.record, Verdict):
            self._bench.heard(submission)
            return self._news()
        if receipt is None or not isinstance(submission.record, Submission) or self._p.docket.settled(submission.id):
            return
        self._p.docket.open(submission, receipt, seen_sequence=self._draws.newest_sequence)
        self._cases.noticed(submission.id, receipt.author)
        self._news()

    # Cases.

    async def _case_loop(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._cases.excuse(await self._own_faults.wait(self._p.board))
                changed = self._changed
                try:
                    self._begin(nursery)
                except DataDirError as error:
                    self._own_faults.met(error)
                self._show_work()
                with trio.move_on_after(min(RETRY_S, max(0.01, self._cases.next_due_s()))):
                    await changed.wait()

    def _begin(self, nursery: trio.Nursery) -> None:
        """Work on every case whose turn it is. Raises DataDirError; what was begun goes on."""
        relays = [client.peer_id for client in self._p.swarm.clients]
        appeals, again = self._appeals.startable(relays), self._again.startable(relays)
        for case in chain(self._cases.startable(self._draw), appeals, again):
            nursery.start_soon(self._work, case, nursery)

    def _draw(self, case: Case, waited_s: float) -> Draw | None:
        """How to check a case; None while it is not known, or not known whether it is this validator's to judge."""
        turn = self._bench.turn(case.opened, waited_s=waited_s)
        admitted = self._p.ledger.state.admitted(case.submission.author)
        if turn == "never" or (not admitted and waited_s > GIVE_UP_S):
            self._p.docket.dismiss(case.submission.id)
            self._cases.closed(case)
        if turn != "now" or not admitted:
            return None
        return self._draws.draw(case.opened, waited_s=waited_s)

    async def _work(self, case: Case, downloads: trio.Nursery) -> None:
        """Bring a case as far as it goes now: to its verdict, or to the next time it is due."""
        record = case.submission.record
        label = f"submission {record.index} of step {record.step} by {case.submission.author.short}"
        self._totals.working_on.append(label)
        try:
            findings = await self._attempt(case, downloads)
            if findings is not None:
                self._conclude(case, findings)
        except DataDirError as error:
            self._pause(case, error)
        finally:
            case.busy = False
            self._totals.working_on.remove(label)
        self._news()

    async def _attempt(self, case: Case, downloads: trio.Nursery) -> Findings | None:
        """The measured result; None when the case must be tried again later."""
        try:
            return await self._findings(case, downloads)
        except NotYet as wait:
            if case.again and wait.from_others:  # the look is over; the next one asks again
                return undecided(f"{wait.what} did not come when it was asked for again")
            return self._put_off(case, wait.what, coming=wait.coming and not case.again)
        except MalformedError as error:
            return Findings("reject", True, f"schema: {error.message}"[:1000])
        except OWN_FAULTS as error:
            return self._pause(case, error)
        except ComputeError as error:
            self._loaded.clear()
            case.crashes += 1
            log.warning("case step=%d crashes=%d error=%r", case.submission.record.step, case.crashes, error.message)
            if case.crashes > CRASHES_FORGIVEN:
                return undecided(f"internal: the validator's engine failed: {error.message[:500]}")
            return self._put_off(case, "the engine to recover")
        except Exception as error:
            # Whatever a submission does to this program, the program goes on and the contributor is told.
            log.exception("case step=%d failed", case.submission.record.step)
            return undecided(f"internal: {type(error).__name__}: {str(error)[:200]}", passing=False)

    def _pause(self, case: Case, error: Exception) -> Findings | None:
        """Put a case off, and with it whatever else would begin: the contributor has no part in it."""
        log.warning("case step=%d put off, own fault error=%r", case.submission.record.step, str(error))
        if not isinstance(error, NoRoomError):
            self._own_faults.met(error)
        case.began = time.monotonic()
        return self._put_off(case, "this validator's computer", coming=True, for_s=own_faults.RETRY_S)

    def _put_off(
        self, case: Case, waits_for: str, *, coming: bool = False, for_s: float | None = None
    ) -> Findings | None:
        patience_s = LOOK_AGAIN_S if case.again else GIVE_UP_S
        if not coming and time.monotonic() - case.began > patience_s:
            return undecided(f"{waits_for} did not come within {patience_s:g} s")
        case.due = time.monotonic() + (RETRY_S if for_s is None else for_s)
        case.relays.rotate(-1)
        return None

    async def _findings(self, case: Case, downloads: trio.Nursery) -> Findings:
        """Raises NotYet, MalformedError when the file is at fault, ComputeError when a child is, OWN_FAULTS."""
        if (fault := self._policy_fault(case)) is not None:
            return fault
        size, limit = case.submission.record.size, max_file_bytes(self._manifest.record)
        if size > limit:  # no honest relay takes it, and looking for its room would keep everybody else waiting
            raise MalformedError(f"a rollout file of {size} bytes; this run's files have at most {limit}")
        require_room(self._p.work_dir, size)
        if (fault := await self._policy_missing(case, downloads)) is not None:
            return fault
        path = await self._fetch(case)
        try:
            async with self._second_desk if case.again else nullcontext(), self._desk:
                rollouts = await self._p.reader.read(path, timeout_s=READ_TIMEOUT_S, **self._limits)
                return await self._examine(case, rollouts)
        finally:
            path.unlink(missing_ok=True)

    def _policy_fault(self, case: Case) -> Findings | None:
        head, held = self._p.swarm.head, self._p.policies.step_of(case.submission.record.checkpoint)
        oldest = head.record.oldest_checkpoint_step if head else 0
        return policy_fault(case, self._p.ledger.state, held=held, oldest=oldest)

    async def _policy_missing(self, case: Case, downloads: trio.Nursery) -> Findings | None:
        """Nothing when the policy is here; a verdict at once when nobody has it. Raises NotYet while it is fetched."""
        record, head = case.submission.record, self._p.swarm.head
        if self._p.policies.path(record.checkpoint) is not None:
            return None
        if record.checkpoint in self._downloads or head is None or record.checkpoint == head.record.checkpoint:
            raise NotYet(f"policy: checkpoint {record.checkpoint_step}", coming=True)
        offered = await self._p.policies.offered(record.checkpoint)
        if offered is False and record.checkpoint_step <= head.record.checkpoint_step:
            return undecided(f"policy: no relay knows the checkpoint {record.checkpoint.hex()[:12]} that it names")
        if offered:
            self._downloads.add(record.checkpoint)
            downloads.start_soon(self._download, record.checkpoint)
        raise NotYet(f"policy: checkpoint {record.checkpoint_step}")

    async def _download(self, checkpoint: bytes) -> None:
        try:
            await self._p.policies.fetch(checkpoint, deadline_s=POLICY_DEADLINE_S)
        finally:
            self._downloads.discard(checkpoint)
        self._news()

    async def _fetch(self, case: Case) -> Path:
        """The file, from the first of its relays that gives it. Raises NotYet."""
        path = self._p.work_dir / f"{case.submission.id.hex()}.parquet"
        with trio.move_on_after(LOOK_AGAIN_S if case.again else math.inf):
            for relay in list(case.relays):
                client = next((one for one in self._p.swarm.clients if one.peer_id == relay), None)
                if client is not None and await self._fetch_from(client, case.submission, path):
                    return path
        raise NotYet("file: the rollouts, from a relay that said it has them,", from_others=True)

    async def _fetch_from(self, client: RelayClient, submission: Signed[Submission], path: Path) -> bool:
        try:
            await client.file(submission, path)
        except RefusedError as error:
            log.warning("file relay=%s code=%s", client.peer_id.short, error.code)
            return False
        except (RelayError, ProtocolError) as error:
            log.warning("file relay=%s error=%r", client.peer_id.short, error.message)
            self._p.swarm.failed(client.peer_id)
            return False
        return True

    async def _examine(self, case: Case, rollouts: list[dict[str, Any]]) -> Findings:
        """Screen a submission, and judge it if it was drawn or looks copied."""
        draw = _due(case)
        screened = await self._screen(case, rollouts, rewards=not draw.drawn)
        if screened.outcome != "accept":
            return screened.findings()
        likeness = self._p.answers.compare(_origin(case), screened.answers)
        if likeness.suspicious and not draw.drawn:
            case.draw = draw = msgspec.structs.replace(draw, drawn=True, why="resembles earlier answers")
        findings = await self._judge(case, rollouts) if draw.drawn else screened.findings()
        return self._learn(case, findings, likeness=likeness, answers=screened.answers)

    def _learn(self, case: Case, findings: Findings, *, likeness: Likeness, answers: Sequence[Answer]) -> Findings:
        """Add what earlier work says to the findings, and keep what this one says for later work.

        The evidence is written last, for what finds no room is judged again.
        """
        tolerance = self._manifest.record.tolerances.get(case.submission.record.dtype)
        evidence = [] if findings.outcome == "undecided" else findings.evidence  # judged again, it is taken in then
        if tolerance and evidence:
            suspicion = self._p.suspicions.weigh(case.submission, tolerance, evidence=evidence)
            findings = findings if suspicion is None else findings.suspected(suspicion.reason, hard=suspicion.hard)
        findings = _weigh(findings, likeness, proved=_due(case).drawn and findings.outcome == "accept")
        if findings.outcome == "accept":
            self._p.answers.add(_origin(case), answers)
        if tolerance and evidence:
            self._p.suspicions.update(case.submission, tolerance, evidence=evidence)
        return findings

    async def _screen(self, case: Case, rollouts: Sequence[Any], *, rewards: bool) -> Screened:
        with self._p.policies.kept(case.submission.record.checkpoint) as path:
            if path is None:
                raise NotYet(f"policy: checkpoint {case.submission.record.checkpoint_step}")
            found = await self._p.screening.call(
                "screen",
                timeout_s=SCREEN_TIMEOUT_S,
                policy_dir=str(path),
                rollouts=rollouts,
                rewards=rewards,
                **self._claim(case.submission),
            )
        return msgspec.convert(found, Screened)

    async def _judge(self, case: Case, rollouts: Sequence[Any]) -> Findings:
        await self._load(case.submission.record)
        found = await self._p.compute.call(
            "judge", timeout_s=JUDGE_TIMEOUT_S, rollouts=rollouts, **self._claim(case.submission)
        )
        findings = msgspec.convert(found, Findings)
        self._totals.seconds += findings.seconds
        return findings

    def _claim(self, submission: Signed[Submission]) -> dict[str, Any]:
        return {
            "submission": msgspec.msgpack.encode(submission.record),
            "manifest": msgspec.msgpack.encode(self._manifest.record),
            "run_id": self._manifest.id,
            "contributor": submission.author.public_key,
        }

    async def _load(self, record: Submission) -> None:
        """Have the engine hold a policy. Raises ComputeError, or NotYet when the policy was dropped meanwhile."""
        if self._loaded_restarts != self._p.compute.restarts:
            self._loaded.clear()
            self._loaded_restarts = self._p.compute.restarts
        if record.checkpoint in self._loaded:
            return
        with self._p.policies.kept(record.checkpoint) as path:
            if path is None:
                raise NotYet(f"policy: checkpoint {record.checkpoint_step}")
            answer = await self._p.compute.call(
                "load",
                timeout_s=LOAD_TIMEOUT_S,
                checkpoint_dir=str(path),
                checkpoint_id=record.checkpoint,
                keep=self._manifest.record.batch.max_staleness + 2,
            )
        self._loaded = set(answer["held"])

    # What goes out.

    def _conclude(self, case: Case, findings: Findings) -> None:
        verdict = self._sign(case, findings)
        self._again.expect(case, findings)  # first: a crash in between costs a look, and no verdict
        self._p.docket.add(verdict)
        self._close(case, findings)
        record, draw = case.submission.record, verdict.record.draw
        self._totals.drawn += draw.drawn
        self._totals.not_drawn += not draw.drawn
        log.info(
            "judged submission=%s step=%d index=%d contributor=%s outcome=%s drawn=%s reason=%r",
            *(case.submission.id.hex()[:12], record.step, record.index, case.submission.author.short),
            *(findings.outcome, draw.why, findings.reason),
        )
        self._show()
        self._poster.wake()

    def _close(self, case: Case, findings: Findings) -> None:
        if case.appeal:
            self._appeals.closed(case)
        elif case.again:
            self._again.concluded(case, findings)
        else:
            self._cases.closed(case)

    def _sign(self, case: Case, findings: Findings) -> Signed[Verdict]:
        head = self._p.swarm.head
        tolerance = self._manifest.record.tolerances.get(case.submission.record.dtype)
        verdict = Verdict(
            run_id=self._manifest.id,
            submission=case.submission.id,
            contributor=case.submission.author.public_key,
            step=case.submission.record.step,
            outcome=findings.outcome,
            hard=findings.hard,
            reason=findings.reason[:1000],
            checks=tuple(with_limits(check, tolerance) for check in findings.checks),
            draw=_due(case),
            mean_reward=findings.mean_reward if math.isfinite(findings.mean_reward) else 0.0,
            engine=findings.engine,
            dtype=findings.dtype,
            software=SOFTWARE,
            head_sequence=head.record.sequence if head else 0,
            appeal=case.appeal,
            issued_at_ms=now_ms(),
        )
        return open_envelope(seal(verdict, self._p.identity), Verdict)

    def _show(self) -> None:
        outcomes = self._p.docket.outcomes()
        self._p.board.update(accepted=outcomes.get("accept", 0), rejected=self._p.docket.rejections())
        self._p.board.details(judged=sum(outcomes.values()), undecided=outcomes.get("undecided", 0))
        self._p.board.details(seconds=round(self._totals.seconds, 2))
        self._p.board.details(drawn=self._totals.drawn, not_drawn=self._totals.not_drawn)

    def _show_work(self) -> None:
        self._p.board.update(pending=len(self._cases))
        self._p.board.details(judges_again=self._again.text())
        if self._totals.working_on:
            self._p.board.working(f"judging {self._totals.working_on[0]}")
        elif len(self._cases):
            self._p.board.waiting(f"beacons, files or policies of {len(self._cases)} submissions")
        else:
            self._p.board.waiting("submissions at the relays")


def _due(case: Case) -> Draw:
    if case.draw is None:
        raise RuntimeError("a case is worked on only once it is known how")
    return case.draw


def _origin(case: Case) -> Origin:
    receipt: Receipt = case.opened.receipt.record
    return Origin(case.submission.author, case.submission.id, receipt.head_sequence)


def _weigh(findings: Findings, likeness: Likeness, *, proved: bool) -> Findings:
    """Add what copies were found; they give the reason where the costly checks failed as well."""
    check = likeness.result(proved=proved)
    findings.checks.append(check)
    if check.outcome == "fail" and findings.outcome == "reject":
        findings.hard, findings.reason = True, f"duplicate: {check.detail}"
    return findings
