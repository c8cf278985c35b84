"""The figures of a simulation, from its recording: what `report.json` holds and what expectations are judged by.

Who was accepted, rejected and evicted is the trainer's ledger's word; who is honest is the scenario's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from protocol.atomic import write_atomically
from simnet.expectations import judge
from simnet.fleet import DISK_FULL
from simnet.gather import Contributor, EvaluationSeen, Life, NodeRecord, Outcome, Recording, as_json
from simnet.hops import hops_of, throughput_of
from simnet.oracles import Evidence, judge_all
from simnet.oracles.books import read_books
from simnet.oracles.excuses import own_times_ms
from simnet.oracles.logs import read_checkpoints
from simnet.oracles.undisturbed import passed_step_ms
from simnet.page import render_page
from simnet.summary import FORMAT, Downloads, NodeSummary, Report, Traffic
from simnet.waits import waits_of

FULL_DISK_CODE: Final = 1
"""With which a node ends that finds no room as it starts."""
IMITATED_DISKS: Final = "full disks are imitated"
"""How the note begins that says so (simnet.disks)."""
GOOD_OUTCOMES: tuple[Outcome, ...] = ("finished", "reached")


def build_report(recording: Recording, evidence: Evidence | None = None) -> Report:
    """Work out every figure, have the oracles judge, and hold the scenario's expectations against it.

    Without `evidence` there is the recording alone: no ledger and no logs.
    """
    evidence = evidence or Evidence(recording)
    trainer = recording.trainer
    reward = [mean for _, mean in sorted(recording.rewards.items())]
    first, last = _tenths(reward)
    contributors = {contributor.peer_id: contributor for contributor in trainer.contributors}
    honest = [_of(contributors, node) for node in recording.nodes if node.role == "inference" and not node.cheat]
    cheats = [_of(contributors, node) for node in recording.nodes if node.role == "inference" and node.cheat]
    evaluations = sorted(trainer.evaluations, key=lambda one: one.step)
    report = Report(
        format=FORMAT,
        scenario=recording.scenario.name,
        title=recording.scenario.title,
        run=recording.run,
        seed=recording.seed,
        outcome=recording.outcome,
        problem=recording.problem,
        notes=[*recording.notes, *(evidence.books.notes if evidence.books else ())],
        passed=False,
        started_ms=recording.started_ms,
        wall_s=_wall_s(recording),
        steps=max(len(reward), _trained(evidence)),
        total_steps=trainer.total_steps,
        reward=reward,
        evaluations=evaluations,
        evaluation_rises=_rises(evaluations),
        reward_last_tenth=last,
        reward_gain=None if first is None or last is None else last - first,
        accepted=recording.accepted,
        rejected=recording.rejected,
        accepted_per_honest=min((contributor.accepted for contributor in honest), default=None),
        honest_rejected=sum(_rejected(contributor) for contributor in honest),
        cheats=len(cheats),
        cheats_evicted=sum(contributor.standing == "evicted" for contributor in cheats),
        cheats_accepted=sum(contributor.accepted for contributor in cheats),
        liars_overruled=_liars_overruled(recording, evidence),
        judges={evidence.name_of(one.peer_id): one for one in evidence.books.judges} if evidence.books else {},
        trainer_wait_fraction=_trainer_wait_fraction(recording),
        bytes_by_relay={node.name: _traffic(node) for node in recording.nodes if node.role == "relay"},
        weights_from_relays_only=_weights_from_relays_only(recording),
        downloads=_downloads(recording),
        unexpected_exits=list(_unexpected_exits(evidence, contributors)),
        nodes=[_summary(node, contributors.get(node.peer_id)) for node in recording.nodes],
        faults=recording.faults,
        faults_planned=recording.faults_planned,
        faults_struck=recording.faults_struck,
        expectations=[],
        oracles=judge_all(evidence),
        throughput=throughput_of(evidence),
        hops=hops_of(evidence),
        waits=waits_of(recording),
        machine_late_p99_ms=recording.late_p99_ms,
    )
    report.expectations = judge(recording.scenario.expect, report)
    met = all(expectation.met for expectation in report.expectations)
    report.passed = report.outcome in GOOD_OUTCOMES and met and not report.failed_oracles
    return report


def gather_evidence(recording: Recording, out_dir: Path) -> Evidence:
    """What the nodes of a simulation left on disk, read once all of them have ended."""
    directories = {node.name: out_dir / "nodes" / node.name for node in recording.nodes}
    trainer = next((node.name for node in recording.nodes if node.role == "trainer"), None)
    if trainer is None:
        return Evidence(recording)
    return Evidence(
        recording,
        books=read_books({name: path / "data" for name, path in directories.items()}, trainer=trainer),
        checkpoints=read_checkpoints(
            {node.name: (node.role, directories[node.name] / "log.txt") for node in recording.nodes}
        ),
    )


def write_report(recording: Recording, out_dir: Path) -> tuple[Report, Path]:
    """Write report.json and report.html; the report and the path of the former."""
    report = build_report(recording, gather_evidence(recording, out_dir))
    write_atomically(out_dir / "report.html", render_page(report, recording).encode(), sync=False)
    path = out_dir / "report.json"
    write_atomically(path, as_json(report) + b"\n", sync=False)
    return report, path


def _trained(evidence: Evidence) -> int:
    """Steps by the ledger: a trainer that could not be asked for a while has shown others by then."""
    steps = evidence.books.steps if evidence.books else []
    return len({one.step for one in steps if one.trained_ms is not None})


def _trainer_wait_fraction(recording: Recording) -> float | None:
    """Over all lives of the trainer: each begins to count anew, and one that was killed lacks its last moments."""
    lives = [life for node in recording.nodes if node.role == "trainer" for life in node.lives]
    accounts = [life.status.details for life in lives if life.status]
    busy_s = sum(one.wait_s + one.train_s for one in accounts)
    return sum(one.wait_s for one in accounts) / busy_s if busy_s > 0 else None


def _wall_s(recording: Recording) -> float:
    return round((recording.closed_ms - recording.started_ms) / 1000, 1)


def _tenths(reward: Sequence[float | None]) -> tuple[float | None, float | None]:
    size = max(1, len(reward) // 10)
    return _mean(reward[:size]), _mean(reward[-size:])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _of(contributors: dict[str, Contributor], node: NodeRecord) -> Contributor:
    return contributors.get(node.peer_id) or Contributor(peer_id=node.peer_id)


def _rejected(contributor: Contributor) -> int:
    return sum(contributor.rejected.values())


def _traffic(node: NodeRecord) -> Traffic:
    details = [life.status.details for life in node.lives if life.status]
    return Traffic(sum(part.bytes_in for part in details), sum(part.bytes_out for part in details))


def _rises(evaluations: Sequence[EvaluationSeen]) -> bool | None:
    """Whether the last pass@1 is above the first beyond what chance explains; None where there are no two."""
    scores = [score for one in evaluations for score in one.pass_at if score.k == 1]
    return scores[-1].low > scores[0].high if len(scores) > 1 else None


def _downloads(recording: Recording) -> Downloads:
    details = [life.status.details for node in recording.nodes for life in node.lives if life.status]
    return Downloads(
        patched_bytes=sum(part.patched_bytes for part in details),
        full_bytes=sum(part.full_bytes for part in details),
        saved_bytes=sum(part.saved_bytes for part in details),
    )


def _weights_from_relays_only(recording: Recording) -> bool | None:
    """Whether everything that inference nodes and validators took in came from the fleet's relays."""
    relays = {node.peer_id for node in recording.nodes if node.role == "relay"}
    sources = {
        seen.peer_id
        for node in recording.nodes
        if node.role in ("inference", "validator")
        for life in node.lives
        if life.status
        for seen in life.status.relays
        if seen.bytes_in > 0
    }
    return sources <= relays if sources else None


