"""Fills a recording from a fleet: reads the nodes' loopback status pages, notes who starts and who ends, takes samples.

A status is hostile until checked: its size and the time to read it are bounded, and it must have the expected form.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from p2p.canary import core_wait_s
from simnet.fleet import Fleet
from simnet.gather import SILENT_MS, Life, NodeRecord, Recording, Sample, Status, VerdictRow, now_ms
from simnet.member import Member, Past
from simnet.processes import ProcessTable
from simnet.sampling import SAMPLE_S, Pulse, keep_evenly, look, processes_within

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 1.0
LOOKED_AWAY_MS = 30_000
"""Between two polls; after that nobody knows whether a node was silent meanwhile."""
MAX_STATUS_BYTES = 8 * 2**20
MAX_SAMPLES = 1000
MAX_RISES = 50_000
"""Of the run's step: a day's; of what comes after them the samples tell."""
MAX_SEGMENTS = 20_000
MAX_AGAINST = 200
MAX_SILENCES = 100
LEFT_AFTER_S = 10.0
MAX_LEFT_BEHIND = 100
FINAL_STATUS_FILE = "status-final.json"


Word = tuple[int, str, str]
"""What a node said that it does: since when, by its own clock, whether that is to work or to wait, and what."""


@dataclass(frozen=True)
class _Heard:
    """What a process said last, and when it had been asked."""

    pid: int
    asked_ms: int
    newest: Word | None


class Gatherer:
    """Fills a recording from a fleet, one round at a time."""

    def __init__(self, fleet: Fleet, recording: Recording) -> None:
        self.recording = recording
        self._fleet = fleet
        self._records = {record.name: record for record in recording.nodes}
        self._seen_against: set[tuple[str, str]] = set()
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="status")
        self._next_look_s = 0.0
        self._polled_ms = 0
        self._looking_since_ms = 0
        self._looks, self._stride = 0, 1
        self._heard: dict[str, _Heard] = {}
        self._pulse = Pulse()
        self._pulse.start()

    def close(self) -> None:
        self._pulse.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def poll(self) -> None:
        """Read every running node's status and note who started and who ended; takes about `READ_TIMEOUT_S` at most."""
        members, asked_ms = list(self._fleet.members.values()), now_ms()
        statuses = self._pool.map(_read_member, members)
        self._look_on()
        for member, status in zip(members, statuses, strict=True):
            self._note(member, self._records[member.plan.name], status, asked_ms=asked_ms)
        if time.monotonic() >= self._next_look_s:
            self._look(members)
            self._next_look_s = time.monotonic() + SAMPLE_S
        self._sample()

    def look_behind(self) -> None:
        """Once every node has ended: which processes have not, or had to be made to."""
        directories = {member.plan.name: member.directory for member in self._fleet.members.values()}
        left = [f"{name}: pid {pid}" for name, pids in processes_within(directories).items() for pid in pids]
        self._keep_left_behind([*self._fleet.left_behind, *left])

    def read_final(self) -> None:
        """Take over what nodes wrote about themselves as they ended."""
        for member in self._fleet.members.values():
            record = self._records[member.plan.name]
            status = _read_final(member.data_dir / FINAL_STATUS_FILE)
            if status and record.lives and record.lives[-1].pid == status.pid:
                self._note_status(member, record, status, asked_ms=now_ms())
                record.lives[-1].final = True
        self._sample(last=True)

    def _look_on(self) -> None:
        """A simulation that stood still itself (a machine that slept) has not seen anybody be silent meanwhile."""
        at_ms = now_ms()
        if at_ms - self._polled_ms > LOOKED_AWAY_MS:
            self._looking_since_ms = at_ms
        self._polled_ms = at_ms

    def _note(self, member: Member, record: NodeRecord, status: Status | None, *, asked_ms: int) -> None:
        while member.past:
            _note_past(record, member.past.popleft())
        if member.process is None:
            return
        record.cpu_s, record.peak_memory_bytes = member.usage.cpu_s, member.usage.peak_bytes
        if not record.lives or record.lives[-1].pid != member.process.pid:
            record.lives.append(Life(pid=member.process.pid, started_ms=member.started_ms))
        life = record.lives[-1]
        if status and status.pid == life.pid:
            self._note_status(member, record, status, asked_ms=asked_ms)
            life.status_at_ms = now_ms()
            life.first_status_at_ms = life.first_status_at_ms or life.status_at_ms
        if life.ended_ms is None and (code := member.process.poll()) is not None:
            life.ended_ms, life.exit_code, life.ended_by = now_ms(), code, member.ended_by
        if life.ended_ms is None:
            note_silence(life, since_ms=self._looking_since_ms, until_ms=now_ms())

    def _note_status(self, member: Member, record: NodeRecord, status: Status, *, asked_ms: int) -> None:
        life, heard = record.lives[-1], self._heard.get(record.name)
        life.refused_ms = refusals(record, status.rejected, at_ms=now_ms())
        life.status = status
        if heard is None or heard.pid != life.pid:
            heard = _Heard(life.pid, life.started_ms, None)
        extend_timeline(
            record.timeline,
            status.timeline,
            after=heard.newest,
            since_ms=heard.asked_ms,
            until_ms=life.ended_ms or now_ms(),
            ahead_ms=round(1000 * member.control.clock_ahead_s),
        )
        self._heard[record.name] = _Heard(life.pid, asked_ms, status.timeline[-1] if status.timeline else heard.newest)

    def _look(self, members: list[Member]) -> None:
        """What every process takes of the machine, and whether any has outlived its node."""
        table = ProcessTable()
        for member in members:
            record = self._records[member.plan.name]
            if member.process is None or not record.running:
                continue
            own = table.key(member.process.pid)
            keys = {*member.offspring, *table.descendants(member.process.pid), *([own] if own else [])}
            status = record.lives[-1].status
            tasks = status.details.discovery.loop.tasks if status else 0
            look(table, keys, record.processes, network_pid=member.process.pid, tasks=tasks or None)
        self.recording.late_p99_ms = self._pulse.late_ms(0.99)
        self.recording.core_waits_known = self.recording.core_waits_known or core_wait_s() > 0
        self._look_for_left_over(members)

    def _look_for_left_over(self, members: list[Member]) -> None:
        ended = {
            member.plan.name: member.directory
            for member in members
            if (lives := self._records[member.plan.name].lives)
            and (lives[-1].ended_ms or now_ms()) < now_ms() - LEFT_AFTER_S * 1000
        }
        found = processes_within(ended) if ended else {}
        self._keep_left_behind([f"{name}: pid {pid}" for name, pids in found.items() for pid in pids])

    def _keep_left_behind(self, found: list[str]) -> None:
        left = self.recording.left_behind
        left += [one for one in dict.fromkeys(found) if one not in left][: MAX_LEFT_BEHIND - len(left)]

    def _sample(self, *, last: bool = False) -> None:
        """Where the run stands. The last one is kept whatever its number: the report's chart ends with it."""
        recording = self.recording
        self._keep_against(recording.trainer.verdicts)
        recording.rewards.update(recording.trainer.rewards)
        sample = Sample(now_ms(), recording.step, recording.accepted, sum(recording.rejected.values()))
        self._stride = keep_evenly(
            recording.samples, sample, look=0 if last else self._looks, stride=self._stride, most=MAX_SAMPLES
        )
        self._looks += not last
        newest = recording.rises[-1][1] if recording.rises else 0
        if sample.step > newest and len(recording.rises) < MAX_RISES:
            recording.rises.append((sample.at_ms, sample.step))

    def _keep_against(self, verdicts: list[VerdictRow]) -> None:
        for verdict in verdicts:
            key = verdict.submission, verdict.reason
            if verdict.outcome != "accept" and key not in self._seen_against and len(self._seen_against) < MAX_AGAINST:
                self._seen_against.add(key)
                self.recording.against.append(verdict)


