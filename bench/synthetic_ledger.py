"""A ledger of any length that keeps every rule, properly signed: for measuring what reads one.

Forty contributors hand in, two relays give receipts, three validators take turns, the trainer signs a head for every
few verdicts, and steps are trained as their batches fill. Newcomers are checked in full, and then the draws decide, so
most verdicts carry a receipt and a head. Now and then a contributor is caught, evicted, and replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from protocol.draw import beacon_of, check_rate, is_drawn
from protocol.envelope import Signed, kind_of, open_envelope, seal
from protocol.identity import Identity, PeerId
from protocol.ledger import LedgerState
from protocol.records import (
    AdmissionSpec,
    Batch,
    BatchSpec,
    CheckResult,
    CheckSpec,
    CreditSpec,
    Draw,
    EnvironmentSpec,
    Eviction,
    Head,
    Manifest,
    ModelSpec,
    Receipt,
    RolloutSpec,
    Submission,
    Tolerance,
    ToplocSpec,
    Trained,
    Verdict,
)

CONTRIBUTORS: Final = 40
SUBMISSIONS_A_STEP: Final = 32
CASES_A_HEAD: Final = 8
CHEAT_EVERY: Final = 500
OPERATOR: Final = Identity.from_phrase("bench operator")
RELAYS: Final = tuple(Identity.from_phrase(f"bench relay {number}") for number in range(2))
VALIDATORS: Final = tuple(Identity.from_phrase(f"bench validator {number}") for number in range(3))


def manifest() -> Signed[Manifest]:
    """The run's."""
    tolerance = Tolerance(**dict.fromkeys(Tolerance.__struct_fields__, 1))
    record = Manifest(
        name="bench",
        issued_at_ms=1,
        trainer=OPERATOR.peer_id.public_key,
        validators=tuple(one.peer_id.public_key for one in VALIDATORS),
        quorum=1,
        admission=AdmissionSpec(),
        credits=CreditSpec(maturity_steps=2),
        model=ModelSpec(architecture=b"a" * 32, tokenizer=b"t" * 32, vocab_size=64, max_model_len=256, stop_ids=(2,)),
        environment=EnvironmentSpec(name="sort-digits", digest=b"e" * 32),
        rollout=RolloutSpec(
            group_size=8, prompts_per_submission=4, max_new_tokens=100, temperature=1.0, max_submissions_per_step=4
        ),
        batch=BatchSpec(rollouts_per_step=32 * SUBMISSIONS_A_STEP, max_staleness=2, total_steps=1 << 20),
        toploc=ToplocSpec(top_k=16),
        tolerances={"float32": tolerance},
        checks=CheckSpec(newcomer_submissions=16, floor=0.1, duplicate_tokens=32),
        shard_bytes=4096,
        recipe=b"r" * 32,
    )
    return open_envelope(seal(record, OPERATOR), Manifest)


@dataclass
class _World:
    run: Signed[Manifest]
    state: LedgerState
    contributors: list[Identity] = field(default_factory=list)
    made: int = 0
    sequence: int = 0
    head: Signed[Head] | None = None

    @property
    def step(self) -> int:
        return len(self.state.committed)


def entries(count: int) -> Iterator[bytes]:
    """At least so many entries, in the order in which a trainer would have them; then they stop after a step."""
    run = manifest()
    world = _World(run, LedgerState(run.id, run.record, signatures_checked=True))
    world.contributors = [Identity.from_phrase(f"bench contributor {number}") for number in range(CONTRIBUTORS)]
    while world.state.length < count:
        for entry in _step(world):
            world.state.apply(entry)
            yield entry


def head_over(state: LedgerState, sequence: int) -> Signed[Head]:
    """The trainer's head over a replay, the one before being of the sequence before."""
    step = len(state.committed)
    record = Head(
        run_id=state.run_id,
        sequence=sequence,
        previous_sequence=sequence - 1,
        issued_at_ms=sequence,
        step=step,
        collecting=True,
        checkpoint_step=step,
        checkpoint=checkpoint(step),
        oldest_checkpoint_step=max(0, step - 2),
        ledger_length=state.length,
        ledger_tip=state.tip,
        finished=False,
    )
    return open_envelope(seal(record, OPERATOR), Head)


def checkpoint(step: int) -> bytes:
    """The id of a step's policy."""
    return hashlib.sha256(b"bench checkpoint %d" % step).digest()


