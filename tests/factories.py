"""Small runs, keys and signed records for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.constants import PROTOCOL_VERSION
from protocol.envelope import Signed, open_envelope, seal
from protocol.identity import Identity
from protocol.records import (
    Admission,
    AdmissionSpec,
    Appeal,
    Batch,
    BatchSpec,
    CheckResult,
    CheckSpec,
    CreditSpec,
    Draw,
    EnvironmentSpec,
    Eviction,
    Head,
    Heartbeat,
    Invite,
    Manifest,
    ModelSpec,
    Receipt,
    Reinstatement,
    RolloutSpec,
    Submission,
    Tolerance,
    ToplocSpec,
    Trained,
    Verdict,
)
from protocol.work import find_work

OPERATOR = Identity.from_phrase("operator")
VALIDATOR = Identity.from_phrase("validator")
RELAY = Identity.from_phrase("relay")
CHECKPOINT = b"c" * 32


def make_manifest(**changes: Any) -> Manifest:
    """A run of tiny sizes, trained by OPERATOR and judged by VALIDATOR."""
    manifest = Manifest(
        name="test",
        issued_at_ms=1,
        trainer=OPERATOR.peer_id.public_key,
        validators=(VALIDATOR.peer_id.public_key,),
        quorum=1,
        admission=AdmissionSpec(),
        credits=CreditSpec(maturity_steps=2),
        model=ModelSpec(architecture=b"a" * 32, tokenizer=b"t" * 32, vocab_size=64, max_model_len=256, stop_ids=(2,)),
        environment=EnvironmentSpec(name="sort-digits", digest=b"e" * 32),
        rollout=RolloutSpec(
            group_size=2, prompts_per_submission=2, max_new_tokens=10, temperature=1.0, max_submissions_per_step=4
        ),
        batch=BatchSpec(rollouts_per_step=8, max_staleness=1, total_steps=3),
        toploc=ToplocSpec(top_k=16),
        tolerances={"float32": make_tolerance()},
        checks=CheckSpec(newcomer_submissions=2, floor=0.25, duplicate_tokens=32),
        shard_bytes=4096,
        recipe=b"r" * 32,
    )
    return msgspec.structs.replace(manifest, **changes)


def make_tolerance(**changes: Any) -> Tolerance:
    """Limits about ten times what honest float32 engines measure on the demo's policy."""
    tolerance = Tolerance(
        max_exponent_mismatches=1,
        max_mantissa_mean=0.125,
        max_mantissa_median=0.0,
        max_rollout_mantissa_mean=0.1,
        max_margin=1e-3,
        max_mean_margin=1e-4,
        max_logprob_error=1e-3,
        max_mean_logprob_error=1e-4,
        max_logprob_shift=1e-5,
        honest_margin=1e-5,
        honest_mantissa=0.01,
        honest_logprob_shift=1e-5,
    )
    return msgspec.structs.replace(tolerance, **changes)


def sealed(record: Any, identity: Identity) -> Signed[Any]:
    return open_envelope(seal(record, identity), type(record))


def make_submission(author: Identity, run_id: bytes, **changes: Any) -> Signed[Submission]:
    record = Submission(
        run_id=run_id,
        step=0,
        index=0,
        checkpoint_step=0,
        checkpoint=CHECKPOINT,
        sha256=b"f" * 32,
        size=100,
        rollouts=4,
        output_tokens=40,
        prompts=b"p" * 32,
        engine="torch",
        dtype="float32",
        software="test",
        issued_at_ms=1,
    )
    record = msgspec.structs.replace(record, **changes)
    if "sha256" not in changes:
        tag = bytes([record.step, record.index]) + author.peer_id.public_key[:30]
        record = msgspec.structs.replace(record, sha256=tag)
    return sealed(record, author)


def make_verdict(submission: Signed[Submission], *, by: Identity = VALIDATOR, **changes: Any) -> Signed[Verdict]:
    record = Verdict(
        run_id=submission.record.run_id,
        submission=submission.id,
        contributor=submission.author.public_key,
        step=submission.record.step,
        outcome="accept",
        hard=False,
        reason="",
        checks=(CheckResult(name="toploc", outcome="pass", numbers={"exponent_mismatches": 0.0}),),
        draw=Draw(drawn=True, rate=1.0, why="newcomer", beacon=b"", receipt=b""),
        mean_reward=0.5,
        engine="torch",
        dtype="float32",
        software="test",
        head_sequence=1,
        appeal=b"",
        issued_at_ms=2,
    )
    return sealed(msgspec.structs.replace(record, **changes), by)


