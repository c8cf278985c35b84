"""Every metric of a node, declared in one table: name, meaning, kind, labels, roles, and where its value comes from.

Pure: a snapshot of the status board in, a page for Prometheus out (node.exposition); docs/metrics.md is made from the
same table. What a peer can influence never becomes a metric's name, and labels take few values that this program knows,
so that nobody outside can grow what a monitoring system must store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.exposition import CONTENT_TYPE, Family, Kind, Sample, render
from node.states import STATES
from trainer.metrics import METRICS

__all__ = ["CATALOGUE", "CONTENT_TYPE", "Metric", "names_of", "status_metrics"]

PREFIX: Final = "intellect_"
EVERY: Final = ("trainer", "relay", "inference", "validator", "watch")
DOWNLOADERS: Final = ("inference", "validator")
CARRIERS: Final = (*DOWNLOADERS, "relay")
TRAINER: Final = ("trainer",)
INFO: Final = ("role", "run", "peer_id", "software", "protocol")
CHECKS: Final = frozenset(
    {"dtype", "duplicate", "file", "history", "internal", "length", "logprob", "policy", "prompt", "proof-shape"}
    | {"reward", "sampling", "schema", "termination", "toploc"}
    | {"already-judged", "duplicate-index", "finished", "future-step", "malformed", "not-yours", "over-cap"}
    | {"over-tokens", "stale-step", "too-large"}
)
"""Names of checks and of relays' refusals; any other reason is counted as OTHER, for relays may invent them."""
OTHER: Final = "other"
_DISCOVERY: Final = ("details", "discovery")
_WEBHOOKS: Final = ("details", "webhooks")
_GATHERING: Final = ("details", "gathering")

Status = Mapping[str, Any]
"""A snapshot of node.status.StatusBoard, with `health` and `process` (node.health) where they are known."""
Read = Callable[[Status], Sequence[Sample]]


@dataclass(frozen=True)
class Metric:
    """One row of the table; `read` takes what it needs from a status and gives no sample where that is not there."""

    name: str
    help: str
    read: Read
    kind: Kind = "gauge"
    labels: tuple[str, ...] = ()
    roles: tuple[str, ...] = EVERY

    def family(self, status: Status) -> Family:
        return Family(self.name, self.help, self.read(status), self.kind)


def status_metrics(status: Status) -> str:
    """The whole page of a node, from a snapshot of its status board."""
    role = status.get("role")
    return render([metric.family(status) for metric in CATALOGUE if role in metric.roles])


def names_of(role: str) -> list[str]:
    """The metrics that a role may show."""
    return [metric.name for metric in CATALOGUE if role in metric.roles]


# Where values come from.


def _one(value: Any, *, scale: float = 1.0) -> list[Sample]:
    return [Sample(value * scale)] if isinstance(value, int | float) else []


def _at(*path: str, scale: float = 1.0) -> Read:
    """A number that lies in a status under names, one in the other."""

    def read(status: Status) -> Sequence[Sample]:
        value: Any = status
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return _one(value, scale=scale)

    return read


def _detail(name: str) -> Read:
    return _at("details", name)


def _details(status: Status) -> Mapping[str, Any]:
    details = status.get("details")
    return details if isinstance(details, Mapping) else {}


def _info(status: Status) -> list[Sample]:
    return [Sample(1, {name: str(status.get(name) or "") for name in INFO})]


def _states(status: Status) -> list[Sample]:
    return [Sample(float(state == status.get("state")), {"state": state}) for state in STATES]


def _activity_seconds(status: Status) -> list[Sample]:
    now, since = status.get("now_ms"), status.get("since_ms")
    return [Sample(max(0, now - since) / 1000)] if isinstance(now, int) and isinstance(since, int) else []


def _rejected(status: Status) -> list[Sample]:
    counted: Counter[str] = Counter()
    for reason, count in (status.get("rejected") or {}).items():
        check = str(reason).partition(":")[0]
        counted[check if check in CHECKS else OTHER] += count
    return [Sample(count, {"check": check}) for check, count in sorted(counted.items())]


def _relays(status: Status) -> Sequence[Mapping[str, Any]]:
    return status.get("relays") or []


def _relay_sum(key: str) -> Read:
    return lambda status: [Sample(sum(row.get(key, 0) for row in _relays(status)))]


def _length(name: str) -> Read:
    """Of a list among the details."""
    return lambda status: [Sample(len(rows))] if isinstance(rows := _details(status).get(name), list) else []


