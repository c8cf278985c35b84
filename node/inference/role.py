"""The inference role: hold the newest policy, generate rollouts with proofs, hand them in, learn what became of them.

Nobody schedules a contributor: step, submission index and its own key fix what it must generate. Four loops share one
durable outbox: policies, generation, sending, verdicts.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import trio

from node.admission.entrance import Entrance
from node.clock import now_ms
from node.compute.process import ComputeProcess
from node.feeds import Feeds
from node.inference.eviction import EvictionWatch
from node.inference.outbox import Outbox, Outgoing
from node.inference.standing import StandingWatch
from node.policies import Policies
from node.relay_client import RECORD_CODES
from node.status import StatusBoard
from node.swarm import Swarm
from node.version import SOFTWARE
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import ComputeCrashed, ComputeError, NodeError, ProtocolError, RefusedError, RelayError
from protocol.identity import Identity, PeerId
from protocol.records import Head, Manifest, Submission, Verdict

log = logging.getLogger(__name__)

GENERATE_TIMEOUT_S = 3600.0
LOAD_TIMEOUT_S = 600.0
SELF_TEST_TIMEOUT_S = 600.0
MAX_UNSENT = 16
"""Generation pauses while this many submissions wait for a relay."""
RESEND_AFTER_S = 60.0
"""A submission without a verdict for this long goes to a second relay, in case the first one is gone."""
RESEND_CHECK_S = 10.0
LEAVING_TRIES = 3
"""Each goes to relays that have not failed just before, as far as there are any."""
LAST_VERDICTS_S = 3.0
FILES_KEPT_STEPS = 8
FINAL_CODES = frozenset(
    {"finished", "stale-step", "over-cap", "over-tokens", "duplicate-index", "not-yours", "bad-hash", *RECORD_CODES}
)
"""Refusals that every relay would repeat for the same submission: they are about its record and file, and the run. All
others may pass, here or elsewhere (a full disk, a busy relay, its own fault, a code that this program does not know),
for as long as the run takes the submission's policy."""


class SelfTestFailed(NodeError):
    """Raised when what this machine generates would be rejected: working on would only cost it its standing."""


@dataclass(frozen=True)
class HeldPolicy:
    """A complete policy on this node's disk, as long as it is kept there (Policies.kept)."""

    step: int
    checkpoint: bytes


class Made(msgspec.Struct):
    """What the compute process says of a generated submission."""

    sha256: bytes
    size: int
    rollouts: int
    output_tokens: int
    prompts: bytes
    mean_reward: float
    could_not_tell: int
    """Answers without a reward."""
    engine: str
    dtype: str
    seconds: float


@dataclass(frozen=True)
class InferenceParts:
    """What the role is built from; node.app makes and starts them."""

    identity: Identity
    swarm: Swarm
    policies: Policies
    compute: ComputeProcess
    outbox: Outbox
    feeds: Feeds
    board: StatusBoard
    work_dir: Path
    entrance: Entrance | None = None
    """None where nothing is asked of newcomers."""
    tests_itself: bool = False
    """Whether it checks its own proofs before it works; a simulated cheat does not."""


