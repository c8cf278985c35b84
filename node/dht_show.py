"""Looking into the DHT by hand: `intellect-node dht find` and `dht get`.

Joins for a moment as a client with a key made for it, through the bootstrap addresses given or the peers that the data
directory's node knows. Nothing is stored and nothing is changed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio
from rich.console import Console
from rich.text import Text

from node.clock import now_ms
from node.logs import printable
from node.status_view import fetch_status
from p2p.dht_records import relay_key, run_key
from p2p.discovery import P2PNode
from p2p.peers import PeerBook
from protocol.envelope import Signed
from protocol.errors import BootstrapError, ConfigError, MalformedError, NodeError
from protocol.identity import Identity, PeerId
from protocol.run import RunAddress

MAX_ADDRESSES = 16


def find_run(data_dir: Path, *, run: str | None, bootstrap: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The run's manifest and relays as plain values. Raises NodeError when nobody could be asked."""

    async def ask(node: P2PNode, address: RunAddress) -> dict[str, Any]:
        manifest = await node.find_run(address, timeout_s=timeout_s)
        relays = await node.find_relays(timeout_s=timeout_s)
        _require_peers(node)
        return {
            "run": str(address),
            "manifest": _described(manifest) if manifest else None,
            "relays": [_described(each) for each in relays],
            "servers_known": node.dht_peers,
        }

    return _joined(data_dir, run, bootstrap, ask)


def get_record(
    data_dir: Path, key: str, *, run: str | None, bootstrap: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    """The newest record under a key as plain values. Raises NodeError when nobody could be asked."""

    async def ask(node: P2PNode, address: RunAddress) -> dict[str, Any]:
        whole = _whole_key(key, address)
        found = None
        with trio.move_on_after(timeout_s):
            while found is None:
                found = await node.get_record(whole)
                await trio.sleep(0.2 if found is None else 0)
        _require_peers(node)
        return {"key": whole, "record": _described(found) if found else None, "servers_known": node.dht_peers}

    return _joined(data_dir, run, bootstrap, ask)


def print_run(found: dict[str, Any]) -> None:
    manifest = found["manifest"]
    _say(f"run {found['run']}")
    _say(f"manifest {manifest['id'] if manifest else 'not found: is its trainer up?'}")
    for relay in found["relays"]:
        record = relay["record"]
        _say(f"relay {relay['author']} at {record['http_url']}, {' '.join(record['multiaddrs'])}; {_times(relay)}")
    if not found["relays"]:
        _say("no relay found")


def print_record(found: dict[str, Any]) -> None:
    _say(found["key"])
    record = found["record"]
    if record is None:
        _say(f"nothing found; {found['servers_known']} DHT servers were asked")
        return
    _say(f"{record['kind']} by {record['author']}; {_times(record)}")
    for name, value in record["record"].items():
        _say(f"  {name} = {value}")


def _joined(
    data_dir: Path,
    run: str | None,
    bootstrap: Sequence[str],
    ask: Callable[[P2PNode, RunAddress], Awaitable[dict[str, Any]]],
) -> dict[str, Any]:
    address = _address(data_dir, run)
    with tempfile.TemporaryDirectory() as scratch:
        node = P2PNode(
            Identity(os.urandom(32)),
            listen=(),
            announce=(),
            bootstrap=[*bootstrap] or _known_to(data_dir),
            dht_server=False,
            run_address=address,
            data_dir=Path(scratch),
        )
        return trio.run(_ask, node, address, ask)


async def _ask(
    node: P2PNode, address: RunAddress, ask: Callable[[P2PNode, RunAddress], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        answer = await ask(node, address)
        nursery.cancel_scope.cancel()
    return answer


def _address(data_dir: Path, run: str | None) -> RunAddress:
    if run is None:
        try:
            run = str(fetch_status(data_dir).get("run"))
        except NodeError as error:
            raise ConfigError(
                f"no --run is given, and {error.message}", hint="give --run <operator peer id>/<name>"
            ) from error
    return RunAddress.parse(run)


def _known_to(data_dir: Path) -> list[str]:
    """Addresses of peers that the directory's node has heard of, and of itself if it is a relay."""
    found = [
        f"{address}/p2p/{peer.peer_id}"
        for peer in PeerBook(data_dir / "peers.json").peers
        for address in peer.addresses[:1]
    ]
    try:
        discovery = fetch_status(data_dir).get("details", {}).get("discovery", {})
        found += discovery.get("multiaddrs", [])
    except NodeError:
        pass  # none runs; what it remembered may do
    if not found:
        raise BootstrapError(
            f"no --bootstrap is given, and {data_dir} remembers no peers",
            hint="give --bootstrap /ip4/<address>/tcp/<port>/p2p/<peer id>, as a relay prints it when it starts",
        )
    return found[:MAX_ADDRESSES]


def _require_peers(node: P2PNode) -> None:
    if not node.dht_peers:
        raise BootstrapError(
            f"nobody could be asked: {node.bootstrap_state}", hint="check --bootstrap and this computer's network"
        )


def _whole_key(key: str, address: RunAddress) -> str:
    if key == "run":
        return run_key(address)
    if key.startswith("/"):
        return key
    try:
        return relay_key(address, PeerId.parse(key))
    except MalformedError as error:
        raise ConfigError(
            f"not a key: {key[:120]!r}", hint="give `run`, a relay's peer id, or a whole key /intellect/…"
        ) from error


def _described(signed: Signed[Any]) -> dict[str, Any]:
    record = {
        name: value if len(str(value)) <= 400 else f"{len(value)} bytes"
        for name, value in msgspec.to_builtins(signed.record, builtin_types=(bytes,)).items()
    }
    return {
        "kind": type(signed.record).KIND,
        "author": str(signed.author),
        "id": signed.id.hex(),
        "record": {name: value.hex() if isinstance(value, bytes) else value for name, value in record.items()},
    }


def _times(described: dict[str, Any]) -> str:
    record, now = described["record"], now_ms()
    return (
        f"sequence {record['sequence']}, {(now - record['issued_at_ms']) // 1000} s old, "
        f"valid for {(record['valid_until_ms'] - now) // 1000} s more"
    )


def _say(line: str) -> None:
    Console().print(Text(printable(line)), soft_wrap=True)