def _unexpected_exits(evidence: Evidence, contributors: dict[str, Contributor]) -> Iterable[str]:
    recording, trained_ms = evidence.recording, _all_trained_ms(evidence)
    imitated = any(note.startswith(IMITATED_DISKS) for note in recording.notes)
    for node in recording.nodes:
        evicted = _of(contributors, node).standing == "evicted"
        for life in node.lives:
            if life.ended_ms is None:
                continue
            if life.ended_by == DISK_FULL:
                unexpected = not _ended_for_room(life, imitated=imitated)
            else:
                may_end = _may_end(node, life.ended_ms, recording=recording, trained_ms=trained_ms)
                unexpected = _was_unexpected(life, evicted=evicted, may_end=may_end)
            if unexpected:
                yield f"{node.name} ended with {_code(life.exit_code)}"


def _ended_for_room(life: Life, *, imitated: bool) -> bool:
    """Whether a full disk explains an end: it is no place to start on, but ends no node that has come to work on it.

    Where it is imitated, nodes meet an error that they do not take for a full disk.
    """
    return life.exit_code == FULL_DISK_CODE and (imitated or life.status is None)


def _all_trained_ms(evidence: Evidence) -> float | None:
    """When the run's last step was trained, before which no node knows of the run's end; None where it never was.

    At the latest when nodes were seen beyond it: the trainer's clock may be wrong. Where the ledger does not tell, the
    begin of a run that has finished: then nothing is held against anybody.
    """
    books, recording = evidence.books, evidence.recording
    steps = [(one.step, one.trained_ms) for one in books.steps if one.trained_ms is not None] if books else []
    last = next((at for at, (step, _) in enumerate(steps) if books and step == books.total_steps - 1), None)
    if last is None:
        return recording.started_ms if evidence.over else None
    seen_ms = passed_step_ms(recording, steps[last][0])
    own_ms = own_times_ms(recording, [at_ms for _, at_ms in steps])[last]
    return own_ms if seen_ms is None else min(own_ms, seen_ms)


