"""Each oracle passes a sound run, fails a run with the one thing spoilt that it is for, and else cannot tell."""

import dataclasses
import random

import pytest
from oracle_world import CHEAT, HONEST, START_MS, judgement, make_evidence, process, submission

from simnet.gather import FaultMark, Life, NodeRecord, Sample
from simnet.oracles import Evidence, judge_all
from simnet.oracles.books import Books, Copy, StepSeen
from simnet.oracles.growth import theil_sen
from simnet.oracles.promises import Promise


@pytest.fixture
def evidence() -> Evidence:
    return make_evidence()


def test_a_sound_run_passes_every_oracle(evidence):
    assert [(one.name, one.finding) for one in judge_all(evidence) if one.outcome != "passed"] == []


def test_without_a_ledger_and_samples_no_oracle_claims_anything(recording):
    assert {one.outcome for one in judge_all(Evidence(recording))} == {"could not tell"}


def test_a_ledger_that_cannot_be_read_is_said_to_be_so(evidence):
    broken = dataclasses.replace(evidence, books=Books(problem="the manifest is torn"))
    assert "the manifest is torn" in judgement(broken, "credits").finding
    assert judgement(broken, "credits").outcome == judgement(broken, "steps advance").outcome == "failed"
    for node in evidence.recording.nodes:
        for life in node.lives:
            life.status = None  # no step was seen, so that there may be no ledger yet
    assert judgement(broken, "credits").outcome == "could not tell"


def pause(evidence, *, seconds, faults=(), nodes=()):
    """What is said of a pause after the second step in which these faults strike, so many seconds after it began."""
    last = evidence.books.steps[-1]
    began_ms = evidence.books.steps[-2].trained_ms
    last.trained_ms = began_ms + 1000 * seconds
    evidence.recording.faults = [FaultMark(began_ms + 1000 * at, 1, node, action) for at, node, action in faults]
    for name, role in nodes:
        lives = [Life(pid=9, started_ms=START_MS)]
        evidence.recording.nodes.append(NodeRecord(name, role, name, lives=lives))
    return judgement(evidence, "steps advance").outcome


@pytest.mark.parametrize(
    ("seconds", "faults", "said"),
    [
        (300, [], "failed"),
        (300, [(1, "trainer-0", "kill"), (200, "trainer-0", "join")], "passed"),
        (300, [(1, "trainer-0", "stop"), (20, "trainer-0", "continue")], "failed"),  # long after it went on
        (170, [(1, "trainer-0", "stop"), (50, "trainer-0", "continue")], "passed"),
        (300, [(1, "validator-0", "kill"), (200, "validator-0", "join")], "passed"),
        (300, [(1, "inference-0", "partition"), (200, "inference-0", "heal")], "passed"),
        (300, [(1, "wrong-model-0", "kill")], "failed"),  # nobody needs a cheat
        (300, [(1, "trainer-0", "clock")], "failed"),
        (300, [(200, "trainer-0", "kill")], "failed"),  # what was before it is unexplained
        (2700, [(2690, "trainer-0", "stop")], "failed"),
    ],
)
def test_a_pause_is_excused_as_long_as_a_fault_explains_it(evidence, seconds, faults, said):
    assert pause(evidence, seconds=seconds, faults=faults) == said


def test_a_fault_of_a_node_that_no_step_needs_excuses_nothing(evidence):
    watched = [(1, "watch-0", "stop"), (290, "watch-0", "continue")]
    assert pause(evidence, seconds=300, faults=watched, nodes=[("watch-0", "watch")]) == "failed"


def test_a_fault_of_a_node_beside_which_another_works_excuses_no_standstill(evidence):
    killed = [(1, "relay-0", "kill"), (290, "relay-0", "join")]
    second = [("relay-1", "relay")]
    assert pause(evidence, seconds=300, faults=killed, nodes=second) == "failed"
    assert pause(evidence, seconds=74, faults=killed) == "passed"  # until everybody turned to the other one
    assert pause(evidence, seconds=78, faults=killed) == "failed"
    both = [*killed, (5, "relay-1", "stop"), (280, "relay-1", "continue")]
    assert pause(evidence, seconds=300, faults=both) == "passed"


def test_a_run_that_stands_still_at_the_end_fails(evidence):
    evidence.recording.outcome, evidence.recording.faults = "timeout", []
    evidence.recording.over_ms = START_MS + 10_000_000
    assert judgement(evidence, "steps advance").outcome == "failed"


def test_a_missing_step_fails(evidence):
    evidence.books.steps[1].trained_ms = None
    assert "gap" in judgement(evidence, "steps advance").finding


@pytest.mark.parametrize(("outcome", "said"), [("timeout", "failed"), ("interrupted", "could not tell")])
def test_no_step_at_all(evidence, outcome, said):
    evidence.books.steps, evidence.recording.outcome = [], outcome
    assert judgement(evidence, "steps advance").outcome == said


@pytest.mark.parametrize("policy", [-1, 3])
def test_a_rollout_beyond_the_bound_fails(evidence, policy):
    """Attack: the trainer trains on what is older than the manifest allows, or on a policy that is yet to come."""
    evidence.books.submissions[2].checkpoint_step = policy
    assert judgement(evidence, "staleness").outcome == "failed"


