"""The DHT with 10, 30 and 60 servers: joining, lookups, 30 % dead; and libp2p 0.8.1's own beside it.

Three processes hold the servers, on loopback; one of them, with 30 % of the servers, is killed for the second half. One
operation at a time, so CPU seconds are those of all processes for it. A lookup is a put of a new value by one node and
a get of it by another, so a stale copy is a failure; its CPU is half of both. Stock drops its local copy before a get,
without which it would ask nobody. What 10 000 servers would cost is drawn from the growth against log2 n.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from bench.harness import Result

SIZES: Final = (10, 30, 60)
STOCK_SIZE: Final = 30
QUICK_SIZE: Final = 10
LOOKUPS: Final = 60
QUICK_LOOKUPS: Final = 12
STOCK_LOOKUPS: Final = 30
WARM_UP: Final = 6
"""Lookups that are not counted, while servers connect to one another."""
FAR_AWAY: Final = 10_000
LEAST_SUCCESS: Final = 0.99
LEAST_CPU_RATIO: Final = 3.0


@dataclass
class Phase:
    """What a number of operations of one kind took."""

    seconds: list[float] = field(default_factory=list)
    good: int = 0
    cpu_s: float = 0.0
    messages: int = 0
    errors: list[str] = field(default_factory=list)

    def note(self, answer: dict[str, Any]) -> None:
        self.seconds.append(answer["s"])
        self.good += answer["ok"]
        if not answer["ok"]:
            self.errors.append(answer.get("error", "not found"))

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return 1000.0 * float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])

    def each(self, amount: float) -> float:
        return amount / max(1, len(self.seconds))


class Worker:
    """One process with servers `first` up to `last`."""

    def __init__(self, kind: str, first: int, last: int) -> None:
        self.numbers = range(first, last)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.dht_worker", kind, str(first), str(last)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        hello = self._read()
        self.addresses: list[str] = hello["addresses"]
        self.base_kib: int = hello["base_kib"]

    def ask(self, **request: Any) -> dict[str, Any]:
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the worker has no stdin")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return self._read()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Network:
    """Servers in three processes; operations are drawn from a seed."""

    def __init__(self, kind: str, size: int) -> None:
        cuts = [0, round(0.35 * size), round(0.7 * size), size]
        self.workers = [Worker(kind, first, last) for first, last in itertools.pairwise(cuts)]
        self.size = size
        self._draw = random.Random(size)
        self._sequences: dict[int, int] = {}

    def join(self) -> Phase:
        phase, bootstrap = Phase(), self.workers[0].addresses[0]
        with self._metered(phase):
            for worker in self.workers:
                for number in worker.numbers:
                    if number:
                        phase.note(worker.ask(do="join", node=number, bootstrap=bootstrap))
                        self.workers[0].ask(do="adopt", node=0)
            for number in range(self.size):
                self._worker_of(number).ask(do="settle", node=number)
        return phase

    def lookups(self, count: int) -> tuple[Phase, Phase]:
        """Puts by random nodes, each followed by a get of it at another: (puts, gets)."""
        puts, gets = Phase(), Phase()
        for _ in range(count):
            writer, reader = self._draw.sample(self._alive(), 2)
            sequence = self._sequences[writer] = self._sequences.get(writer, 0) + 1
            with self._metered(puts):
                puts.note(self._worker_of(writer).ask(do="put", node=writer, sequence=sequence))
            with self._metered(gets):
                gets.note(self._worker_of(reader).ask(do="get", node=reader, whose=writer, sequence=sequence))
        return puts, gets

    def host_kib(self) -> float:
        """Memory a host beyond that of the libraries, and of the idle process."""
        looks = [(worker, worker.ask(do="look")) for worker in self.workers]
        return float(sum(look["rss_kib"] - worker.base_kib for worker, look in looks)) / self.size

    def known(self) -> float:
        counts = [count for worker in self.workers for count in worker.ask(do="look")["known"]]
        return float(sum(counts)) / len(counts)

    def kill_some(self) -> None:
        """End the last process: 30 % of the servers, refused from then on."""
        self.workers.pop().kill()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _alive(self) -> list[int]:
        return [number for worker in self.workers for number in worker.numbers]

    def _worker_of(self, number: int) -> Worker:
        return next(worker for worker in self.workers if number in worker.numbers)

    @contextmanager
    def _metered(self, phase: Phase) -> Iterator[None]:
        before = [worker.ask(do="look") for worker in self.workers]
        yield
        after = [worker.ask(do="look") for worker in self.workers]
        phase.cpu_s += sum(late["cpu_s"] - early["cpu_s"] for late, early in zip(after, before, strict=True))
        phase.messages += sum(late["sent"] - early["sent"] for late, early in zip(after, before, strict=True))


def bench(*, quick: bool) -> Result:
    """Ours at every size, then stock at one of them."""
    result = Result()
    lookups = QUICK_LOOKUPS if quick else LOOKUPS
    sizes = (QUICK_SIZE,) if quick else SIZES
    for size in sizes:
        _measure(result, "ours", size, lookups)
    stock = QUICK_SIZE if quick else STOCK_SIZE
    _measure(result, "stock", stock, QUICK_LOOKUPS if quick else STOCK_LOOKUPS)
    figures = result.figures
    for what in ("lookup", "join"):
        figures[f"{what}_cpu_ratio"] = figures[f"stock_{stock}_{what}_cpu_ms"] / figures[f"ours_{stock}_{what}_cpu_ms"]
    if not quick:
        extrapolate(figures)
    judge(result, sizes)
    return result


def judge(result: Result, sizes: Sequence[int]) -> None:
    """Puts and gets each have to succeed: gets that fail are not made up for by puts that do not."""
    for size, dead, kind in itertools.product(sizes, ("", "_dead"), ("get", "put")):
        result.at_least(f"ours_{size}{dead}_{kind}_success", LEAST_SUCCESS)
    result.at_least("lookup_cpu_ratio", LEAST_CPU_RATIO)


def _measure(result: Result, kind: str, size: int, lookups: int) -> None:
    network = Network(kind, size)
    name, figures = f"{kind}_{size}", result.figures
    try:
        joined = network.join()
        network.lookups(WARM_UP)
        figures[f"{name}_join_p50_ms"] = joined.quantile_ms(0.5)
        figures[f"{name}_join_p99_ms"] = joined.quantile_ms(0.99)
        figures[f"{name}_join_cpu_ms"] = 1000 * joined.each(joined.cpu_s)
        figures[f"{name}_known"] = network.known()
        note_lookups(figures, name, *network.lookups(lookups))
        figures[f"{name}_host_kib"] = network.host_kib()
        network.kill_some()
        note_lookups(figures, f"{name}_dead", *network.lookups(lookups))
    finally:
        network.close()


def note_lookups(figures: dict[str, float], name: str, puts: Phase, gets: Phase) -> None:
    """Success, time, CPU and messages of each kind; and CPU of a lookup, which is half of both."""
    for kind, phase in (("get", gets), ("put", puts)):
        figures[f"{name}_{kind}_success"] = phase.each(phase.good)
        figures[f"{name}_{kind}_p50_ms"] = phase.quantile_ms(0.5)
        figures[f"{name}_{kind}_p99_ms"] = phase.quantile_ms(0.99)
        figures[f"{name}_{kind}_cpu_ms"] = 1000 * phase.each(phase.cpu_s)
        figures[f"{name}_{kind}_messages"] = phase.each(phase.messages)
    figures[f"{name}_lookup_cpu_ms"] = (figures[f"{name}_get_cpu_ms"] + figures[f"{name}_put_cpu_ms"]) / 2


def extrapolate(figures: dict[str, float]) -> None:
    """A straight line through what was measured against log2 n, at FAR_AWAY servers."""
    for what in ("get_cpu_ms", "get_messages", "get_p50_ms", "join_cpu_ms", "known"):
        points = [(math.log2(size), figures[f"ours_{size}_{what}"]) for size in SIZES]
        middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        rise = sum((x - middle_x) * (y - middle_y) for x, y in points) / sum((x - middle_x) ** 2 for x, _ in points)
        figures[f"implied_{FAR_AWAY}_{what}"] = middle_y + rise * (math.log2(FAR_AWAY) - middle_x)
