"""What contributors ask of the run through a relay: to be admitted, and to be judged once more.

A relay takes a petition only if the trainer could enter it into the ledger as this relay has it, so that what is
refused is refused at once and by name. Cheap checks come first; one proof of work is hashed at a time, whoever asks.
Blocks on the disk and on scrypt: call it from a worker thread.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from node.relay.desk import RelayDesk, require_run
from node.relay.store import RelayStore
from protocol.envelope import Signed, open_envelope
from protocol.errors import ClockError, LedgerError, RefusedError
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.records import Admission, Appeal

WORK_WAIT_S: Final = 5.0
OLDEST_S: Final = 86_400.0
"""A petition that was signed longer ago is refused: its author signs another one when it starts again."""
ADMISSION_HINTS: Final = {
    "not-allowed": "ask the run's operator; who may take part stands in the manifest: intellect-node run show",
    "no-invite": "ask the run's operator for an invite, and start with --invite FILE",
    "invite": "ask the run's operator for an invite to this very run, and start with --invite FILE",
    "invite-expired": "ask the run's operator for a new invite, and start with --invite FILE",
    "invite-spent": "an invite is good for one key: ask the run's operator for another one",
    "protocol": "pip install --upgrade intellect-node",
    "work": "start the node again: it makes a new proof",
}
APPEAL_HINTS: Final = {
    "unknown-submission": "wait until the ledger has the verdict, some seconds after it came",
    "not-rejected": "appeal against a verdict that rejects: intellect-node verdict show last",
    "too-late": "nothing to do: the validity window is over (credits.maturity_steps of `intellect-node run show`), and"
    " relays keep the file no longer",
    "duplicate-appeal": "nothing to do: one appeal for each verdict, a second one only where the first ended"
    " undecided, and none after a refusal",
    "appeal-open": "wait for the answer to the other appeal: intellect-node status shows it",
    "too-soon": "wait for that step: an appeal that was wrong costs this",
    "nobody-left": "nothing to do: this run's operator named too few validators beside those who judged it, or those"
    " who were asked disagree",
}


class Petitions:
    """Takes admissions and appeals for the feed. Every method may raise ProtocolError, RefusedError, DataDirError."""

    def __init__(self, desk: RelayDesk, store: RelayStore) -> None:
        self._desk = desk
        self._store = store
        self._hashing = threading.Lock()

    def admit(self, data: bytes, peer: PeerId) -> bool:
        """Take an admission by whom it is; whether its author is admitted by now.

        RefusedError `admission-<rule>` names the ledger's rule that it breaks.
        """
        entry = self._opened(data, Admission, peer)
        self._refuse_old(entry)
        state = self._state()
        if state.admitted(peer):
            return True
        if self._store.has(entry.id):
            return False
        try:
            state.check_admission(entry, work=False)
            with self._one_at_a_time():
                state.check_admission(entry)
        except LedgerError as error:
            raise _refused("admission", error, ADMISSION_HINTS) from error
        self._store.add_petition(entry, subject=b"")
        self._desk.feed_changed()
        return False

    def appeal(self, data: bytes, peer: PeerId) -> str:
        """Take an appeal by whom it is: its state in the ledger, however old it is; `taken` before it stands there.

        RefusedError `appeal-<rule>` names the ledger's rule that it breaks.
        """
        entry = self._opened(data, Appeal, peer)
        state = self._state()
        if (known := state.appeals.get(entry.id)) is not None:
            return known.state
        if not self._store.has(entry.id):
            self._refuse_old(entry)
            try:
                state.check_appeal(entry)
            except LedgerError as error:
                raise _refused("appeal", error, APPEAL_HINTS) from error
            filed = sum(one.record.submission == entry.record.submission for one in list(state.appeals.values()))
            self._store.add_petition(entry, subject=entry.record.verdict + bytes(filed))
            self._desk.feed_changed()
        return "taken"

    def _opened(self, data: bytes, kind: type[Any], peer: PeerId) -> Signed[Any]:
        entry: Signed[Any] = open_envelope(data, kind)
        if entry.author != peer:
            raise RefusedError(
                f"an {kind.KIND} of {entry.author.short}, handed in by {peer.short}",
                code="not-yours",
                hint="each node speaks for itself",
            )
        require_run(entry.record.run_id, self._desk.require_manifest(), kind.KIND)
        self._desk.check_clock(entry.record.issued_at_ms, kind.KIND, entry.author)
        return entry

    def _refuse_old(self, entry: Signed[Any]) -> None:
        age_s = (self._desk.now_ms() - entry.record.issued_at_ms) / 1000
        if age_s > OLDEST_S:
            raise ClockError(
                f"an {entry.record.KIND} of {entry.author.short} was signed {age_s / 3600:.0f} hours ago by this"
                " relay's clock",
                hint="set this computer's clock (`timedatectl set-ntp true`), and start the node again, or run the"
                " command again",
            )

    def _state(self) -> LedgerState:
        self._desk.require_manifest()
        if self._desk.ledger is None:
            raise RefusedError("this relay has no ledger yet", code="busy", hint="try again soon")
        return self._desk.ledger.state

    def _one_at_a_time(self) -> _Turn:
        return _Turn(self._hashing)


class _Turn:
    """A lock that is not waited for longer than a client would."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=WORK_WAIT_S):
            raise RefusedError(
                "this relay checks many proofs of work", code="busy", hint="try again soon, or at another relay"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _refused(what: str, error: LedgerError, hints: dict[str, str]) -> RefusedError:
    return RefusedError(error.message, code=f"{what}-{error.rule}", hint=hints.get(error.rule, ""))
