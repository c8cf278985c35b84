from types import SimpleNamespace

import trio

from p2p.canary import PULSE_S, Canary, core_wait_s


async def test_canary_counts_a_loop_that_stood_still(caplog):
    canary = Canary()
    canary.note(0.3)
    canary.note(1.5)
    assert (canary.worst_s, canary.lags) == (1.5, 1)
    assert "loop_lag seconds=1.5" in caplog.text


async def test_canary_measures_each_pulse(autojump_clock, monkeypatch):
    """Three pulses: in time, 1.5 s late, in time."""
    at_s = iter((0.0, PULSE_S, 10.0, 11.5 + PULSE_S, 20.0, 20.0 + PULSE_S))
    monkeypatch.setattr("p2p.canary.time", SimpleNamespace(monotonic=lambda: next(at_s, 30.0)))
    monkeypatch.setattr("p2p.canary.core_wait_s", lambda: 0.0)
    canary = Canary()
    with trio.move_on_after(3.5 * PULSE_S):
        await canary.run()
    assert (canary.worst_s, canary.lags) == (1.5, 1)


async def test_waiting_for_a_core_is_the_machine_s_fault(autojump_clock, monkeypatch):
    """2 s late, of which the thread was ready to run for 1.75 s."""
    at_s, queued_s = iter((0.0, 2.0 + PULSE_S)), iter((5.0, 6.75))
    monkeypatch.setattr("p2p.canary.time", SimpleNamespace(monotonic=lambda: next(at_s, 2.0 + PULSE_S)))
    monkeypatch.setattr("p2p.canary.core_wait_s", lambda: next(queued_s, 6.75))
    canary = Canary()
    with trio.move_on_after(1.5 * PULSE_S):
        await canary.run()
    assert (canary.worst_s, canary.lags) == (0.25, 0)


def test_a_thread_that_works_is_told_how_long_it_waited_for_a_core(tmp_path, monkeypatch):
    waited_s = core_wait_s()
    assert waited_s >= 0
    sum(range(1_000_000))
    assert core_wait_s() >= waited_s
    schedstat = tmp_path / "schedstat"
    monkeypatch.setattr("p2p.canary.SCHEDSTAT", schedstat)
    assert core_wait_s() == 0.0, "a system that does not tell"
    schedstat.write_text("9000000000 1500000000 12\n")
    assert core_wait_s() == 1.5


async def test_canary_knows_what_share_of_pulses_was_how_late():
    canary = Canary()
    assert (canary.lag_ms(0.99), canary.describe()["pulses"]) == (0, 0)
    for lag_ms in range(1, 101):
        canary.note(lag_ms / 1000)
    assert (canary.lag_ms(0.5), canary.lag_ms(0.99), canary.lag_ms(1.0)) == (50, 99, 100)
    canary.note(3600)
    described = canary.describe()
    assert (described["pulses"], described["p99_ms"], described["worst_ms"]) == (101, 100, 3_600_000)
    assert described["tasks"] >= 1


async def test_a_clock_that_seems_to_go_back_is_no_lag():
    canary = Canary()
    canary.note(-0.4)
    assert (canary.lag_ms(1.0), canary.describe()["worst_ms"]) == (0, 0)
