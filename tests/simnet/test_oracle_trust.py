"""The oracles about trust: books that were not looked at, and honest work for which nobody gets anything."""

import pytest
from oracle_world import CHEAT, HONEST, START_MS, judgement, make_evidence, submission
from simnet_world import SMALL, peer_id, status

from simnet.gather import Contributor, FaultMark, Life, NodeRecord, Sample
from simnet.oracles import Evidence
from simnet.oracles.books import Copy, StepSeen
from simnet.oracles.promises import Promise
from simnet.scenario import parse_scenario

OTHER = peer_id("inference-1")
LONG_S = 600


@pytest.fixture
def evidence() -> Evidence:
    return make_evidence()


def credits_(evidence: Evidence):
    return judgement(evidence, "credits")


def honest(evidence: Evidence):
    return judgement(evidence, "honest")


@pytest.mark.parametrize(
    "copies",
    [[], [Copy("relay-0", 0, agrees=True)], [Copy("validator-0", 18, agrees=True)]],
    ids=["none", "empty", "other"],
)
def test_a_relay_without_a_copy_of_the_ledger_is_said_to_have_none(evidence, copies):
    evidence.books.copies = copies
    found = credits_(evidence)
    assert (found.outcome, found.numbers["relays without a copy"]) == ("could not tell", 1)
    assert "the copy of relay-0" in found.finding


def test_of_a_relay_that_never_came_to_know_the_run_no_copy_is_asked_for(evidence):
    evidence.recording.nodes.append(NodeRecord("relay-1", "relay", "relay-1", lives=[Life(9, START_MS)]))
    assert credits_(evidence).outcome == "passed"


@pytest.mark.parametrize("what", ["credits", "accepted", "standing", "rejected"])
def test_each_figure_that_the_trainer_tells_otherwise_fails(evidence, what):
    """Attack: the trainer shows one thing and has another in its ledger."""
    others = {"credits": 301.0, "accepted": 4, "standing": "evicted", "rejected": {"toploc": 1}}
    setattr(evidence.recording.trainer.contributors[0], what, others[what])
    found = credits_(evidence)
    assert (found.outcome, found.numbers["differing"]) == ("failed", 1)


def test_credits_of_somebody_who_is_not_in_the_ledger_fail(evidence):
    """Attack: the trainer shows credits of a friend that has handed in nothing."""
    evidence.recording.trainer.contributors.append(Contributor("a friend", credits=5.0))
    assert credits_(evidence).outcome == "failed"


@pytest.mark.parametrize(
    ("exit_code", "faults", "said"),
    [
        (0, [], "failed"),
        (1, [], "failed"),
        (-9, [], "could not tell"),
        (None, [], "could not tell"),
        (1, ["disk-full"], "could not tell"),
        (1, ["disk-full", "disk-free"], "failed"),
    ],
)
def test_only_a_trainer_that_could_not_say_a_last_word_is_excused_for_another(evidence, exit_code, faults, said):
    evidence.recording.trainer.contributors[0].credits += 1
    last = evidence.recording.nodes[0].lives[-1]
    last.final, last.exit_code = False, exit_code
    evidence.recording.faults = [FaultMark(START_MS, 1, "trainer-0", action) for action in faults]
    assert credits_(evidence).outcome == said


@pytest.mark.parametrize(
    ("ended_by", "exit_code", "said"),
    [
        ("close", 143, "could not tell"),
        ("close", 130, "could not tell"),
        ("leave", 130, "could not tell"),
        ("close", 0, "failed"),
        ("close", 1, "failed"),
        ("", 143, "failed"),
    ],
)
def test_a_trainer_that_was_hurried_is_excused_and_one_that_ends_with_that_code_is_not(
    evidence, ended_by, exit_code, said
):
    """Asked a second time, as at a busy close, a node ends at once, with 128 and the signal's number."""
    evidence.recording.trainer.contributors[0].credits += 1
    last = evidence.recording.nodes[0].lives[-1]
    last.final, last.ended_by, last.exit_code = False, ended_by, exit_code
    assert credits_(evidence).outcome == said