def _may_end(node: NodeRecord, ended_ms: int, *, recording: Recording, trained_ms: float | None) -> bool:
    """Whether a node may have come to its end by itself: an honest one does once all steps are trained.

    Whoever attacks goes when nobody talks to it any more.
    """
    if node.cheat or node.role == "hostile":
        return recording.outcome in GOOD_OUTCOMES
    return trained_ms is not None and ended_ms >= trained_ms


def _was_unexpected(life: Life, *, evicted: bool, may_end: bool) -> bool:
    if life.ended_by:  # one that leaves must do it well; at the close there is no time to ask for it
        return life.ended_by == "leave" and life.exit_code != 0
    return not evicted and not (may_end and life.exit_code == 0)


def _liars_overruled(recording: Recording, evidence: Evidence) -> bool | None:
    """Whether the ledger tells validators that lie from others: they, and they alone, were overruled."""
    liars = {node.peer_id for node in recording.nodes if node.role == "validator" and node.cheat}
    judges = [one for one in evidence.books.judges if one.verdicts] if evidence.books else []
    if not liars.intersection(one.peer_id for one in judges):
        return None
    return all((one.overruled > 0) == (one.peer_id in liars) for one in judges)


def _summary(node: NodeRecord, contributor: Contributor | None) -> NodeSummary:
    last = node.lives[-1] if node.lives else None
    return NodeSummary(
        name=node.name,
        role=node.role,
        peer_id=node.peer_id,
        state=_state(last, contributor),
        cheat=node.cheat,
        standing=contributor.standing if contributor else None,
        accepted=contributor.accepted if contributor else 0,
        rejected=contributor.rejected if contributor else {},
        refused=_refused(node, contributor),
        starts=len(node.lives),
        cpu_s=round(node.cpu_s, 1),
        peak_memory_mb=node.peak_memory_bytes >> 20,
        exit_code=last.exit_code if last else None,
        log=f"nodes/{node.name}/log.txt",
    )


def _refused(node: NodeRecord, contributor: Contributor | None) -> dict[str, int]:
    """What the node counts itself, without what the ledger has as rejected."""
    if node.role != "inference" or node.status is None:
        return {}
    judged = contributor.rejected if contributor else {}
    return {reason: count for reason, count in node.status.rejected.items() if reason not in judged}


def _state(life: Life | None, contributor: Contributor | None) -> str:
    if life is None:
        return "never started"
    if contributor and contributor.standing == "evicted":
        return "evicted"
    if life.ended_ms is None:
        return life.status.state if life.status else "starting"
    if life.had_to_be_killed:
        return "killed at the close"
    if life.ended_by:
        return {"kill": "killed", "leave": "left", "close": "stopped"}.get(life.ended_by, life.ended_by)
    return "finished" if life.exit_code == 0 else _code(life.exit_code)


def _code(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
