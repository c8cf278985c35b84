"""Where a node looks for the swarm first: what `--bootstrap` may say, and trying it for ever.

An entry is a multiaddr with a peer id, a `/dnsaddr/<name>` whose TXT records hold such multiaddrs, or `@<file>` with
one a line, read again each time. Entries are tried side by side, each with its own growing, jittered pause, short
enough for a peer that comes back to be used within a minute. How trying goes is kept in words.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio
from multiaddr import Multiaddr

from p2p.host import DialError, DialProblem, parse_announce, to_libp2p
from p2p.text import cut
from protocol.errors import BootstrapError, ConfigError, MalformedError
from protocol.identity import PeerId

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S: Final = 8.0
FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 30.0
WATCH_S: Final = 10.0
MAX_TARGETS: Final = 64
MAX_FILE_BYTES: Final = 64 * 1024
MAX_DNS_DEPTH: Final = 3
DNS_TIMEOUT_S: Final = 5.0
DIALS_AT_ONCE: Final = 8
HINT: Final = (
    "write --bootstrap /ip4/<address>/tcp/<port>/p2p/<peer id>, as a relay prints it when it starts, "
    "or /dnsaddr/<name>, or @<file>"
)
_DNSADDR = re.compile(r"/dnsaddr/([A-Za-z0-9_.-]{1,253})(?:/p2p/([1-9A-HJ-NP-Za-km-z]+))?")

ResolveTxt = Callable[[str], Awaitable[list[str]]]
"""The TXT records of a name. Raises OSError, saying why."""
Dial = Callable[[Any, Multiaddr], Awaitable[None]]
"""Connects to a peer. Raises DialError."""


@dataclass
class Target:
    """One peer to bootstrap from: where it should be, and how trying went."""

    peer_id: Any
    address: Multiaddr
    since_s: float = field(default_factory=time.time)
    tries: int = 0
    connected: bool = False
    dialling: bool = False
    problem: str = ""
    next_step: str = ""

    def became(self, *, connected: bool, problem: str = "", next_step: str = "") -> None:
        if connected != self.connected or (not connected and problem != self.problem):
            self.since_s = time.time()
        self.tries = 0 if connected else self.tries + 1
        self.connected, self.problem, self.next_step = connected, problem, next_step

    def describe(self) -> str:
        age_s = time.time() - self.since_s
        if self.connected:
            return f"{self.address}: connected for {age_s:.0f} s"
        step = f"; next: {self.next_step}" if self.next_step else ""
        problem = self.problem or ("no answer yet" if self.dialling else "not tried yet")
        return f"{self.address}: {problem} (try {self.tries + self.dialling}, for {age_s:.0f} s){step}"


@dataclass
class Entry:
    """One `--bootstrap` as it was written, and the peers that it stands for at present."""

    text: str
    targets: dict[tuple[Any, Multiaddr], Target] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_fixed(self) -> bool:
        return not (self.text.startswith("@") or _DNSADDR.fullmatch(self.text))


class Bootstraps:
    """All entries of a node. Raises BootstrapError for one that makes no sense."""

    def __init__(self, texts: Sequence[str], *, own: PeerId, resolve_txt: ResolveTxt | None = None) -> None:
        self._own = to_libp2p(own)
        self._resolve = resolve_txt or resolve_txt_by_dns
        self._limit = trio.CapacityLimiter(DIALS_AT_ONCE)
        self.entries = [Entry(text) for text in dict.fromkeys(texts)]
        for entry in self.entries:
            if entry.is_fixed:
                self._set_targets(entry, [parse_target(entry.text)])
            elif entry.text.startswith("@"):
                self._set_targets(entry, read_targets(Path(entry.text[1:])))
        self.entries = [entry for entry in self.entries if entry.targets or not entry.is_fixed]

    @property
    def targets(self) -> list[Target]:
        return [target for entry in self.entries for target in entry.targets.values()]

    @property
    def peer_ids(self) -> set[Any]:
        return {target.peer_id for target in self.targets}

    def describe(self) -> list[str]:
        """One phrase per peer, and per entry that leads to none."""
        lines = [target.describe() for target in self.targets]
        return [*lines, *(f"{entry.text}: {entry.problem}" for entry in self.entries if entry.problem)]

    async def run(self, dial: Dial, connected: Callable[[Target], Awaitable[None]]) -> None:
        """Keep every entry's peers connected, for ever; `connected` is awaited at each new connection."""
        async with trio.open_nursery() as nursery:
            for entry in self.entries:
                nursery.start_soon(self._keep, entry, dial, connected)

    async def _keep(self, entry: Entry, dial: Dial, connected: Callable[[Target], Awaitable[None]]) -> None:
        pause_s = FIRST_RETRY_S
        while True:
            await self._refresh(entry)
            async with trio.open_nursery() as nursery:
                for target in list(entry.targets.values()):
                    nursery.start_soon(self._try, target, dial, connected)
            works = any(target.connected for target in entry.targets.values())
            pause_s = FIRST_RETRY_S if works else min(2 * pause_s, LAST_RETRY_S)
            await trio.sleep(jittered(WATCH_S if works else pause_s))

    async def _try(self, target: Target, dial: Dial, connected: Callable[[Target], Awaitable[None]]) -> None:
        was_connected = target.connected
        try:
            async with self._limit:
                target.dialling = True
                await dial(target.peer_id, target.address)
        except DialError as error:
            self._note_failure(target, error)
            return
        finally:
            target.dialling = False
        target.became(connected=True)
        if not was_connected:
            await connected(target)

    def _note_failure(self, target: Target, error: DialError) -> None:
        problem = error.reason
        if error.problem is DialProblem.OTHER_PEER:
            problem = f"answers as {error.other_peer} instead of {target.peer_id}"
        target.became(connected=False, problem=problem, next_step=error.problem.value)
        log.log(
            _level(target.tries),
            "bootstrap_failed address=%s try=%d error=%s next=%s",
            target.address,
            target.tries,
            problem,
            target.next_step,
        )

    async def _refresh(self, entry: Entry) -> None:
        """Look again at what an entry stands for; what it stood for before is kept while that fails."""
        if entry.is_fixed:
            return
        try:
            if entry.text.startswith("@"):
                found = await trio.to_thread.run_sync(read_targets, Path(entry.text[1:]))
            else:
                found = await self._resolve_name(entry.text, MAX_DNS_DEPTH)
            if not found:
                raise BootstrapError("it names no peer")
        except (BootstrapError, OSError) as error:
            entry.problem = error.message if isinstance(error, BootstrapError) else str(error)
            log.warning("bootstrap_unusable entry=%s error=%s", entry.text, entry.problem)
            return
        entry.problem = ""
        self._set_targets(entry, found)

    async def _resolve_name(self, text: str, depth: int) -> list[tuple[Any, Multiaddr]]:
        match = _DNSADDR.fullmatch(text)
        if match is None:
            raise BootstrapError(f"not a /dnsaddr: {text[:160]!r}", hint=HINT)
        found: list[tuple[Any, Multiaddr]] = []
        for record in (await self._resolve(f"_dnsaddr.{match[1]}"))[:MAX_TARGETS]:
            kind, equals, value = record.partition("=")
            if kind != "dnsaddr" or not equals:
                continue
            if value.startswith("/dnsaddr/") and depth > 1:
                found += await self._resolve_name(value, depth - 1)
            else:
                found += _parsed_or_nothing(value, text)
        wanted = to_libp2p(PeerId.parse(match[2])) if match[2] else None
        return [pair for pair in found if wanted is None or pair[0] == wanted][:MAX_TARGETS]

    def _set_targets(self, entry: Entry, found: Sequence[tuple[Any, Multiaddr]]) -> None:
        kept = [pair for pair in dict.fromkeys(found) if pair[0] != self._own]
        entry.targets = {pair: entry.targets.get(pair) or Target(*pair) for pair in kept[:MAX_TARGETS]}


