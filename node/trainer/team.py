"""A trainer's compute process as several: torchrun starts them, the first one speaks to the node, the others follow it.

The node starts one process, which becomes torchrun when the recipe asks for more than one. The first worker takes the
node's pipe over from torchrun, and tells the others what to do, so that all make the same calls. Whichever dies takes
the others along, and the node starts anew. Leaves out what they compute (trainer.parallel, node.trainer.compute).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from node.compute.serve import CHANNEL_VARIABLE
from protocol.errors import ComputeError, NodeError

if TYPE_CHECKING:
    from trainer.parallel import World

_PR_SET_PDEATHSIG: Final = 1

logger = logging.getLogger(__name__)


def started_by_torchrun() -> bool:
    """Whether this is one of several processes."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def become_torchrun(processes: int, module: str, arguments: Sequence[str]) -> NoReturn:
    """Go on as torchrun with so many workers of a module. The node's pipe stays open in this process."""
    environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--module", module]
    os.execve(sys.executable, [sys.executable, *command, *arguments], environment)


def join_torchrun() -> None:
    """Die with torchrun, and as its first worker take over the pipe to the node. Raises ComputeError if it cannot."""
    agent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = os.environ.pop(CHANNEL_VARIABLE, "")
    if os.environ["RANK"] != "0" or not channel:
        return
    requests, replies, memory_bytes = channel.split(",")
    try:
        # torchrun closes its descriptors in its workers; they are still open in itself, and the kernel shows them.
        ours = (
            os.open(f"/proc/{agent}/fd/{requests}", os.O_RDONLY),
            os.open(f"/proc/{agent}/fd/{replies}", os.O_WRONLY),
        )
    except OSError as error:
        raise ComputeError(
            f"the pipe to the node cannot be taken over from torchrun: {error.strerror}",
            hint="several processes need Linux and its /proc; set policy.processes = 1 in the recipe",
        ) from error
    os.environ[CHANNEL_VARIABLE] = f"{ours[0]},{ours[1]},{memory_bytes}"


class Team:
    """The other processes of a trainer, as its first one sees them. Alone, there is nobody to tell."""

    def __init__(self, world: World) -> None:
        self.world = world

    def tell(self, method: str, /, **params: Any) -> None:
        """Have the others make a call that this process is about to make."""
        if self.world.size > 1:
            self.world.share(msgspec.msgpack.encode([method, params]))


def follow(world: World, handlers: Mapping[str, Callable[..., Any]]) -> NoReturn:
    """Make the calls that the first process makes, until it is gone.

    What a call raises by name it raises in every process; the first one reports it.
    """
    while True:
        method, params = msgspec.msgpack.decode(world.share(None))
        try:
            handlers[method](**params)
        except NodeError as error:
            logger.info("call failed rank=%d method=%s error=%r", world.rank, method, error.message)
