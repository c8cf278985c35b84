"""The wall clock, for signed times only. Deadlines use the monotonic clock."""

import time
from typing import Final

from protocol.constants import MAX_CLOCK_SKEW_S

SET_CLOCK: Final = "timedatectl set-ntp true"
WARN_SKEW_S: Final = 10.0
MAX_NODE_SKEW_S: Final = 300.0
"""A node whose clock is further off than this does not work: others would refuse much of what it signs."""


def now_ms() -> int:
    """Milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000


def clock_fault(ahead_s: float) -> str:
    """What is wrong where somebody else's signed time is that far ahead of this clock; empty within the bound."""
    if ahead_s <= MAX_CLOCK_SKEW_S:
        return ""
    return f"this computer's clock is {ahead_s:.0f} s behind the trainer's: set it (`{SET_CLOCK}`)"