def test_a_trainer_that_had_not_come_up_again_at_the_close_has_said_nothing_since(evidence):
    evidence.recording.trainer.contributors[0].credits += 1
    node = evidence.recording.nodes[0]
    node.lives.append(Life(11, START_MS, START_MS + 1, 1, "close"))
    assert credits_(evidence).outcome == "could not tell"


def at_length(evidence: Evidence, *, steps: int = 60) -> None:
    """Have the run last for ten minutes and sixty steps, in each of which the honest contributor gets on."""
    recording, books = evidence.recording, evidence.books
    recording.over_ms = recording.ended_ms = START_MS + 1000 * LONG_S
    recording.faults = []
    for node in recording.nodes:
        node.lives = [node.lives[-1]]
        node.lives[0].started_ms, node.lives[0].ended_ms = START_MS, recording.over_ms
    recording.samples = [Sample(START_MS + 10_000 * at, at, 0, 0) for at in range(steps)]
    books.steps = [StepSeen(at, [], START_MS + 10_000 * at, START_MS + 10_000 * at) for at in range(steps)]
    books.submissions = [submission(at) for at in range(steps)]


@pytest.mark.parametrize(
    ("entries", "stop_s", "said"),
    [
        (98, None, "passed"),  # of 120: all that was there two minutes before the end
        (97, None, "could not tell"),
        (40, None, "could not tell"),
        (58, 400, "passed"),  # then it stood still for good
        (57, 400, "could not tell"),
        (2, 290, "passed"),  # and had hardly been there
    ],
)
def test_a_relay_that_follows_no_more_has_no_copy_that_tells(evidence, entries, stop_s, said):
    """Its old copy is the beginning of the ledger, and looks like one that agrees."""
    at_length(evidence)
    for step in evidence.books.steps:
        step.entries = 2 * step.step + 2
    evidence.books.entries = 120
    evidence.books.copies = [Copy("relay-0", entries, agrees=True)]
    if stop_s is not None:
        evidence.recording.faults = [FaultMark(START_MS + 1000 * stop_s, 1, "relay-0", "stop")]
    found = credits_(evidence)
    assert (found.outcome, found.numbers["relays with a short one"]) == (said, int(said != "passed"))
    assert said == "passed" or f"relay-0 ({entries} of 120 entries)" in found.finding


def another(evidence: Evidence, **changes) -> NodeRecord:
    """One more honest contributor, with nothing in the ledger."""
    fields = {"started_ms": START_MS, "ended_ms": START_MS + 1000 * LONG_S, "status": status("inference-1")}
    node = NodeRecord("inference-1", "inference", OTHER, lives=[Life(pid=9, **(fields | changes))])
    evidence.recording.nodes.append(node)
    return node


def test_an_honest_node_that_gets_nothing_settled_while_others_do_fails(evidence):
    """Attack: relays or the trainer lock a contributor out, without a word in the ledger."""
    at_length(evidence)
    assert honest(evidence).outcome == "passed"
    another(evidence)
    found = honest(evidence)
    assert found.outcome == "failed"
    assert "inference-1" in found.finding


def test_an_honest_node_that_was_there_briefly_or_disturbed_is_no_proof(evidence):
    at_length(evidence)
    node = another(evidence, started_ms=START_MS + 1000 * (LONG_S - 100))
    assert honest(evidence).outcome == "could not tell"
    node.lives[0].started_ms = START_MS
    evidence.recording.faults = [
        FaultMark(START_MS + 1000 * at, 0, "inference-1", action)
        for begin in range(0, LONG_S, 110)
        for at, action in ((begin, "partition"), (begin + 5, "heal"))
    ]
    assert honest(evidence).outcome == "could not tell"


