"""The oracle about rollouts: what is lost, passed over or left lying fails, and what cannot be looked at is said."""

from types import SimpleNamespace

import msgspec
import pytest
from factories import (
    OPERATOR,
    VALIDATOR,
    make_answer,
    make_appeal,
    make_batch,
    make_eviction,
    make_manifest,
    make_reinstatement,
    make_submission,
    make_trained,
    make_verdict,
    sealed,
)
from oracle_world import HONEST, START_MS, judgement, make_evidence, submission

from node.ledger.segments import SegmentWriter
from protocol.identity import Identity
from simnet.gather import FaultMark, Sample
from simnet.oracles import ORACLES, Evidence, judge_all
from simnet.oracles.batch_order import PassedOver
from simnet.oracles.books import StepSeen, read_books
from simnet.oracles.promises import Promise

ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")
MANIFEST = sealed(make_manifest(), OPERATOR)
RUN = MANIFEST.id


@pytest.fixture
def evidence() -> Evidence:
    return make_evidence()


def once(evidence: Evidence):
    return judgement(evidence, "trained once")


def ledger(directory, entries):
    """Books of a trainer that leaves this ledger."""
    (directory / "ledger").mkdir(parents=True)
    writer = SegmentWriter(directory / "ledger", start=RUN)
    writer.append(entries)
    writer.close()
    (directory / "manifest").write_bytes(MANIFEST.data)
    return read_books({"trainer-0": directory}, trainer="trainer-0")


def accepted(author: Identity, index: int, **changes):
    one = make_submission(author, RUN, index=index, sha256=bytes([index + 1]) * 31 + author.peer_id.public_key[:1])
    return one, [one.data, make_verdict(one, by=VALIDATOR, **changes).data]


def test_an_accepted_submission_that_a_batch_passes_over_for_a_later_one_fails(tmp_path, evidence):
    """Attack: the trainer forgets accepted work, and says that it was more than the steps needed."""
    first, entries = accepted(ALICE, 0)
    second, more = accepted(BOB, 0)
    books = ledger(tmp_path, [*entries, *more, make_batch(RUN, 0, [second])])
    assert books.passed_over == [PassedOver(0, first.id.hex(), second.id.hex())]
    assert books.breaches == []  # no rule of the ledger's is broken
    evidence.books.passed_over = books.passed_over
    found = once(evidence)
    assert (found.outcome, found.numbers["passed over"]) == ("failed", 1)
    assert first.id.hex()[:12] in found.finding


def test_what_is_accepted_after_a_batch_or_comes_later_is_not_passed_over(tmp_path):
    first, entries = accepted(ALICE, 0)
    _, more = accepted(BOB, 0)
    submitted_first = [more[0], *entries, make_batch(RUN, 0, [first]), more[1]]
    assert ledger(tmp_path / "a", submitted_first).passed_over == []
    assert ledger(tmp_path / "b", [*entries, *more, make_batch(RUN, 0, [first])]).passed_over == []


def test_work_of_whoever_is_evicted_is_not_passed_over(tmp_path):
    bad = make_submission(ALICE, RUN, index=1, sha256=b"x" * 32)
    verdict = make_verdict(bad, by=VALIDATOR, outcome="reject", hard=True, reason="toploc: no")
    _, entries = accepted(ALICE, 0)
    good, more = accepted(BOB, 0)
    eviction = [bad.data, verdict.data, make_eviction(verdict)]
    books = ledger(tmp_path, [*entries, *eviction, *more, make_batch(RUN, 0, [good])])
    assert (books.breaches, books.passed_over) == ([], [])


def test_since_when_a_batch_lay_there_is_told_by_the_trainers_own_entries(tmp_path):
    """The next entry that it signs after the last accept; the batch of the step before opens a step, too."""
    _, entries = accepted(ALICE, 0)
    first, second = (accepted(who, 0)[0] for who in (ALICE, BOB))
    _, more = accepted(BOB, 0)
    waits = [*entries, *more, make_batch(RUN, 0, [first]), make_batch(RUN, 1, [second], issued_at_ms=50_003)]
    books = ledger(tmp_path / "a", waits)
    assert [(step.ready_ms, step.idle_ms) for step in books.steps] == [(None, 0), (3, 50_000)]
    busy = [*entries, make_batch(RUN, 0, [first]), *more, make_batch(RUN, 1, [second], issued_at_ms=50_003)]
    assert [step.idle_ms for step in ledger(tmp_path / "b", busy).steps] == [0, 0]


