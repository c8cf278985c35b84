"""One origin, 4 relays and 16 clients over links of limited rate: when has the last client the version?

The ideal is size / bottleneck, here a client's own link; the origin's link carries the checkpoint twice in that time,
and the relays' links carry it to everybody with a quarter to spare. 21 processes, each behind its own link.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.cast import CastNode
from bench.harness import Result
from bench.links import Link, Links, make_links
from bench.shardcast import SETTLE_S, random_policy, work_directory

RELAYS: Final = 4
CLIENTS: Final = 16
FAN_OUT: Final = 2
ORIGIN_LINK: Final = Link(up=50, down=50)
RELAY_LINK: Final = Link(up=125, down=125)
CLIENT_LINK: Final = Link(up=25, down=25)
BYTES: Final = 60_000_000
QUICK_BYTES: Final = 20_000_000
SHARD_BYTES: Final = 1 << 20
WAIT_S: Final = 300.0


def bench(*, quick: bool) -> Result:
    """Publish once and wait for everybody."""
    size = QUICK_BYTES if quick else BYTES
    names = {"origin": ORIGIN_LINK}
    names |= {f"relay{number}": RELAY_LINK for number in range(RELAYS)}
    names |= {f"client{number}": CLIENT_LINK for number in range(CLIENTS)}
    with work_directory(size * (CLIENTS + RELAYS)) as root, make_links(names) as links:
        policy = random_policy(root / "policy", size)
        return result_of(measure(policy, root, links), size, links)


def ideal_s(size: int) -> float:
    """No plan can be quicker: each client's link, the relays' links together, the origin's link once."""
    mbit = min(CLIENT_LINK.down, RELAYS * RELAY_LINK.up / CLIENTS, ORIGIN_LINK.up)
    return size * 8 / (mbit * 1e6)


def measure(policy: Path, root: Path, links: Links) -> dict[str, Any]:
    with ExitStack() as nodes:

        def start(name: str, **more: Any) -> CastNode:
            role = name.rstrip("0123456789")
            node = CastNode(
                role,
                root / name,
                prefix=links.prefix(name),
                shard_bytes=SHARD_BYTES,
                host=links.host(name),
                fan_out=FAN_OUT,
                **more,
            )
            return nodes.enter_context(node)

        relays = {f"relay{number}": start(f"relay{number}") for number in range(RELAYS)}
        clients = {f"client{number}": start(f"client{number}") for number in range(CLIENTS)}
        for node in (*relays.values(), *clients.values()):
            node.wait_ready()
        origin = start("origin", relays=[relay.peer for relay in relays.values()]).wait_ready()
        connect(origin, relays, clients, links)
        time.sleep(SETTLE_S)
        sent_before = links.sent("origin")
        origin.order(do="publish", path=str(policy), step=1)
        began = origin.wait("publishing", timeout_s=WAIT_S)["at"]
        ended = [node.wait("complete", timeout_s=WAIT_S)["at"] - began for node in clients.values()]
        relayed = [node.wait("complete", timeout_s=WAIT_S)["at"] - began for node in relays.values()]
        sent = links.sent("origin") - sent_before
        received = [sum(node.report()["received"].values()) for node in (*relays.values(), *clients.values())]
    return {"clients_s": ended, "relays_s": relayed, "origin_sent": sent, "received": received}


def connect(origin: CastNode, relays: dict[str, CastNode], clients: dict[str, CastNode], links: Links) -> None:
    """Relays know the origin and each other, clients know the relays."""
    for name, relay in relays.items():
        others = {"origin": origin} | {other: each for other, each in relays.items() if other != name}
        relay.upstream(
            *others.values(),
            tokens=origin.ready["tokens"],
            urls=[links.seen_by(name, other, each.ready["url"]) for other, each in others.items()],
        )
    for name, client in clients.items():
        urls = [links.seen_by(name, other, each.ready["url"]) for other, each in relays.items()]
        client.upstream(*relays.values(), urls=urls)


def result_of(found: dict[str, Any], size: int, links: Links) -> Result:
    ideal = ideal_s(size)
    result = Result(
        {
            "ideal_s": ideal,
            "first_client_s": min(found["clients_s"]),
            "last_client_s": max(found["clients_s"]),
            "last_relay_s": max(found["relays_s"]),
            "of_ideal": max(found["clients_s"]) / ideal,
            "fan_out": FAN_OUT,
            "origin_sent_sizes": found["origin_sent"] / size,
            "all_received_sizes": sum(found["received"]) / size,
            "origin_share": found["origin_sent"] / sum(found["received"]),
            "namespaces": float(links.kind == "namespaces"),
        }
    )
    result.at_most("of_ideal", 1.3)
    result.at_most("origin_sent_sizes", FAN_OUT * 1.05)  # with headers, TLS and TCP
    return result
