import os
import signal
from contextlib import contextmanager

import pytest

from protocol.errors import NodeError
from simnet.interrupts import interruptible, shielded


@contextmanager
def handled_by(number, handler):
    """Whatever the tests themselves were started with."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_keyboard_interrupt_and_handlers_come_back(number):
    with handled_by(number, signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.default_int_handler


def test_a_terminal_that_nohup_has_closed_without_us_ends_nothing():
    with handled_by(signal.SIGHUP, signal.SIG_IGN):
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_shield_keeps_it_back_until_all_are_gone():
    seen = []

    def act():
        with interruptible(), shielded():
            with shielded():
                os.kill(os.getpid(), signal.SIGINT)
                seen.append("inner")
            seen.append("outer")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert seen == ["inner", "outer"]


def test_what_fails_behind_a_shield_after_a_signal_is_an_interrupt_all_the_same():
    """A tool that the same Ctrl-C ended is no error of its own."""

    def act():
        with interruptible(), shielded():
            os.kill(os.getpid(), signal.SIGINT)
            raise NodeError("the tool was killed")

    with pytest.raises(KeyboardInterrupt):
        act()


def test_a_shield_without_a_signal_changes_nothing():
    with interruptible(), shielded():
        pass
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
