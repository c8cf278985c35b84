"""An oracle about nodes that run and do nothing: each answers who asks for its status, until it is to end, and ends.

What stands still by plan (a `stop`) is excused for that time. How busy the machine is may make a node slow to answer:
it was asked twice a second, and one answer within the limit is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from simnet.gather import Life, NodeRecord, Recording
from simnet.oracles.excuses import overlap_ms, stopped_spells
from simnet.oracles.judgement import Evidence, Figure, Judgement, listed

MAX_SILENCE_S: Final = 60.0
"""Some sixty questions, each of which waits a second: even with thirty runnable threads a core, one is answered."""
FIRST_ANSWER_S: Final = 300.0
"""Programs are loaded and ledgers replayed before the first answer, often by all nodes at the same time. A node that is
started again and again has no more than that in all, until it answers."""
LONG_LIFE_S: Final = 120.0
"""A life of which an answer could be expected, though a very busy machine may keep it from one."""
AT_THE_CLOSE_MS: Final = 10_000
"""Who was silent up to so long before the end, for as long at least, and had to be killed then, was hung."""


@dataclass(frozen=True)
class _Silence:
    whose: str
    seconds: float
    limit_s: float

    @property
    def text(self) -> str:
        return f"{self.whose} for {self.seconds:.0f} s"


def nodes_keep_answering(evidence: Evidence) -> Judgement:
    """No node that runs and was not stopped shows no status for a minute, and none has to be killed at the end.

    Neither does one that is started again never come up any more.
    """
    name, recording = "no running node falls silent", evidence.recording
    nodes = [node for node in recording.nodes if node.role != "hostile" and node.lives]
    silences = sorted((one for node in nodes for one in _silences(recording, node)), key=lambda one: -one.seconds)
    killed = [node.name for node in nodes if node.lives[-1].had_to_be_killed]
    outlived = [node.name for node in nodes if evidence.over and node.lives[-1].ended_by == "close"]
    numbers: dict[str, Figure] = {"nodes": len(nodes), "killed at the close": len(killed)}
    if silences:
        numbers |= {"longest silence s": round(silences[0].seconds), "of": silences[0].whose}
    if outlived:
        numbers |= {"still there after the end": listed(outlived)}
    hung = sorted({node.name for node in nodes if _is_hung(recording, node)})
    long = [one for one in silences if one.seconds > one.limit_s]
    lost = {node.name: lost_s for node in nodes if (lost_s := _lost_s(recording, node))}
    once = {one.whose for one in long}
    gone = [f"{who} for {lost_s:.0f} s" for who, lost_s in lost.items() if lost_s > FIRST_ANSWER_S and who not in once]
    if long or hung or gone:
        said = [f"Silent while running: {listed([one.text for one in long])}."] if long else []
        said += [f"Started again and again, and did not come up: {listed(gone)}."] if gone else []
        said += [f"Silent, and had to be killed at the close: {listed(hung)}."] if hung else []
        return Judgement(name, "failed", " ".join(said), numbers)
    mute = [node.name for node in nodes if all(life.status_at_ms is None for life in node.lives) and _was_there(node)]
    if mute or not any(life.status_at_ms for node in nodes for life in node.lives):
        finding = f"Never gave a status: {listed(mute)}." if mute else "No node was there long enough to be asked."
        return Judgement(name, "could not tell", finding, numbers)
    if lost:
        finding = f"Gave no status in a life of {LONG_LIFE_S:.0f} s or more: {listed(list(lost))}."
        return Judgement(name, "could not tell", finding, numbers)
    if killed:
        finding = f"Answered to the end or was still starting, and had to be killed at the close: {listed(killed)}."
        return Judgement(name, "could not tell", finding, numbers)
    longest = f"; the longest silence was of {silences[0].text}" if silences else ""
    return Judgement(name, "passed", f"{len(nodes)} nodes answered while they ran{longest}.", numbers)


def _silences(recording: Recording, node: NodeRecord) -> Iterator[_Silence]:
    """Without the time for which the node stood still by plan."""
    stopped = stopped_spells(recording, node)
    for life in node.lives:
        for begin_ms, end_ms in life.silences:
            starting = life.first_status_at_ms is None or begin_ms < life.first_status_at_ms
            limit_s = FIRST_ANSWER_S if starting else MAX_SILENCE_S
            own_ms = end_ms - begin_ms - overlap_ms(stopped, begin_ms, end_ms)
            yield _Silence(node.name, own_ms / 1000, limit_s)


def _lost_s(recording: Recording, node: NodeRecord) -> float:
    """For how long it ran, at most, in long lives of which none gave a status, and none in between."""
    stopped, longest_ms, lost_ms = stopped_spells(recording, node), 0.0, 0.0
    for life in node.lives:
        if life.first_status_at_ms is not None:
            lost_ms = 0.0
            continue
        own_ms = sum(end_ms - begin_ms - overlap_ms(stopped, begin_ms, end_ms) for begin_ms, end_ms in life.silences)
        lost_ms += own_ms if own_ms >= 1000 * LONG_LIFE_S else 0.0
        longest_ms = max(longest_ms, lost_ms)
    return longest_ms / 1000


def _is_hung(recording: Recording, node: NodeRecord) -> bool:
    """Whether it had answered and did so no more; one that still starts has `FIRST_ANSWER_S` for that."""
    life = node.lives[-1]
    if not life.had_to_be_killed or not life.silences or life.ended_ms is None or life.first_status_at_ms is None:
        return False
    begin_ms, end_ms = life.silences[-1]
    stopped_ms = overlap_ms(stopped_spells(recording, node), begin_ms, end_ms)
    over_ms = recording.ended_ms or life.ended_ms
    return end_ms > over_ms - AT_THE_CLOSE_MS and end_ms - begin_ms - stopped_ms >= AT_THE_CLOSE_MS


def _was_there(node: NodeRecord) -> bool:
    """Whether it ran for long enough that a status could be expected of it."""
    return sum(_length_ms(life) for life in node.lives) >= 1000 * MAX_SILENCE_S


def _length_ms(life: Life) -> int:
    last_ms = life.silences[-1][1] if life.silences else life.started_ms
    return (life.ended_ms or last_ms) - life.started_ms
