"""Running one node: the parts that every role has, one nursery, a role, and a graceful end.

Every role has a locked data directory, a key, a status board on loopback and an HTTP thread; node.assembly builds what
a role adds. The process ends when the role is done, when a signal asks for it, or with a named error.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Final

import trio

from node.assembly import Kind, Role, build_role
from node.config import NodeConfig
from node.dashboard.routes import Dashboard
from node.dashboard.sources import Sources
from node.datadir import DataDir
from node.health import HealthWatch
from node.homes import say_about, settle
from node.identity import load_or_create_identity
from node.joining import Node
from node.logs import keep_log, set_up_logging
from node.narrator import TerminalLine, narrate
from node.oversight import Oversight, download_meter
from node.preflight import require_ready
from node.run_link import require_way_in
from node.signals import leave_on_signal
from node.status import StatusBoard, serve_status
from p2p.bridge import AioThread
from p2p.http import HttpClient
from protocol.errors import named_error
from protocol.identity import Identity

log = logging.getLogger(__name__)

LEAVE_GRACE_S: Final = 10.0
"""For closing down after a role has left, before the process ends itself."""
LOG_FILE: Final = "node.log"


def run_node(config: NodeConfig, *, kind: Kind | None = None) -> int:
    """Run a node to its end; the exit code. Raises NodeError for what a person can mend.

    `kind` makes an inference node or a validator a cheat, for simulations.
    """
    terminal = TerminalLine.of(sys.stderr) if config.log_format == "text" else None
    quiet = terminal is not None and config.log_level == "info"  # a person reads node.narrator's lines instead
    set_up_logging(
        config.log_level,
        stream=terminal,
        shown_level="warning" if quiet else None,
        log_format=config.log_format,
    )
    require_way_in(config)
    gc.freeze()  # what is imported stays: the collector need not look at it again and again
    settle(config.data_dir, os.environ)
    with DataDir(config.data_dir) as data, closing(keep_log(data.path / LOG_FILE)):
        require_ready(config)
        identity = load_or_create_identity(data.path, passphrase=config.passphrase.text)
        say_about(data.path, role=config.role, run=config.run)
        try:
            trio.run(partial(_main, config, data, identity, kind, terminal=terminal))
        except BaseExceptionGroup as group:
            named = named_error(group)
            if named is None:
                log.exception("the node ends with an error that has no name")
            raise named or group from group
    return 0


async def _main(
    config: NodeConfig, data: DataDir, identity: Identity, kind: Kind | None, *, terminal: TerminalLine | None
) -> None:
    board = StatusBoard(role=config.role, peer_id=identity.peer_id, run=config.run)
    async with AsyncExitStack() as stack:
        aio = await stack.enter_async_context(AioThread())
        meter = download_meter(config, board, data.path)
        http = await stack.enter_async_context(HttpClient(aio, budget=meter.budget))
        nursery = await stack.enter_async_context(trio.open_nursery())
        leaving = trio.Event()
        await nursery.start(partial(leave_on_signal, leaving.set, grace_s=config.leave_deadline_s + LEAVE_GRACE_S))
        nursery.start_soon(narrate, board, terminal)
        sources = Sources(config.run_address)
        oversight = Oversight(config, board, http, data_dir=data.path, meter=meter)
        await nursery.start(oversight.run, aio)
        await nursery.start(_show_board, board, aio, config, data, sources, oversight.health)
        log.info("start role=%s peer_id=%s data_dir=%s", config.role, identity.peer_id, data.path)
        try:
            await _run_role(Node(config, data, identity, board, aio, http, sources), kind, leaving)
        finally:
            await oversight.finish()
        nursery.cancel_scope.cancel()


async def _show_board(
    board: StatusBoard,
    aio: AioThread,
    config: NodeConfig,
    data: DataDir,
    sources: Sources,
    health: HealthWatch,
    *,
    task_status: trio.TaskStatus[str],
) -> None:
    dashboard = Dashboard(board, sources, log_path=data.path / "dashboard.log")
    await serve_status(
        board,
        aio,
        data_dir=data.path,
        port=config.status_port,
        dashboard=dashboard,
        health=health,
        task_status=task_status,
    )


async def _run_role(node: Node, kind: Kind | None, leaving: trio.Event) -> None:
    """Build the role and run it until it is done or, asked to leave, has left."""
    role: Role | None = None
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            await leaving.wait()
            if role is not None:
                await role.leave(node.config.leave_deadline_s)
            nursery.cancel_scope.cancel()

        nursery.start_soon(leave)
        async with trio.open_nursery() as services:
            role = await build_role(node, services, kind)
            await role.run()
            services.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