def use(monkeypatch, **spec):
    """Have ledgers be of a run whose batches are made otherwise."""
    manifest = sealed(make_manifest(batch=msgspec.structs.replace(make_manifest().batch, **spec)), OPERATOR)
    monkeypatch.setattr("test_oracle_losses.MANIFEST", manifest)
    monkeypatch.setattr("test_oracle_losses.RUN", manifest.id)
    return manifest.id


def test_a_step_opens_with_the_batch_before_it_and_not_earlier(tmp_path, monkeypatch):
    run = use(monkeypatch, max_staleness=2)
    third = Identity.from_phrase("carol")
    files = [accepted(who, 0)[0] for who in (ALICE, BOB, third)]
    entries = [data for who in (ALICE, BOB, third) for data in accepted(who, 0)[1]]
    batches = [make_batch(run, at, files[at : at + 1], issued_at_ms=3 + 10_000 * at) for at in range(3)]
    assert [step.idle_ms for step in ledger(tmp_path, [*entries, *batches]).steps] == [0, 10_000, 10_000]


def test_a_step_that_waits_for_its_deadline_is_not_idle(tmp_path, monkeypatch):
    run = use(monkeypatch, deadline_s=10.0, minimum_share=0.5)
    (first, entries), (second, more) = accepted(ALICE, 0), accepted(BOB, 0)
    batches = [
        make_batch(run, at, [one], ended="deadline", issued_at_ms=20_000 * (at + 1))
        for at, one in enumerate((first, second))
    ]
    books = ledger(tmp_path, [*entries, *more, *batches])
    assert books.breaches == []
    assert [step.ready_ms for step in books.steps] == [None, None]
    assert [step.due_ms for step in books.steps] == [None, 30_000]


def test_a_batch_is_due_when_the_last_vote_for_what_it_holds_was_signed(tmp_path):
    (first, entries), (second, more) = accepted(ALICE, 0, issued_at_ms=30_000), accepted(BOB, 0, issued_at_ms=20_000)
    batch = make_batch(RUN, 0, [first, second], issued_at_ms=50_000)
    (step,) = ledger(tmp_path, [*entries, *more, batch]).steps
    assert (step.ready_ms, step.due_ms) == (None, 30_000)


def test_a_step_opens_with_the_policy_that_it_waited_for(tmp_path, monkeypatch):
    """It is no idle time of the trainer's that nothing new enough could be trained on."""
    run = use(monkeypatch, max_staleness=1)
    files = [accepted(who, 0)[0] for who in (ALICE, BOB)]
    third = make_submission(Identity.from_phrase("carol"), run, step=1, checkpoint_step=1)
    entries = [data for who in (ALICE, BOB) for data in accepted(who, 0)[1]]
    opened = [make_batch(run, at, [one], issued_at_ms=10_000 + at) for at, one in enumerate(files)]
    trained = make_trained(run, 0, issued_at_ms=50_000)
    last = make_batch(run, 2, [third], issued_at_ms=51_000)
    books = ledger(tmp_path, [*entries, third.data, make_verdict(third).data, *opened, trained, last])
    assert books.breaches == []
    assert (books.steps[2].ready_ms, books.steps[2].due_ms, books.steps[2].idle_ms) == (50_000, 50_000, 1000)