def parse_target(text: str) -> tuple[Any, Multiaddr]:
    """Peer id and address of a multiaddr that ends in /p2p/<peer id>. Raises BootstrapError."""
    if text.startswith("/dnsaddr/"):
        raise BootstrapError(f"not a /dnsaddr/<name>: {text[:160]!r}", hint=HINT)
    transport, found, peer = text.rpartition("/p2p/")
    if not found:
        raise BootstrapError(f"a bootstrap address without a peer id: {text[:160]!r}", hint=HINT)
    try:
        return to_libp2p(PeerId.parse(peer)), parse_announce(transport)
    except (ConfigError, MalformedError) as error:
        raise BootstrapError(f"cannot use the bootstrap address {text[:160]!r}: {error.message}", hint=HINT) from error


def read_targets(path: Path) -> list[tuple[Any, Multiaddr]]:
    """The multiaddrs in a file, one a line; empty lines and those with # are left out. Raises BootstrapError."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise BootstrapError(f"the bootstrap file {path} is not a regular file", hint="write --bootstrap @<file>")
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_FILE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise BootstrapError(
            f"cannot read the bootstrap file {path}: {error.strerror}", hint="write --bootstrap @<file>"
        ) from error
    texts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [parse_target(text) for text in texts[:MAX_TARGETS]]


async def resolve_txt_by_dns(name: str) -> list[str]:
    """The TXT records of a name, from this computer's resolver. Raises OSError."""
    import dns.asyncresolver  # here: most nodes never need it
    import dns.exception

    try:
        answer = await dns.asyncresolver.resolve(name, "TXT", lifetime=DNS_TIMEOUT_S)
    except dns.exception.DNSException as error:
        reason = cut(str(error) or type(error).__name__)
        raise OSError(f"{name} has no TXT records that can be read ({reason}); next: `dig TXT {name}`") from error
    return [b"".join(record.strings).decode("utf-8", "replace") for record in answer]


def _parsed_or_nothing(value: str, entry: str) -> list[tuple[Any, Multiaddr]]:
    """Others may stand in a name's records for programs that speak more: they are passed over."""
    try:
        return [parse_target(value)]
    except BootstrapError as error:
        log.info("bootstrap_record_skipped entry=%s error=%s", entry, cut(error.message))
        return []


def jittered(seconds: float) -> float:
    """Between 80 and 120 % of a time, so that nodes started together do not act together."""
    return seconds * random.uniform(0.8, 1.2)


def _level(tries: int) -> int:
    """Powers of two are told, the rest is for debugging: a peer that is down for days fills no log."""
    return logging.WARNING if tries & (tries - 1) == 0 else logging.DEBUG
