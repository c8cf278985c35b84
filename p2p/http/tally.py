"""How many HTTP requests a node makes, by what they are about."""

from __future__ import annotations

from collections import Counter
from typing import Final

API: Final = "v1"
OTHER: Final = "other"
KNOWN: Final = frozenset(
    (
        *("admissions", "appeals", "checkpoints", "feed", "head", "heartbeats", "hello", "info", "ledger", "manifest"),
        *("origin", "standing", "submissions", "verdicts"),
    )
)
"""What relays answer about: a URL comes from a relay's advert, so anything else in one is not kept."""


class RequestTally:
    """Counts by method and first name under /v1, such as `GET head`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, method: str, url: str) -> None:
        """One more; a request that is sent again counts again. A URL that is none counts too."""
        _, _, rest = url.partition("?")[0].partition("://")
        parts = rest.split("/", 3)
        about = parts[2] if len(parts) > 2 and parts[1] == API and parts[2] in KNOWN else OTHER
        self._counts[f"{method} {about}"] += 1

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)
