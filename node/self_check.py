"""`intellect-node validate --self FILE`: a validator's verdict on a contributor's own file, before anything is sent.

Runs the very processes that a validator runs, the reader and the judge, on this machine, with the policy that the
submission names. Leaves out what only a validator knows: other contributors' rollouts and a node's whole history.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio
from rich.console import Console
from rich.text import Text

from node.compute.process import ComputeProcess
from node.compute.reader import RolloutReader
from node.held import HeldPolicy, held_policy, held_run
from node.inference.outbox import Outbox
from node.logs import printable
from node.validator.findings import with_limits
from node.verdict_show import render_checks
from protocol.envelope import Signed, open_envelope
from protocol.errors import ConfigError, DataDirError, MalformedError
from protocol.records import CheckResult, Manifest, Submission

OUTBOX: Final = "outbox.sqlite"
READ_TIMEOUT_S: Final = 60.0
LOAD_TIMEOUT_S: Final = 600.0
JUDGE_TIMEOUT_S: Final = 1800.0


class SelfCheck(msgspec.Struct, frozen=True):
    """What a validator would say."""

    outcome: Literal["accept", "reject", "undecided"]
    hard: bool
    reason: str
    step: int
    index: int
    checks: list[CheckResult] = []
    mean_reward: float = 0.0


def check_file(data_dir: Path, file: Path, envelope: Path | None = None) -> SelfCheck:
    """Judge a rollout file by its submission: the outbox's, or the one in `envelope`.

    Raises DataDirError when the submission or its policy is not here, ConfigError when there is no file.
    """
    if not file.is_file():
        raise ConfigError(f"there is no rollout file {file}", hint=f"look into {data_dir / 'rollouts'}")
    submission = _submission(data_dir, file, envelope)
    run = held_run(data_dir)
    policy = held_policy(data_dir, run.id, submission.record.checkpoint)
    if policy is None:
        raise DataDirError(
            f"checkpoint {submission.record.checkpoint_step}, which {file.name} was generated with, is not in "
            f"{data_dir} any more",
            hint="check files while they are new: a node keeps only the newest checkpoints",
        )
    if submission.record.run_id != run.id:
        return _verdict(submission, "reject", "submission: it is for another run")
    if not _is_as_signed(file, submission.record):
        return _verdict(submission, "reject", "file: it is not the one that was signed for")
    return trio.run(_judge, data_dir, file, submission, run, policy)


def _submission(data_dir: Path, file: Path, envelope: Path | None) -> Signed[Submission]:
    if envelope is not None:
        try:
            return open_envelope(envelope.read_bytes(), Submission)
        except OSError as error:
            raise ConfigError(f"{envelope} cannot be read: {error.strerror}") from error
    path = data_dir / OUTBOX
    found = None
    if path.exists():
        outbox = Outbox(path)
        found = outbox.find(file.resolve())
        outbox.close()
    if found is None:
        raise DataDirError(
            f"the outbox of {data_dir} has no submission of {file}",
            hint="give its submission with --submission FILE, or the node's --data-dir",
        )
    return open_envelope(found, Submission)


def _is_as_signed(file: Path, record: Submission) -> bool:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").digest()
    return digest == record.sha256 and file.stat().st_size == record.size


async def _judge(
    data_dir: Path, file: Path, submission: Signed[Submission], run: Signed[Manifest], policy: HeldPolicy
) -> SelfCheck:
    log_path = data_dir / "validate.log"
    reader = RolloutReader(log_path=log_path)
    judge = ComputeProcess("node.validator.compute", name="self check", log_path=log_path)
    record, manifest = submission.record, run.record
    async with trio.open_nursery() as nursery:
        await nursery.start(reader.run)
        await nursery.start(judge.run)
        try:
            rollouts = await reader.read(
                file,
                timeout_s=READ_TIMEOUT_S,
                max_rollouts=manifest.rollouts_per_submission,
                max_tokens=manifest.model.max_model_len,
            )
            await judge.call(
                "load", timeout_s=LOAD_TIMEOUT_S, checkpoint_dir=str(policy.path), checkpoint_id=record.checkpoint
            )
            found = await judge.call(
                "judge",
                timeout_s=JUDGE_TIMEOUT_S,
                submission=msgspec.msgpack.encode(record),
                manifest=msgspec.msgpack.encode(manifest),
                run_id=run.id,
                contributor=submission.author.public_key,
                rollouts=rollouts,
            )
            check = msgspec.convert({**found, "step": record.step, "index": record.index}, SelfCheck)
            tolerance = manifest.tolerances.get(record.dtype)
            return msgspec.structs.replace(check, checks=[with_limits(each, tolerance) for each in check.checks])
        except MalformedError as error:
            return _verdict(submission, "reject", f"schema: {error.message}")
        finally:
            nursery.cancel_scope.cancel()


def _verdict(submission: Signed[Submission], outcome: Literal["reject"], reason: str) -> SelfCheck:
    return SelfCheck(outcome, True, reason, submission.record.step, submission.record.index)


def show(found: SelfCheck, console: Console) -> None:
    """Print the checks and what they come to."""
    grade = " (hard: it would evict this node)" if found.hard and found.outcome == "reject" else ""
    style = "bold green" if found.outcome == "accept" else "bold red"
    console.print(f"submission {found.index} of step {found.step}", highlight=False)
    console.print(render_checks(found.checks))
    console.print(Text.assemble((found.outcome, style), grade, f": {printable(found.reason)}"))
