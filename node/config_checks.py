"""What the types of settings cannot say: whether addresses and peer ids can be meant. Each refusal names its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from node.run_link import PEER_HINT, RunLink, check_peer
from protocol.errors import ConfigError, MalformedError
from protocol.identity import PeerId

if TYPE_CHECKING:
    from node.config import NodeConfig

_WEBHOOK: Final = re.compile(r"^(https://[^\s/]+|http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?)(/\S*)?\Z")


def check_run(text: str, source: str) -> RunLink:
    """A run's address, with peers or without. Raises ConfigError."""
    try:
        return RunLink.parse(text)
    except MalformedError as error:
        raise ConfigError(f"run from {source}: {error.message}", hint=error.hint) from error


def check_addresses(config: NodeConfig, sources: Mapping[str, str]) -> None:
    """What is written as an address or a peer id. Raises ConfigError."""
    for text in config.allow:
        _check_peer_id(text, sources["allow"])
    for address in config.bootstrap:
        _check_bootstrap(address, sources["bootstrap"])
    for address in config.listen:
        if not re.match(r"^/(ip4|ip6|dns4|dns6)/[^/]+/tcp/[0-9]+\Z", address):
            raise ConfigError(
                f"listen from {sources['listen']}: {address[:120]!r} is no TCP multiaddr",
                hint="write /ip4/<address>/tcp/<port>, for example /ip4/0.0.0.0/tcp/8471",
            )
    for address in config.announce:
        _check_announce(address, sources["announce"])
    for number, url in enumerate(config.webhooks, start=1):
        _check_webhook(url, number, sources["webhooks"])


def _check_announce(address: str, source: str) -> None:
    match = re.match(r"^/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)\Z", address)
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
    if address.startswith("@"):
        return  # what stands there is looked at when the node starts
    try:
        check_peer(address)
    except MalformedError as error:
        raise ConfigError(f"bootstrap from {source}: {error.message}", hint=f"{PEER_HINT}, or @<file>") from error
