import html.parser
import json
import re

import pytest
from simnet_world import peer_id, status

from simnet.gather import Contributor, Details, EvaluationSeen, FaultMark, Life, NodeRecord, PassSeen, RelaySeen
from simnet.gatherer import parse_status
from simnet.oracles import Evidence
from simnet.oracles.books import Books, Judge, StepSeen
from simnet.report import build_report, write_report
from simnet.scenario import Expect
from simnet.summary import Downloads

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e&\"'"


def expecting(recording, **expect):
    recording.scenario = type(recording.scenario)(
        **{name: getattr(recording.scenario, name) for name in recording.scenario.__struct_fields__}
        | {"expect": Expect(**expect)}
    )
    return build_report(recording)


def test_the_figures_of_a_run(recording):
    report = build_report(recording)
    assert report.passed
    assert (report.steps, report.total_steps, report.wall_s) == (20, 20, 100.0)
    assert report.reward_last_tenth == pytest.approx(0.975)
    assert report.reward_gain == pytest.approx(0.9)
    assert (report.accepted, report.accepted_per_honest, report.honest_rejected) == (40, 40, 0)
    assert (report.cheats, report.cheats_evicted, report.cheats_accepted) == (1, 1, 0)
    assert report.rejected == {"toploc: exponent mismatches": 2}
    assert report.trainer_wait_fraction == pytest.approx(0.3)
    assert report.weights_from_relays_only
    assert report.unexpected_exits == []


def test_the_trainers_wait_is_that_of_all_its_lives(recording):
    trainer = recording.nodes[0]
    earlier = Life(9, recording.started_ms - 10, recording.started_ms - 5, -9, "kill")
    earlier.status = status("trainer-0", details=Details(wait_s=70.0, train_s=30.0))
    trainer.lives.insert(0, earlier)
    assert build_report(recording).trainer_wait_fraction == pytest.approx(0.5)


def test_what_is_rejected_of_honest_nodes_is_counted_and_of_cheats_is_not(recording):
    recording.trainer.contributors[0].rejected = {"late": 2, "toploc": 1}
    report = build_report(recording)
    assert (report.honest_rejected, report.passed) == (3, False)


def test_steps_that_no_status_told_of_are_counted_by_the_ledger(recording):
    recording.rewards = dict.fromkeys(range(1, 17), 0.5)
    steps = [StepSeen(step, [], 0, 1) for step in range(20)]
    assert build_report(recording).steps == 16
    assert build_report(recording, Evidence(recording, Books(steps=steps))).steps == 20


def test_bytes_of_all_lives_of_a_relay_are_added(recording):
    traffic = build_report(recording).bytes_by_relay["relay-0"]
    assert (traffic.bytes_in, traffic.bytes_out) == (30, 400)


def test_what_patches_spared_is_added_over_everyone_who_downloads(recording, tmp_path):
    for node in recording.nodes[1:4]:
        node.status.details = Details(patched_bytes=2_000_000, full_bytes=10_000_000, saved_bytes=38_000_000)
    report, _ = write_report(recording, tmp_path)
    assert report.downloads == Downloads(patched_bytes=6_000_000, full_bytes=30_000_000, saved_bytes=114_000_000)
    page = (tmp_path / "report.html").read_text()
    for text in ("policies came as", "6.0 MB", "stood for 120.0 MB", "30.0 MB"):
        assert text in page


def test_a_run_without_downloads_says_nothing_of_patches(recording, tmp_path):
    write_report(recording, tmp_path)
    assert "policies came as" not in (tmp_path / "report.html").read_text()


def test_what_this_machine_could_not_do_is_said_in_both_reports(recording, tmp_path):
    recording.notes = ["no packets are lost, which needs namespaces: home-0 <b>"]
    report, path = write_report(recording, tmp_path)
    assert json.loads(path.read_bytes())["notes"] == report.notes == recording.notes
    assert "no packets are lost, which needs namespaces: home-0 &lt;b&gt;" in (tmp_path / "report.html").read_text()


def test_what_each_node_took_of_the_machine_is_shown(recording, tmp_path):
    recording.nodes[0].cpu_s, recording.nodes[0].peak_memory_bytes = 74.26, 3 << 30
    report, _ = write_report(recording, tmp_path)
    assert (report.nodes[0].cpu_s, report.nodes[0].peak_memory_mb) == (74.3, 3072)
    page = (tmp_path / "report.html").read_text()
    assert "1 min 14 s" in page
    assert "3072 MB" in page


