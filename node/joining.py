"""Joining a run: what every node is built upon, and how it finds manifest, relays and head.

A node that was in the run before remembers enough to go on while the DHT is away; one that never was gives up in time.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import trio

from node.config import NodeConfig
from node.dashboard.sources import Sources
from node.datadir import DataDir
from node.status import StatusBoard
from node.swarm import Swarm
from p2p.bridge import AioThread
from p2p.contacts import Contacts
from p2p.discovery import P2PNode
from p2p.http import HttpClient
from protocol.envelope import Signed
from protocol.errors import BootstrapError, NodeError, RelayError
from protocol.identity import Identity
from protocol.records import Manifest
from protocol.run import RunAddress

log = logging.getLogger(__name__)

EXPLAIN_S: Final = 2.0
EXPLAIN_EVERY: Final = 5
SHOW_DISCOVERY_S: Final = 5.0


@dataclass(frozen=True)
class Node:
    """What every role is built upon."""

    config: NodeConfig
    data: DataDir
    identity: Identity
    board: StatusBoard
    aio: AioThread
    http: HttpClient
    sources: Sources
    """What its dashboard shows."""

    @property
    def address(self) -> RunAddress:
        return self.config.run_address

    @cached_property
    def contacts(self) -> Contacts:
        """How this node is let in at relays."""
        return Contacts(self.identity, self.address.digest)

    def path(self, name: str) -> Path:
        return self.data.path / name


async def join_swarm(
    node: Node, services: trio.Nursery, manifest: Signed[Manifest] | None = None
) -> tuple[P2PNode, Swarm]:
    """Join discovery as a client: find the run's manifest and relays, follow its head. Raises NodeError."""
    p2p = P2PNode(
        node.identity,
        listen=(),
        announce=(),
        bootstrap=node.config.bootstrap,
        dht_server=False,
        run_address=node.address,
        data_dir=node.data.path,
    )
    swarm = Swarm(
        node.address,
        node.http,
        contacts=node.contacts,
        find_relays=p2p.find_relays,
        find_manifest=partial(p2p.find_run, node.address),
        board=node.board,
        manifest=manifest,
        cache_path=node.path("swarm.cache"),
        follow_head=manifest is None,
    )
    await services.start(p2p.run)
    services.start_soon(show_discovery, p2p, node.board)
    await services.start(swarm.run)
    async with _explaining(node.board, lambda: f"the run's manifest; {p2p.bootstrap_state}"):
        with trio.move_on_after(node.config.join_timeout_s or math.inf) as joining:
            await swarm.wait_manifest()
    if joining.cancelled_caught:
        raise _not_found(node, p2p)
    node.board.waiting("the run's head: its trainer has not opened the first step yet, or no relay has heard of it")
    return p2p, swarm


async def show_discovery(p2p: P2PNode, board: StatusBoard) -> None:
    """Keep on the board whom this node knows in the DHT, for `intellect-node peers`."""
    while True:
        board.details(discovery=p2p.describe())
        await trio.sleep(SHOW_DISCOVERY_S)


def _not_found(node: Node, p2p: P2PNode) -> NodeError:
    """Why a node that was never in its run could not join."""
    waited = f"within {node.config.join_timeout_s:g} s"
    if not p2p.dht_peers:
        return BootstrapError(
            f"no bootstrap peer could be reached {waited}: {p2p.bootstrap_state}",
            hint="check the addresses and this computer's network, or ask the operator for another --bootstrap",
        )
    return RelayError(
        f"nobody knows the run {node.address} {waited}; {p2p.dht_peers} peers were asked",
        hint="check --run letter by letter with the operator, and that the run's trainer is up",
    )


@asynccontextmanager
async def _explaining(board: StatusBoard, waits_for: Callable[[], str]) -> AsyncIterator[None]:
    """Say on the board, and now and then in the log, what a block waits for."""

    async def explain() -> None:
        for count in itertools.count():
            board.waiting(waits_for())
            if count % EXPLAIN_EVERY == EXPLAIN_EVERY - 1:
                log.info("waiting for %s", waits_for())
            await trio.sleep(EXPLAIN_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(explain)
        yield
        nursery.cancel_scope.cancel()