def test_a_rollout_that_is_trained_twice_fails(evidence):
    evidence.books.steps[2].submissions.append(evidence.books.submissions[0].id)
    found = judgement(evidence, "trained once")
    assert (found.outcome, found.numbers["twice"]) == ("failed", 1)


def test_an_accepted_rollout_that_the_ledger_lacks_is_lost(evidence):
    lost = Promise("ab" * 32, HONEST, START_MS, accepts=1)
    evidence.books.promises.append(lost)
    found = judgement(evidence, "trained once")
    assert (found.outcome, found.numbers["lost"]) == ("failed", 1)
    assert "abababababab" in found.finding
    lost.accepts = 0  # nobody has judged it yet
    assert judgement(evidence, "trained once").outcome == "passed"


def test_what_its_author_has_a_receipt_for_and_no_relay_has_is_lost_before_anybody_judged_it(evidence):
    """Attack: a relay gives a receipt and throws the submission away."""
    evidence.books.promises.append(Promise("ab" * 32, HONEST, START_MS, accepts=0, dropped=True))
    assert judgement(evidence, "trained once").numbers["lost"] == 1


def test_what_was_on_its_way_when_a_run_was_cut_off_is_not_lost(evidence):
    evidence.recording.outcome, evidence.recording.over_ms = "reached", START_MS + 100_000
    evidence.books.promises.append(Promise("ab" * 32, HONEST, START_MS + 90_000, accepts=1))
    assert judgement(evidence, "trained once").outcome == "passed"
    evidence.books.promises.append(Promise("cd" * 32, HONEST, START_MS + 20_000, accepts=1))
    assert judgement(evidence, "trained once").numbers["lost"] == 1


def test_a_batch_that_was_never_trained_loses_what_it_holds(evidence):
    evidence.books.steps.append(StepSeen(3, [evidence.books.submissions[0].id.replace("0", "e", 1)], START_MS))
    assert judgement(evidence, "trained once").outcome == "failed"


def test_what_is_too_old_and_what_is_left_over_is_counted_and_no_loss(evidence):
    evidence.books.total_steps = 50
    evidence.books.submissions += [submission(50, used_in=None, checkpoint_step=0), submission(51, used_in=None)]
    found = judgement(evidence, "trained once")
    assert (found.outcome, found.numbers["too old"], found.numbers["left over"]) == ("passed", 1, 1)


def test_credits_that_the_trainer_tells_otherwise_fail(evidence):
    """Attack: the trainer shows a contributor more credits than its ledger gives."""
    evidence.recording.trainer.contributors[0].credits += 1
    assert "inference-0" in judgement(evidence, "credits").finding
    last = evidence.recording.nodes[0].lives[-1]
    last.final = False
    assert judgement(evidence, "credits").outcome == "failed"  # it ended by itself, and writes a last word then
    last.exit_code = -9  # its last word may be older than its ledger
    assert judgement(evidence, "credits").outcome == "could not tell"


def test_a_copy_that_is_another_ledger_fails(evidence):
    """Attack: the trainer gives one relay another history than it keeps."""
    evidence.books.copies.append(Copy("relay-1", 18, agrees=False))
    assert judgement(evidence, "credits").outcome == "failed"


def test_what_the_audit_finds_fails(evidence):
    evidence.books.breaches = ["balance: a balance of 1 credits"]
    assert "a balance of 1" in judgement(evidence, "credits").finding


def test_an_honest_node_that_was_evicted_fails(evidence):
    evidence.books.accounts[0].standing = "evicted"
    assert judgement(evidence, "honest").outcome == "failed"


def test_an_honest_node_with_a_hard_rejection_fails_and_with_a_soft_one_passes(evidence):
    evidence.books.submissions.append(submission(50, state="rejected", used_in=None))
    assert judgement(evidence, "honest").numbers["others"] == 1
    assert judgement(evidence, "honest").outcome == "passed"
    evidence.books.submissions[-1].hard = True
    assert judgement(evidence, "honest").outcome == "failed"


def test_a_hard_rejection_that_an_appeal_took_back_is_no_punishment(evidence):
    evidence.books.submissions[0].hard = True  # its state is `accepted`
    assert judgement(evidence, "honest").outcome == "passed"


@pytest.mark.parametrize("author", [CHEAT, "a stranger"])
def test_a_file_of_a_cheat_or_a_stranger_in_a_batch_fails(evidence, author):
    """Attack: a lie is trained on."""
    evidence.books.submissions[1].contributor = author
    assert judgement(evidence, "bad rollout").outcome == "failed"


def test_of_a_cheat_whose_first_file_is_sound_nothing_is_claimed(evidence):
    evidence.recording.nodes[-1].cheat = "replayed-file"
    evidence.books.submissions[1].contributor = CHEAT
    assert judgement(evidence, "bad rollout").outcome == "could not tell"


