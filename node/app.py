"""Running one node: the parts that every role has, one nursery, a role, and a graceful end.

Every role has a locked data directory, a key, a status board on loopback and an HTTP thread; node.assembly builds what
a role adds. The process ends when the role is done, when a signal asks for it, or with a named error.
"""

from __future__ import annotations

import gc
import logging
from contextlib import AsyncExitStack
from typing import Final

import trio

from node.assembly import InferenceKind, Node, Role, build_role
from node.config import NodeConfig
from node.datadir import DataDir
from node.identity import load_or_create_identity
from node.logs import set_up_logging
from node.signals import leave_on_signal
from node.status import StatusBoard, serve_status
from p2p.bridge import AioThread
from p2p.http import HttpClient
from protocol.errors import NodeError
from protocol.identity import Identity

log = logging.getLogger(__name__)

LEAVE_DEADLINE_S: Final = 10.0


def run_node(config: NodeConfig, *, kind: InferenceKind | None = None) -> int:
    """Run a node to its end; the exit code. Raises NodeError for what a person can mend.

    `kind` makes an inference node a cheat, for simulations.
    """
    set_up_logging(config.log_level)
    gc.freeze()  # what is imported stays: the collector need not look at it again and again
    with DataDir(config.data_dir) as data:
        identity = load_or_create_identity(data.path, passphrase=config.passphrase.text)
        try:
            trio.run(_main, config, data, identity, kind or InferenceKind())
        except BaseExceptionGroup as group:
            raise _one_node_error(group) or group from group
    return 0


def _one_node_error(group: BaseExceptionGroup[BaseException]) -> NodeError | None:
    """The error to show a person, when all that went wrong is errors that have a name."""
    named, rest = group.split(NodeError)
    if rest is not None or named is None:
        return None
    first: BaseException = named
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, NodeError) else None


async def _main(config: NodeConfig, data: DataDir, identity: Identity, kind: InferenceKind) -> None:
    board = StatusBoard(role=config.role, peer_id=identity.peer_id, run=config.run)
    async with AsyncExitStack() as stack:
        aio = await stack.enter_async_context(AioThread())
        http = await stack.enter_async_context(HttpClient(aio))
        nursery = await stack.enter_async_context(trio.open_nursery())
        leaving = trio.Event()
        await nursery.start(leave_on_signal, leaving.set)
        await nursery.start(_show_board, board, aio, config, data)
        log.info("start role=%s peer_id=%s data_dir=%s", config.role, identity.peer_id, data.path)
        await _run_role(Node(config, data, identity, board, aio, http), kind, leaving)
        nursery.cancel_scope.cancel()


async def _show_board(
    board: StatusBoard, aio: AioThread, config: NodeConfig, data: DataDir, *, task_status: trio.TaskStatus[str]
) -> None:
    await serve_status(board, aio, data_dir=data.path, port=config.status_port, task_status=task_status)


async def _run_role(node: Node, kind: InferenceKind, leaving: trio.Event) -> None:
    """Build the role and run it until it is done or, asked to leave, has left."""
    role: Role | None = None
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            await leaving.wait()
            if role is not None:
                await role.leave(LEAVE_DEADLINE_S)
            nursery.cancel_scope.cancel()

        nursery.start_soon(leave)
        async with trio.open_nursery() as services:
            role = await build_role(node, services, kind)
            await role.run()
            services.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
