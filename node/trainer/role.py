"""The trainer role: collect accepted rollouts, train, publish (PRIME-RL's trainer; INTELLECT-2 section 2.1).

Three loops overlap. `_gather_loop` commits each step's batch to the ledger and opens the next step; `_train_loop`
trains committed batches in order and publishes checkpoints; `_beat_loop` signs the head anew every few seconds and
hands it to every relay. What a crash interrupts is redone from the ledger: a committed batch is trained exactly once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import trio

from node.clock import now_ms
from node.compute.process import ComputeProcess
from node.compute.reader import RolloutReader
from node.ledger.log import LedgerLog
from node.ledger.witness import HEAD_FILE, keep_head
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from node.trainer.collector import Collector
from node.trainer.gather import Gathered, Signals, batch_metrics, gather, wants_more, with_length
from node.trainer.monitor import Monitor
from node.trainer.scoreboard import Scoreboard
from p2p.shardcast.store import CheckpointStore
from protocol.batches import is_trained, pack_bits, silent_groups, tally_of
from protocol.envelope import Signed, seal
from protocol.errors import DataDirError, ProtocolError, RefusedError, RelayError
from protocol.identity import Identity, PeerId
from protocol.records import Batch, CheckpointManifest, Head, Manifest, OriginNotice, Trained

log = logging.getLogger(__name__)

BEAT_S = 2.0
"""How often the head is signed anew: the beacon for drawn checks, and the sign that the trainer lives."""
POST_TIMEOUT_S = 10.0
TRAIN_TIMEOUT_S = 24 * 3600.0
READ_TIMEOUT_S = 120.0
END_DEADLINE_S = 20.0
LAST_VERDICTS_MIN_S = 2.0
LOOK_AGAIN_S = 0.5
SILENT_RELAYS_S = 30.0
"""After so long no relay is waited for that cannot be reached."""
LAST_VERDICTS_DEADLINE_S = 120.0
"""Only while something is outstanding: a validator steps in after 15 heads (30 s), and whoever could not tell looks
again after 30 s; then it loads the policy and judges."""


class TrainResult(msgspec.Struct):
    """What the compute process says of a training step."""

    step: int
    policy_dir: str
    mean_reward: float = 0.0
    metrics: dict[str, float] = {}


@dataclass(frozen=True)
class TrainerParts:
    """What the role is built from; node.app makes and starts them."""

    identity: Identity
    manifest: Signed[Manifest]
    swarm: Swarm
    store: CheckpointStore
    ledger: LedgerLog
    collector: Collector
    compute: ComputeProcess
    reader: RolloutReader
    monitor: Monitor
    board: StatusBoard
    origin_url: str
    origin_fingerprint: bytes
    """Of the origin's TLS certificate."""
    origin_token: Callable[[PeerId], str]
    discovery_state: Callable[[], str]