@pytest.mark.parametrize(
    ("last", "rises"),
    [(None, None), ((0.5, 0.41, 0.6), True), ((0.5, 0.40, 0.6), False), ((0.1, 0.05, 0.2), False)],
)
def test_an_evaluation_rises_when_the_intervals_lie_apart(recording, last, rises):
    first = EvaluationSeen(0, [PassSeen(4, 0.9, 0.8, 0.95), PassSeen(1, 0.3, 0.2, 0.4)])
    recording.trainer.evaluations = [first, *([EvaluationSeen(20, [PassSeen(1, *last)])] if last else [])]
    assert build_report(recording).evaluation_rises is rises
    assert expecting(recording, evaluation_rises=True).passed is (rises is True)


def test_states_say_how_each_node_ended(recording):
    states = {node.name: node.state for node in build_report(recording).nodes}
    assert states["wrong-model-0"] == "evicted"
    assert states["inference-0"] == "finished"


def test_what_relays_refused_is_told_apart_from_what_was_rejected(recording):
    for node in recording.nodes[-2:]:
        node.status.rejected = {"toploc: exponent mismatches": 3, "stale-step": 4}
    honest, cheat = build_report(recording).nodes[-2:]
    assert cheat.refused == {"stale-step": 4}
    assert honest.rejected == {}
    assert build_report(recording).honest_rejected == 0


def test_weights_from_elsewhere_are_seen(recording):
    """Attack: a node takes its weights from another peer than a relay."""
    status = next(node for node in recording.nodes if node.role == "inference").status
    status.relays.append(RelaySeen(peer_id=peer_id("trainer-0"), bytes_in=1))
    assert build_report(recording).weights_from_relays_only is False


@pytest.mark.parametrize(
    ("code", "ended_by", "unexpected"),
    [
        (1, "", True),
        (-11, "", True),
        (0, "leave", False),
        (130, "leave", True),
        (-9, "kill", False),
        (1, "close", False),
        (-11, "disk-full", True),
        (0, "disk-full", True),
        (1, "disk-full", True),  # it had come to work there
    ],
)
def test_an_exit_is_unexpected_when_nobody_asked_for_it_or_leaving_failed(recording, code, ended_by, unexpected):
    life = next(node for node in recording.nodes if node.name == "inference-0").lives[0]
    life.exit_code, life.ended_by = code, ended_by
    assert bool(build_report(recording).unexpected_exits) is unexpected


def test_a_full_disk_explains_that_a_node_does_not_start_on_it(recording):
    life = next(node for node in recording.nodes if node.name == "inference-0").lives[0]
    life.exit_code, life.ended_by, shown, life.status = 1, "disk-full", life.status, None
    assert build_report(recording).unexpected_exits == []
    life.exit_code = -11
    assert build_report(recording).unexpected_exits == ["inference-0 ended with signal 11"]
    life.exit_code, life.status = 1, shown
    assert build_report(recording).unexpected_exits
    recording.notes = [
        "full disks are imitated by a limit on the size of files: this is not root"
    ]  # then nodes meet another error, and may end by it
    assert build_report(recording).unexpected_exits == []


def test_a_node_that_ends_well_before_the_run_does_was_not_asked_to(recording):
    assert build_report(recording).unexpected_exits == []
    recording.outcome = "timeout"
    assert "inference-0 ended with exit code 0" in build_report(recording).unexpected_exits


def with_ledger(recording, *, steps=20, every_ms=4000):
    """A ledger with a step trained every four seconds, the last of twenty after 80 s."""
    trained = [StepSeen(at, [], 0, recording.started_ms + every_ms * (at + 1)) for at in range(steps)]
    return Evidence(recording, Books(total_steps=20, steps=trained))