def test_work_of_whoever_comes_back_is_passed_over_from_then_on_and_tells_no_time(tmp_path, monkeypatch):
    """Its votes are from long before it could be used again."""
    second = Identity.from_phrase("v2")
    manifest = sealed(
        make_manifest(validators=(VALIDATOR.peer_id.public_key, second.peer_id.public_key)), OPERATOR
    )  # fmt: skip
    monkeypatch.setattr("test_oracle_losses.MANIFEST", manifest)
    monkeypatch.setattr("test_oracle_losses.RUN", manifest.id)
    (mine, entries), (other, more) = accepted(ALICE, 0), accepted(BOB, 0)
    bad = make_submission(ALICE, RUN, index=1, sha256=b"x" * 32)
    verdict = make_verdict(bad, by=VALIDATOR, outcome="reject", hard=True, reason="toploc: no")
    appeal = make_appeal(ALICE, verdict)
    answer = make_answer(bad, appeal, by=second)
    out = [bad.data, verdict.data, make_eviction(verdict)]
    back = [appeal.data, answer.data, make_reinstatement(answer, appeal, issued_at_ms=40_000).data]
    without = ledger(tmp_path / "a", [*entries, *out, *more, make_batch(RUN, 0, [other]), *back])
    assert (without.breaches, without.passed_over) == ([], [])
    without = ledger(tmp_path / "b", [*entries, *out, *more, *back, make_batch(RUN, 0, [other])])
    assert without.passed_over == [PassedOver(0, mine.id.hex(), other.id.hex())]
    held = ledger(tmp_path / "c", [*entries, *out, *back, make_batch(RUN, 0, [mine], issued_at_ms=41_000)])
    assert (held.breaches, held.steps[0].ready_ms, held.steps[0].due_ms) == ([], 40_000, None)


def test_work_of_a_policy_that_is_none_of_the_runs_is_not_passed_over(tmp_path):
    """A policy that the trainer took back after a crash: what was made with it is of no use."""
    first, entries = accepted(ALICE, 0)
    other = make_submission(ALICE, RUN, step=1, checkpoint_step=1, checkpoint=b"o" * 32)
    good = make_submission(BOB, RUN, step=1, checkpoint_step=1)
    more = [data for one in (other, good) for data in (one.data, make_verdict(one).data)]
    batches = [make_batch(RUN, 0, [first]), make_trained(RUN, 0), make_batch(RUN, 1, [good], issued_at_ms=5)]
    books = ledger(tmp_path, [*entries, *batches[:2], *more, batches[2]])
    assert (books.breaches, books.passed_over) == ([], [])


def idle(evidence: Evidence, *, seconds: int, faults=()):
    """What is said when the last step's batch lay there so long."""
    last = evidence.books.steps[-1]
    evidence.recording.over_ms = START_MS + 400_000
    evidence.recording.nodes[0].lives[-1].ended_ms = START_MS + 400_000
    last.ready_ms, last.committed_ms, last.due_ms = START_MS + 40_000, START_MS + 40_000 + 1000 * seconds, None
    evidence.recording.faults = [FaultMark(START_MS + 1000 * at, 1, "trainer-0", action) for at, action in faults]
    return once(evidence)


@pytest.mark.parametrize(
    ("seconds", "faults", "said"),
    [
        (59, [], "passed"),
        (61, [], "failed"),
        (61, [(50, "stop"), (90, "continue")], "passed"),
        (61, [(10, "stop"), (15, "continue")], "failed"),  # long before
        (100, [(30, "restart")], "passed"),  # it had just come back
    ],
)
def test_a_batch_that_lay_there_and_was_not_made_fails_unless_a_fault_struck_the_trainer(
    evidence, seconds, faults, said
):
    assert idle(evidence, seconds=seconds, faults=faults).outcome == said


def late(evidence: Evidence, *, seconds: float, count: int = 20, faults=(), ready: bool = False):
    """What is said when each of so many batches is made so long after the last vote for it, half a minute apart."""
    recording, books = evidence.recording, evidence.books
    recording.over_ms = START_MS + 1000 * max(200, 30 * (count + 2))
    for node in recording.nodes:
        node.lives = [node.lives[-1]]
        node.lives[0].started_ms, node.lives[0].ended_ms = START_MS, recording.over_ms
    books.total_steps, books.submissions, books.steps, books.promises = count, [], [], []
    for at in range(count):
        due_ms = START_MS + 30_000 * (at + 1)
        made_ms = due_ms + round(1000 * seconds)
        one = submission(at, judged_ms=due_ms)
        books.submissions.append(one)
        books.steps.append(StepSeen(at, [one.id], made_ms, made_ms + 1, due_ms if ready else None, due_ms))
    recording.faults = [FaultMark(START_MS + round(1000 * at), 1, *what, **more) for at, *what, more in faults]
    return once(evidence)


@pytest.mark.parametrize(("seconds", "said"), [(4.9, "passed"), (5.1, "failed"), (25, "failed")])
def test_a_trainer_that_makes_each_batch_late_fails_though_it_signs_nothing_between(evidence, seconds, said):
    """Attack: it waits with each batch, and no entry of its own says since when it could have been made."""
    found = late(evidence, seconds=seconds)
    assert (found.outcome, found.numbers["batches timed"]) == (said, 20)