def rising(mb_per_min: float, *, noise_mb: float = 0.2, count: int = 60) -> list[int]:
    """Memory of a process that is looked at every 10 s."""
    rng = random.Random(1)
    return [round(1e6 * (50 + mb_per_min * at / 6 + rng.uniform(-noise_mb, noise_mb))) for at in range(count)]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (rising(0.0), "passed"),
        (rising(0.9), "passed"),
        (rising(1.5, count=120), "failed"),
        (rising(20.0, count=20), "could not tell"),  # it was not there for long enough
        (rising(1.5, noise_mb=60, count=120), "could not tell"),
        ([*rising(60.0, count=6), *[60_000_000] * 60], "passed"),  # the warm-up
    ],
)
def test_memory_that_grows_is_told_from_memory_that_does_not(evidence, memory, said):
    for node in evidence.recording.nodes:
        node.processes = [process(memory)]
    assert judgement(evidence, "memory").outcome == said


def test_one_jump_does_not_make_a_slope():
    points = [(float(at), 5.0 if at > 17 else 0.0) for at in range(20)]
    assert theil_sen(points) == pytest.approx(0.0)


@pytest.mark.parametrize("what", ["descriptors", "tasks"])
def test_a_level_that_is_not_come_back_to_fails(evidence, what):
    count = 60
    leak = [30 + 2 * at for at in range(count)]
    evidence.recording.nodes[0].processes = [process([1] * count, **{what: leak})]
    found = judgement(evidence, "descriptors")
    assert found.outcome == "failed"
    assert "trainer-0" in found.finding
    wave = [30 + 20 * (at % 10) for at in range(count)]
    evidence.recording.nodes[0].processes = [process([1] * count, **{what: wave})]
    assert judgement(evidence, "descriptors").outcome == "passed"


def relay_that_is_joined(evidence, *, joined_s: int, count=60):
    """A relay that is looked at every 10 s, and has five descriptors more for each of eight nodes that come."""
    fds = [20 + (40 if 10 * at > joined_s else 0) for at in range(count)]
    evidence.recording.nodes[1].processes = [process([1] * count, descriptors=fds)]
    return evidence.recording.nodes[1]


def test_nodes_that_come_by_plan_explain_more_descriptors(evidence):
    """They are looked at from the last first start on."""
    joined_s = 300
    relay_that_is_joined(evidence, joined_s=joined_s)
    assert judgement(evidence, "descriptors").outcome == "failed"  # nobody came
    for number in range(8):
        came_ms = START_MS + 1000 * joined_s
        lives = [Life(pid=9, started_ms=came_ms, first_status_at_ms=came_ms + 2000)]
        evidence.recording.nodes.append(NodeRecord(f"watch-{number}", "watch", str(number), lives=lives))
    assert judgement(evidence, "descriptors").outcome == "passed"


def test_nodes_that_come_back_explain_more_descriptors_and_a_leak_beside_them_is_still_seen(evidence):
    relay = relay_that_is_joined(evidence, joined_s=300)
    for number in range(8):
        lives = [
            Life(pid=9, started_ms=START_MS, ended_ms=START_MS + 5000),
            Life(pid=9, started_ms=START_MS + 300_000, first_status_at_ms=START_MS + 302_000),
        ]
        evidence.recording.nodes.append(NodeRecord(f"watch-{number}", "watch", str(number), lives=lives))
    assert judgement(evidence, "descriptors").outcome == "passed"
    relay.processes = [process([1] * 60, descriptors=[20 + 4 * at for at in range(60)])]
    assert judgement(evidence, "descriptors").outcome == "failed"


def test_what_is_opened_before_the_first_step_is_no_growth(evidence):
    count = 60
    starting = [20 if at < 25 else 60 for at in range(count)]
    evidence.recording.nodes[0].processes = [process([1] * count, descriptors=starting)]
    evidence.recording.samples = [Sample(START_MS, 0, 0, 0), Sample(START_MS + 260_000, 1, 8, 0)]
    assert judgement(evidence, "descriptors").outcome == "passed"
    evidence.recording.samples = [Sample(START_MS, 1, 8, 0)]
    assert judgement(evidence, "descriptors").outcome == "failed"


def test_what_a_hostile_peer_takes_is_its_own_affair(evidence):
    evidence.recording.nodes[1].role = "hostile"
    evidence.recording.nodes[1].processes = [process(rising(9.0), descriptors=[30 + at for at in range(60)])]
    assert judgement(evidence, "memory").outcome == judgement(evidence, "descriptors").outcome == "passed"


def test_a_late_loop_fails_unless_the_machine_itself_was_late(evidence):
    loop = evidence.recording.nodes[1].lives[-1].status.details.discovery.loop
    loop.pulses, loop.p99_ms = 1200, 140
    assert judgement(evidence, "loops").outcome == "failed"
    evidence.recording.late_p99_ms = 80
    assert judgement(evidence, "loops").outcome == "could not tell"
    evidence.recording.core_waits_known = True  # then the lag is without the time that it waited for a core
    assert judgement(evidence, "loops").outcome == "failed"


def test_a_process_left_behind_fails(evidence):
    evidence.recording.left_behind = ["relay-0: pid 7"]
    assert judgement(evidence, "left behind").outcome == "failed"
