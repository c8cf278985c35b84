"""Quantities as people write them: lengths of time, sizes, counts."""

from __future__ import annotations


def span(seconds: float) -> str:
    """A length of time, in the unit that leaves a number of few digits."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h" if whole < 172_800 else f"{whole // 86_400} days"


def size(count: float) -> str:
    """Bytes, in powers of ten as disks and links are sold."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def count(number: int, what: str) -> str:
    """`1 relay`, `2 relays`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
