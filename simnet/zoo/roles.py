"""Cheats that compute honestly and lie to the network: the inference role with one step replaced."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import trio

from node.feeds import Feeds
from node.inference.outbox import Outbox
from node.inference.role import HeldPolicy, InferenceParts, InferenceRole, Made
from protocol.envelope import Signed
from protocol.errors import ProtocolError, RelayError
from protocol.identity import PeerId
from protocol.records import Head, Submission, Verdict

log = logging.getLogger(__name__)

CANDIDATES: Final = 4
PAUSE_S: Final = 1.0


class GroundIndex(InferenceRole):
    """The index is part of the seed: it computes the next few, leaves out the very next, and takes the best."""

    async def produce(self, head: Head, policy: HeldPolicy) -> None:
        first = self._p.outbox.next_index(head.step) + 1
        found: dict[int, Made] = {}
        for index in range(first, first + CANDIDATES):
            made = await self.generate(head.step, index, policy)
            if made is not None:
                found[index] = made
        if found:
            best = max(found, key=lambda index: found[index].mean_reward)
            self.post(head.step, best, policy, found[best])


class GroundCheckpoint(InferenceRole):
    """The policy is part of the seed too, and a run takes several: it computes with each and takes the best."""

    def __init__(self, parts: InferenceParts) -> None:
        super().__init__(parts)
        self._seen: dict[bytes, HeldPolicy] = {}

    async def produce(self, head: Head, policy: HeldPolicy) -> None:
        index = self._p.outbox.next_index(head.step)
        kept = self.file(head.step, index).with_suffix(".best")
        best: tuple[Made, HeldPolicy] | None = None
        self._seen[policy.checkpoint] = policy
        for candidate in self._takable(head):
            made = await self.generate(head.step, index, candidate)
            if made is not None and (best is None or made.mean_reward > best[0].mean_reward):
                best = made, candidate
                shutil.copyfile(self.file(head.step, index), kept)
        if best is not None:
            kept.replace(self.file(head.step, index))
            self.post(head.step, index, best[1], best[0])

    def _takable(self, head: Head) -> list[HeldPolicy]:
        seen = self._seen.values()
        held = self._p.policies.path
        return [one for one in seen if one.step >= head.oldest_checkpoint_step and held(one.checkpoint) is not None]


class CopiedFile(InferenceRole):
    """Takes the newest file of another contributor from a relay, and signs for it."""

    def __init__(self, parts: InferenceParts) -> None:
        super().__init__(parts)
        self._after: dict[PeerId, int] = {}
        self._newest: Signed[Submission] | None = None

    async def produce(self, head: Head, policy: HeldPolicy) -> None:
        index = self._p.outbox.next_index(head.step)
        self._p.board.working("looking for a file to copy")
        copied = await self._copy(self.file(head.step, index))
        if copied is None:
            await trio.sleep(PAUSE_S)
            return
        theirs = copied.record
        made = Made(
            sha256=theirs.sha256,
            size=theirs.size,
            rollouts=theirs.rollouts,
            output_tokens=theirs.output_tokens,
            prompts=theirs.prompts,
            mean_reward=0.0,
            could_not_tell=0,
            engine=theirs.engine,
            dtype=theirs.dtype,
            seconds=1.0,
        )
        self.post(head.step, index, policy, made)

    async def _copy(self, path: Path) -> Signed[Submission] | None:
        client = self._p.swarm.choose_relay()
        if client is None:
            return None
        try:
            for item in await client.feed(self._after.get(client.peer_id, 0), kinds=[Submission.KIND]):
                self._after[client.peer_id] = item.seq
                self._newest = item.signed if item.about != self._p.identity.peer_id else self._newest
            if self._newest is not None:
                await trio.Path(path).unlink(missing_ok=True)
                await client.file(self._newest, path)
        except (RelayError, ProtocolError) as error:
            log.info("nothing to copy relay=%s error=%r", client.peer_id.short, error.message)
            return None
        return self._newest


class TwoNodes:
    """Two honest nodes with one key, as on two computers: each has an outbox of its own."""

    def __init__(self, parts: InferenceParts) -> None:
        directory = parts.work_dir / "second"
        directory.mkdir(parents=True, exist_ok=True)
        peer_id, swarm = parts.identity.peer_id, parts.swarm
        self._feeds = Feeds(lambda: swarm.clients, kinds=[Verdict.KIND], cursors_path=None, about=peer_id)
        second = replace(
            parts, outbox=Outbox(directory / "outbox.sqlite"), feeds=self._feeds, work_dir=directory / "rollouts"
        )
        self._roles = [InferenceRole(parts), InferenceRole(second)]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._feeds.run)
            async with trio.open_nursery() as both:
                for role in self._roles:
                    both.start_soon(role.run)
            nursery.cancel_scope.cancel()

    async def leave(self, deadline_s: float) -> None:
        async with trio.open_nursery() as nursery:
            for role in self._roles:
                nursery.start_soon(role.leave, deadline_s)


ROLES: Final[dict[str, Callable[[InferenceParts], InferenceRole | TwoNodes]]] = {
    "ground-index": GroundIndex,
    "ground-checkpoint": GroundCheckpoint,
    "copied-file": CopiedFile,
    "two-nodes-one-key": TwoNodes,
}