def refusals(record: NodeRecord, counts: Mapping[str, int], *, at_ms: int) -> dict[str, int]:
    """When each of these counts was last seen to grow, now that a node's newest process tells them.

    A node counts on from process to process: what an earlier one told has not grown, and its time is that one's.
    """
    known_ms = record.lives[-1].refused_ms
    grown = {reason: at_ms for reason, count in counts.items() if count > _told(record, reason)}
    return {reason: known_ms[reason] for reason in counts if reason in known_ms} | grown


def _told(record: NodeRecord, reason: str) -> int:
    """How many the newest status has that names a reason; a process may show a status before it has its counts."""
    told = (life.status.rejected for life in reversed(record.lives) if life.status)
    return next((counts[reason] for counts in told if reason in counts), 0)


def note_silence(life: Life, *, since_ms: int, until_ms: int) -> None:
    """Note for how long a process that runs has given no status, as far as anybody asked for one.

    Of too many the shortest goes, but never the newest: it may still grow.
    """
    heard_ms = max(life.status_at_ms or life.started_ms, since_ms)
    if until_ms - heard_ms < SILENT_MS:
        return
    if life.silences and life.silences[-1][0] == heard_ms:
        life.silences.pop()
    if len(life.silences) >= MAX_SILENCES:
        life.silences.remove(min(life.silences, key=lambda one: one[1] - one[0]))
    life.silences.append((heard_ms, until_ms))


