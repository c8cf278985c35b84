from types import SimpleNamespace

import trio

from p2p.canary import PULSE_S, Canary


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
    canary = Canary()
    with trio.move_on_after(3.5 * PULSE_S):
        await canary.run()
    assert (canary.worst_s, canary.lags) == (1.5, 1)