def make_admission(author: Identity, run_id: bytes, *, bits: int = 0, **changes: Any) -> Signed[Admission]:
    """What a contributor joins with; `bits` of work are really done, a few milliseconds for each try."""
    record = Admission(
        run_id=run_id,
        protocol=PROTOCOL_VERSION,
        software="test",
        nonce=find_work(author.peer_id, run_id, bits=bits),
        invite=b"",
        issued_at_ms=1,
    )
    return sealed(msgspec.structs.replace(record, **changes), author)


def make_invite(
    run_id: bytes, number: int = 0, *, by: Identity = OPERATOR, valid_until_ms: int = 1 << 40
) -> Signed[Invite]:
    return sealed(Invite(run_id=run_id, token=number.to_bytes(16, "big"), valid_until_ms=valid_until_ms), by)


def make_heartbeat(author: Identity, run_id: bytes, sequence: int = 1, **changes: Any) -> Signed[Heartbeat]:
    record = Heartbeat(
        run_id=run_id,
        role="inference",
        instance=b"i" * 16,
        sequence=sequence,
        software="test",
        protocol=PROTOCOL_VERSION,
        checkpoint_step=0,
        tokens_per_s=100.0,
        activity="generating",
        issued_at_ms=sequence,
    )
    return sealed(msgspec.structs.replace(record, **changes), author)


def make_appeal(author: Identity, verdict: Signed[Verdict], **changes: Any) -> Signed[Appeal]:
    record = Appeal(
        run_id=verdict.record.run_id,
        submission=verdict.record.submission,
        verdict=verdict.id,
        reason="my engine is honest",
        issued_at_ms=6,
    )
    return sealed(msgspec.structs.replace(record, **changes), author)


def make_answer(
    submission: Signed[Submission], appeal: Signed[Appeal], *, by: Identity, **changes: Any
) -> Signed[Verdict]:
    """The verdict of another validator, which answers an appeal."""
    return make_verdict(submission, by=by, appeal=appeal.id, **changes)


def make_reinstatement(
    answer: Signed[Verdict], appeal: Signed[Appeal], *, by: Identity = OPERATOR, **changes: Any
) -> Signed[Reinstatement]:
    record = Reinstatement(
        run_id=answer.record.run_id,
        contributor=answer.record.contributor,
        appeal=appeal.id,
        verdict=answer.id,
        reason="another validator accepts it",
        issued_at_ms=7,
    )
    return sealed(msgspec.structs.replace(record, **changes), by)


def receipt_of(submission: Signed[Submission], *, by: Identity = RELAY, head_sequence: int = 1) -> Signed[Receipt]:
    record = Receipt(
        run_id=submission.record.run_id, submission=submission.id, head_sequence=head_sequence, received_at_ms=2
    )
    return sealed(record, by)


def make_head(run_id: bytes, sequence: int, *, by: Identity = OPERATOR, **changes: Any) -> Signed[Head]:
    record = Head(
        run_id=run_id,
        sequence=sequence,
        previous_sequence=max(0, sequence - 1),
        issued_at_ms=sequence,
        step=0,
        collecting=True,
        checkpoint_step=0,
        checkpoint=CHECKPOINT,
        oldest_checkpoint_step=0,
        ledger_length=0,
        ledger_tip=run_id,
        finished=False,
    )
    return sealed(msgspec.structs.replace(record, **changes), by)


def make_draw_evidence(submission: Signed[Submission], beacon: Signed[Head], *, rate: float) -> Draw:
    """What excuses a submission, whose receipt names head 1, from the costly checks, if this beacon does."""
    return Draw(drawn=False, rate=rate, why="not drawn", beacon=beacon.data, receipt=receipt_of(submission).data)


def make_batch(
    run_id: bytes, step: int, submissions: list[Signed[Submission]], *, by: Identity = OPERATOR, **changes: Any
) -> bytes:
    ids = tuple(one.id for one in submissions)
    record = Batch(run_id=run_id, step=step, submissions=ids, issued_at_ms=3, ended="whole", silent=b"")
    return seal(msgspec.structs.replace(record, **changes), by)


def make_trained(run_id: bytes, step: int, *, by: Identity = OPERATOR, issued_at_ms: int = 4) -> bytes:
    record = Trained(
        run_id=run_id,
        step=step,
        checkpoint=CHECKPOINT,
        mean_reward=0.5,
        metrics={"loss": 0.1},
        issued_at_ms=issued_at_ms,
    )
    return seal(record, by)


def make_eviction(verdict: Signed[Verdict], *, by: Identity = OPERATOR) -> bytes:
    record = Eviction(
        run_id=verdict.record.run_id,
        contributor=verdict.record.contributor,
        verdict=verdict.id,
        reason=verdict.record.reason,
        issued_at_ms=5,
    )
    return seal(record, by)
