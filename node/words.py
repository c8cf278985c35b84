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
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    if count >= 1e6:
        return f"{count / 1e6:,.1f} MB"
    return f"{count / 1e3:,.1f} kB" if count >= 1e3 else f"{count:.0f} bytes"


def count(number: int, what: str) -> str:
    """`1 relay`, `2 relays`, `3,000 entries`."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what[:-1]}ies" if what.endswith("ry") else f"{number:,} {what}s"
