"""The wall clock, for signed times only. Deadlines use the monotonic clock."""

import time


def now_ms() -> int:
    """Milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000