@pytest.mark.parametrize(
    ("outcome", "steps", "ended_s", "unexpected"),
    [
        ("finished", 20, 80, False),
        ("finished", 20, 79, True),
        ("finished", 19, 79, False),  # the ledger does not tell when
        ("reached", 19, 79, True),
        ("reached", 20, 80, False),
        ("reached", 20, 5, True),
    ],
)
def test_a_node_ends_by_itself_once_the_last_step_is_trained(recording, outcome, steps, ended_s, unexpected):
    """A contributor takes the run for finished that goes on without it, and ends with code 0."""
    recording.outcome = outcome
    life = next(node for node in recording.nodes if node.name == "inference-0").lives[0]
    life.ended_ms = recording.started_ms + 1000 * ended_s
    found = build_report(recording, with_ledger(recording, steps=steps)).unexpected_exits
    assert ("inference-0 ended with exit code 0" in found) is unexpected


def test_a_trainer_whose_clock_is_ahead_makes_nobodys_end_an_early_one(recording):
    recording.faults = [FaultMark(recording.started_ms + 1000, 1, "trainer-0", "clock", seconds=3600.0)]
    recording.samples = []
    evidence = with_ledger(recording)
    for step in evidence.books.steps:
        step.trained_ms += 3_600_000
    assert build_report(recording, evidence).unexpected_exits == []
    recording.faults, recording.rises = [], [(recording.started_ms + 81_000, 20)]  # its clock is wrong unbeknown to us
    assert build_report(recording, evidence).unexpected_exits == []


def test_a_hostile_peer_whom_nobody_talks_to_goes_at_any_time(recording):
    life = Life(12, recording.started_ms, recording.started_ms + 5000, 0)
    recording.nodes.append(NodeRecord("flood-0", "hostile", "x", lives=[life]))
    assert build_report(recording, with_ledger(recording)).unexpected_exits == []
    life.exit_code = 1
    assert build_report(recording, with_ledger(recording)).unexpected_exits == ["flood-0 ended with exit code 1"]


def test_a_node_that_had_to_be_killed_at_the_close_is_said_to_be_so(recording):
    life = recording.nodes[2].lives[-1]
    life.exit_code, life.ended_by = -9, "close"
    assert build_report(recording).nodes[2].state == "killed at the close"


@pytest.mark.parametrize(
    ("expect", "met"),
    [
        ({"reward_at_least": 0.97}, True),
        ({"reward_at_least": 0.98}, False),
        ({"reward_gain_at_least": 0.95}, False),
        ({"steps_at_least": 20}, True),
        ({"accepted_at_least": 41}, False),
        ({"accepted_per_honest_at_least": 40}, True),
        ({"cheats_evicted": True}, True),
        ({"cheats_evicted": False}, False),
        ({"cheats_accepted": 0}, True),
        ({"honest_rejected": 0}, True),
        ({"unexpected_exits": 0}, True),
        ({"weights_from_relays_only": True}, True),
        ({"trainer_wait_fraction_at_most": 0.29}, False),
        ({}, True),
    ],
)
def test_each_expectation_decides(recording, expect, met):
    report = expecting(recording, **expect)
    assert report.passed is met
    assert [expectation.met for expectation in report.expectations] == [met] * len(expect)


@pytest.mark.parametrize(
    ("overruled", "met"),
    [
        ({"liar": 3, "honest": 0}, True),
        ({"liar": 0, "honest": 0}, False),
        ({"liar": 3, "honest": 1}, False),
        ({}, None),
    ],
)
def test_liars_are_told_from_others_by_the_ledger(recording, overruled, met):
    keys = {name: peer_id(name) for name in ("liar", "honest")}
    recording.nodes += [
        NodeRecord("liar", "validator", keys["liar"], "framer"),
        NodeRecord("honest", "validator", keys["honest"]),
    ]
    judges = [Judge(keys[name], 9, count) for name, count in overruled.items()]
    judges.append(Judge(peer_id("silent"), 0, 0))
    report = build_report(recording, Evidence(recording, Books(judges=judges)))
    assert report.liars_overruled is met
    assert (report.cheats, report.cheats_evicted) == (1, 1)  # contributors are counted, not validators


@pytest.mark.parametrize("name", Expect.__struct_fields__)
def test_every_expectation_has_a_rule_and_none_holds_of_a_run_that_never_began(recording, name):
    recording.nodes, recording.rewards = [], {}
    truths = dict.fromkeys(("cheats_evicted", "liars_overruled", "weights_from_relays_only", "evaluation_rises"), True)
    goal = truths.get(name, 0 if name.endswith("ed") else 1)
    (expectation,) = expecting(recording, **{name: goal}).expectations
    assert expectation.met == (name in ("cheats_accepted", "honest_rejected", "unexpected_exits"))


