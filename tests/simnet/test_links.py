"""What is told to `ip`, `tc` and `nft`; whether it works is test_network's business."""

import pytest

from simnet import links
from simnet.links import Place, Step
from simnet.scenario import Link, parse_scenario


def place(number=3, **link):
    return Place(number, Link(**link))


def test_a_plain_link_is_a_cable_with_an_address_at_each_end():
    assert list(links.cables(place())) == [Step("ip", "hub", ("link add n3 type veth peer name cable netns {n3}",))]
    assert list(links.addresses(place())) == [
        Step("ip", "hub", ("address add 10.77.3.1/24 dev n3", "link set n3 up")),
        Step(
            "ip",
            "n3",
            (
                "link set lo up",
                "address add 10.77.3.2/24 dev cable",
                "link set cable up",
                "route add default via 10.77.3.1",
            ),
        ),
    ]
    assert list(links.rates(place())) == []


def test_rates_are_token_buckets_at_the_sending_ends():
    steps = list(links.rates(place(up_mbit=5, down_mbit=50)))
    assert [(step.namespace, step.lines[0].split()[3], step.lines[0].split()[7]) for step in steps] == [
        ("n3", "cable", "5mbit"),
        ("hub", "n3", "50mbit"),
    ]
    assert "burst 125000" in steps[1].lines[0]


def test_a_delay_leaves_the_cable_to_the_tun_link():
    assert list(links.cables(place(delay_ms=20))) == []


@pytest.mark.parametrize(("nat", "how"), [("port-preserving", "masquerade"), ("symmetric", "masquerade random,fully")])
def test_a_router_lies_between_a_node_and_its_cable(nat, how):
    behind = place(nat=nat, up_mbit=1)
    assert (behind.namespace, behind.edge, behind.address, behind.outer_address) == (
        "n3",
        "r3",
        "192.168.77.2",
        "10.77.3.2",
    )
    rules = next(step for step in links.addresses(behind) if step.tool == "nft")
    assert (rules.namespace, any(how in line for line in rules.lines)) == ("r3", True)
    assert next(links.rates(behind)).namespace == "r3"


def test_losses_are_dropped_in_both_directions():
    lines = links.hub_rules({"a": place(loss=0.015)}, {}).lines
    assert "iifname n3 numgen random mod 10000 < 150 drop" in lines
    assert "oifname n3 numgen random mod 10000 < 150 drop" in lines


def test_sides_of_a_partition_see_themselves_only():
    places = {name: Place(number, Link()) for number, name in enumerate("abc", start=1)}
    assert not [line for line in links.hub_rules(places, {}).lines if "saddr" in line]
    lines = [line for line in links.hub_rules(places, {"c": "x"}).lines if "saddr" in line]
    assert lines == [
        "ip saddr { 10.77.1.2, 10.77.2.2 } ip daddr != { 10.77.1.2, 10.77.2.2 } drop",
        "ip saddr { 10.77.3.2 } ip daddr != { 10.77.3.2 } drop",
    ]


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        (lambda t: None, False),
        (lambda t: t["fleet"][3].update(nice=3), False),
        (lambda t: (t.update(link={"x": {"delay_ms": 1}}), t["fleet"][3].update(link="x")), True),
        (lambda t: t.update(fault=[{"node": "relay-0", "action": "partition", "at_step": 1}]), True),
        (
            lambda t: t.update(
                random=[{"nodes": "*", "actions": ["partition"], "count": 1, "from_s": 1, "to_s": 2}],
            ),
            True,
        ),
    ],
)
def test_loopback_is_enough_unless_a_link_or_a_partition_says_otherwise(small, change, needed):
    change(small)
    assert links.needs_network(parse_scenario(small, name="x")) is needed