class TrainerRole:
    """The trainer's node. `run` ends when the last step is published and every reachable relay knows it."""

    def __init__(self, parts: TrainerParts) -> None:
        self._p = parts
        self._manifest = parts.manifest.record
        self._run_id = parts.manifest.id
        self._checkpoint: Signed[CheckpointManifest] | None = None
        self._collecting = True
        self._finished = False
        self._sequence = 0
        self._head: bytes | None = None
        self._head_changed = trio.Event()
        self._published = trio.Event()
        self._idle_step: int | None = None
        self._introduced: set[tuple[PeerId, str]] = set()
        self._scores = Scoreboard(parts.ledger.state, parts.board)
        self._signals = Signals(parts.manifest.record, self._rows)

    async def run(self) -> None:
        self._p.collector.on_verdict = self._scores.verdict
        await self._recover()
        try:
            await self._run_to_the_end()
        finally:
            self._scores.catch_up()  # the last status is what the ledger holds, also of what came while it ended

    async def _run_to_the_end(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._p.monitor.run)
            nursery.start_soon(self._beat_loop)
            batches = trio.open_memory_channel[int](self._manifest.batch.max_staleness + 1)
            nursery.start_soon(self._gather_loop, batches[0])
            async with trio.open_nursery() as collecting:
                collecting.start_soon(self._p.collector.run)
                await self._train_loop(batches[1])
                await self._take_last_verdicts()
                await self._p.monitor.finish()
                collecting.cancel_scope.cancel()  # no head would confirm what is entered after the last one
            self._finished = True
            self._p.board.state("finished", "all steps are trained")
            await self._tell_the_end()
            nursery.cancel_scope.cancel()

    async def leave(self, deadline_s: float) -> None:
        """Nothing is lost by stopping at any point; say so and go."""
        self._p.board.state("stopping", "the next start continues from the last checkpoint")
        with trio.move_on_after(deadline_s):
            await trio.lowlevel.checkpoint()

    # Where the run stands

    @property
    def _step(self) -> int:
        """The step being collected: one more than the last committed batch."""
        return len(self._p.ledger.state.batches)

    def _newest(self) -> Signed[CheckpointManifest]:
        if self._checkpoint is None:
            raise RuntimeError("the trainer has no checkpoint before it has recovered")
        return self._checkpoint

    async def _recover(self) -> None:
        """Open the newest durable policy and publish it if a crash came between writing and publishing."""
        self._p.board.working("opening the newest policy")
        opened = msgspec.convert(await self._p.compute.call("open", timeout_s=TRAIN_TIMEOUT_S), TrainResult)
        self._require_one_history(opened.step)
        self._p.collector.catch_up()
        await self._publish(opened)
        for key, one in self._p.ledger.state.submissions.items():
            if one.used_in in self._p.ledger.state.trained:
                self._p.collector.discard(key)
        self._scores.restore()
        self._p.monitor.trained(self._p.ledger.state.trained)
        log.info("recovered checkpoint=%d batches=%d", self._newest().record.step, self._step)

    def _require_one_history(self, checkpoint: int) -> None:
        """A policy is at most one step ahead of the ledger: a crash can come between the two, and nothing else."""
        trained = len(self._p.ledger.state.trained)
        if trained <= checkpoint <= trained + 1:
            return
        raise DataDirError(
            f"the newest usable training state is checkpoint {checkpoint}, but the ledger has {trained} trained steps: "
            "one of the two is damaged, missing, or from another time",
            hint="restore `ledger` and `training/` from one back-up, taken while the node was off",
        )

    async def _require_no_fork(self, client: RelayClient) -> None:
        """A relay's head is of this key: what it says of the ledger must be in this ledger. Raises DataDirError."""
        try:
            head = await client.head()
        except RefusedError:
            return  # it knows nothing of the run yet
        if head is None or self._p.ledger.state.tip_at(head.record.ledger_length) == head.record.ledger_tip:
            return
        theirs = head.record.ledger_length
        raise DataDirError(
            f"relay {client.peer_id.short} holds a head of this trainer with {theirs} ledger entries; "
            f"the {self._p.ledger.state.length} entries here do not lead there: this data directory is an old "
            "copy, or a second trainer runs with this key",
            hint="start the trainer with its newest data directory; if that is lost, create a new run that starts from "
            "the newest policy (`run create` with model.source = a checkpoint's directory)",
        )

    # Collecting

    async def _gather_loop(self, send: trio.MemorySendChannel[int]) -> None:
        for step in range(len(self._p.ledger.state.trained), self._manifest.batch.total_steps):
            if step not in self._p.ledger.state.batches:
                await self._open_step(step)
                self._commit(step, await self._gather(step))
            await send.send(step)

    async def _open_step(self, step: int) -> None:
        """Wait until the newest policy is fresh enough for rollouts of this step to be worth anything."""
        while step - self._newest().record.step > self._manifest.batch.max_staleness:
            self._set_collecting(False)
            published = self._published
            await published.wait()
        self._set_collecting(True)

    async def _gather(self, step: int) -> Gathered:
        """Wait until a step's batch is whole, has been tried for often enough, or is due."""
        opened = trio.current_time() - self._open_for_s(step)
        self._scores.stale(step, self._p.collector.drop_stale(step))
        while True:
            usable = self._p.ledger.state.shelf.usable(step)
            silent = await self._signals.read(usable)
            if usable != self._p.ledger.state.shelf.usable(step):
                continue  # more came while files were being read
            waited_s = trio.current_time() - opened
            gathered = gather(self._manifest, usable, silent, waited_s=waited_s)
            pending = self._p.collector.pending(step)
            self._scores.gathered(step, gathered, pending=pending, waited_s=waited_s)
            if gathered.ended is not None:
                return gathered
            self._set_collecting(wants_more(self._manifest, gathered, pending=pending))
            deadline_s = self._manifest.batch.deadline_s
            left_s = math.inf if deadline_s is None or waited_s >= deadline_s else deadline_s - waited_s
            with trio.move_on_after(left_s):
                await self._p.collector.wait_changed()

    def _open_for_s(self, step: int) -> float:
        """How long a step has been open before this trainer started: its deadline goes on over a restart.

        By the ledger it opened when the batch before it was committed and its oldest usable policy was there. The
        first step opens with the trainer, since a run may be made long before it.
        """
        state, waited_for = self._p.ledger.state, step - 1 - self._manifest.batch.max_staleness
        if step == 0 or (waited_for >= 0 and waited_for not in state.trained):
            return 0.0
        opened_ms = state.committed_at_ms(step)
        if waited_for >= 0:
            opened_ms = max(opened_ms, state.trained[waited_for].issued_at_ms)
        return max(0.0, (now_ms() - opened_ms) / 1e3)

    def _commit(self, step: int, gathered: Gathered) -> None:
        issued_at_ms = now_ms()
        if gathered.ended == "deadline" and self._manifest.batch.deadline_s is not None:
            # The clock may have been set back since the last batch; the ledger must see that the time is over.
            deadline_ms = math.ceil(1000 * self._manifest.batch.deadline_s)
            issued_at_ms = max(issued_at_ms, self._p.ledger.state.committed_at_ms(step) + deadline_ms)
        batch = Batch(
            run_id=self._run_id,
            step=step,
            submissions=gathered.submissions,
            issued_at_ms=issued_at_ms,
            ended=gathered.ended or "whole",
            silent=pack_bits(gathered.silent),
        )
        self._p.ledger.append([seal(batch, self._p.identity)])
        log.info(
            "batch step=%d submissions=%d rollouts=%d silent_groups=%d ended=%s",
            *(step, len(batch.submissions), gathered.tally.rollouts, sum(gathered.silent), batch.ended),
        )
        self._collecting = step + 1 - self._newest().record.step <= self._manifest.batch.max_staleness
        self._touch_head()

    def _set_collecting(self, collecting: bool) -> None:
        if collecting != self._collecting:
            self._collecting = collecting
            self._touch_head()

    # Training

    async def _train_loop(self, receive: trio.MemoryReceiveChannel[int]) -> None:
        last = self._manifest.batch.total_steps
        while len(self._p.ledger.state.trained) < last:
            step = len(self._p.ledger.state.trained)
            self._idle_step = step
            self._say_what_is_missing()
            began = time.monotonic()
            step = await receive.receive()
            self._idle_step = None
            wait_s = time.monotonic() - began
            self._scores.waited(wait_s)
            self._p.board.working(f"training step {step}")
            began = time.monotonic()
            await self._train(step, wait_s)
            self._scores.worked(time.monotonic() - began)

    def _say_what_is_missing(self) -> None:
        if self._idle_step is None:
            return
        if self._introduced:
            self._p.board.waiting(f"accepted rollouts for step {self._idle_step}")
        else:
            self._p.board.waiting(f"a relay: {self._p.discovery_state()}")

    async def _train(self, step: int, wait_s: float) -> None:
        began = time.monotonic()
        result, metrics = await self._learn(step)
        seconds = {"train_seconds": time.monotonic() - began, "wait_seconds": wait_s}
        await self._publish(result)
        trained = Trained(
            run_id=self._run_id,
            step=step,
            checkpoint=self._newest().id,
            mean_reward=metrics["reward"],
            metrics={name: value for name, value in {**metrics, **seconds}.items() if math.isfinite(value)},
            issued_at_ms=now_ms(),
        )
        self._p.ledger.append([seal(trained, self._p.identity)])
        self._scores.trained(trained)
        self._p.monitor.trained(self._p.ledger.state.trained)
        self._touch_head()
        for key in self._p.ledger.state.batches[step]:
            self._p.collector.discard(key)
        log.info("trained step=%d reward=%.3f", step, trained.mean_reward)

    async def _learn(self, step: int) -> tuple[TrainResult, dict[str, float]]:
        """Have a step's batch trained. Its metrics speak of all that was collected for it."""
        batch = self._p.ledger.state.committed[step]
        rollouts: list[dict[str, Any]] = []
        for key in batch.submissions:
            rollouts += await self._rollouts(key)
        silent = silent_groups(self._manifest, batch)
        size = self._manifest.rollout.group_size
        useful = [row for place, row in enumerate(rollouts) if not silent[place // size]]
        skip = not is_trained(self._manifest, tally_of(self._manifest, batch))
        what = {"rollouts": [], "skip": True} if skip else {"rollouts": useful}
        answer = await self._p.compute.call("train", timeout_s=TRAIN_TIMEOUT_S, step=step, **what)
        result = msgspec.convert(answer, TrainResult)
        metrics = result.metrics | batch_metrics(self._manifest, rollouts, silent, skipped=skip)
        return result, metrics | self._scores.dropped(step)

    async def _rows(self, key: bytes) -> list[dict[str, Any]]:
        return await self._p.reader.read(
            self._p.collector.file(key),
            timeout_s=READ_TIMEOUT_S,
            max_rollouts=self._manifest.rollouts_per_submission,
            max_tokens=self._manifest.model.max_model_len,
        )

    async def _rollouts(self, key: bytes) -> list[dict[str, Any]]:
        submission = self._p.ledger.state.submissions[key]
        origin = {"checkpoint_step": submission.record.checkpoint_step, "submission": key.hex()}
        rows = with_length(self._manifest, self._run_id, submission, await self._rows(key))
        return [row | origin for row in rows]

    async def _publish(self, result: TrainResult) -> None:
        """Make a policy available to relays; a second time changes nothing."""
        self._checkpoint = await self._p.store.publish(
            Path(result.policy_dir),
            identity=self._p.identity,
            run_id=self._run_id,
            step=result.step,
            shard_bytes=self._manifest.shard_bytes,
        )
        self._p.board.update(checkpoint_step=result.step)
        self._p.monitor.published(result.step, Path(result.policy_dir))
        self._published.set()
        self._published = trio.Event()
        self._touch_head()

    async def _take_last_verdicts(self) -> None:
        """Work that was handed in before the end is judged and credited, within a deadline."""
        self._p.board.waiting("the verdicts about the last submissions")
        with trio.move_on_after(LAST_VERDICTS_DEADLINE_S) as deadline:
            began = trio.current_time()
            await trio.sleep(LAST_VERDICTS_MIN_S)
            while not self._p.collector.has_all(but_silent=trio.current_time() - began >= SILENT_RELAYS_S):
                with trio.move_on_after(LOOK_AGAIN_S):
                    await self._p.collector.wait_changed()
        if deadline.cancelled_caught:
            self._p.collector.say_what_is_missing()

    # Telling the swarm

    def _touch_head(self) -> None:
        self._head_changed.set()
        self._head_changed = trio.Event()

    def _sign_head(self) -> bytes:
        """A head is for good, so that it speaks of nothing that this disk has not taken. Raises DataDirError."""
        self._p.ledger.flush()
        newest, step = self._newest(), self._step
        previous, self._sequence = self._sequence, max(self._sequence + 1, now_ms())
        head = Head(
            run_id=self._run_id,
            sequence=self._sequence,
            previous_sequence=previous,
            issued_at_ms=now_ms(),
            step=step,
            collecting=self._collecting and not self._finished and step < self._manifest.batch.total_steps,
            checkpoint_step=newest.record.step,
            checkpoint=newest.id,
            oldest_checkpoint_step=max(0, step - self._manifest.batch.max_staleness),
            ledger_length=self._p.ledger.state.length,
            ledger_tip=self._p.ledger.state.tip,
            finished=self._finished,
        )
        self._p.board.update(step=step, head_sequence=self._sequence)
        return seal(head, self._p.identity)

    async def _beat_loop(self) -> None:
        while True:
            changed = self._head_changed
            head = self._sign_head()
            keep_head(self._p.ledger.path / HEAD_FILE, head)
            self._scores.catch_up()
            await self._tell_relays(head)
            self._say_what_is_missing()
            with trio.move_on_after(BEAT_S):
                await changed.wait()

    async def _tell_relays(self, head: bytes) -> None:
        async with trio.open_nursery() as nursery:
            for client in self._p.swarm.clients:
                nursery.start_soon(self._tell_relay, client, head)

    async def _tell_relay(self, client: RelayClient, head: bytes) -> None:
        with trio.move_on_after(POST_TIMEOUT_S):
            try:
                if (client.peer_id, client.url) not in self._introduced:
                    await self._require_no_fork(client)
                    await client.post_origin(self._p.manifest.data, self._notice(client.peer_id), head)
                    self._introduced.add((client.peer_id, client.url))
                    log.info("introduced to relay=%s", client.peer_id.short)
                else:
                    await client.post_head(head)
            except RefusedError as error:
                log.warning("head relay=%s code=%s error=%r", client.peer_id.short, error.code, error.message)
                if error.code in ("no-manifest", "no-origin"):
                    self._introduced.discard((client.peer_id, client.url))
            except (RelayError, ProtocolError) as error:
                self._introduced.discard((client.peer_id, client.url))
                log.info("head relay=%s error=%r", client.peer_id.short, error.message)

    def _notice(self, relay: PeerId) -> bytes:
        notice = OriginNotice(
            run_id=self._run_id,
            relay=relay.public_key,
            issued_at_ms=now_ms(),
            http_url=self._p.origin_url,
            tls_fingerprint=self._p.origin_fingerprint,
            token=self._p.origin_token(relay),
        )
        return seal(notice, self._p.identity)

    async def _tell_the_end(self) -> None:
        """Stay until every relay that answers has the last head and the whole ledger, within a deadline."""
        with trio.move_on_after(END_DEADLINE_S):
            while True:
                self._touch_head()
                await trio.sleep(BEAT_S)
                if all([await self._knows_the_end(client) for client in self._p.swarm.clients]):
                    return

    async def _knows_the_end(self, client: RelayClient) -> bool:
        try:
            return bool(await client.ledger(self._p.ledger.state.length - 1))
        except (RelayError, ProtocolError):
            return True  # gone: there is nobody to tell
