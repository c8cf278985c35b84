"""What a contributor knows of its own standing: credits, appeals, and the proof that its work was used.

Asked of relays now and then, and shown. What a relay says of standing and credits is shown as that; what proves use, a
step's batch in the trainer's envelope, is checked and kept in the outbox beside receipts and verdicts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from node.inference.outbox import Outbox
from node.membership import MAX_ASKED, AppealRow, Standing
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from protocol.errors import ProtocolError, RelayError

log = logging.getLogger(__name__)

ASK_EVERY_S: Final = 10.0
ASK_TIMEOUT_S: Final = 15.0
STEPS_AT_ONCE: Final = 8


class StandingWatch:
    """`run` keeps asking; `ask` may be used beside it."""

    def __init__(self, swarm: Swarm, outbox: Outbox, board: StatusBoard) -> None:
        self._swarm = swarm
        self._outbox = outbox
        self._board = board

    async def run(self) -> None:
        while True:
            await trio.sleep(ASK_EVERY_S)
            await self.ask()

    async def ask(self) -> Standing | None:
        """Where this node stands by a relay that answers; None if none does. Shows it, and keeps what it proves."""
        wanted = self._outbox.unproved(MAX_ASKED)
        with trio.move_on_after(ASK_TIMEOUT_S):
            for client in self._swarm.clients:
                try:
                    standing = await client.standing(wanted)
                except (RelayError, ProtocolError) as error:
                    log.debug("standing relay=%s error=%r", client.peer_id.short, error.message)
                    continue
                self._show(standing)
                await self._keep_proofs(client, standing)
                return standing
        return None

    def _show(self, standing: Standing) -> None:
        steps = self._swarm.manifest.record.credits.maturity_steps
        shown = {"mature": standing.mature, f"maturing, each for {steps} trained steps": standing.maturing}
        if standing.forfeited:
            shown["forfeited"] = standing.forfeited
        self._board.details(credits=shown, appeals=appeals_text(standing.appeals))

    async def _keep_proofs(self, client: RelayClient, standing: Standing) -> None:
        by_step: dict[int, list[bytes]] = {}
        for row in standing.submissions:
            if row.used_in is not None:
                by_step.setdefault(row.used_in, []).append(row.submission)
        for step in sorted(by_step)[:STEPS_AT_ONCE]:
            try:
                batch, trained = await client.step_entries(step)
            except (RelayError, ProtocolError) as error:
                log.info("step=%d relay=%s error=%r", step, client.peer_id.short, error.message)
                continue
            used = set(batch.record.submissions).intersection(by_step[step])
            self._outbox.keep_step(step, batch.data, b"" if trained is None else trained.data, used)


def answers_text(row: AppealRow) -> str:
    """How many validators have said what, and how many must say the same."""
    return f"{row.accepts} of {row.needed} accept, {row.rejects} of {row.needed} reject"


def appeals_text(appeals: Sequence[AppealRow]) -> str:
    """Each appeal and how far it is, for a person; empty without any."""
    said = {
        "open": "is in the ledger and waits for other validators",
        "granted": "was granted",
        "refused": "was refused",
        "undecided": "ended without a decision",
    }

    def text(row: AppealRow) -> str:
        once_more = ", and may be filed once more" if row.once_more else ""
        return f"about {row.submission.hex()[:12]}: {said[row.state]} ({answers_text(row)}){once_more}"

    return "; ".join(map(text, appeals))
