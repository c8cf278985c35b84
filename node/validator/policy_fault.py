"""What is wrong with the policy that a submission names, as far as signed records tell, before anything is computed."""

from __future__ import annotations

from node.validator.cases import Case
from node.validator.findings import Findings, undecided
from protocol.ledger import LedgerState


def policy_fault(case: Case, ledger: LedgerState, *, held: int | None, oldest: int) -> Findings | None:
    """None where nothing is. `held`: the step of the policy if it is here; `oldest`: the oldest that is still taken."""
    submission, record = case.submission, case.submission.record
    step = record.checkpoint_step
    if not record.step - ledger.manifest.batch.max_staleness <= step <= record.step:
        return Findings("reject", False, f"policy: checkpoint {step} is no policy for step {record.step}")
    trained = ledger.trained.get(step - 1)
    if trained is not None and trained.checkpoint != record.checkpoint:
        return Findings("reject", False, f"policy: checkpoint {step} of this run is another one")
    if held is not None and held != step:
        return Findings("reject", True, f"policy: named as checkpoint {step}, but it is checkpoint {held}")
    back = "" if submission.id in ledger.submissions else ledger.policy_fault(submission.author, record)
    if back:
        return Findings("reject", False, f"policy: {back}")
    if held is None and step < oldest and not case.appeal:  # relays keep it longer than that, for appeals
        reason = f"policy: checkpoint {step} is gone; step {oldest} is the oldest that is still taken"
        return undecided(reason, passing=False)
    return None