def _note_past(record: NodeRecord, past: Past) -> None:
    """A process whose end nobody has looked at, since the next one was started at once."""
    life = next((one for one in record.lives if (one.pid, one.started_ms) == (past.pid, past.started_ms)), None)
    if life is None:
        life = Life(pid=past.pid, started_ms=past.started_ms)
        record.lives.append(life)
    if life.ended_ms is None:
        life.ended_ms, life.exit_code, life.ended_by = past.ended_ms, past.exit_code, past.ended_by


def extend_timeline(
    timeline: list[Word], newest: Sequence[Word], *, after: Word | None, since_ms: int, until_ms: int, ahead_ms: int
) -> None:
    """Append what a node said after its newest word so far; the oldest goes when the timeline grows too long.

    By our own clock: `ahead_ms` is taken off, and it was said between the last question and now whatever a clock says.
    """
    known = next((at for at in reversed(range(len(newest))) if newest[at] == after), -1)
    for at_ms, kind, what in newest[known + 1 :]:
        since_ms = min(max(at_ms - ahead_ms, since_ms), until_ms)
        timeline.append((since_ms, kind, what))
    del timeline[:-MAX_SEGMENTS]


def parse_status(data: bytes) -> Status | None:
    """A status page's content, or None where it has another form."""
    try:
        return msgspec.json.decode(data, type=Status, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("a status cannot be read error=%s", str(error)[:200])
        return None


def _read_member(member: Member) -> Status | None:
    if not member.running:
        return None
    try:
        url = (member.data_dir / "status.url").read_text(encoding="ascii")[:256].strip()
        return parse_status(_fetch(url, member.inside))
    except (OSError, ValueError, http.client.HTTPException):  # not up yet, stopped, or just ended
        return None


def _fetch(url: str, inside: Callable[[], AbstractContextManager[None]]) -> bytes:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname != "127.0.0.1":
        raise ValueError(f"not a loopback status address: {url!r}")
    deadline = time.monotonic() + READ_TIMEOUT_S
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=READ_TIMEOUT_S)
    try:
        with inside():
            connection.connect()
        connection.request("GET", parts.path)
        return _read_bounded(connection.getresponse(), deadline)
    finally:
        connection.close()


def _read_bounded(response: http.client.HTTPResponse, deadline: float) -> bytes:
    body = bytearray()
    while block := response.read1(1 << 16):
        body += block
        if len(body) > MAX_STATUS_BYTES or time.monotonic() > deadline:
            raise ValueError("a status that is too large or comes too slowly")
    if response.status != 200:
        raise ValueError(f"status code {response.status}")
    return bytes(body)


def _read_final(path: Path) -> Status | None:
    try:
        if path.stat().st_size > MAX_STATUS_BYTES:
            return None
        return parse_status(path.read_bytes())
    except OSError:  # a node that was killed leaves none
        return None
