"""What a status says beside the main things, in people's words and units: one row for what belongs together.

Names that nobody has put into words are shown with spaces for underscores, and in the unit that they end with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from node.words import count, size, span

Details = Mapping[str, Any]

SAID_ELSEWHERE: Final = frozenset(
    {
        *("relays_known", "newest_checkpoint_step", "accepted_tokens", "bytes_in", "bytes_out", "dht_peers", "join"),
        *("downloaded_today", "download_per_day", "policies_bytes", "policies_quota", "file_bytes", "disk_quota_bytes"),
        *("patched_bytes", "full_bytes", "saved_bytes", "bytes_today", "bytes_per_day", "submissions", "verdicts_held"),
    }
)
"""Names that another row, or the rest of the status, has."""


def detail_rows(details: Details) -> dict[str, str]:
    """Label and text of every row that has something to say."""
    rows = {label: text for label, make in _TOGETHER.items() if (text := make(details))}
    for name, value in details.items():
        if name not in SAID_ELSEWHERE and isinstance(value, int | float | str) and value not in ("", None):
            label, text = _one(name, value)
            if text:
                rows[label] = text
    return rows


def _one(name: str, value: Any) -> tuple[str, str]:
    label, worded = _WORDS.get(name, (name.replace("_", " "), _plain(name)))
    return label, worded(value) if isinstance(value, int | float) else str(value)


def _plain(name: str) -> Callable[[float], str]:
    if name.endswith("_bytes"):
        return size
    return span if name.endswith("_s") and not name.endswith("_per_s") else _number


def _number(value: float) -> str:
    return f"{value:,}"


def _unless_none(worded: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: worded(value) if value else ""


def _counted(what: str) -> Callable[[float], str]:
    return _unless_none(lambda value: count(int(value), what))


def _downloads(details: Details) -> str:
    return _of(details, "downloaded_today", "download_per_day", " a day at most")


def _policies(details: Details) -> str:
    return _of(details, "policies_bytes", "policies_quota", " at most")


def _files(details: Details) -> str:
    if "file_bytes" not in details:
        return ""
    stored = f"{_int(details, 'submissions'):,} submissions, {_int(details, 'verdicts_held'):,} verdicts"
    return f"{stored}, {_of(details, 'file_bytes', 'disk_quota_bytes', ' at most')} of files"


def _served(details: Details) -> str:
    return _of(details, "bytes_today", "bytes_per_day", " a day at most")


def _savings(details: Details) -> str:
    patched, saved = _int(details, "patched_bytes"), _int(details, "saved_bytes")
    if not patched:
        return ""
    return f"{size(patched)} came as patches, {size(_int(details, 'full_bytes'))} whole; {size(saved)} did not have to"


_TOGETHER: Final[Mapping[str, Callable[[Details], str]]] = {
    "downloaded today": _downloads,
    "policies on disk": _policies,
    "stored": _files,
    "given out today": _served,
    "weights": _savings,
}
_WORDS: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "tokens_per_s": ("speed", _unless_none(lambda value: f"{value:,.1f} tokens a second")),
    "outbox": ("to be handed in", _counted("submission")),
    "could_not_tell": ("could not be judged", _counted("submission")),
    "total_steps": ("length of the run", _counted("step")),
    "stale_rollouts": ("too old to be trained", _counted("rollout")),
    "stale": ("too old, of those accepted", _counted("submission")),
    "unused": ("accepted, not trained yet", _counted("submission")),
    "groups_without_signal": ("groups without signal", _unless_none(_number)),
    "wait_s": ("waited for rollouts", _unless_none(span)),
    "train_s": ("trained", _unless_none(span)),
    "evaluations_passed_over": ("evaluations passed over", _unless_none(_number)),
    "evaluations_failed": ("evaluations failed", _unless_none(_number)),
    "tracking_dropped": ("metrics not delivered", _unless_none(_number)),
    "judged": ("judged", _counted("submission")),
    "undecided": ("undecided", _counted("submission")),
    "seconds": ("time spent judging", _unless_none(span)),
    "drawn": ("drawn for a whole check", _counted("submission")),
    "not_drawn": ("not drawn", _counted("submission")),
    "judges_again": ("judges again", str),
    "ledger_length": ("ledger", _counted("entry")),
    "evicted": ("evicted", _counted("node")),
    "active_nodes": ("active nodes", _number),
    "http_url": ("serves at", str),
    "metrics_file": ("metrics in", str),
    "fork": ("WARNING", str),
}
"""Label, and how the number is said; an empty text leaves the row out."""


def _of(details: Details, used: str, most: str, how: str) -> str:
    """So many bytes, and what the limit is where there is one."""
    if used not in details:
        return ""
    limit = _int(details, most)
    return f"{size(_int(details, used))} of {size(limit)}{how}" if limit else size(_int(details, used))


def _int(details: Details, name: str) -> int:
    value = details.get(name)
    return value if isinstance(value, int) else 0
