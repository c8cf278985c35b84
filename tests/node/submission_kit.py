"""A contributor and a validator in one process, without a network: what they make and say of each other's files."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from environments.registry import get_environment
from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from node.validator.compute import Judge
from protocol.identity import Identity
from protocol.records import (
    AdmissionSpec,
    BatchSpec,
    CheckSpec,
    CreditSpec,
    EnvironmentSpec,
    Manifest,
    ModelSpec,
    RolloutSpec,
    Submission,
    Tolerance,
    ToplocSpec,
)
from protocol.rollouts import Rollout, read_rollouts

POLICY = Path(__file__).parents[2] / "trainer" / "assets" / "sort-digits"
ALICE = Identity.from_phrase("alice").peer_id.public_key
BOB = Identity.from_phrase("bob").peer_id.public_key
RUN_ID = b"r" * 32
CHECKPOINT = b"c" * 32


FLOAT32 = Tolerance(
    max_exponent_mismatches=1,
    max_mantissa_mean=0.125,
    max_mantissa_median=0.0,
    max_rollout_mantissa_mean=0.125,
    max_margin=1e-3,
    max_mean_margin=1e-4,
    max_logprob_error=1e-3,
    max_mean_logprob_error=1e-4,
    max_logprob_shift=1e-5,
    honest_margin=1e-5,
    honest_mantissa=0.01,
    honest_logprob_shift=1e-5,
)
BFLOAT16 = Tolerance(
    max_exponent_mismatches=3,
    max_mantissa_mean=1.5,
    max_mantissa_median=1.0,
    max_rollout_mantissa_mean=1.25,
    max_margin=0.5,
    max_mean_margin=0.005,
    max_logprob_error=0.5,
    max_mean_logprob_error=0.02,
    max_logprob_shift=0.005,
    honest_margin=1e-3,
    honest_mantissa=0.9,
    honest_logprob_shift=0.003,
)


def make_manifest(policy=POLICY, **rollout) -> Manifest:
    """A run of the demo policy, or another, over float32 and bfloat16 engines."""
    limits = {"group_size": 4, "prompts_per_submission": 4, "max_new_tokens": 10, "temperature": 1.0} | rollout
    environment = get_environment("sort-digits")
    return Manifest(
        name="test",
        issued_at_ms=1,
        trainer=ALICE,
        validators=(ALICE,),
        quorum=1,
        admission=AdmissionSpec(),
        credits=CreditSpec(maturity_steps=2),
        model=ModelSpec(
            architecture=digest(policy / "config.json"),
            tokenizer=digest(policy / "tokenizer.json"),
            vocab_size=64,
            max_model_len=256,
            stop_ids=(2,),
        ),
        environment=EnvironmentSpec(name=environment.name, digest=environment.digest),
        rollout=RolloutSpec(max_submissions_per_step=64, **limits),
        batch=BatchSpec(rollouts_per_step=64, max_staleness=1, total_steps=3),
        toploc=ToplocSpec(top_k=16),
        tolerances={"float32": FLOAT32, "bfloat16": BFLOAT16},
        checks=CheckSpec(newcomer_submissions=2, floor=0.25, duplicate_tokens=32),
        shard_bytes=4096,
        recipe=b"r" * 32,
    )


def digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@dataclass(frozen=True)
class HandedIn:
    """A submission and the rollouts of its file."""

    record: Submission
    rollouts: list[Rollout]
    contributor: bytes = ALICE


def make_worker(policy=POLICY, *, kind=RolloutWorker, max_batch=64, **engine) -> RolloutWorker:
    worker = kind(TorchEngine(max_batch=max_batch, **engine))
    worker.load(str(policy), CHECKPOINT)
    return worker


def hand_in(worker: RolloutWorker, manifest: Manifest, path: Path, *, index=0, contributor=ALICE) -> HandedIn:
    """What a contributor's node does between a head and its outbox."""
    made = generate(worker, manifest, path, index=index, contributor=contributor)
    rollouts = read_rollouts(path, max_rollouts=manifest.rollouts_per_submission, max_tokens=256)
    record = Submission(
        run_id=RUN_ID,
        step=3,
        index=index,
        checkpoint_step=3,
        checkpoint=CHECKPOINT,
        sha256=made["sha256"],
        size=made["size"],
        rollouts=made["rollouts"],
        output_tokens=made["output_tokens"],
        prompts=made["prompts"],
        engine=made["engine"],
        dtype=made["dtype"],
        software="test",
        issued_at_ms=1,
    )
    return HandedIn(record, rollouts, contributor)


def generate(worker: RolloutWorker, manifest: Manifest, path: Path, *, index=0, contributor=ALICE, **changes):
    call = {
        "run_id": RUN_ID,
        "step": 3,
        "checkpoint": CHECKPOINT,
        "contributor": contributor,
        "index": index,
        "manifest": msgspec.msgpack.encode(manifest),
        "path": str(path),
    }
    return worker.generate(**call | changes)


def make_judge(policy=POLICY, **engine) -> Judge:
    judge = Judge(lambda: TorchEngine(**engine))
    judge.load(str(policy), CHECKPOINT)
    return judge


def judge_rows(judge: Judge, manifest: Manifest, handed_in: HandedIn, rows) -> dict:
    """Judge whatever a reader might give for this submission's file."""
    return judge.judge(
        submission=msgspec.msgpack.encode(handed_in.record),
        manifest=msgspec.msgpack.encode(manifest),
        run_id=RUN_ID,
        contributor=handed_in.contributor,
        rollouts=rows,
    )


def judge_rollouts(judge: Judge, manifest: Manifest, handed_in: HandedIn, rollouts=None) -> dict:
    """Judge a submission, with other rollouts (and counts that fit them) where given."""
    if rollouts is not None:
        tokens = sum(len(rollout.output_ids) for rollout in rollouts)
        record = msgspec.structs.replace(handed_in.record, output_tokens=max(1, tokens))
        handed_in = HandedIn(record, rollouts, handed_in.contributor)
    rows = [msgspec.to_builtins(rollout, builtin_types=(bytes,)) for rollout in handed_in.rollouts]
    return judge_rows(judge, manifest, handed_in, rows)


def numbers(judgement: dict, check: str) -> dict:
    return next(found["numbers"] for found in judgement["checks"] if found["name"] == check)
