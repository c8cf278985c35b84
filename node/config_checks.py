"""What the types of settings cannot say: whether addresses and peer ids can be meant. Each refusal names its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from protocol.errors import ConfigError, MalformedError
from protocol.identity import PeerId
from protocol.run import RunAddress

if TYPE_CHECKING:
    from node.config import NodeConfig

_WEBHOOK: Final = re.compile(r"^(https://[^\s/]+|http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?)(/\S*)?$")


def check_run(text: str, source: str) -> RunAddress:
    """A run's address. Raises ConfigError."""
    try:
        return RunAddress.parse(text)
    except MalformedError as error:
        raise ConfigError(f"run from {source}: {error.message}", hint=error.hint) from error


def check_addresses(config: NodeConfig, sources: Mapping[str, str]) -> None:
    """What is written as an address or a peer id. Raises ConfigError."""
    for text in config.allow:
        _check_peer_id(text, sources["allow"])
    for address in config.bootstrap:
        _check_bootstrap(address, sources["bootstrap"])
    for address in config.listen:
        if not re.match(r"^/(ip4|ip6|dns4|dns6)/[^/]+/tcp/[0-9]+$", address):
            raise ConfigError(
                f"listen from {sources['listen']}: {address[:120]!r} is no TCP multiaddr",
                hint="write /ip4/<address>/tcp/<port>, for example /ip4/0.0.0.0/tcp/8471",
            )
    for address in config.announce:
        _check_announce(address, sources["announce"])
    for number, url in enumerate(config.webhooks, start=1):
        _check_webhook(url, number, sources["webhooks"])


def _check_announce(address: str, source: str) -> None:
    match = re.match(r"^/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)$", address)
    if match is None or match[2] in ("0.0.0.0", "::") or int(match[3]) == 0:
        raise ConfigError(
            f"announce from {source}: nobody can dial {address[:120]!r}",
            hint="write the address and port that others reach this relay at, for example /ip4/203.0.113.7/tcp/8471",
        )


def _check_webhook(url: str, number: int, source: str) -> None:
    """The URL itself is not shown: it is often a secret."""
    if len(url) > 2000 or not _WEBHOOK.match(url):
        raise ConfigError(
            f"webhook {number} from {source} is neither an https URL nor an http URL of this computer",
            hint="write https://<host>/<path>",
        )


def _check_peer_id(text: str, source: str) -> None:
    try:
        PeerId.parse(text)
    except MalformedError as error:
        raise ConfigError(
            f"allow from {source}: {error.message}", hint="write peer ids, as `intellect-node id` prints them"
        ) from error


def _check_bootstrap(address: str, source: str) -> None:
    if address.startswith("@") or re.match(r"^/dnsaddr/[A-Za-z0-9_.-]{1,253}(/p2p/[1-9A-HJ-NP-Za-km-z]+)?$", address):
        return  # what stands there is looked at when the node starts
    transport, found, peer = address.rpartition("/p2p/")
    try:
        if not found or not re.match(r"^/(ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/[0-9]+$", transport):
            raise MalformedError("it has no /tcp/<port> or no /p2p/<peer id>")
        PeerId.parse(peer)
    except MalformedError as error:
        raise ConfigError(
            f"bootstrap from {source}: {address[:120]!r} is no address of a peer: {error.message}",
            hint="write /ip4/<address>/tcp/<port>/p2p/<peer id>, as a relay prints it when it starts, "
            "or /dnsaddr/<name>, or @<file>",
        ) from error
