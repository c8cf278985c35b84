"""Metrics in the text format that Prometheus reads (exposition format 0.0.4), made from a node's status.

Pure: values in, text out. Every name begins with `intellect_`. What a peer can influence never becomes a name of a
metric, and labels take few values, so that nobody outside can grow what a monitoring system must store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from trainer.metrics import METRICS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "intellect_"
_METRIC: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Sample:
    """One value and its labels."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """All samples of one metric. A counter's name ends with `_total`."""

    name: str
    help: str
    samples: Sequence[Sample]
    kind: Kind = "gauge"


def render(families: Sequence[Family]) -> str:
    """The page. Raises ValueError for what the format forbids; families without samples are left out."""
    shown = [family for family in families if family.samples]
    names = [family.name for family in shown]
    if len(set(names)) != len(names):
        raise ValueError(f"a metric is there twice: {sorted(names)}")
    return "".join(line + "\n" for family in shown for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    if not _METRIC.fullmatch(family.name):
        raise ValueError(f"no name for a metric: {family.name!r}")
    if (family.kind == "counter") != family.name.endswith("_total"):
        raise ValueError(f"{family.name}: a counter's name ends with _total, and no other's does")
    series = [_series(family.name, sample.labels) for sample in family.samples]
    if len(set(series)) != len(series):
        raise ValueError(f"{family.name}: two samples have the same labels")
    yield f"# HELP {family.name} {_escape(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for name, sample in zip(series, family.samples, strict=True):
        yield f"{name} {_number(sample.value)}"


def _series(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise ValueError(f"{name}: no name for a label: {label!r}")
    pairs = (f'{label}="{_escape(value, quotes=True)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{','.join(pairs)}}}"


def _escape(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))


def node_families(status: Mapping[str, Any]) -> list[Family]:
    """What every role says of itself, from a snapshot of its status board."""
    info = {key: str(status.get(key) or "") for key in ("role", "peer_id", "software")}
    rejected = status.get("rejected") or {}
    return [
        Family(f"{PREFIX}node_info", "Role, peer id and software of this node", [Sample(1, info)]),
        Family(f"{PREFIX}state", "1 for what the node does now", [Sample(1, {"state": str(status.get("state"))})]),
        Family(
            f"{PREFIX}started_timestamp_seconds", "When the node started", _one(status.get("started_ms"), scale=1e-3)
        ),
        Family(f"{PREFIX}step", "Training step that is being collected", _one(status.get("step"))),
        Family(f"{PREFIX}checkpoint_step", "Newest policy that this node has", _one(status.get("checkpoint_step"))),
        Family(f"{PREFIX}accepted_total", "Submissions accepted", _one(status.get("accepted")), "counter"),
        Family(f"{PREFIX}pending", "Submissions not judged yet", _one(status.get("pending"))),
        Family(f"{PREFIX}rejected_total", "Submissions rejected", [Sample(sum(rejected.values()))], "counter"),
    ]


def trainer_families(status: Mapping[str, Any]) -> list[Family]:
    """What a trainer adds: its newest step by the paper's names, its newest evaluation, where its time goes."""
    details = status.get("details") or {}
    newest = (details.get("metrics") or [{}])[-1]
    evaluation = (details.get("evaluations") or [{}])[-1]
    families = [Family(f"{PREFIX}trainer_{name}", text, _one(newest.get(name))) for name, text in METRICS.items()]
    families += [
        Family(f"{PREFIX}trainer_steps_total", "Steps trained", _one(len(details.get("rewards") or [])), "counter"),
        Family(f"{PREFIX}trainer_waiting_seconds_total", "Waited for batches", _one(details.get("wait_s")), "counter"),
        Family(f"{PREFIX}trainer_training_seconds_total", "Trained", _one(details.get("train_s")), "counter"),
        Family(f"{PREFIX}trainer_tracking_dropped_total", "Rows that the tracking service did not take",
               _one(details.get("tracking_dropped")), "counter"),
        Family(f"{PREFIX}evaluation_step", "Policy that was evaluated last", _one(evaluation.get("step"))),
        Family(f"{PREFIX}evaluation_reward", "Mean reward on held-out prompts", _one(evaluation.get("reward"))),
        *_pass_families(evaluation.get("pass_at") or []),
    ]  # fmt: skip
    return families


def _pass_families(scores: Sequence[Mapping[str, Any]]) -> list[Family]:
    texts = {
        "value": ("evaluation_pass", "pass@k on held-out prompts"),
        "low": ("evaluation_pass_low", "Lower end of its 95 % interval"),
        "high": ("evaluation_pass_high", "Upper end of its 95 % interval"),
    }
    return [
        Family(PREFIX + name, text, [Sample(score[key], {"k": str(score["k"])}) for score in scores])
        for key, (name, text) in texts.items()
    ]


def _one(value: Any, *, scale: float = 1.0) -> list[Sample]:
    return [Sample(value * scale)] if isinstance(value, int | float) else []


def status_metrics(status: Mapping[str, Any]) -> str:
    """The whole page of a node, from a snapshot of its status board."""
    families = node_families(status)
    return render(families + trainer_families(status) if status.get("role") == "trainer" else families)
