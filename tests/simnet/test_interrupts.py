import os
import signal

import pytest

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


def test_a_shield_without_a_signal_changes_nothing():
    with interruptible(), shielded():
        pass
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
