"""Links as commands: what `ip`, `tc` and `nft` are told so that nodes lie behind their own networks.

Pure: nothing is run here. Each node has a network namespace, joined by one cable to a hub that forwards; behind a
translating router there is one more between them. Rates are token buckets at both ends of the cable, losses and
partitions rules in the hub. A cable with a delay is a pair of TUN devices (simnet.tunlink).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from simnet.scenario import Link, Scenario

HUB: Final = "hub"
DEVICE: Final = "cable"
"""The node's end of its cable; the hub's is `n<number>`."""
INSIDE: Final = "inside"
LEAST_BURST_BYTES: Final = 16_384
QUEUE_MS: Final = 200
_MASQUERADE: Final = {"port-preserving": "masquerade", "symmetric": "masquerade random,fully-random"}


@dataclass(frozen=True)
class Place:
    """Where a node lies: its number from 1, its link, and the names that follow from both."""

    number: int
    link: Link

    @property
    def namespace(self) -> str:
        """Short name of the node's own namespace."""
        return f"n{self.number}"

    @property
    def edge(self) -> str:
        """Short name of the namespace at the end of the cable: the node's, or its router's."""
        return f"r{self.number}" if self.link.nat != "none" else self.namespace

    @property
    def hub_device(self) -> str:
        return f"n{self.number}"

    @property
    def outer_address(self) -> str:
        """What others see."""
        return f"10.77.{self.number}.2"

    @property
    def gateway(self) -> str:
        return f"10.77.{self.number}.1"

    @property
    def address(self) -> str:
        """The node's own."""
        return "192.168.77.2" if self.link.nat != "none" else self.outer_address


@dataclass(frozen=True)
class Step:
    """Lines for one tool's standard input, within one namespace."""

    tool: str
    namespace: str
    lines: tuple[str, ...]


def needs_network(scenario: Scenario) -> bool:
    """Whether a scenario asks for anything that loopback does not do."""
    actions = {fault.action for fault in scenario.fault} | {one for draw in scenario.random for one in draw.actions}
    return "partition" in actions or any(plan.link != Link() for plan in scenario.nodes())


def places(scenario: Scenario) -> dict[str, Place]:
    """Every node's place by its name."""
    return {plan.name: Place(number, plan.link) for number, plan in enumerate(scenario.nodes(), start=1)}


def cables(place: Place) -> Iterator[Step]:
    """Make a node's cable without a delay; with one, the devices are there already."""
    if not place.link.delay_ms:
        yield Step("ip", HUB, (f"link add {place.hub_device} type veth peer name {DEVICE} netns {{{place.edge}}}",))


def addresses(place: Place) -> Iterator[Step]:
    """Give both ends their addresses, and put the router in between if there is one."""
    yield Step("ip", HUB, (f"address add {place.gateway}/24 dev {place.hub_device}", f"link set {place.hub_device} up"))
    up = ("link set lo up", f"address add {place.outer_address}/24 dev {DEVICE}", f"link set {DEVICE} up")
    yield Step("ip", place.edge, (*up, f"route add default via {place.gateway}"))
    if place.link.nat != "none":
        yield from _router(place)


def rates(place: Place) -> Iterator[Step]:
    """Limit what a node sends, and what it gets."""
    for mbit, namespace, device in (
        (place.link.up_mbit, place.edge, DEVICE),
        (place.link.down_mbit, HUB, place.hub_device),
    ):
        if mbit is not None:
            burst = max(LEAST_BURST_BYTES, int(mbit * 1e6 / 8 / 50))
            line = f"qdisc add dev {device} root tbf rate {mbit:g}mbit burst {burst} latency {QUEUE_MS}ms"
            yield Step("tc", namespace, (line,))


def hub_rules(all_places: Mapping[str, Place], sides: Mapping[str, str]) -> Step:
    """What the hub drops: packets between sides of a partition, and what the links lose. Replaces what it had."""
    lines = ["table ip simnet {}", "delete table ip simnet", "table ip simnet {"]
    lines += ["chain forward {", "type filter hook forward priority 0; policy accept;"]
    lines += [*_partition_rules(all_places, sides), *_loss_rules(all_places.values()), "}", "}"]
    return Step("nft", HUB, tuple(lines))


def _partition_rules(all_places: Mapping[str, Place], sides: Mapping[str, str]) -> Iterator[str]:
    """A rule a side: who is on it reaches nobody else. Nodes that no partition names are on one side together."""
    groups: dict[str, list[str]] = {}
    for name, place in all_places.items():
        groups.setdefault(sides.get(name, ""), []).append(place.outer_address)
    if len(groups) > 1:
        for members in groups.values():
            own = "{ " + ", ".join(members) + " }"
            yield f"ip saddr {own} ip daddr != {own} drop"


def _loss_rules(of: Iterable[Place]) -> Iterator[str]:
    for place in of:
        if place.link.loss:
            lost = f"numgen random mod 10000 < {round(place.link.loss * 10_000)} drop"
            yield f"iifname {place.hub_device} {lost}"
            yield f"oifname {place.hub_device} {lost}"


def _router(place: Place) -> Iterator[Step]:
    yield Step("ip", place.edge, (f"link add {INSIDE} type veth peer name {DEVICE} netns {{{place.namespace}}}",))
    yield Step("ip", place.edge, (f"address add 192.168.77.1/24 dev {INSIDE}", f"link set {INSIDE} up"))
    up = ("link set lo up", f"address add {place.address}/24 dev {DEVICE}", f"link set {DEVICE} up")
    yield Step("ip", place.namespace, (*up, "route add default via 192.168.77.1"))
    rules: tuple[str, ...] = ("table ip nat {", "chain post {", "type nat hook postrouting priority 100;")
    rules += (f"oifname {DEVICE} {_MASQUERADE[place.link.nat]}", "}")
    rules += ("chain forward {", "type filter hook forward priority 0; policy drop;")
    rules += ("ct state established,related accept", f"iifname {INSIDE} accept", "}", "}")
    yield Step("nft", place.edge, rules)
