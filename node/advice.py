"""What a person should do next, from what a node says of itself: one sentence, and a command where there is one.

Looks at the gravest thing first. Pure: a status in, a sentence out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

Status = dict[str, Any]

LONG_WAIT_S: Final = 300
MANY_REJECTED: Final = 0.2
"""Share of judged submissions that is more than rounding's bad luck."""
OF_NUMBERS: Final = ("toploc", "sampling", "logprob", "dtype", "history")
"""Checks that a number format, an engine or a device fails, so that calibration tells more."""


def next_step(status: Status) -> str:
    """The sentence. Empty for a status that says too little."""
    return next((said for rule in _RULES if (said := rule(status))), "")


def _ended(status: Status) -> str:
    match status.get("state"):
        case "evicted":
            return "look at why: intellect-node verdict show last; an honest node appeals: intellect-node appeal last"
        case "finished":
            return "nothing: the run is finished, and what was accepted is in its ledger"
        case "stopping":
            return "wait: it leaves when that is done (intellect-node leave --now ends it at once)"
    return ""


def _alone(status: Status) -> str:
    discovery = _details(status).get("discovery") or {}
    if status.get("state") == "waiting" and _waited_s(status) > 20 and not discovery.get("peers"):
        return "nobody was reached yet: intellect-node doctor says why"
    return ""


def _unreachable(status: Status) -> str:
    said = str((_details(status).get("discovery") or {}).get("reachability", ""))
    return f"let others in: {said}" if status.get("role") == "relay" and "not reach" in said else ""


def _rejected(status: Status) -> str:
    rejected: dict[str, int] = status.get("rejected") or {}
    lost = sum(rejected.values())
    if not lost or lost < MANY_REJECTED * (lost + int(status.get("accepted") or 0)):
        return ""
    worst = max(rejected, key=lambda reason: rejected[reason])
    if worst in OF_NUMBERS:
        return f"much is rejected ({worst}): intellect-node verdict show last, then intellect-node calibrate"
    return f"much is rejected ({worst}): intellect-node verdict show last shows what was measured"


def _unsent(status: Status) -> str:
    waiting = int(_details(status).get("outbox") or 0)
    return f"{waiting} finished submissions reach no relay: intellect-node doctor says why" if waiting > 4 else ""


def _stuck(status: Status) -> str:
    if status.get("state") == "waiting" and _waited_s(status) > LONG_WAIT_S:
        return "it has waited long: intellect-node doctor looks for a fault here; else ask the run's operator"
    return ""


def _well(status: Status) -> str:
    if status.get("state") not in ("waiting", "working", "starting"):
        return ""
    if status.get("state") == "waiting":
        return "nothing: it goes on by itself"
    return "nothing: let it run; intellect-node leave ends it well"


_RULES: Final[tuple[Callable[[Status], str], ...]] = (
    *(_ended, _alone, _unreachable, _rejected, _unsent, _stuck, _well),
)


def _details(status: Status) -> dict[str, Any]:
    details = status.get("details")
    return details if isinstance(details, dict) else {}


def _waited_s(status: Status) -> float:
    return max(0.0, (int(status.get("now_ms") or 0) - int(status.get("since_ms") or 0)) / 1000)
