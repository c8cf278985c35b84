import os
import signal

import pytest

from protocol.errors import NodeError
from simnet.interrupts import interruptible, shielded


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_keyboard_interrupt_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


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