def test_what_the_trainer_signs_between_makes_no_batch_less_late(evidence):
    late(evidence, seconds=25)
    for step in evidence.books.steps:
        step.ready_ms = step.committed_ms - 1000  # a step before was trained
    assert once(evidence).outcome == "failed"


@pytest.mark.parametrize("node", ["relay-0", "validator-0"])
def test_a_vote_whose_way_a_fault_struck_makes_no_batch_late(evidence, node):
    """And a relay that is gone for good strikes nobody's way any more."""
    faults = [
        mark for at in range(1, 21) for mark in ((30 * at + 6, node, "stop", {}), (30 * at + 8, node, "continue", {}))
    ]
    found = late(evidence, seconds=7, faults=faults)
    assert (found.outcome, found.numbers["batches timed"], found.numbers["idle s"]) == ("could not tell", 0, 0)
    assert "Only 0 of 20" in found.finding
    found = late(evidence, seconds=7, faults=[(0, node, "kill", {})])
    assert (found.outcome, found.numbers["batches timed"]) == ("failed", 18)


@pytest.mark.parametrize(
    ("node", "action", "said"),
    [
        ("validator-0", "clock", "could not tell"),
        ("validator-0", "disk-slow", "could not tell"),
        ("relay-0", "clock", "failed"),  # votes do not bear its time
        ("inference-0", "stop", "failed"),
    ],
)
def test_votes_tell_no_time_while_their_clock_or_disk_is_out_of_order(evidence, node, action, said):
    more = {"seconds": 20.0} if action == "clock" else {"sync_ms": 50.0} if action == "disk-slow" else {}
    assert late(evidence, seconds=7, faults=[(0, node, action, more)]).outcome == said


def test_a_batch_after_a_start_of_the_trainer_is_not_late(evidence):
    """It loads for longer than it takes to have connections again."""
    restarts = [
        mark
        for at in range(1, 20)
        for mark in ((30 * at + 10, "trainer-0", "restart", {}), (30 * at + 10.5, "trainer-0", "join", {}))
    ]
    found = late(evidence, seconds=7, faults=restarts)
    assert (found.outcome, found.numbers["batches timed"]) == ("could not tell", 1)


@pytest.mark.parametrize("role", ["trainer", "validator"])
def test_nodes_whose_clocks_differ_by_plan_have_no_common_time(evidence, role):
    scenario = evidence.recording.scenario
    fleet = [msgspec.structs.replace(one, clock_ahead_s=90.0) if one.role == role else one for one in scenario.fleet]
    evidence.recording.scenario = msgspec.structs.replace(scenario, fleet=tuple(fleet))
    assert late(evidence, seconds=7).outcome == "could not tell"
    ahead_ms = 90_000 if role == "trainer" else 0
    late(evidence, seconds=7, ready=True)
    for step in evidence.books.steps:
        step.ready_ms, step.committed_ms = step.ready_ms + ahead_ms, step.committed_ms + ahead_ms
    assert once(evidence).outcome == "failed"  # its own entries are all of one clock


@pytest.mark.parametrize(("known", "said"), [(5, "passed"), (4, "could not tell")])
def test_of_a_run_in_which_few_batches_could_be_timed_nothing_is_claimed(evidence, known, said):
    late(evidence, seconds=1)
    for step in evidence.books.steps[known:]:
        step.due_ms = None
    found = once(evidence)
    assert (found.outcome, found.numbers["batches timed"]) == (said, known)


def test_a_vote_from_after_the_batch_tells_no_time(evidence):
    late(evidence, seconds=-1)
    assert once(evidence).outcome == "could not tell"


@pytest.mark.parametrize(("kind", "who"), [("store", "relay-0"), ("outbox", "inference-0"), ("docket", "validator-0")])
def test_a_disk_that_is_gone_is_said_to_be_and_not_called_sound(evidence, kind, who):
    evidence.books.sources[kind].remove(who)
    found = once(evidence)
    assert found.outcome == "could not tell"
    assert f"the {kind} of {who}" in found.finding