def _contributors(status: Status) -> list[Sample]:
    rows = _details(status).get("contributors")
    if not isinstance(rows, list):
        return []
    standings = Counter(row.get("standing") for row in rows)
    return [Sample(standings[each], {"standing": each}) for each in ("active", "evicted")]


def _newest(name: str, key: str) -> Read:
    """A number of the last row of a list among the details."""

    def read(status: Status) -> Sequence[Sample]:
        rows = _details(status).get(name) or [{}]
        return _one(rows[-1].get(key))

    return read


def _passes(key: str) -> Read:
    def read(status: Status) -> Sequence[Sample]:
        rows = _details(status).get("evaluations") or [{}]
        return [Sample(score[key], {"k": str(score["k"])}) for score in rows[-1].get("pass_at") or []]

    return read


def _metric(name: str, text: str, read: Read, *labels: str, roles: tuple[str, ...] = EVERY) -> Metric:
    kind: Kind = "counter" if name.endswith("_total") else "gauge"
    return Metric(PREFIX + name, text, read, kind, labels, roles)


_OF_EVERY_ROLE: Final = (
    _metric("node_info", "1; who this node is and what it runs", _info, *INFO),
    _metric("state", "1 for the state that the node is in, 0 for the others", _states, "state"),
    _metric("activity_seconds", "Seconds since the node began what it does or waits for now", _activity_seconds),
    _metric("started_timestamp_seconds", "Unix time at which the node started", _at("started_ms", scale=1e-3)),
    _metric("live", "1 while the node's event loop turns; 0: restart it", _at("health", "live")),
    _metric("ready", "1 while the node can do its part; 0: /health has the reasons", _at("health", "ready")),
    _metric("head_age_seconds", "Seconds since a newer head of the trainer came", _at("health", "head_age_s")),
    _metric("step", "Training step that is being collected", _at("step")),
    _metric("checkpoint_step", "Newest policy that this node has", _at("checkpoint_step")),
    _metric("accepted_total", "Submissions accepted: own, judged, or of the run", _at("accepted")),
    _metric("pending", "Submissions not judged yet", _at("pending")),
    _metric("rejected_total", "Submissions rejected, by the check that failed", _rejected, "check"),
    _metric("relays", "Relays that this node has used", lambda status: [Sample(len(_relays(status)))]),
    _metric("relay_received_bytes_total", "Bytes that came from relays", _relay_sum("bytes_in")),
    _metric("relay_sent_bytes_total", "Bytes that went to relays", _relay_sum("bytes_out")),
    _metric("relay_failures_total", "Requests that relays did not answer as they should", _relay_sum("failures")),
    _metric("loop_lag_worst_seconds", "Longest stand-still of the network process", _at(*_DISCOVERY, "worst_lag_s")),
    _metric("process_resident_bytes", "Memory of the network process", _at("process", "resident_bytes")),
    _metric("process_cpu_seconds_total", "CPU time of the network process", _at("process", "cpu_s")),
    _metric("process_open_files", "File descriptors that the network process has open", _at("process", "open_files")),
    _metric("disk_free_bytes", "Free bytes on the disk of the data directory", _at("process", "disk_free_bytes")),
    _metric("webhooks_delivered_total", "Webhook calls that were taken", _at(*_WEBHOOKS, "delivered")),
    _metric("webhooks_dropped_total", "Webhook calls that were given up", _at(*_WEBHOOKS, "dropped")),
)

_OF_RELAYS: Final = tuple(
    _metric(name, text, read, roles=("relay",))
    for name, text, read in (
        ("dht_peers", "DHT servers in the routing table", _detail("dht_peers")),
        ("http_received_bytes_total", "Bytes that the relay was sent", _detail("bytes_in")),
        ("http_sent_bytes_total", "Bytes that the relay sent", _detail("bytes_out")),
        ("refused_total", "Requests turned away at the door", _detail("refused_at_door")),
        ("stored_submissions", "Submissions that the relay stores", _detail("submissions")),
        ("stored_verdicts", "Verdicts that the relay stores", _detail("verdicts_held")),
        ("stored_file_bytes", "Bytes of rollout files on its disk", _detail("file_bytes")),
        ("disk_quota_bytes", "Most bytes of rollout files", _detail("disk_quota_bytes")),
        ("day_bytes", "Bytes sent today (UTC)", _detail("bytes_today")),
        ("day_limit_bytes", "Most bytes sent a day; 0: no limit", _detail("bytes_per_day")),
        ("held_checkpoints", "Complete checkpoints on its disk", _length("checkpoints")),
        ("ledger_entries", "Entries of the ledger's mirror", _detail("ledger_length")),
        ("evicted_nodes", "Contributors that are turned away for good", _detail("evicted")),
    )
)