class InferenceRole:
    """A contributor's node. `run` ends when the run is finished and raises Evicted when this node is thrown out."""

    def __init__(self, parts: InferenceParts) -> None:
        self._p = parts
        self._manifest = parts.swarm.manifest
        self._loaded: tuple[bytes, int] | None = None
        self._tested = not parts.tests_itself
        self._leaving = False
        self._sending = trio.Lock()
        self._idle = trio.Event()
        """Set while nothing is being generated."""
        self._idle.set()
        self._ran_out = False
        """Whether the compute process died of memory, so that its successor must take less."""
        self._changed = trio.Event()
        self._standing = StandingWatch(parts.swarm, parts.outbox, parts.board)
        self._sent_at: dict[bytes, float] = {}
        self._tokens = 0
        self._could_not_tell = 0
        self._busy_s = 0.0

    async def run(self) -> None:
        self._p.work_dir.mkdir(parents=True, exist_ok=True)
        self._show_counts()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_loop)
            nursery.start_soon(self._verdict_loop)
            nursery.start_soon(EvictionWatch(self._p.swarm, self._p.outbox, self._p.board, self._standing).run)
            nursery.start_soon(self._standing.run)
            if self._p.entrance is not None:
                nursery.start_soon(self._p.entrance.run)
            await self._generate_loop()
            await self._hand_in_rest()
            nursery.cancel_scope.cancel()

    async def leave(self, deadline_s: float) -> None:
        """Finish what is being generated and hand it in, within a deadline.

        What is finished and not handed in stays in the outbox for the next start.
        """
        self._leaving = True
        with trio.move_on_after(deadline_s) as deadline:
            if not self._idle.is_set():
                self._p.board.state("stopping", f"finishing what is being generated, within {deadline_s:g} s")
                await self._idle.wait()
            self._p.board.state("stopping", "handing in finished rollouts")
            for _ in range(LEAVING_TRIES):
                if await self._send_ready():
                    break
        kept, lost = self._p.outbox.count("ready"), deadline.cancelled_caught and not self._idle.is_set()
        log.info("left kept_for_the_next_start=%d unfinished_work_lost=%s", kept, lost)

    async def _generate_loop(self) -> None:
        while True:
            head = await self._p.swarm.wait_head(0)
            if self._leaving:
                await trio.sleep_forever()
            if head.record.finished:
                return
            policy, blocked = self._policy(head.record), self._blocked(head.record)
            if policy is not None and blocked is None:
                await self._produce(head.record, policy)
                continue
            self._p.board.waiting(blocked or f"checkpoint {head.record.checkpoint_step} from the relays")
            await self._wait_for_news(head)

    def _policy(self, head: Head) -> HeldPolicy | None:
        """The newest policy on this node's disk that it may still use: neither too old nor older than its last one."""
        newest = self._p.outbox.newest()
        oldest = max(head.oldest_checkpoint_step, newest.checkpoint_step if newest else 0)
        held = self._p.policies.newest(oldest)
        return None if held is None else HeldPolicy(*held[:2])

    def _blocked(self, head: Head) -> str | None:
        """Why nothing can be generated now, in words for a person; None when something can."""
        if self._p.entrance is not None and self._p.entrance.waits_for is not None:
            return self._p.entrance.waits_for
        if self._p.outbox.count("ready") >= MAX_UNSENT:
            return f"a relay to take {MAX_UNSENT} finished submissions"
        if not head.collecting:
            return f"step {head.step + 1}: enough rollouts for step {head.step} are on their way"
        if self._p.outbox.has_refused(head.step):
            return f"step {head.step + 1}: one of step {head.step} was refused or is lost, and none may follow it"
        if self._p.outbox.next_index(head.step) >= self._manifest.record.rollout.max_submissions_per_step:
            return f"step {head.step + 1}: this node's share of step {head.step} is done"
        newest = self._p.outbox.newest()
        if newest is not None and newest.step > head.step:  # heard from a relay that is behind: steps never go back
            return f"step {newest.step}, for which this node has worked already"
        return None

    async def _wait_for_news(self, head: Signed[Head]) -> None:
        changed = self._changed
        async with trio.open_nursery() as nursery:

            async def until_head() -> None:
                await self._p.swarm.wait_head(head.record.sequence)
                nursery.cancel_scope.cancel()

            async def until_outbox() -> None:
                await changed.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_head)
            nursery.start_soon(until_outbox)

    async def _produce(self, head: Head, policy: HeldPolicy) -> None:
        self._idle = trio.Event()
        try:
            await self.produce(head, policy)
        finally:
            self._idle.set()

    async def produce(self, head: Head, policy: HeldPolicy) -> None:
        """Make the next submission and post it; a simulation of a cheat does something else here."""
        index = self._p.outbox.next_index(head.step)
        made = await self.generate(head.step, index, policy)
        if made is not None:
            self.post(head.step, index, policy, made)

    async def generate(self, step: int, index: int, policy: HeldPolicy) -> Made | None:
        """Have a submission computed; None, after a pause, where the engine failed."""
        self._p.board.working(f"generating submission {index} of step {step} with checkpoint {policy.step}")
        try:
            with self._p.policies.kept(policy.checkpoint) as held:
                if held is None:
                    return None  # dropped meanwhile, for a newer one
                await self._load(policy.checkpoint, held)
                await self._test_itself(f"generating submission {index} of step {step} with checkpoint {policy.step}")
                made = await self._p.compute.call(
                    "generate",
                    timeout_s=GENERATE_TIMEOUT_S,
                    run_id=self._manifest.id,
                    step=step,
                    checkpoint=policy.checkpoint,
                    contributor=self._p.identity.peer_id.public_key,
                    index=index,
                    manifest=msgspec.msgpack.encode(self._manifest.record),
                    path=str(self.file(step, index)),
                )
        except ComputeError as error:
            self._loaded = None
            self._ran_out = isinstance(error, ComputeCrashed) and self._p.compute.died_of_memory
            log.error("generate step=%d index=%d error=%r", step, index, error.message)
            self._p.board.waiting(f"the engine to recover: {error.message[:200]}")
            await trio.sleep(2)
            return None
        return msgspec.convert(made, Made)

    async def _test_itself(self, then: str) -> None:
        """Once in a process' life. Raises NodeError where every submission would be rejected."""
        if self._tested:
            return
        self._p.board.working("a short self-check of this machine's own proofs")
        found = await run_self_test(self._p.compute, self._manifest.record)
        self._p.board.details(self_test=found)
        self._tested = True
        self._p.board.working(then)

    def file(self, step: int, index: int) -> Path:
        """Where a submission's rollouts lie."""
        return self._p.work_dir / f"{step:06d}-{index:04d}.parquet"

    async def _load(self, checkpoint: bytes, path: Path) -> None:
        if self._loaded == (checkpoint, self._p.compute.restarts):
            return
        options: dict[str, Any] = {"ran_out": True} if self._ran_out else {}
        await self._p.compute.call(
            "load", timeout_s=LOAD_TIMEOUT_S, checkpoint_dir=str(path), checkpoint_id=checkpoint, **options
        )
        self._ran_out = False
        self._loaded = (checkpoint, self._p.compute.restarts)

    def post(self, step: int, index: int, policy: HeldPolicy, made: Made) -> None:
        """Sign for a file and put it into the outbox."""
        record = Submission(
            run_id=self._manifest.id,
            step=step,
            index=index,
            checkpoint_step=policy.step,
            checkpoint=policy.checkpoint,
            sha256=made.sha256,
            size=made.size,
            rollouts=made.rollouts,
            output_tokens=made.output_tokens,
            prompts=made.prompts,
            engine=made.engine,
            dtype=made.dtype,
            software=SOFTWARE,
            issued_at_ms=now_ms(),
        )
        self._p.outbox.add(open_envelope(seal(record, self._p.identity), Submission), self.file(step, index))
        self._tokens += made.output_tokens
        self._could_not_tell += made.could_not_tell
        self._busy_s += made.seconds
        self._news()

    async def _send_loop(self) -> None:
        while True:
            changed = self._changed
            if not await self._send_ready():
                await trio.sleep(random.uniform(0.5, 2.0))
                continue
            with trio.move_on_after(RESEND_CHECK_S):
                await changed.wait()
            await self._resend_unjudged()

    async def _send_ready(self) -> bool:
        """Hand in what is ready, in order; whether all of it is settled.

        Whatever comes after one that no relay takes now waits with it: the ledger takes a step's submissions by index,
        and one whose predecessor comes too late would be accepted and never entered. So one task sends at a time, too.
        """
        async with self._sending:
            while waiting := self._p.outbox.ready():
                for outgoing in waiting:
                    if not await self._send(outgoing):
                        return False
            return True

    async def _send(self, outgoing: Outgoing, *, avoid: PeerId | None = None) -> bool:
        """Give one submission to one relay; whether it is settled there (taken or refused for good)."""
        if avoid is None and not self._p.outbox.is_ready(outgoing.id):
            return True  # one before it was refused meanwhile
        client = self._p.swarm.choose_relay(avoid=avoid)
        if client is None:
            return False
        try:
            receipt = await client.submit(outgoing.envelope, outgoing.path)
        except RefusedError as error:
            return self._refused(outgoing, error)
        except (RelayError, ProtocolError) as error:
            log.warning("send relay=%s step=%d error=%r", client.peer_id.short, outgoing.step, error.message)
            self._p.swarm.failed(client.peer_id)
            return False
        except FileNotFoundError:
            return self._lost(outgoing)
        except OSError as error:
            log.error("send step=%d file=%s error=%r; `ls -l` it", outgoing.step, outgoing.path, str(error))
            return self._is_stale(outgoing) and self._given_up(outgoing, f"lost: its file could not be read: {error}")
        self._p.outbox.received(outgoing.id, client.peer_id, receipt)
        self._sent_at[outgoing.id] = time.monotonic()
        self._news()
        return True

    def _refused(self, outgoing: Outgoing, error: RefusedError) -> bool:
        if error.code not in FINAL_CODES and not self._is_stale(outgoing):
            return False
        log.warning(
            "refused step=%d index=%d code=%s reason=%r", *(outgoing.step, outgoing.index), error.code, error.message
        )
        return self._given_up(outgoing, f"{error.code}: {error.message}")

    def _lost(self, outgoing: Outgoing) -> bool:
        """Its file was deleted, by somebody who needed room or since a verdict came. What a relay has is not lost."""
        log.warning("file gone step=%d index=%d file=%s", outgoing.step, outgoing.index, outgoing.path)
        return self._given_up(outgoing, "lost: its file was deleted before a relay had it; delete only old files")

    def _given_up(self, outgoing: Outgoing, reason: str) -> bool:
        if self._p.outbox.refused(outgoing.id, reason):
            self._sent_at.pop(outgoing.id, None)
            self._news()
        return True

    def _is_stale(self, outgoing: Outgoing) -> bool:
        """Whether no relay takes it any more, whatever it says: its policy is out of the run's window."""
        head = self._p.swarm.head
        record = open_envelope(outgoing.envelope, Submission).record
        return head is not None and record.checkpoint_step < head.record.oldest_checkpoint_step

    async def _resend_unjudged(self) -> None:
        """Offer what nobody judges to another relay: the first one may be gone with it."""
        for outgoing in self._p.outbox.unjudged():
            sent_at = self._sent_at.setdefault(outgoing.id, time.monotonic())
            if time.monotonic() - sent_at > RESEND_AFTER_S and outgoing.path.exists():
                await self._send(outgoing, avoid=self._p.outbox.relay_of(outgoing.id))
                self._sent_at[outgoing.id] = time.monotonic()

    async def _verdict_loop(self) -> None:
        while True:
            client, item = await self._p.feeds.next()
            verdict = item.signed
            if isinstance(verdict.record, Verdict) and self._p.outbox.judged(verdict):
                record = verdict.record
                self._sent_at.pop(record.submission, None)
                log.info(
                    "verdict submission=%s step=%d outcome=%s reason=%r",
                    *(record.submission.hex()[:12], record.step, record.outcome, record.reason),
                )
                self._celebrate(verdict)
                self._p.outbox.discard_files(record.step - FILES_KEPT_STEPS)
                self._news()
            self._p.feeds.done(client, item)

    def _celebrate(self, verdict: Signed[Verdict]) -> None:
        """The first work that was accepted is worth telling, with where its proof lies."""
        if verdict.record.outcome != "accept" or self._p.outbox.count("accepted") != 1:
            return
        submission = self._p.outbox.submission(verdict.record.submission)
        if submission is None:
            return
        self._p.board.details(
            first_accepted={
                "submission": verdict.record.submission.hex(),
                "step": submission.step,
                "rollouts": submission.rollouts,
                "tokens": submission.output_tokens,
                "validator": verdict.author.short,
                "kept": str(self._p.outbox.path),
            }
        )

    async def _hand_in_rest(self) -> None:
        """The run is finished: what no relay has taken yet is of no use to anybody."""
        self._p.board.state("finished", "the run is finished")
        with trio.move_on_after(LAST_VERDICTS_S):
            while self._p.outbox.count("received"):
                changed = self._changed
                await changed.wait()

    def _news(self) -> None:
        self._show_counts()
        self._changed.set()
        self._changed = trio.Event()

    def _show_counts(self) -> None:
        self._p.board.update(
            accepted=self._p.outbox.count("accepted"),
            pending=self._p.outbox.count("ready", "received", "undecided"),
            rejected=self._p.outbox.reasons(),
        )
        speed = self._tokens / self._busy_s if self._busy_s else 0.0
        self._p.board.details(
            tokens_per_s=round(speed, 1),
            outbox=self._p.outbox.count("ready"),
            could_not_tell=self._could_not_tell,
            accepted_tokens=self._p.outbox.accepted_tokens(),
        )


async def run_self_test(compute: ComputeProcess, manifest: Manifest) -> dict[str, Any]:
    """Have the engine that holds a policy check itself. Raises NodeError where a validator would reject its work."""
    found: dict[str, Any] = await compute.call(
        "self_test", timeout_s=SELF_TEST_TIMEOUT_S, manifest=msgspec.msgpack.encode(manifest)
    )
    if found["reason"]:
        raise SelfTestFailed(
            f"this machine's own work does not hold against itself: {found['reason']}",
            hint="measure more: intellect-node calibrate; then start with --dtype float32, or on --device cpu",
        )
    return found