@pytest.mark.parametrize("reason", ["stale-step", "not-admitted"])
def test_a_slow_node_whose_work_comes_late_is_no_victim_and_one_that_is_not_let_in_is(evidence, reason):
    at_length(evidence)
    another(evidence).lives[0].status.rejected = {reason: 4}
    assert honest(evidence).outcome == {"stale-step": "could not tell"}.get(reason, "failed")


def test_a_node_whose_work_relays_took_is_not_too_slow(evidence):
    at_length(evidence)
    another(evidence).lives[0].status.rejected = {"stale-step": 4}
    evidence.books.promises.append(Promise("ab" * 32, OTHER, START_MS))
    assert honest(evidence).outcome == "failed"


def test_of_a_node_that_the_scenario_slows_nothing_is_claimed(evidence):
    at_length(evidence)
    another(evidence).name = "slow-0"
    assert honest(evidence).outcome == "failed"
    slowed = {"role": "inference", "name": "slow", "nice": 10}
    evidence.recording.scenario = parse_scenario({**SMALL, "fleet": [*SMALL["fleet"], slowed]}, name="small")
    assert honest(evidence).outcome == "could not tell"


def test_a_node_is_not_kept_out_of_a_run_that_stands_still(evidence):
    at_length(evidence)
    another(evidence)
    evidence.books.steps = evidence.books.steps[:4]
    assert honest(evidence).outcome == "could not tell"


def test_a_node_is_not_kept_out_where_others_get_nothing_either_or_start_as_slowly(evidence):
    at_length(evidence)
    another(evidence)
    evidence.books.submissions = evidence.books.submissions[:9]
    assert honest(evidence).outcome == "could not tell"
    at_length(evidence)
    for one in evidence.books.submissions:
        one.judged_ms = START_MS + 1000 * (LONG_S - 300)  # four times that is more than there was
    assert honest(evidence).outcome == "could not tell"


@pytest.mark.parametrize(("began_s", "said"), [(149, "failed"), (151, "could not tell")])
def test_a_node_is_kept_out_when_the_slowest_other_began_four_times_as_fast(evidence, began_s, said):
    at_length(evidence)
    another(evidence)  # for ten minutes
    for one in evidence.books.submissions:
        one.judged_ms = max(one.judged_ms, START_MS + 1000 * began_s)
    assert honest(evidence).outcome == said


def shut_out(evidence: Evidence, *, from_step: int = 20, until_step: int = 60) -> NodeRecord:
    """One more honest contributor that gets on as the other does, but for some steps; it says that it works."""
    at_length(evidence)
    node = another(evidence)
    node.timeline = [(START_MS + 10_000 * at, "working", f"generating for step {at}") for at in range(60)]
    evidence.books.submissions += [
        submission(1000 + at, contributor=OTHER, judged_ms=START_MS + 10_000 * at + 11_100)
        for at in range(60)
        if not from_step <= at < until_step
    ]
    return node


def test_a_contributor_that_is_shut_out_after_it_had_got_on_fails(evidence):
    """Attack: after a fault relays refuse all that a contributor hands in, for good, and it answers its status."""
    shut_out(evidence, from_step=60)
    assert honest(evidence).outcome == "passed"
    evidence = make_evidence()
    shut_out(evidence)
    found = honest(evidence)
    assert (found.outcome, found.numbers["with nothing more settled"]) == ("failed", 1)
    assert "Shut out though honest" in found.finding
    assert "inference-1" in found.finding


def test_one_that_comes_back_within_five_minutes_is_spared(evidence):
    shut_out(evidence, from_step=20, until_step=48)
    assert honest(evidence).outcome == "passed"


