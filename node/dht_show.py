"""Looking into the DHT by hand: `intellect-node dht find` and `dht get`.

Joins for a moment as a client with a key made for it, through the bootstrap addresses given or the peers that the data
directory's node knows. Nothing is stored and nothing is changed. All of it, the node's own answer included, takes
`timeout_s` at most, and a moment for leaving.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from rich.console import Console
from rich.text import Text

from node.clock import now_ms
from node.logs import printable
from node.run_link import known_peers
from node.status_view import TIMEOUT_S, fetch_status
from node.swarm import remembered_manifest
from p2p.dht_records import parse_key, relay_key, run_key
from p2p.discovery import P2PNode
from protocol.envelope import Signed
from protocol.errors import BootstrapError, ConfigError, MalformedError, NodeError, named_error
from protocol.identity import Identity, PeerId
from protocol.run import RunAddress

MAX_ADDRESSES: Final = 16

Ask = Callable[[P2PNode, RunAddress, float], Awaitable[dict[str, Any]]]
"""Asks through a running node, for so many seconds at most."""


def find_run(data_dir: Path, *, run: str | None, bootstrap: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The run's manifest and relays as plain values. Raises NodeError when nobody could be asked."""

    async def ask(node: P2PNode, address: RunAddress, left_s: float) -> dict[str, Any]:
        found: dict[str, Any] = {"run": str(address), "manifest": None, "relays": []}

        async def find_manifest() -> None:
            if manifest := await node.find_run(address, timeout_s=left_s):
                found["manifest"] = _described(manifest)

        async def find_relays() -> None:
            found["relays"] = [_described(each) for each in await node.find_relays(timeout_s=left_s)]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(find_manifest)
            nursery.start_soon(find_relays)
        return {**found, "servers_known": node.dht_peers}

    return joined(data_dir, run, bootstrap, ask, timeout_s=timeout_s)


def get_record(
    data_dir: Path, key: str, *, run: str | None, bootstrap: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    """The newest record under a key as plain values. Raises NodeError when nobody could be asked."""

    async def ask(node: P2PNode, address: RunAddress, left_s: float) -> dict[str, Any]:
        whole = _whole_key(key, address)
        found = None
        with trio.move_on_after(left_s):
            while found is None:
                found = await node.get_record(whole)
                await trio.sleep(0.2 if found is None else 0)
        return {"key": whole, "record": _described(found) if found else None, "servers_known": node.dht_peers}

    return joined(data_dir, run, bootstrap, ask, timeout_s=timeout_s)


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


def joined(data_dir: Path, run: str | None, bootstrap: Sequence[str], ask: Ask, *, timeout_s: float) -> dict[str, Any]:
    """What `ask` finds with a client that joins for a moment. Raises NodeError when nobody could be asked."""
    ends_at = time.monotonic() + timeout_s
    running = {} if run and bootstrap else _status_of(data_dir, min(TIMEOUT_S, timeout_s / 2))
    address = RunAddress.parse(run or _remembered_run(data_dir) or _run_of(running))
    with tempfile.TemporaryDirectory() as scratch:
        node = P2PNode(
            Identity(os.urandom(32)),
            listen=(),
            announce=(),
            bootstrap=[*bootstrap] or _known_to(data_dir, running),
            dht_server=False,
            run_address=address,
            data_dir=Path(scratch),
        )
        try:
            return trio.run(_ask, node, address, ask, max(0.0, ends_at - time.monotonic()))
        except BaseExceptionGroup as group:
            raise named_error(group) or group from group


async def _ask(node: P2PNode, address: RunAddress, ask: Ask, left_s: float) -> dict[str, Any]:
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        answer = await ask(node, address, left_s)
        tried = "" if node.dht_peers else node.bootstrap_state
        nursery.cancel_scope.cancel()
    if tried:
        raise BootstrapError(f"nobody could be asked: {tried}", hint="check --bootstrap and this computer's network")
    return answer


def _status_of(data_dir: Path, timeout_s: float) -> dict[str, Any]:
    """The status of the directory's node; why there is none, if there is none."""
    try:
        return fetch_status(data_dir, timeout_s=timeout_s)
    except NodeError as error:
        return {"error": error.message}


def _remembered_run(data_dir: Path) -> str:
    """The run that a node of the directory was in; empty where none was."""
    manifest = remembered_manifest(data_dir / "swarm.cache")
    return "" if manifest is None else str(RunAddress(manifest.author, manifest.record.name))


def _run_of(status: dict[str, Any]) -> str:
    if "error" in status:
        raise ConfigError(f"no --run is given, and {status['error']}", hint="give --run <operator peer id>/<name>")
    return str(status.get("run"))


def _known_to(data_dir: Path, status: dict[str, Any]) -> list[str]:
    """Addresses of peers that the directory's node has heard of, and of itself if it is a relay."""
    found = known_peers(data_dir)
    found += status.get("details", {}).get("discovery", {}).get("multiaddrs", [])
    if not found:
        raise BootstrapError(
            f"no --bootstrap is given, and {data_dir} remembers no peers",
            hint="give --run <address>@/ip4/<address>/tcp/<port>/p2p/<peer id>, as the operator hands it on, or the "
            "same as --bootstrap /ip4/<address>/tcp/<port>/p2p/<peer id>",
        )
    return found[:MAX_ADDRESSES]


def _whole_key(key: str, address: RunAddress) -> str:
    if key == "run":
        return run_key(address)
    try:
        if key.startswith("/"):
            parse_key(key)
            return key
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
