"""Everything between a contributor's file and its standing, in one process: relay's desk, reader, checks, ledger.

The very code that the roles run, without network and processes save the reading child, which keeps its memory limit.
For measuring what gets through; `simnet` runs the same among real nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from node.clock import now_ms
from node.compute.reader import RolloutReader
from node.engines.assignment import Work, derive_work
from node.engines.base import Engine
from node.engines.tokenizer import Tokenizer
from node.engines.torch_engine import TorchEngine
from node.relay.desk import RelayDesk
from node.relay.store import RelayStore
from node.run_create import manifest_from_recipe
from node.validator.checks import (
    Decision,
    check_logprobs,
    check_prompts,
    check_proof_shapes,
    check_rewards,
    check_sampling,
    check_termination,
    check_toploc,
    decide,
)
from node.validator.compute import Judge
from node.validator.duplicates import AnswerIndex, Origin
from node.validator.findings import Findings, Screened
from node.validator.measure import MeasuredRollout, Measurer
from node.validator.screening import Screen
from node.validator.suspicion import Suspicions
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import LedgerError, MalformedError, RefusedError
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import Draw, Eviction, Head, Manifest, Receipt, Submission, Verdict
from protocol.rollouts import Rollout
from protocol.run import RunAddress
from protocol.seeds import submission_seed
from trainer.recipe import AdmissionChoice, Recipe

READ_TIMEOUT_S: Final = 60.0
RELAY_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Trial:
    """What became of one submission. `place` is the part of the system that said no; empty where none did."""

    place: str
    check: str
    hard: bool = False
    detail: str = ""

    @property
    def accepted(self) -> bool:
        return not self.place

    @property
    def caught_by(self) -> str:
        return f"{self.place}: {self.check}" if self.place else ""


@dataclass(frozen=True)
class Single:
    """What the checks say of one rollout by itself."""

    tokens: int
    decision: Decision

    @property
    def caught(self) -> bool:
        return self.decision.outcome != "accept"


@dataclass
class HandedIn:
    """A signed submission and its file."""

    submission: Signed[Submission]
    path: Path


@dataclass
class Court:
    """A run of some policies, number i being checkpoint i; the step that is collected for is the last one's."""

    manifest: Signed[Manifest]
    policies: Sequence[Path]
    directory: Path
    reader: RolloutReader
    operator: Identity
    new_engine: Callable[[], Engine] = TorchEngine
    _judge: Judge = field(init=False)
    _signed: int = 0
    _screen: Screen = field(default_factory=Screen)
    _engine: Engine = field(init=False)
    """Of the last policy, for what the judge does not tell."""
    _tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._judge = Judge(self.new_engine)
        for step, path in enumerate(self.policies):
            self._judge.load(str(path), self.checkpoint(step), keep=len(self.policies))
        self._engine, self._tokenizer = self.new_engine(), Tokenizer(self.policies[-1])
        self._engine.load(self.policies[-1])
        self.ledger = LedgerState(self.manifest.id, self.manifest.record)
        self._answers = AnswerIndex(self.directory / "answers.sqlite")
        self._suspicions = Suspicions(self.directory / "suspicions.sqlite")
        self._relays = [self._open_relay(number) for number in range(2)]

    @property
    def step(self) -> int:
        return len(self.policies) - 1

    def checkpoint(self, step: int) -> bytes:
        """The id of a policy."""
        return hashlib.sha256(b"court's checkpoint %d" % step).digest()

    def close(self) -> None:
        for desk, store in self._relays:
            desk.close()
            store.close()
        self._answers.close()
        self._suspicions.close()

    def sign(self, made: Mapping[str, Any], path: Path, *, by: Identity, index: int, policy: int) -> HandedIn:
        """What a contributor's role makes of what its compute process made. No two records are alike."""
        self._signed += 1
        record = Submission(
            run_id=self.manifest.id,
            step=self.step,
            index=index,
            checkpoint_step=policy,
            checkpoint=self.checkpoint(policy),
            software="bench",
            issued_at_ms=now_ms() - self._signed,
            **{name: made[name] for name in _SIGNED},
        )
        return HandedIn(open_envelope(seal(record, by), Submission), path)

    async def try_submission(self, handed_in: HandedIn, *, relay: int = 0) -> Trial:
        """From the relay's door to the ledger."""
        try:
            receipt = self._upload(handed_in, relay)
        except RefusedError as error:
            return Trial("relay", error.code, detail=error.message)
        findings, place = await self._findings(handed_in, receipt)
        entered = self._enter(handed_in.submission, findings, receipt)
        if findings.outcome == "accept":
            return entered
        label, _, detail = findings.reason.partition(": ")
        return Trial(place, label if findings.outcome == "reject" else "undecided", findings.hard, detail)

    def judge_singly(self, handed_in: HandedIn, rollouts: Sequence[Rollout]) -> list[Single]:
        """What the checks say of each rollout alone, cheap ones first. Their places in the file must be right."""
        record, run = handed_in.submission.record, self.manifest.record
        work = derive_work(run, self._tokenizer, seed=self._seed(handed_in.submission))
        width = self._engine.info.hidden_size
        tolerance = run.tolerances[record.dtype]
        found: dict[int, Single] = {}
        for number, row in enumerate(rollouts):
            cheap = [check_prompts([row], work), check_termination([row], run)]
            cheap.append(check_proof_shapes([row], run, hidden_size=width))
            if decide(cheap).outcome != "accept":
                found[number] = Single(len(row.output_ids), decide(cheap))
        left = [number for number in range(len(rollouts)) if number not in found]
        for number, one in zip(left, self._measure([rollouts[number] for number in left], work), strict=True):
            costly = [check([one], tolerance) for check in (check_toploc, check_sampling, check_logprobs)]
            costly.append(check_rewards([rollouts[number]], work, tokenizer=self._tokenizer))
            found[number] = Single(one.tokens, decide(costly))
        return [found[number] for number in range(len(rollouts))]

    async def read(self, path: Path) -> list[dict[str, Any]]:
        """The rows of a file. Raises MalformedError."""
        run = self.manifest.record
        return await self.reader.read(
            path,
            timeout_s=READ_TIMEOUT_S,
            max_rollouts=run.rollouts_per_submission,
            max_tokens=run.model.max_model_len,
        )

    def _open_relay(self, number: int) -> tuple[RelayDesk, RelayStore]:
        home = self.directory / f"relay-{number}"
        home.mkdir()
        store = RelayStore(home, max_bytes=RELAY_BYTES)
        run = RunAddress(self.operator.peer_id, self.manifest.record.name)
        desk = RelayDesk(run, Identity.from_phrase(f"relay {number}"), store=store, ledger_path=home / "ledger")
        desk.accept_manifest(self.manifest.data)
        desk.head = self._head()  # without an origin: checkpoints are no relay's business here
        return desk, store

    def _head(self) -> Signed[Head]:
        head = Head(
            run_id=self.manifest.id,
            sequence=1,
            previous_sequence=0,
            issued_at_ms=now_ms(),
            step=self.step,
            collecting=True,
            checkpoint_step=self.step,
            checkpoint=self.checkpoint(self.step),
            oldest_checkpoint_step=max(0, self.step - self.manifest.record.batch.max_staleness),
            ledger_length=0,
            ledger_tip=self.manifest.id,
            finished=False,
        )
        return open_envelope(seal(head, self.operator), Head)

    def _upload(self, handed_in: HandedIn, relay: int) -> Signed[Receipt]:
        desk, store = self._relays[relay]
        held = desk.admit(handed_in.submission)
        if held is None:
            with store.upload(handed_in.submission) as upload:
                upload.write(handed_in.path.read_bytes())
                held = upload.keep(lambda: desk.make_receipt(handed_in.submission))
        return open_envelope(held, Receipt)

    async def _findings(self, handed_in: HandedIn, receipt: Signed[Receipt]) -> tuple[Findings, str]:
        """As the validator's role goes about it, every submission being drawn; and which part had the last word."""
        try:
            rows = await self.read(handed_in.path)
        except MalformedError as error:
            return Findings("reject", True, f"schema: {error.message}"), "reader"
        record, author = handed_in.submission.record, handed_in.submission.author
        claim = self._claim(record, author.public_key)
        policy = str(self.policies[record.checkpoint_step])
        screened = msgspec.convert(
            self._screen.screen(policy_dir=policy, rollouts=rows, rewards=False, **claim), Screened
        )
        if screened.outcome != "accept":
            return screened.findings(), "screening"
        origin = Origin(author, handed_in.submission.id, receipt.record.head_sequence)
        likeness = self._answers.compare(origin, screened.answers)
        findings = msgspec.convert(self._judge.judge(rollouts=rows, **claim), Findings)
        if likeness.copies and findings.outcome == "reject":
            return msgspec.structs.replace(findings, hard=True, reason="duplicate: a copy"), "duplicates"
        if findings.outcome == "accept":
            self._answers.add(origin, screened.answers)
        return self._with_history(handed_in.submission, findings)

    def _with_history(self, submission: Signed[Submission], findings: Findings) -> tuple[Findings, str]:
        tolerance = self.manifest.record.tolerances[submission.record.dtype]
        if not findings.evidence:
            return findings, "judging"
        suspicion = self._suspicions.update(submission, tolerance, evidence=findings.evidence)
        if suspicion is None:
            return findings, "judging"
        suspected = findings.suspected(suspicion.reason, hard=suspicion.hard)
        return suspected, "history" if suspected.reason.startswith("history") else "judging"

    def _measure(self, rollouts: Sequence[Rollout], work: Work) -> list[MeasuredRollout]:
        run = self.manifest.record
        measurer = Measurer(
            rollouts,
            work.noise_seed,
            temperature=run.rollout.temperature,
            top_k=run.toploc.top_k,
            vocab_size=run.model.vocab_size,
        )
        for prefill in self._engine.prefill([(rollout.prompt_ids, rollout.output_ids) for rollout in rollouts]):
            measurer.add(prefill)
        return measurer.results()

    def _seed(self, submission: Signed[Submission]) -> bytes:
        record = submission.record
        return submission_seed(
            self.manifest.id,
            record.step,
            checkpoint=record.checkpoint,
            contributor_key=submission.author.public_key,
            index=record.index,
        )

    def _claim(self, record: Submission, contributor: bytes) -> dict[str, Any]:
        return {
            "submission": msgspec.msgpack.encode(record),
            "manifest": msgspec.msgpack.encode(self.manifest.record),
            "run_id": self.manifest.id,
            "contributor": contributor,
        }

    def _enter(self, submission: Signed[Submission], findings: Findings, receipt: Signed[Receipt]) -> Trial:
        """Into the ledger, as the trainer does it; evicts where the verdict is hard."""
        verdict = self._verdict(submission, findings, receipt)
        try:
            self.ledger.apply(submission.data)
            self.ledger.apply(verdict.data)
        except LedgerError as error:
            return Trial("ledger", error.rule, detail=error.message)
        if findings.hard:
            record = verdict.record
            eviction = Eviction(
                run_id=record.run_id,
                contributor=record.contributor,
                verdict=verdict.id,
                reason=record.reason,
                issued_at_ms=now_ms(),
            )
            self.ledger.apply(seal(eviction, self.operator))
        return Trial("", "")

    def _verdict(self, submission: Signed[Submission], findings: Findings, receipt: Signed[Receipt]) -> Signed[Verdict]:
        verdict = Verdict(
            run_id=self.manifest.id,
            submission=submission.id,
            contributor=submission.author.public_key,
            step=submission.record.step,
            outcome=findings.outcome,
            hard=findings.hard,
            reason=findings.reason[:1000],
            checks=tuple(findings.checks),
            draw=Draw(drawn=True, rate=1.0, why="newcomer", beacon=b"", receipt=receipt.data),
            mean_reward=findings.mean_reward,
            engine=findings.engine,
            dtype=findings.dtype,
            software="bench",
            head_sequence=1,
            appeal=b"",
            issued_at_ms=now_ms(),
        )
        return open_envelope(seal(verdict, self.operator), Verdict)


_SIGNED: Final = ("sha256", "size", "rollouts", "output_tokens", "prompts", "engine", "dtype")


@asynccontextmanager
async def open_court(
    recipe: Recipe, policies: Sequence[Path], directory: Path, *, reader: RolloutReader
) -> AsyncIterator[Court]:
    """A fresh relay pair, ledger and history for a run of this recipe, in an empty directory.

    The run's operator is its trainer and its only validator. It admits everybody: keys are made here by the dozen.
    """
    recipe = msgspec.structs.replace(recipe, admission=AdmissionChoice(work_bits=0))
    operator = Identity.from_phrase("operator")
    manifest = manifest_from_recipe(
        recipe,
        policies[0],
        trainer=operator.peer_id,
        validators=[operator.peer_id],
        name=recipe.name,
        issued_at_ms=0,
        recipe_digest=bytes(32),
    )
    court = Court(open_envelope(seal(manifest, operator), Manifest), policies, directory, reader, operator)
    try:
        yield court
    finally:
        court.close()


@asynccontextmanager
async def reading(log_path: Path) -> AsyncIterator[RolloutReader]:
    """The child that reads hostile files."""
    reader = RolloutReader(log_path=log_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(reader.run)
        yield reader
        nursery.cancel_scope.cancel()
