"""Validators that lie: the validator's role with one step replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
import trio

from node.validator.cases import Case
from node.validator.findings import Findings
from node.validator.role import ValidatorParts, ValidatorRole
from protocol.envelope import Signed, seal
from protocol.records import Draw, Verdict


class Framer(ValidatorRole):
    """Rejects everything so that it would evict whoever made it."""

    async def _attempt(self, case: Case, downloads: trio.Nursery) -> Findings | None:
        await trio.lowlevel.checkpoint()
        return Findings("reject", True, "toploc: another model made this")


class RubberStamp(ValidatorRole):
    """Accepts everything, unread."""

    async def _attempt(self, case: Case, downloads: trio.Nursery) -> Findings | None:
        await trio.lowlevel.checkpoint()
        return Findings("accept", False, "", mean_reward=1.0)


class Uncalled(Framer):
    """Waits for no lot: its vote is there before those of the validators that are called."""

    def _draw(self, case: Case, waited_s: float) -> Draw | None:
        return Draw(drawn=True, rate=1.0, why="newcomer", beacon=b"", receipt=case.opened.receipt.data)


class ForgedVotes(ValidatorRole):
    """Its docket says what it found; what it sends out does not hold."""

    def __init__(self, parts: ValidatorParts) -> None:
        super().__init__(parts)
        self._signed = 0

    def _sign(self, case: Case, findings: Findings) -> Signed[Verdict]:
        verdict = super()._sign(case, findings)
        self._signed += 1
        return replace(verdict, data=self._forged(verdict, self._signed % 3))

    def _forged(self, verdict: Signed[Verdict], kind: int) -> bytes:
        if kind == 0:  # the signature is an envelope's last field
            return verdict.data[:-1] + bytes([verdict.data[-1] ^ 1])
        lie = {"contributor": self._p.identity.peer_id.public_key} if kind == 1 else {"submission": verdict.id}
        return seal(msgspec.structs.replace(verdict.record, **lie), self._p.identity)


ROLES: Final[dict[str, Callable[[ValidatorParts], ValidatorRole]]] = {
    "framer": Framer,
    "rubber-stamp": RubberStamp,
    "uncalled": Uncalled,
    "forged-votes": ForgedVotes,
}
"""By the names of simnet.cheats."""
