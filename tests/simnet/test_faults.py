import pytest

from simnet.faults import FaultPlan, undoes
from simnet.gather import FaultMark
from simnet.scenario import Fault


def make_apply(done, *, refuse=(), miss=()):
    def apply(fault):
        if fault.action in refuse:
            return "not yet"
        if fault.node in miss:
            return "missed"
        done.append((fault.node, fault.action))
        return "struck"

    return apply


def test_faults_strike_when_their_step_or_time_has_come():
    plan = FaultPlan([Fault(node="a", action="leave", at_step=8), Fault(node="b", action="kill", at_s=5.0)])
    done = []
    plan.strike(make_apply(done), step=7, elapsed_s=4.9)
    assert done == []
    plan.strike(make_apply(done), step=7, elapsed_s=5.0)
    assert done == [("b", "kill")]
    plan.strike(make_apply(done), step=9, elapsed_s=5.0)
    plan.strike(make_apply(done), step=10, elapsed_s=9.0)
    assert done == [("b", "kill"), ("a", "leave")]


def test_a_join_waits_until_the_node_has_left_and_holds_back_what_follows():
    plan = FaultPlan([Fault(node="a", action=action, at_step=1) for action in ("leave", "join", "kill")])
    done = []
    struck = plan.strike(make_apply(done, refuse=("join",)), step=1, elapsed_s=0)
    assert [fault.action for fault in struck] == ["leave"]
    assert plan.will_join("a")
    struck = plan.strike(make_apply(done), step=1, elapsed_s=0)
    assert [fault.action for fault in struck] == ["join", "kill"]
    assert not plan.will_join("a")


def test_what_lasts_a_while_is_undone_before_what_follows():
    first = Fault(node="a", action="stop", at_step=2, for_s=5.0)
    plan = FaultPlan([first, Fault(node="a", action="kill", at_step=3)])
    done = []
    plan.strike(make_apply(done), step=9, elapsed_s=100.0)
    assert done == [("a", "stop")]
    plan.strike(make_apply(done), step=9, elapsed_s=104.9)
    assert done == [("a", "stop")]
    plan.strike(make_apply(done), step=9, elapsed_s=105.0)
    assert done == [("a", "stop"), ("a", "continue"), ("a", "kill")]


def test_a_restart_is_a_kill_and_a_join_as_soon_as_it_can_be():
    plan = FaultPlan([Fault(node="trainer-0", action="restart", at_step=1)])
    done = []
    plan.strike(make_apply(done, refuse=("join",)), step=1, elapsed_s=3.0)
    assert done == [("trainer-0", "restart")]
    assert plan.will_join("trainer-0")
    plan.strike(make_apply(done), step=1, elapsed_s=3.5)
    assert done[-1] == ("trainer-0", "join")


def test_a_node_without_room_comes_back_when_there_is_some():
    plan = FaultPlan([Fault(node="a", action="disk-full", at_s=1.0, for_s=5.0)])
    plan.strike(make_apply([]), step=0, elapsed_s=1.0)
    assert plan.will_join("a")
    plan.strike(make_apply([]), step=0, elapsed_s=6.0)
    assert not plan.will_join("a")


def test_what_finds_its_node_gone_is_left_out_and_not_undone():
    faults = [Fault(node="a", action="stop", at_s=1, for_s=5.0), Fault(node="b", action="kill", at_s=1, for_s=5.0)]
    plan, done = FaultPlan(faults), []
    assert [one.node for one in plan.strike(make_apply(done, miss=("a",)), step=0, elapsed_s=2.0)] == ["b"]
    assert [(one.node, one.action) for one in plan.missed] == [("a", "stop")]
    plan.strike(make_apply(done), step=0, elapsed_s=100.0)
    assert done == [("b", "kill"), ("b", "join")]


def test_what_was_left_out_counts_among_what_never_struck():
    faults = [Fault(node="a", action="stop", at_s=at, for_s=1.0) for at in (1, 2)]
    plan = FaultPlan([*faults, Fault(node="b", action="kill", at_s=1), Fault(node="c", action="kill", at_s=9999.0)])
    plan.strike(make_apply([], miss=("a",)), step=0, elapsed_s=100.0)
    plan.missed.clear()  # they have been told
    assert plan.planned - plan.struck == 3
    assert plan.shortfalls() == ["3 of 4 planned faults never struck: a (2), c"]


def test_what_never_came_about_is_counted_and_told_by_node():
    """A leave that does not come to its end holds back all that follows, and nothing else would say so."""
    faults = [Fault(node="a", action="leave", at_s=1, for_s=2.0), Fault(node="b", action="restart", at_s=1)]
    faults += [Fault(node="a", action="kill", at_s=5 + at, for_s=1.0) for at in range(3)]
    plan = FaultPlan([*faults, Fault(node="c", action="stop", at_s=9999.0)])
    plan.strike(make_apply([]), step=0, elapsed_s=2.0)
    plan.strike(make_apply([], refuse=("join",)), step=0, elapsed_s=100.0)
    assert (plan.planned, plan.struck) == (6, 2)
    assert plan.shortfalls() == [
        "4 of 6 planned faults never struck: a (3), c",
        "struck and was not undone by the end: a",
    ]
    plan.strike(make_apply([]), step=0, elapsed_s=9999.0)
    plan.strike(make_apply([]), step=0, elapsed_s=10_999.0)
    plan.strike(make_apply([]), step=0, elapsed_s=11_999.0)
    plan.strike(make_apply([]), step=0, elapsed_s=12_999.0)
    assert (plan.struck, plan.shortfalls()) == (6, [])


@pytest.mark.parametrize(
    ("action", "seconds", "undoing"),
    [
        *[("join", None, True), ("heal", None, True), ("kill", None, False), ("restart", None, False)],
        *[("clock", None, True), ("clock", 0.0, True), ("clock", -3.0, False)],
    ],
)
def test_a_clock_is_put_right_by_the_action_that_puts_it_wrong(action, seconds, undoing):
    assert undoes(Fault(node="a", action=action, at_s=1.0, seconds=seconds)) is undoing
    assert undoes(FaultMark(1, 1, "a", action, seconds)) is undoing
