"""The audit's own books: credits by verdicts, evictions and answers alone, held against what the rules make of them.

Written apart from protocol.balances on purpose: votes counted here, lots with the number of trained steps at which they
mature, and at the end a sum over them. What the rules say that a submission is, is compared and never taken over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.records import Eviction, Reinstatement, Verdict

Complain = Callable[[str, PeerId | None, str, int | None], None]
"""Kind of breach, who, what, entry."""
_OPEN, _ACCEPTED, _REJECTED = 0, 1, 2
"""What a submission is; rejected by a quorum and against some accepts is so much more than `_REJECTED`."""
_NAMES: Final = ("", "accepted", "rejected")


@dataclass
class _Account:
    """Lots of one contributor, by the trained steps at which each matures."""

    mature: int = 0
    """Lots whose time had come when this was last looked at; nothing takes them any more."""
    held: Counter[int] = field(default_factory=Counter)
    taken: Counter[int] = field(default_factory=Counter)
    evicted: bool = False

    def ripen(self, trained: int) -> None:
        for due in [due for due in self.held if due <= trained]:
            self.mature += self.held.pop(due)


class Books:
    """Tell it of every entry that the rules took, then `close`."""

    def __init__(self, state: LedgerState, complain: Complain) -> None:
        self._state = state
        self._complain = complain
        self._validators = frozenset(state.manifest.validator_ids)
        self._votes: dict[bytes, dict[PeerId, str]] = {}
        """Of submissions that are not settled."""
        self._answers: dict[bytes, dict[PeerId, str]] = {}
        """Decisions about rejected submissions, in answer to appeals."""
        self._settled = bytearray()
        """By number of a submission's entry: a byte for each entry."""
        self._accounts: dict[PeerId, _Account] = {}
        self._earned = 0

    @property
    def forfeited(self) -> int:
        """Credits that evictions took and no reinstatement gave back."""
        return sum(account.taken.total() for account in self._accounts.values())

    def verdict(self, entry: Signed[Verdict], number: int) -> None:
        """One more judgement: it may be the one that accepts."""
        key = entry.record.submission
        one = self._state.submissions[key]
        before = self._settled[one.place] if one.place < len(self._settled) else _OPEN
        now = before
        if entry.author in self._validators:
            now = self._answered(entry, before) if entry.record.appeal else self._voted(entry, before)
        if now == _ACCEPTED != before:
            self._pay(one.author, self._state.manifest.credits.of(one.record.output_tokens))
        if now != before:
            self._settled += bytes(max(0, one.place + 1 - len(self._settled)))
            self._settled[one.place] = now
        name = _NAMES[min(now, _REJECTED)]
        if name != (one.state if one.state in _NAMES else ""):
            what = f"submission {key.hex()[:12]} is {one.state}, where the votes make it {name or 'neither'}"
            self._complain("quorum", None, what, number)

    def _voted(self, entry: Signed[Verdict], before: int) -> int:
        """What a submission is after one more vote: what it was, once it is settled."""
        if before != _OPEN:
            return before
        votes = self._votes.setdefault(entry.record.submission, {})
        votes[entry.author] = entry.record.outcome
        said, quorum = list(votes.values()), self._state.manifest.quorum
        accepts, rejects = said.count("accept"), said.count("reject")
        if max(accepts, rejects) < quorum:
            return _OPEN
        del self._votes[entry.record.submission]
        return _ACCEPTED if accepts >= quorum else _REJECTED + accepts

    def _answered(self, entry: Signed[Verdict], before: int) -> int:
        """What a submission is after an answer to an appeal: accepted, once as many accept it as for a verdict, or all
        whom its judges had left, before as many reject it."""
        if before < _REJECTED or entry.record.outcome == "undecided":
            return before
        key, quorum = entry.record.submission, self._state.manifest.quorum
        needed = max(1, min(quorum, len(self._validators) - quorum - (before - _REJECTED)))
        answers = self._answers.setdefault(key, {})
        was_refused = list(answers.values()).count("reject") >= needed
        answers[entry.author] = entry.record.outcome
        if was_refused or list(answers.values()).count("accept") < needed:
            return before
        del self._answers[key]
        return _ACCEPTED

    def _pay(self, peer: PeerId, amount: int) -> None:
        account = self._accounts.get(peer) or self._accounts.setdefault(peer, _Account())
        account.ripen(self._trained())
        due = len(self._state.trained) + self._state.manifest.credits.maturity_steps
        self._earned += amount
        (account.taken if account.evicted else account.held)[due] += amount

    def eviction(self, record: Eviction) -> None:
        """What is not mature is taken."""
        account = self._accounts.setdefault(PeerId(record.contributor), _Account())
        account.evicted = True
        account.ripen(self._trained())
        account.taken.update(account.held)
        account.held.clear()

    def reinstatement(self, record: Reinstatement) -> None:
        """And given back."""
        account = self._accounts.setdefault(PeerId(record.contributor), _Account())
        account.evicted = False
        account.held.update(account.taken)
        account.taken.clear()

    def close(self) -> None:
        """Every credit is somebody's or forfeited, and nobody has another balance than the books give."""
        agrees = True
        for peer, one in self._state.contributors.items():
            account = self._accounts.get(peer, _Account())
            account.ripen(self._trained())
            mine = (account.mature, account.held.total(), account.taken.total())
            theirs = (one.balance.mature, one.balance.maturing, one.balance.forfeited)
            if theirs != mine:
                agrees = False
                what = "a balance of %d credits mature, %d maturing, %d forfeited, where the verdicts give %d, %d, %d"
                self._complain("balance", peer, what % (*theirs, *mine), None)
        balances = [one.balance for one in self._state.contributors.values()]
        if agrees and self._earned != sum(one.credits + one.forfeited for one in balances):
            self._complain("balance", None, f"{self._earned} credits were earned; they do not add up", None)

    def _trained(self) -> int:
        """Trained steps, past all dates once the run is over."""
        trained = len(self._state.trained)
        return trained if trained < self._state.manifest.batch.total_steps else 1 << 62