def test_stretches_between_faults_add_up_and_brief_ones_say_nothing(evidence):
    def faults(*times_s):
        evidence.recording.faults = [
            FaultMark(START_MS + 1000 * at, 0, "inference-1", action)
            for begin in times_s
            for at, action in ((begin, "stop"), (begin + 5, "continue"))
        ]
        return honest(evidence).outcome

    shut_out(evidence)
    assert faults(400) == "failed"
    assert faults(300, 400, 500) == "passed"


@pytest.mark.parametrize("why", ["late", "pauses", "slowed", "starting"])
def test_who_gets_nothing_more_for_a_reason_of_its_own_is_no_proof(evidence, why):
    node = shut_out(evidence)
    life = node.lives[0]
    life.refused_ms = {"stale-step": START_MS + 150_000, "not-admitted": START_MS + 500_000}
    assert honest(evidence).outcome == "failed"
    if why == "late":
        life.refused_ms["stale-step"] = START_MS + 500_000
    elif why == "pauses":
        node.timeline = [*node.timeline[:24], (START_MS + 240_000, "waiting", "step 25: enough rollouts for step 24")]
    elif why == "starting":
        node.timeline = []
    else:
        node.name = "slow-0"
        slowed = {"role": "inference", "name": "slow", "nice": 10}
        evidence.recording.scenario = parse_scenario({**SMALL, "fleet": [*SMALL["fleet"], slowed]}, name="small")
    found = honest(evidence)
    assert (found.outcome, found.numbers["with nothing more settled"]) == ("could not tell", 1)
    assert "nothing more was settled" in found.finding


@pytest.mark.parametrize(
    ("what", "limits", "said"),
    [
        ("room on the disk: it is full", {}, "could not tell"),
        ("midnight UTC: the 9 bytes that may be downloaded today have come", {}, "could not tell"),
        ("checkpoint 23 from the relays", {}, "failed"),
        ("checkpoint 23 from the relays", {"link": "home"}, "could not tell"),
        ("checkpoint 23 from the relays", {"settings": {"download_bytes_per_day": 9}}, "could not tell"),
    ],
)
def test_who_lacks_what_is_its_own_is_not_shut_out_and_one_to_whom_relays_give_no_policy_is(
    evidence, what, limits, said
):
    node = shut_out(evidence)
    node.name = "far-0"
    node.timeline = [*node.timeline[:24], (START_MS + 240_000, "waiting", what)]
    links = {"link": {"home": {"down_mbit": 2}}} if "link" in limits else {}
    fleet = [*SMALL["fleet"], {"role": "inference", "name": "far", **limits}]
    evidence.recording.scenario = parse_scenario({**SMALL, **links, "fleet": fleet}, name="small")
    assert honest(evidence).outcome == said


def test_a_contributor_that_was_never_started_has_nothing_settled_and_is_no_victim(evidence):
    at_length(evidence)
    another(evidence).lives = []
    assert honest(evidence).outcome == "passed"


def test_ten_settled_of_the_only_other_contributor_are_enough(evidence):
    node = shut_out(evidence)
    honest_ms = [one.judged_ms for one in evidence.books.submissions if one.contributor != node.peer_id]
    begin_ms = max(one.judged_ms for one in evidence.books.submissions if one.contributor == node.peer_id)
    spare = [at_ms for at_ms in honest_ms if at_ms > begin_ms][11:]
    evidence.books.submissions = [one for one in evidence.books.submissions if one.judged_ms not in spare]
    assert honest(evidence).outcome == "failed"


def test_one_that_waits_for_the_next_step_between_its_work_may_be_shut_out(evidence):
    node = shut_out(evidence)
    node.timeline = [
        word
        for at, kind, what in node.timeline
        for word in ((at, kind, what), (at + 2000, "waiting", "step 9: enough rollouts for step 8 are on their way"))
    ]
    assert honest(evidence).outcome == "failed"