def _step(world: _World) -> Iterator[bytes]:
    kept: list[bytes] = []
    at = 0
    while len(kept) < SUBMISSIONS_A_STEP:
        place, at = (7 * world.step + at) % CONTRIBUTORS, at + 1
        if world.made % CASES_A_HEAD == 0:
            world.sequence += 2
            world.head = head_over(world.state, world.sequence)
        submission = _submission(world, world.contributors[place])
        cheats = world.made % CHEAT_EVERY == CHEAT_EVERY - 1
        verdict = _verdict(world, submission, hard=cheats)
        yield submission.data
        yield verdict.data
        if cheats:
            yield _eviction(world, verdict)
            world.contributors[place] = Identity.from_phrase(f"bench contributor {CONTRIBUTORS + world.made}")
        else:
            kept.append(submission.id)
        world.made += 1
    step = world.step
    run_id, now_ms = world.run.id, world.sequence
    batch = Batch(run_id=run_id, step=step, submissions=tuple(kept), ended="whole", silent=b"", issued_at_ms=now_ms)
    yield seal(batch, OPERATOR)
    metrics = dict.fromkeys(("loss", "kl", "entropy", "grad_norm", "reward", "tokens", "rollouts"), 0.5)
    trained = Trained(
        run_id=run_id,
        step=step,
        checkpoint=checkpoint(step + 1),
        mean_reward=0.5,
        metrics=metrics,
        issued_at_ms=now_ms,
    )
    yield seal(trained, OPERATOR)


def _submission(world: _World, author: Identity) -> Signed[Submission]:
    record = Submission(
        run_id=world.run.id,
        step=world.step,
        index=world.state.next_index(author.peer_id, world.step),
        checkpoint_step=world.step,
        checkpoint=checkpoint(world.step),
        sha256=hashlib.sha256(b"bench file %d" % world.made).digest(),
        size=123_456,
        rollouts=32,
        output_tokens=3000 + world.made % 97,
        prompts=b"p" * 32,
        engine="torch 2.13.0",
        dtype="float32",
        software="intellect-node/0.1.0",
        issued_at_ms=world.sequence,
    )
    return open_envelope(seal(record, author), Submission, signature_checked=True)


def _verdict(world: _World, submission: Signed[Submission], *, hard: bool) -> Signed[Verdict]:
    validator = VALIDATORS[world.made % len(VALIDATORS)]
    record = Verdict(
        run_id=world.run.id,
        submission=submission.id,
        contributor=submission.author.public_key,
        step=submission.record.step,
        outcome="reject" if hard else "accept",
        hard=hard,
        reason="toploc: 32 of 32 proofs fail" if hard else "",
        checks=_CHECKS,
        draw=_draw(world, submission, hard=hard),
        mean_reward=0.5,
        engine="torch 2.13.0",
        dtype="float32",
        software="intellect-node/0.1.0",
        head_sequence=world.sequence,
        appeal=b"",
        issued_at_ms=world.sequence,
    )
    return open_envelope(seal(record, validator), Verdict, signature_checked=True)


def _draw(world: _World, submission: Signed[Submission], *, hard: bool) -> Draw:
    head = world.head
    receipt = Receipt(
        run_id=world.run.id, submission=submission.id, head_sequence=world.sequence - 1, received_at_ms=world.sequence
    )
    data = seal(receipt, RELAYS[world.made % len(RELAYS)])
    track = world.state.record(submission.author, head.record.ledger_length if head else 0)
    rate = check_rate(track, world.run.record.checks)
    if head is None or hard or rate == 1.0:
        return Draw(drawn=True, rate=1.0, why="newcomer", beacon=b"", receipt=data)
    drawn = is_drawn(beacon_of(head), submission.id, rate=rate)
    return Draw(drawn=drawn, rate=rate, why="drawn" if drawn else "not drawn", beacon=head.data, receipt=data)


def _eviction(world: _World, verdict: Signed[Verdict]) -> bytes:
    record = verdict.record
    eviction = Eviction(
        run_id=world.run.id,
        contributor=PeerId(record.contributor).public_key,
        verdict=verdict.id,
        reason=record.reason,
        issued_at_ms=world.sequence,
    )
    return seal(eviction, OPERATOR)


_CHECKS: Final = tuple(
    CheckResult(name=name, outcome="pass", numbers={"mean": 0.012, "max": 0.034}, limits={"max": 0.1})
    for name in ("dtype", "schema", "prompts", "termination", "toploc", "sampling", "logprobs", "rewards")
)


Signature = tuple[bytes, bytes, bytes]
"""Key, signed bytes, signature."""


def signatures_in(data: bytes) -> list[Signature]:
    """Everything in an entry that a reader has to check: its own signature, and those of a verdict's evidence."""
    if kind_of(data) != Verdict.KIND:
        return [_signature(data)]
    draw = open_envelope(data, Verdict, signature_checked=True).record.draw
    return [_signature(each) for each in (data, draw.receipt, draw.beacon) if each]


def _signature(data: bytes) -> Signature:
    envelope = msgspec.msgpack.decode(data)
    parts = (envelope["domain"].encode(), envelope["kind"].encode(), envelope["author"], envelope["payload"])
    signed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return envelope["author"], signed, envelope["signature"]