def test_a_run_that_did_not_come_to_its_end_has_not_passed(recording):
    recording.outcome = "timeout"
    assert not expecting(recording).passed


def test_the_files_hold_the_report(recording, tmp_path):
    report, path = write_report(recording, tmp_path)
    written = json.loads(path.read_text())
    assert written["reward"] == report.reward
    assert written["expectations"][0] == {"name": "reward_at_least", "goal": "≥ 0.8", "value": "0.975", "met": True}
    page = (tmp_path / "report.html").read_text()
    for text in ("A small run", "passed", "Mean reward by step", "relay-0: kill at step 10", "inference-0", "evicted"):
        assert text in page


def test_the_page_is_whole_and_fetches_nothing(recording, tmp_path):
    write_report(recording, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    assert not re.search(r"@import|url\(", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    assert not re.search(r"\$[a-z]", page)
    check = Balance()
    check.feed(page)
    assert check.open == []


def test_evaluations_are_in_the_training_curve(recording, tmp_path):
    scores = [PassSeen(1, 0.5, 0.4, 0.6), PassSeen(4, 0.9, 0.8, 0.95)]
    recording.trainer.evaluations = [EvaluationSeen(20, scores), EvaluationSeen(0, [PassSeen(1, 0.3, 0.2, 0.4)])]
    report, path = write_report(recording, tmp_path)
    assert [one.step for one in report.evaluations] == [0, 20]
    written = json.loads(path.read_text())["evaluations"]
    assert written[1]["pass_at"][1] == {"k": 4, "value": 0.9, "low": 0.8, "high": 0.95}
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="interval"') == page.count('class="dot"') == 2
    assert "after 0 steps: pass@1 0.300 on held-out prompts (95 %: 0.200 to 0.400)" in page
    assert "held-out prompts, after 20 steps pass@1 0.50 (0.40 to 0.60), pass@4 0.90 (0.80 to 0.95)" in page


def test_a_status_without_evaluations_or_with_more_in_them_is_read():
    plain = b'{"peer_id": "p", "pid": 1, "state": "working", "details": {}}'
    assert parse_status(plain).details.evaluations == []
    more = plain.replace(b"{}}", b'{"evaluations": [{"step": 3, "seconds": 1.5, "prompts": 64, "pass_at": []}]}}')
    assert parse_status(more).details.evaluations == [EvaluationSeen(3)]


def test_hostile_text_stays_text(recording, tmp_path):
    """Attack: a contributor hands in markup and control characters wherever a node's words are shown."""
    recording.run = HOSTILE
    recording.problem = HOSTILE
    trainer = recording.trainer
    for verdict in (trainer.verdicts[1], recording.against[0]):
        verdict.reason = verdict.outcome = verdict.submission = verdict.contributor = HOSTILE
    trainer.contributors[1].rejected = {HOSTILE: 3}
    trainer.contributors[1].standing = HOSTILE
    for node in recording.nodes:
        node.timeline = [(at, kind, HOSTILE) for at, kind, _ in node.timeline]
    write_report(recording, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;" in page


def test_a_flood_of_words_does_not_make_a_flood_of_page(recording, tmp_path):
    """Attack: a node switches between states a thousand times a second, with the longest words it may use."""
    start = recording.started_ms
    for node in recording.nodes:
        node.timeline = [(start + i, ("working", "waiting")[i % 2], "w" * 300) for i in range(20_000)]
    recording.trainer.contributors = [Contributor(peer_id=str(i), rejected={"r" * 5000: 1}) for i in range(3)]
    write_report(recording, tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_an_empty_recording_still_gives_a_report(recording, tmp_path):
    for node in recording.nodes:
        node.lives, node.timeline = [], []
    recording.rewards = {}
    recording.samples, recording.faults, recording.run, recording.outcome = [], [], "", "failed"
    report, _ = write_report(recording, tmp_path)
    assert (report.steps, report.reward_last_tenth, report.passed) == (0, None, False)
    assert "No step was trained" in (tmp_path / "report.html").read_text()


class Balance(html.parser.HTMLParser):
    """Which elements are open at the end."""

    VOID = ("meta", "br", "path", "!doctype")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        return

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag
