"""Answers that were handed in before: copies and near-copies, found before anything costly is computed.

Noise is fixed by the contributor's key, so nobody gives another's long answer to the same prompt except by copying, or
where the policy leaves no choice. How improbable an answer is, is taken from the earlier one's log-probabilities: a
copier cannot talk its copy into a coincidence. What looks copied is always checked in full, and it is that check which
tells the copier from the copied: only the author's own noise gives the answer again. So whoever came first by the
trainer's beat is never punished, nor is anyone for an answer that its seeds prove.

The index is one bounded SQLite file. Leaves out short answers, which may be equal by chance (manifest.checks).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from node.database import Database
from protocol.identity import PeerId
from protocol.records import CheckResult

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COINCIDENCE_NATS: Final = 40.0
"""An answer of probability e^-40 is not given twice. More probable ones are nobody's property."""
NEAR: Final = 0.8
"""Share of word sequences in common from which two answers are called alike."""
MAX_ANSWERS: Final = 100_000
"""Newest answers that the index keeps; about 40 MB."""
_MAX_OF_PROMPT: Final = 256
_GRAM_TOKENS: Final = 8
_HASHES: Final = 64
_MIX: Final = 0x9E3779B97F4A7C15

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, prompt BLOB NOT NULL, answer BLOB NOT NULL, sketch BLOB NOT NULL,
    nats REAL NOT NULL, contributor BLOB NOT NULL, submission BLOB NOT NULL, beat INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_prompt ON answers (prompt, seq);
CREATE INDEX IF NOT EXISTS by_submission ON answers (submission);
"""


class Answer(msgspec.Struct, frozen=True):
    """One long answer, for comparison."""

    prompt: bytes
    answer: bytes
    """Hash of the tokens: equal for equal answers."""
    sketch: bytes
    """MinHash of its token 8-grams: 64 numbers of 32 bits."""
    nats: float
    """Minus the sum of its recorded log-probabilities."""


class Origin(msgspec.Struct, frozen=True):
    """Who handed an answer in, and when: the sequence of the head that the relay's receipt names."""

    contributor: PeerId
    submission: bytes
    beat: int


class Likeness(msgspec.Struct):
    """What a submission has in common with earlier ones."""

    compared: int = 0
    copies: int = 0
    """Answers that are equal to an earlier one of somebody else."""
    alike: int = 0
    """Answers that are nearly equal to an earlier one, or equal to one of the same contributor or the same beat."""
    closest: float = 0.0
    """Largest estimated share of 8-grams in common with an earlier answer."""
    source: str = ""

    @property
    def suspicious(self) -> bool:
        return self.copies + self.alike > 0

    def result(self, *, proved: bool) -> CheckResult:
        """The check as a verdict carries it; `proved`: the submission's own seeds give its answers."""
        detail = ""
        if self.copies:
            detail = f"{self.copies} of {self.compared} long answers are copies of {self.source}"
        elif self.alike:
            detail = f"{self.alike} of {self.compared} long answers resemble {self.source}; checked in full"
        names = ("compared", "copies", "alike", "closest") if self.compared else ("compared",)
        numbers = {name: float(getattr(self, name)) for name in names}
        outcome: Literal["pass", "fail"] = "fail" if self.copies and not proved else "pass"
        return CheckResult(name="duplicate", outcome=outcome, detail=detail, numbers=numbers)


def sketch_answer(prompt_ids: Sequence[int], output_ids: Sequence[int], logprobs: Sequence[float]) -> Answer:
    """An answer's fingerprint. Needs numpy; for a compute process."""
    import numpy as np

    tokens = np.asarray(output_ids, dtype=np.uint64)
    return Answer(
        prompt=_digest(np.asarray(prompt_ids, dtype=np.uint64)),
        answer=_digest(tokens),
        sketch=_min_hash(tokens),
        nats=float(-np.sum(np.asarray(logprobs, dtype=np.float64))),
    )


def _digest(tokens: NDArray[np.uint64]) -> bytes:
    return hashlib.sha256(tokens.astype("<u8").tobytes()).digest()[:16]


def _min_hash(tokens: NDArray[np.uint64]) -> bytes:
    import numpy as np

    grams = np.zeros(max(1, len(tokens) - _GRAM_TOKENS + 1), dtype=np.uint64)
    for offset in range(min(_GRAM_TOKENS, len(tokens))):
        grams = _mixed(grams ^ tokens[offset : offset + len(grams)])
    least = [
        _mixed(grams ^ np.uint64(seed * _MIX % (1 << 64))).min() >> np.uint64(32) for seed in range(1, 1 + _HASHES)
    ]
    return np.array(least, dtype="<u4").tobytes()


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    import numpy as np

    values = (values ^ (values >> np.uint64(31))) * np.uint64(_MIX)
    return values ^ (values >> np.uint64(29))


def similarity(one: bytes, other: bytes) -> float:
    """Estimated share of 8-grams that two sketches have in common."""
    pairs = zip(memoryview(one).cast("I"), memoryview(other).cast("I"), strict=True)
    return sum(a == b for a, b in pairs) / _HASHES


class AnswerIndex:
    """Long answers of recently accepted submissions. Every change is on disk on return. Raises DataDirError."""

    def __init__(self, path: Path, *, max_answers: int = MAX_ANSWERS) -> None:
        self._max_answers = max_answers
        hint = "remove the file: it is only a memory of recent answers, and the node starts a new one"
        self._db = Database(path, _SCHEMA, name="the index of answers", hint=hint)

    def close(self) -> None:
        self._db.close()

    def add(self, origin: Origin, answers: Sequence[Answer]) -> None:
        """Remember an accepted submission's answers, and forget the oldest ones; again changes nothing."""
        key, beat = origin.contributor.public_key, origin.beat
        rows = [(one.prompt, one.answer, one.sketch, one.nats, key, origin.submission, beat) for one in answers]
        query = (
            "INSERT INTO answers (prompt, answer, sketch, nats, contributor, submission, beat)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)"
        )
        with self._db.transaction():
            if self._db.row("SELECT 1 FROM answers WHERE submission = ?", origin.submission):
                return
            for row in rows:
                self._db.change(query, *row)
            self._db.change("DELETE FROM answers WHERE seq <= (SELECT MAX(seq) FROM answers) - ?", self._max_answers)

    def compare(self, origin: Origin, answers: Sequence[Answer]) -> Likeness:
        """Hold a submission's answers against those of others to the same prompts, and against each other."""
        likeness = Likeness(compared=len(answers))
        within: set[tuple[bytes, bytes]] = set()
        for one in answers:
            sources = list(self._sources(one, origin, likeness))
            copied = [text for text, is_copy in sources if is_copy]
            if copied:
                likeness.copies += 1
                likeness.source = copied[0]
            elif sources or ((one.prompt, one.answer) in within and one.nats >= COINCIDENCE_NATS):
                likeness.alike += 1
                likeness.source = likeness.source or (sources[0][0] if sources else "one another")
            within.add((one.prompt, one.answer))
        return likeness

    def _sources(self, one: Answer, origin: Origin, likeness: Likeness) -> Iterator[tuple[str, bool]]:
        """Earlier answers that this one is like: whose, and whether it can only be a copy of it."""
        for answer, sketch, nats, contributor, submission, beat in self._of_prompt(one.prompt, origin.submission):
            shared = similarity(one.sketch, sketch)
            likeness.closest = max(likeness.closest, shared)
            if nats >= COINCIDENCE_NATS and (shared >= NEAR or answer == one.answer):
                foreign = contributor != origin.contributor.public_key
                whose = f"submission {submission.hex()[:12]} of {PeerId(contributor).short}"
                yield whose, answer == one.answer and foreign and beat < origin.beat

    def _of_prompt(self, prompt: bytes, submission: bytes) -> list[tuple[Any, ...]]:
        query = (
            "SELECT answer, sketch, nats, contributor, submission, beat FROM answers"
            " WHERE prompt = ? AND submission != ? ORDER BY seq DESC LIMIT ?"
        )
        return self._db.rows(query, prompt, submission, _MAX_OF_PROMPT)