_OF_DOWNLOADERS: Final = tuple(
    _metric(name, text, read, roles=roles)
    for roles, name, text, read in (
        (CARRIERS, "download_patched_bytes_total", "Bytes of checkpoints as patches", _detail("patched_bytes")),
        (CARRIERS, "download_full_bytes_total", "Bytes of checkpoints as whole shards", _detail("full_bytes")),
        (CARRIERS, "download_saved_bytes_total", "Bytes of checkpoints that need not come", _detail("saved_bytes")),
        (DOWNLOADERS, "download_day_bytes", "Bytes downloaded today (UTC)", _detail("downloaded_today")),
        (DOWNLOADERS, "download_day_limit_bytes", "Most of them a day; 0: no limit", _detail("download_per_day")),
        (DOWNLOADERS, "policies_bytes", "Bytes of policies on the disk", _detail("policies_bytes")),
        (DOWNLOADERS, "policies_quota_bytes", "Most of them; 0: no limit", _detail("policies_quota")),
    )
)  # fmt: skip

_OF_INFERENCE: Final = tuple(
    _metric(name, text, read, roles=("inference",))
    for name, text, read in (
        ("tokens_per_second", "Output tokens a second while generating", _detail("tokens_per_s")),
        ("outbox", "Finished submissions that no relay has taken yet", _detail("outbox")),
        ("answers_without_reward_total", "Answers that the environment could not judge", _detail("could_not_tell")),
    )
)

_OF_VALIDATORS: Final = tuple(
    _metric(name, text, read, roles=("validator",))
    for name, text, read in (
        ("judged_total", "Submissions that this validator has judged", _detail("judged")),
        ("undecided", "Of these, those it could not decide", _detail("undecided")),
        ("judging_seconds_total", "Seconds of the costly checks", _detail("seconds")),
        ("drawn_total", "Submissions drawn for the costly checks", _detail("drawn")),
        ("not_drawn_total", "Submissions that the cheap checks were enough for", _detail("not_drawn")),
    )
)

_OF_TRAINERS: Final = tuple(
    _metric(name, text, read, roles=TRAINER)
    for name, text, read in (
        *((f"trainer_{name}", text, _newest("metrics", name)) for name, text in METRICS.items()),
        ("trainer_steps_total", "Steps trained", _detail("steps_trained")),
        ("trainer_steps_wanted", "Steps that the run has in all", _detail("total_steps")),
        ("trainer_waiting_seconds_total", "Seconds waited for batches", _detail("wait_s")),
        ("trainer_training_seconds_total", "Seconds trained", _detail("train_s")),
        ("trainer_batch_rollouts", "Rollouts that the batch being gathered has", _at(*_GATHERING, "rollouts")),
        ("trainer_batch_rollouts_wanted", "Rollouts that a batch needs", _at(*_GATHERING, "wanted_rollouts")),
        ("trainer_tracking_dropped_total", "Rows that the tracking service did not take", _detail("tracking_dropped")),
        ("evaluation_step", "Policy that was evaluated last", _newest("evaluations", "step")),
        ("evaluation_reward", "Mean reward on held-out prompts", _newest("evaluations", "reward")),
    )
)

_OF_TRAINERS_BY_LABEL: Final = (
    _metric("trainer_contributors", "Contributors of the run, by standing", _contributors, "standing", roles=TRAINER),
    _metric("evaluation_pass", "pass@k on held-out prompts", _passes("value"), "k", roles=TRAINER),
    _metric("evaluation_pass_low", "Lower end of its 95 % interval", _passes("low"), "k", roles=TRAINER),
    _metric("evaluation_pass_high", "Upper end of its 95 % interval", _passes("high"), "k", roles=TRAINER),
)

CATALOGUE: Final[tuple[Metric, ...]] = (
    *(*_OF_EVERY_ROLE, *_OF_RELAYS, *_OF_DOWNLOADERS, *_OF_INFERENCE, *_OF_VALIDATORS, *_OF_TRAINERS),
    *_OF_TRAINERS_BY_LABEL,
)
"""All metrics. A name is there once; a role's page has those whose `roles` include it."""
