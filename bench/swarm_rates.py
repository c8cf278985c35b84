"""What nodes take a second, by two looks at each, and one swarm as it was measured. Not a benchmark itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from bench.swarm_fleet import RELAYS, Shape, Use

FOR_POLICIES: Final = "GET checkpoints"
ROLES: Final = ("trainer", "relay", "validator", "node")


@dataclass(frozen=True)
class Rates:
    """What the nodes of one role take each, a second unless it says otherwise."""

    bytes_in: float
    bytes_out: float
    requests: float
    asked: Mapping[str, float]
    """Requests by what they are about."""
    dht_messages: float
    cpu_ms: float
    policy_bytes: float
    hand_ins: float
    private_mb: float
    steps: float

    @property
    def bytes(self) -> float:
        return self.bytes_in + self.bytes_out

    @property
    def messages(self) -> float:
        """HTTP requests that it made, and messages of the DHT that it sent."""
        return self.requests + self.dht_messages


@dataclass(frozen=True)
class Point:
    """One swarm, measured."""

    shape: Shape
    roles: Mapping[str, Rates]
    took_s: float
    yardstick_ms: float
    """CPU time of one request meanwhile (bench.swarm_yardstick)."""

    @property
    def node(self) -> Rates:
        return self.roles["node"]

    @property
    def relay(self) -> Rates:
        return self.roles["relay"]

    @property
    def trainer(self) -> Rates:
        return self.roles["trainer"]

    @property
    def count(self) -> int:
        return self.shape.contributors

    @property
    def of_each_relay(self) -> float:
        """Contributors for each relay."""
        return self.count / RELAYS

    @property
    def beside_policies(self) -> float:
        """Bytes a second of a contributor beside policies, if those cost as many as they are long."""
        return self.node.bytes - self.node.policy_bytes

    @property
    def messages_beside_policies(self) -> float:
        """Requests and messages a second of a contributor beside those for policies."""
        return self.node.messages - self.node.asked.get(FOR_POLICIES, 0.0)


def rates_by_role(before: Mapping[str, Use], after: Mapping[str, Use]) -> dict[str, Rates]:
    """The mean over each role's nodes."""
    of_role: dict[str, list[Rates]] = {}
    for name, late in after.items():
        of_role.setdefault(name.rpartition("-")[0], []).append(_rates(before[name], late))
    return {role: _mean(each) for role, each in of_role.items()}


def _rates(early: Use, late: Use) -> Rates:
    seconds = late.at_s - early.at_s
    asked = {name: (count - early.requests[name]) / seconds for name, count in late.requests.items()}
    return Rates(
        bytes_in=(late.bytes_in - early.bytes_in) / seconds,
        bytes_out=(late.bytes_out - early.bytes_out) / seconds,
        requests=sum(asked.values()),
        asked=asked,
        dht_messages=(late.dht_messages - early.dht_messages) / seconds,
        cpu_ms=(late.cpu_s - early.cpu_s) / seconds * 1e3,
        policy_bytes=(late.policy_bytes - early.policy_bytes) / seconds,
        hand_ins=asked.get("POST submissions", 0.0),
        private_mb=late.private_mb,
        steps=(late.step - early.step) / seconds,
    )


def _mean(each: Sequence[Rates]) -> Rates:
    def mean(name: str) -> float:
        return fmean(getattr(one, name) for one in each)

    asked: Counter[str] = Counter()
    for one in each:
        asked.update(one.asked)
    names = [name for name in Rates.__dataclass_fields__ if name != "asked"]
    means = {name: mean(name) for name in names}
    return Rates(asked={name: total / len(each) for name, total in asked.items()}, **means)