def test_nothing_is_expected_beyond_a_contributors_own_pace_or_where_others_get_little(evidence):
    node = shut_out(evidence)
    own = [one for one in evidence.books.submissions if one.contributor == node.peer_id]
    evidence.books.submissions = [one for one in evidence.books.submissions if one not in own[:-4]]
    assert honest(evidence).outcome == "passed"
    evidence = make_evidence()
    shut_out(evidence)
    settled = evidence.books.submissions
    evidence.books.submissions = settled[:25] + [one for one in settled if one.contributor == OTHER]
    assert honest(evidence).outcome == "passed"


@pytest.mark.parametrize(
    ("made_s", "received_s", "said"), [(50, 51, "failed"), (300, 50, "passed"), (50, 300, "passed")]
)
def test_what_was_settled_nobody_knows_when_tells_nothing_of_the_time_when_it_was_made(
    evidence, made_s, received_s, said
):
    """As after an appeal that was granted, whose author is then shut out for it; clocks may be wrong."""
    shut_out(evidence)
    times = {"made_ms": START_MS + 1000 * made_s, "received_ms": START_MS + 1000 * received_s}
    evidence.books.submissions.append(submission(2000, contributor=OTHER, judged_ms=None, used_in=None, **times))
    assert honest(evidence).outcome == said


def unsettled(evidence: Evidence, *, count: int, state: str, step: int = 5) -> None:
    if state == "submitted":
        evidence.books.promises += [
            Promise(f"{at:064d}", HONEST, START_MS, step, step) for at in range(1000, 1000 + count)
        ]
    else:
        evidence.books.submissions += [
            submission(at, step=step, checkpoint_step=step, state=state, judged_ms=None, used_in=None)
            for at in range(1000, 1000 + count)
        ]


@pytest.mark.parametrize("state", ["disputed", "undecided", "pending", "submitted"])
def test_honest_work_that_is_never_settled_fails_when_it_is_much_and_old(evidence, state):
    """Attack: validators leave a contributor's work lying, or contradict each other for ever."""
    at_length(evidence)
    unsettled(evidence, count=11, state=state)
    found = honest(evidence)
    assert (found.outcome, found.numbers["of these old"]) == ("failed", 11)
    assert f"11 {state}" in found.finding


@pytest.mark.parametrize(("count", "step"), [(10, 5), (40, 50), (40, 41)], ids=["few", "of the last steps", "new"])
def test_a_little_or_new_work_that_is_not_settled_is_shown_and_no_failure(evidence, count, step):
    at_length(evidence)
    unsettled(evidence, count=count, state="undecided", step=step)
    found = honest(evidence)
    assert (found.outcome, found.numbers["unsettled"]) == ("passed", count)


def test_work_of_the_last_steps_is_not_old_however_long_they_take(evidence):
    at_length(evidence)
    unsettled(evidence, count=40, state="undecided", step=50)
    evidence.recording.over_ms += 1_000_000
    assert honest(evidence).numbers["of these old"] == 0


def test_old_work_is_nobodys_fault_where_the_validator_was_away(evidence):
    at_length(evidence)
    unsettled(evidence, count=40, state="undecided")
    evidence.recording.faults = [FaultMark(START_MS + 70_000, 7, "validator-0", "kill")]
    found = honest(evidence)
    assert (found.outcome, found.numbers["of these old"]) == ("could not tell", 40)


def test_work_of_a_cheat_or_of_whoever_is_evicted_need_not_be_settled(evidence):
    at_length(evidence)
    evidence.books.submissions += [
        submission(at, step=5, contributor=CHEAT, state="disputed", used_in=None) for at in range(1000, 1040)
    ]
    assert honest(evidence).numbers["unsettled"] == 0


@pytest.mark.parametrize(("count", "said"), [(10, "passed"), (11, "failed")])
def test_honest_work_that_is_turned_down_again_and_again_fails(evidence, count, said):
    at_length(evidence)
    for one in evidence.books.submissions[:count]:
        one.state, one.reason = "rejected", "duplicate"
    assert honest(evidence).outcome == said
