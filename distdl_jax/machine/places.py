"""Where workers run: which of them share a host, and which a cache."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

Pair = tuple[int, int]
Team = tuple[int, ...]

_PROCESSORS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Place:
    """Where one worker runs.

    - `host`: the host's name.
    - `caches`: the last caches of the processors that it may run on; none where the system does not tell.
    """

    host: str
    caches: frozenset[str] = frozenset()


def own_place() -> Place:
    """Return where this process runs."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    caches = {cache for processor in usable if (cache := _last_cache(_PROCESSORS / f"cpu{processor}" / "cache"))}
    return Place(socket.gethostname(), frozenset(caches))


def _last_cache(folder: Path) -> str:
    """Return the processors that share the last cache, as Linux lists them; "" where it does not."""
    levels = {}
    for index in folder.glob("index*"):
        try:
            levels[int((index / "level").read_text())] = (index / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
    return levels[max(levels)] if levels else ""


@dataclass(frozen=True)
class Places:
    """Where all workers run, by world rank.

    >>> far = Places((Place("a", frozenset({"0-1"})), Place("a", frozenset({"2-3"})), Place("b")))
    >>> far.level(0, 1), far.level(1, 2), far.workers_per_host
    ('host', 'network', 2)
    """

    of: tuple[Place, ...]

    @property
    def hosts(self) -> tuple[Team, ...]:
        """The workers of each host."""
        found: dict[str, list[int]] = {}
        for worker, place in enumerate(self.of):
            found.setdefault(place.host, []).append(worker)
        return tuple(map(tuple, found.values()))

    @property
    def workers_per_host(self) -> int:
        """How many workers the fullest host has."""
        return max(map(len, self.hosts))

    @property
    def workers_per_cache(self) -> int:
        """How many workers share a cache, at most; all of a host where the system tells of none."""
        alike = [sum(self._share_cache(a, b) for b in host) for host in self.hosts for a in host]
        return max(max(alike), 1) if any(place.caches for place in self.of) else self.workers_per_host

    def _share_cache(self, a: int, b: int) -> bool:
        one, other = self.of[a], self.of[b]
        return one.host == other.host and len(one.caches) == 1 and one.caches == other.caches

    def level(self, a: int, b: int) -> str:
        """Return how far two workers are apart; "host" where all of a host share one cache."""
        if self.of[a].host != self.of[b].host:
            return "network"
        near = self._share_cache(a, b) and self.workers_per_cache < self.workers_per_host
        return "shared cache" if near else "host"

    def pairs(self, level: str) -> tuple[Pair, ...]:
        """Return pairs of workers so far apart, of one host, or between the same two; each worker is in one at most."""
        if level == "network":
            return tuple(zip(*self.hosts[:2], strict=False)) if len(self.hosts) > 1 else ()
        for host in self.hosts:
            paired: set[int] = set()
            found = []
            for a, b in combinations(host, 2):
                if not paired & {a, b} and self.level(a, b) == level:
                    found.append((a, b))
                    paired |= {a, b}
            if found:
                return tuple(found)
        return ()

    def teams(self) -> tuple[tuple[Team, int], ...]:
        """Return teams of 2, 4, 8, ... workers of a host, then of one worker a host, then all workers; with hosts."""
        fullest = max(self.hosts, key=len)
        found = {(len(team), 1): team for team in _powers(fullest)}
        found |= {(len(team), len(team)): team for team in _powers(tuple(host[0] for host in self.hosts))}
        if len(self.of) > 1:
            found[len(self.of), len(self.hosts)] = tuple(range(len(self.of)))
        return tuple((team, hosts) for (_, hosts), team in found.items())


def _powers(workers: Team) -> Iterator[Team]:
    """Yield the first 2, 4, 8, ... workers, and all of them."""
    size = 2
    while size < len(workers):
        yield workers[:size]
        size *= 2
    if len(workers) > 1:
        yield workers


def host_memory() -> float:
    """Return the bytes of memory of this host."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def xla_threads() -> int:
    """Return with how many threads XLA's CPU client computes."""
    count = os.environ.get("NPROC", "")
    if count.isdigit() and int(count) > 0:
        return int(count)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
