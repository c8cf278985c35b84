"""The text format that Prometheus reads (exposition format 0.0.4): families of samples in, a page out.

Pure. What the format forbids is refused; node.metrics says which metrics there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
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
