"""Downloading checkpoints from several relays at once, none of which is trusted (SHARDCAST).

A checkpoint is asked for by its id, or begun early by the plan that the trainer announces while it still hashes. Every
shard is hashed as it arrives; a wrong one names its relay and is fetched elsewhere. What is verified survives a kill.
How one download goes is p2p.shardcast.transfer's work.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from p2p.http import PROGRESS_TIMEOUT_S, HttpClient
from p2p.shardcast.balance import Balancer
from p2p.shardcast.following import POLL_S
from p2p.shardcast.partial import PartialCheckpoint
from p2p.shardcast.patch_client import PatchClient, Savings
from p2p.shardcast.sources import Links, OnBytes, OnMisdeed, Source, Sources, checkpoint_path
from p2p.shardcast.store import CheckpointStore
from p2p.shardcast.transfer import OnProgress, Transfer, disk_error
from protocol.checkpoint import CheckpointRules, Layout, open_checkpoint
from protocol.envelope import Signed, open_envelope
from protocol.errors import MalformedError, NodeError, ProtocolError, RelayError, StaleRecordError, first_of
from protocol.identity import PeerId
from protocol.records import CheckpointManifest, CheckpointPlan

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 6
PATIENCE_S: Final = 60.0
"""How long a download may go without a byte from anyone before it is given up; what it has stays for the next one."""
NEXT_WAIT_S: Final = 20.0
NEXT_AT_ONCE: Final = 2
"""Relays that are asked for the next plan at the same time."""
MIN_NEXT_S: Final = 0.5
"""A relay that answers at once with nothing is not asked again sooner than this."""

__all__ = ["CheckpointClient", "Source"]


class CheckpointClient:
    """Downloads checkpoints into a store. `relays` is asked again for every shard, so the set may change at any time.

    Callbacks run in trio's thread: `on_bytes(relay, received)`, `on_misdeed(relay, what)`,
    `on_progress(bytes done, bytes in total, bytes by relay)`.
    """

    def __init__(
        self,
        http: HttpClient,
        store: CheckpointStore,
        rules: CheckpointRules,
        relays: Sources,
        *,
        balancer: Balancer | None = None,
        patches: PatchClient | None = None,
        connections: int = MAX_CONNECTIONS,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        on_bytes: OnBytes | None = None,
        on_misdeed: OnMisdeed | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._links = Links(http, relays, balancer or Balancer(), progress_timeout_s, on_bytes, on_misdeed)
        self._store = store
        self._patches = patches or PatchClient(store)
        self._rules = rules
        self._connections = connections
        self._patience_s = patience_s
        self._on_progress = on_progress
        self._under_way: set[Layout] = set()
        self._ended = trio.Event()
        self._early: tuple[Layout, trio.CancelScope] | None = None
        self._tried = -1

    @property
    def savings(self) -> Savings:
        """What its downloads cost so far."""
        return self._patches.savings

    async def download(self, checkpoint: bytes, *, step: int | None = None) -> Signed[CheckpointManifest]:
        """Have a checkpoint complete in the store, whatever is missing of it fetched.

        Raises RelayError when no relay gives a byte for `patience_s`, ProtocolError when the checkpoint itself breaks
        the run's rules, DataDirError when this disk cannot take it. Cancelling keeps what is verified. A download that
        its plan began becomes this one; several checkpoints may be under way at once.
        """
        manifest = self._store.manifest(checkpoint) or await self._fetch_manifest(checkpoint)
        self._rules.check(manifest, step=step)
        try:
            self._store.close(manifest)
        except OSError as error:
            raise disk_error(error) from error
        if self._early is not None and self._early[0].step < manifest.record.step:
            self._early[1].cancel()
        await self._have(manifest)
        return manifest

    async def follow(
        self,
        on_installed: Callable[[Signed[CheckpointManifest]], None] = lambda _: None,
        *,
        until_allowed: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """For ever: begin with each checkpoint when its first part is signed. What goes wrong is left to `download`.

        `until_allowed` is awaited before each one: it returns when something may be downloaded.
        """
        while True:
            await until_allowed()
            plan = await self._next_plan()
            self._tried = plan.record.step
            try:
                on_installed(await self._download_early(plan))
            except NodeError as error:
                log.debug("plan step=%d given_up=%r", plan.record.step, error.message[:300])

    async def _download_early(self, plan: Signed[CheckpointPlan]) -> Signed[CheckpointManifest]:
        with trio.CancelScope() as scope:
            self._early = Layout.of(plan.record), scope
            try:
                await self._have(plan)
            finally:
                self._early = None
            if (manifest := self._store.manifest(plan.id)) is not None:
                return manifest
        raise RelayError("a newer checkpoint was named")

    async def _have(self, signed: Signed[CheckpointManifest] | Signed[CheckpointPlan]) -> None:
        """Have a checkpoint complete; one that is on its way already is waited for, and gone on with if it failed."""
        async with self._alone_with(Layout.of(signed.record)):
            try:
                with self._store.begin(signed) as partial:
                    if partial is not None:
                        await self._complete(partial)
            except OSError as error:
                raise disk_error(error) from error
            except ExceptionGroup as group:  # out of a nursery of the transfer's or of a request's
                if (refusal := first_of(group, OSError)) is None:
                    raise
                raise disk_error(refusal) from group

    @asynccontextmanager
    async def _alone_with(self, layout: Layout) -> AsyncIterator[None]:
        """One transfer at a time writes a checkpoint's files, by whichever of its names it was asked for."""
        while layout in self._under_way:
            ended = self._ended
            await ended.wait()
        self._under_way.add(layout)
        try:
            yield
        finally:
            self._under_way.discard(layout)
            self._ended.set()
            self._ended = trio.Event()

    async def _complete(self, partial: PartialCheckpoint) -> None:
        with self._patches.towards(partial) as patching:
            transfer = Transfer(
                self._links,
                self._store,
                self._rules,
                partial,
                patching=patching,
                connections=self._connections,
                patience_s=self._patience_s,
                on_progress=self._on_progress,
            )
            await transfer.run()
        checkpoint = partial.draft.ids[0]
        try:
            await self._store.install(checkpoint)
        except MalformedError:
            self._store.discard(checkpoint)
            raise

    # ------------------------------------------------------------------------------------------------------ records

    async def _fetch_manifest(self, checkpoint: bytes) -> Signed[CheckpointManifest]:
        asked: set[PeerId] = set()
        said = "no relay is known"
        with trio.move_on_after(self._patience_s):
            while True:
                source = await self._choose(asked)
                try:
                    path = checkpoint_path(checkpoint, "manifest")
                    response = await self._links.get(source, path, max_bytes=CheckpointManifest.MAX_BYTES + 1024)
                    return open_checkpoint(response.body, checkpoint)
                except RelayError as error:
                    said = error.message
                except ProtocolError as error:
                    said = error.message
                    self._links.blame(source.peer, f"manifest of checkpoint {checkpoint.hex()[:12]}: {error.message}")
                await self._next_round(asked, source.peer)
        raise RelayError(f"no relay gave the manifest of checkpoint {checkpoint.hex()[:12]}; the last word was: {said}")

    async def _choose(self, asked: set[PeerId]) -> Source:
        """The relay to ask next; waits while all are paused or none is known."""
        while True:
            sources = {source.peer: source for source in self._links.sources()}
            peer = self._links.balancer.choose(list(sources), avoid=asked)
            if peer is not None:
                return sources[peer]
            pauses = [self._links.balancer.paused_s(each) for each in sources]
            await trio.sleep(min([POLL_S, *pauses]) + 0.01)

    async def _next_round(self, asked: set[PeerId], peer: PeerId) -> None:
        """After a relay could not help: ask each of the others before it is asked again, after a moment."""
        asked.add(peer)
        if all(source.peer in asked for source in self._links.sources()):
            asked.clear()
            await trio.sleep(POLL_S)

    async def _next_plan(self) -> Signed[CheckpointPlan]:
        """The next checkpoint that the trainer announces; waits for it at two relays at once."""
        found: list[Signed[CheckpointPlan]] = []
        asked: set[PeerId] = set()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                while not found:
                    if (plan := await self._ask_next(asked)) is not None:
                        found.append(plan)
                nursery.cancel_scope.cancel()

            for _ in range(NEXT_AT_ONCE):
                nursery.start_soon(ask)
        return found[0]

    async def _ask_next(self, asked: set[PeerId]) -> Signed[CheckpointPlan] | None:
        source = await self._choose(asked)
        began = trio.current_time()
        asked.add(source.peer)
        oldest = max([self._tried, *(step for step, _ in self._store.complete())]) + 1
        try:
            return await self._next_from(source, oldest)
        except RelayError as error:
            log.debug("next relay=%s error=%r", source.peer.short, error.message)
        except ProtocolError as error:
            self._links.blame(source.peer, f"next checkpoint: {error.message}")
        finally:
            asked.discard(source.peer)
        await trio.sleep(max(0.0, began + MIN_NEXT_S - trio.current_time()))
        return None

    async def _next_from(self, source: Source, oldest: int) -> Signed[CheckpointPlan] | None:
        response = await self._links.get(
            source,
            f"/v1/checkpoints/next?from={oldest}&wait_s={NEXT_WAIT_S:g}",
            max_bytes=CheckpointPlan.MAX_BYTES + 1024,
            wait_s=NEXT_WAIT_S,
        )
        if response.status == 204:
            return None
        plan = open_envelope(response.body, CheckpointPlan)
        self._rules.check_plan(plan)
        if plan.record.step < oldest:
            raise StaleRecordError(f"a plan of step {plan.record.step}, when one from {oldest} on was asked for")
        return plan
