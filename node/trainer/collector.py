"""From relays' feeds to the ledger: submissions, verdicts and files, in an order that the ledger takes.

A submission enters the ledger together with a verdict, after its file is on disk: whatever the ledger calls accepted
can be trained on after any crash. Submissions of one contributor and step enter by index. Admissions and appeals come
the same way and are node.trainer.petitions' business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import trio

from node.feeds import Feeds
from node.ledger.log import LedgerLog
from node.ledger.memory import looked_at
from node.relay_client import FeedItem, RelayClient
from node.trainer.consequences import Consequences
from node.trainer.petitions import Petitions
from protocol.envelope import Signed
from protocol.errors import LedgerError, ProtocolError, RelayError
from protocol.identity import Identity, PeerId
from protocol.ledger_memory import LedgerSubmission
from protocol.records import Admission, Appeal, Submission, Verdict

log = logging.getLogger(__name__)

SUFFIX: Final = ".parquet"
RETRY_S = 3.0
PENDING_S = 60.0
"""A submission that nobody judged for this long is no longer counted on."""

MAX_CASES = 1 << 15
"""Beyond so many, those without a submission go, the oldest first; then those of whom the ledger takes nothing."""
MAX_HELD_EACH = 256
"""Submissions of one key that is evicted, or not admitted: it may come back, or be admitted yet."""


@dataclass
class _Case:
    """A submission on its way into the ledger."""

    seen_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)
    """When there was something new about it for the last time."""
    submission: Signed[Submission] | None = None
    relays: dict[PeerId, RelayClient] = field(default_factory=dict)
    verdicts: dict[PeerId, Signed[Verdict]] = field(default_factory=dict)


class Collector:
    """Keeps the ledger up to date with what validators say; `changed` wakes whoever waits for accepted rollouts."""

    def __init__(self, identity: Identity, ledger: LedgerLog, feeds: Feeds, rollout_dir: Path) -> None:
        self._ledger = ledger
        self._feeds = feeds
        self._rollout_dir = rollout_dir
        self._consequences = Consequences(identity, ledger)
        self._petitions = Petitions(ledger, self._consequences)
        self._cases: dict[bytes, _Case] = {}
        self._changed = trio.Event()
        self.on_verdict: Callable[[Signed[Verdict]], None] = lambda verdict: None

    async def run(self) -> None:
        self._rollout_dir.mkdir(parents=True, exist_ok=True)
        while True:
            with trio.move_on_after(RETRY_S) as idle:
                client, item = await self._feeds.next()
            if idle.cancelled_caught:
                await self._settle_all()
                continue
            await self._take(client, item)
            self._feeds.done(client, item)

    def catch_up(self) -> None:
        """Write what an earlier process was kept from writing; before a batch is made, or anything new is taken."""
        self._consequences.write()

    def file(self, submission: bytes) -> Path:
        return self._rollout_dir / f"{submission.hex()}{SUFFIX}"

    def discard(self, submission: bytes) -> None:
        """Delete a file that is not needed any more. One that the disk keeps does no harm."""
        try:
            self.file(submission).unlink(missing_ok=True)
        except OSError as error:
            log.warning("rollouts file=%s cannot be deleted: %s", self.file(submission), error.strerror)

    def pending(self, step: int) -> int:
        """Submissions that a batch for `step` could hold once they are judged; not those that nobody judges."""
        oldest = step - self._ledger.state.manifest.batch.max_staleness
        recent = time.monotonic() - PENDING_S
        waiting = [case.submission for case in self._cases.values() if not case.verdicts and case.seen_at > recent]
        return sum(
            one is not None and one.record.checkpoint_step >= oldest and self._takes_from(one.author) for one in waiting
        )

    def has_all(self, *, but_silent: bool = False) -> bool:
        """Whether every relay has been heard and nothing that it announced has still to be judged or written down.

        However old its policy: what is accepted too late for any batch is credited as well. With `but_silent` nothing
        is expected of relays that are silent.
        """
        if (self._feeds.silent and not but_silent) or self._ledger.state.open_appeals():
            return False
        return not any(self._unsettled(key, case) for key, case in self._cases.items())

    def say_what_is_missing(self) -> None:
        """Log what `has_all` waits for."""
        waiting = [key.hex()[:12] for key, case in self._cases.items() if self._unsettled(key, case)]
        log.warning(
            "last verdicts missing silent_relays=%s open_appeals=%d submissions=%d first=%s",
            *([peer.short for peer in self._feeds.silent], len(self._ledger.state.open_appeals())),
            *(len(waiting), waiting[:3]),
        )

    def drop_stale(self, step: int) -> int:
        """Delete files that no batch from `step` on may use; the number of accepted rollouts that went that way."""
        state = self._ledger.state
        for path in list(self._rollout_dir.glob(f"*{SUFFIX}")):
            with suppress(ValueError):  # no file of ours
                one = looked_at(state.submissions, bytes.fromhex(path.stem))
                if one is not None and state.shelf.is_too_old(one, step):
                    self.discard(bytes.fromhex(path.stem))
        return state.shelf.stale(step).rollouts

    async def wait_changed(self) -> None:
        """Until a submission or an entry is there that was not when this was called."""
        await self._changed.wait()

    async def _take(self, client: RelayClient, item: FeedItem) -> None:
        signed = item.signed
        if isinstance(signed.record, Admission | Appeal) or (
            isinstance(signed.record, Verdict) and signed.record.appeal
        ):
            return await self._petition(signed)
        key = signed.record.submission if isinstance(signed.record, Verdict) else signed.id
        if self._settled(key) or (isinstance(signed.record, Submission) and self._holds_enough_of(signed)):
            return
        case = self._case(key)
        if isinstance(signed.record, Verdict):
            before = case.verdicts.get(signed.author)
            if before is None or (before.record.outcome == "undecided" and before.id != signed.id):
                case.verdicts[signed.author] = signed
                case.heard_at = time.monotonic()
        else:
            if case.submission is None:
                case.heard_at = time.monotonic()
            case.submission = signed
            case.relays[client.peer_id] = client
            self._notify()
        await self._settle(key, case)

    def _case(self, key: bytes) -> _Case:
        """Of too many, one without its submission is forgotten: verdicts alone cost nothing to make."""
        if key not in self._cases and len(self._cases) >= MAX_CASES:
            hollow = (one for one, case in self._cases.items() if case.submission is None)
            held = (
                one
                for one, case in self._cases.items()
                if case.submission is not None and not self._takes_from(case.submission.author)
            )
            if (last := next(chain(hollow, held), None)) is not None:
                del self._cases[last]
        return self._cases.setdefault(key, _Case())

    def _holds_enough_of(self, submission: Signed[Submission]) -> bool:
        """Whether this is one more than is kept of a key of which the ledger takes nothing now."""
        if submission.id in self._cases or self._takes_from(submission.author):
            return False
        return len(self._cases_of(submission.author)) >= MAX_HELD_EACH

    def _cases_of(self, author: PeerId) -> list[tuple[bytes, _Case]]:
        cases = self._cases.items()
        return [(key, one) for key, one in cases if one.submission is not None and one.submission.author == author]

    async def _petition(self, entry: Signed[Any]) -> None:
        """What an admission, or a reinstatement that follows from an answer, lets in has waited for it."""
        before = {peer for peer in (self._ledger.state.evicted | {entry.author}) if not self._takes_from(peer)}
        for verdict in await self._petitions.take(entry):
            self.on_verdict(verdict)
        self._notify()
        for author in before:
            if self._takes_from(author):
                for key, case in self._cases_of(author):
                    await self._settle(key, case)

    def _unsettled(self, key: bytes, case: _Case) -> bool:
        """Whether a verdict about a submission, or its place in the ledger, is still to be expected."""
        known = looked_at(self._ledger.state.submissions, key)
        if time.monotonic() - case.heard_at > PENDING_S or (known is not None and not self._may_be_settled(known)):
            return False
        authors = {PeerId(verdict.record.contributor) for verdict in case.verdicts.values()}
        if case.submission is not None:
            authors = {case.submission.author}
        return any(self._takes_from(author) for author in authors)

    def _may_be_settled(self, known: LedgerSubmission) -> bool:
        """Whether those who have not decided can still make a quorum: the next validator is called where one could not
        tell, or two contradict each other, and who could not tell looks again."""
        manifest = self._ledger.state.manifest
        said = [one.record.outcome for one in known.verdicts.values()]
        accepts, rejects = said.count("accept"), said.count("reject")
        left = len(manifest.validators) - accepts - rejects
        return known.state not in ("accepted", "rejected") and max(accepts, rejects) + left >= manifest.quorum

    def _takes_from(self, author: PeerId) -> bool:
        """Whether the ledger takes work of a contributor now."""
        contributor = self._ledger.state.contributors.get(author)
        evicted = contributor is not None and contributor.standing == "evicted"
        return not evicted and self._ledger.state.admitted(author)

    def _settled(self, key: bytes) -> bool:
        """Asked about every old submission when a trainer that starts again hears its relays' feeds."""
        state = self._ledger.state
        if key not in state.unaccepted:
            return key in state.submissions
        known = looked_at(state.submissions, key)
        return known is not None and known.state == "rejected"

    async def _settle_all(self) -> None:
        for key, case in list(self._cases.items()):
            await self._settle(key, case)

    async def _settle(self, key: bytes, case: _Case) -> None:
        """Put one case, and those that waited for it, into the ledger if its turn has come."""
        found: tuple[bytes, _Case] | None = (key, case)
        while found is not None and self._due(*found) and await self._have_file(*found):
            key, case = found
            self._append(key, case)
            if self._settled(key):
                self._cases.pop(key, None)
            found = self._following(case.submission)

    def _due(self, key: bytes, case: _Case) -> bool:
        state = self._ledger.state
        if case.submission is None or not case.verdicts:
            return False
        if key in state.submissions:
            return bool(self._fresh(key, case))
        record, author = case.submission.record, case.submission.author
        return self._takes_from(author) and record.index == state.next_index(author, record.step)

    def _following(self, submission: Signed[Submission] | None) -> tuple[bytes, _Case] | None:
        if submission is None:
            return None
        wanted = (submission.author, submission.record.step, submission.record.index + 1)
        for key, case in self._cases.items():
            one = case.submission
            if one is not None and (one.author, one.record.step, one.record.index) == wanted:
                return key, case
        return None

    async def _have_file(self, key: bytes, case: _Case) -> bool:
        """Whether the file of an accepted submission is on disk; one that is rejected or too old is not needed."""
        accepted = any(verdict.record.outcome == "accept" for verdict in case.verdicts.values())
        if not accepted or self.file(key).exists() or case.submission is None:
            return True
        state = self._ledger.state
        if case.submission.record.checkpoint_step < len(state.batches) - state.manifest.batch.max_staleness:
            return True
        for client in list(case.relays.values()):
            try:
                await client.file(case.submission, self.file(key))
            except (RelayError, ProtocolError) as error:
                log.warning("rollouts relay=%s error=%r", client.peer_id.short, error.message)
                continue
            return True
        return False

    def _append(self, key: bytes, case: _Case) -> None:
        if case.submission is None:
            return
        for verdict in self._fresh(key, case):
            if self._settled(key):
                break  # whoever has not judged it in the ledger may still answer an appeal
            before = [] if key in self._ledger.state.submissions else [case.submission.data]
            self._append_verdict(case, before, verdict)
            if key not in self._ledger.state.submissions:
                self._cases.pop(key, None)  # it is the submission that the ledger refuses
                break
        self._notify()

    def _fresh(self, key: bytes, case: _Case) -> list[Signed[Verdict]]:
        """Verdicts that the ledger lacks."""
        known = looked_at(self._ledger.state.submissions, key)
        return [one for author, one in case.verdicts.items() if not (known and known.was_judged_by(author, one.record))]

    def _append_verdict(self, case: _Case, before: list[bytes], verdict: Signed[Verdict]) -> None:
        """A verdict that the ledger refuses is dropped, and others on the same submission are not."""
        try:
            self._ledger.append([*before, verdict.data])
        except LedgerError as error:
            log.warning("ledger validator=%s rule=%s %s", verdict.author.short, error.rule, error.message)
            case.verdicts.pop(verdict.author, None)
            return
        self.on_verdict(verdict)
        self._consequences.write()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