def test_a_disk_of_a_node_that_never_took_part_or_that_lies_is_not_asked_for(evidence):
    evidence.books.sources["outbox"] = []
    for node in evidence.recording.nodes:
        if node.role == "inference":
            node.lives[-1].status.step = None
    assert once(evidence).outcome == "passed"
    evidence.recording.nodes[-1].lives[-1].status.step = 3  # the cheat
    assert once(evidence).outcome == "passed"


def test_what_is_lost_by_the_disks_that_are_left_fails_all_the_same(evidence):
    evidence.books.sources["store"] = []
    evidence.books.promises.append(Promise("ab" * 32, HONEST, START_MS, accepts=1))
    assert once(evidence).outcome == "failed"


def test_nothing_is_called_dropped_while_a_relays_store_is_missing(evidence):
    evidence.books.sources["store"] = []
    evidence.books.promises.append(Promise("ab" * 32, HONEST, START_MS, dropped=True))
    assert once(evidence).outcome == "could not tell"


@pytest.mark.parametrize("author", ["a stranger", "wrong-model-0"])
def test_what_only_a_stranger_or_a_cheat_misses_is_no_loss(evidence, author):
    cheat = evidence.recording.nodes[-1].peer_id
    evidence.books.promises.append(Promise("ab" * 32, cheat if author == "wrong-model-0" else author, 0, accepts=1))
    assert once(evidence).outcome == "passed"


def test_what_an_evicted_contributor_misses_is_no_loss(evidence):
    evidence.books.promises.append(Promise("ab" * 32, HONEST, START_MS, accepts=1))
    evidence.books.accounts[0].standing = "evicted"
    assert once(evidence).outcome == "passed"


def cut_off(evidence: Evidence, *, received_s: int, checkpoint_step: int = 0):
    evidence.recording.outcome, evidence.recording.over_ms = "reached", START_MS + 100_000
    received_ms = START_MS + 1000 * received_s
    evidence.books.promises.append(Promise("ab" * 32, HONEST, received_ms, 0, checkpoint_step, accepts=1))
    return once(evidence)


@pytest.mark.parametrize(("received_s", "said"), [(39, "failed"), (41, "passed")])
def test_what_came_a_minute_before_a_run_was_cut_off_is_not_on_its_way_any_more(evidence, received_s, said):
    assert cut_off(evidence, received_s=received_s).outcome == said


@pytest.mark.parametrize("received_s", [3700, -3500])
def test_a_relay_whose_clock_is_wrong_neither_hides_nor_makes_a_loss(evidence, received_s):
    """The run's progress by our own clock says when the policy was too old for any batch."""
    evidence.recording.faults = [FaultMark(START_MS - 100_000, 0, "relay-0", "clock", 3600.0)]
    evidence.recording.samples = [Sample(START_MS + 1000 * at, at // 10, 0, 0) for at in range(100)]
    assert cut_off(evidence, received_s=received_s, checkpoint_step=0).outcome == "failed"  # since step 3, at 30 s
    evidence.books.promises[-1].checkpoint_step = 2  # since step 5, at 50 s
    assert once(evidence).outcome == "passed"


def test_what_no_step_could_use_is_too_old_and_the_rest_left_over(evidence):
    """The last step takes what is as old as it may be, though the run has trained it by then."""
    evidence.books.total_steps = 4
    evidence.books.steps.append(StepSeen(3, [], 0, 1))
    evidence.books.submissions += [
        submission(50, used_in=None, checkpoint_step=0),
        submission(51, used_in=None, checkpoint_step=1),
    ]
    found = once(evidence)
    assert (found.numbers["too old"], found.numbers["left over"]) == (1, 1)


def test_an_oracle_that_breaks_has_failed_and_takes_no_other_with_it(evidence):
    """Attack: what a node says of itself makes an oracle stumble, so that there is no report at all."""
    evidence.books.accounts.append(SimpleNamespace(peer_id="x", standing="active"))
    found = judge_all(evidence)
    assert len(found) == len(ORACLES)
    (broken,) = [one for one in found if "broke" in one.finding]
    assert (broken.outcome, broken.name) == ("failed", "credits equal the replay")


def test_submissions_without_rollouts_break_no_oracle(evidence):
    for one in evidence.books.submissions:
        one.rollouts = 0
    assert judgement(evidence, "staleness").outcome == "passed"
