"""One `mpiexec` with its ranks, or one process without MPI, seen from the parent."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import mpiexec
from launcher.costs import Costs
from launcher.marks import Group
from launcher.stacks import merge, shorten, whole

TAIL = 4000
LOCK = "alive.lock"
OUTPUT = "output.txt"
SEGMENTS = re.compile(r"/dev/shm/(?:mpich_shm|sm_segment|vader_segment)\S*$", re.MULTILINE)


@dataclass
class Rank:
    """What one process of the world has written about itself so far."""

    pid: int
    rank: int = -1
    ended: bool = False
    started: dict[int, float] = field(default_factory=dict)
    done: dict[int, tuple[float, int]] = field(default_factory=dict)
    agreed: dict[int, float] = field(default_factory=dict)  # with the processor seconds of each item
    reports: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    collected: list[dict[str, Any]] = field(default_factory=list)
    ready: dict[str, Any] | None = None
    refused: str = ""
    last: float = 0.0
    offset: int = 0

    def take(self, event: dict[str, Any]) -> None:
        kind, item = event["kind"], event.get("item", -1)
        self.last = event["t"]
        if kind == "rank":
            self.rank = event["rank"]
        elif kind == "refused":
            self.refused = event["text"]
        elif kind == "collect":
            self.collected.append(event)
        elif kind == "ready":
            self.ready = event
        elif kind == "start":
            self.started[item] = event["t"]
        elif kind == "report":
            self.reports.setdefault(item, []).append(event["data"])
        elif kind == "done":
            self.done[item] = (event["t"], event["code"])
        elif kind == "agreed":
            self.agreed[item] = event["cost"]
        elif kind == "end":
            self.ended = True


class World:
    """Starts `size` ranks, reads what they write, shows where they are, and leaves none of them behind."""

    def __init__(
        self,
        group: Group,
        costs: Costs,
        home: Path,
        spec: dict[str, Any],
        arguments: list[str],
        environment: dict[str, str],
        cwd: Path,
        show: bool,
    ) -> None:
        self.size, self.costs = group.processes, costs
        self.spent = False  # it has run all its tests, or its messages may be half way
        self.ranks: dict[int, Rank] = {}
        self.warnings: list[dict[str, Any]] = []
        self.segments: set[str] = set()
        self.home = Path(tempfile.mkdtemp(prefix=f"world{group.world}-", dir=home))
        (self.home / "spec.json").write_text(json.dumps(spec))
        # Ranks block on this lock: they get it, and leave, when the parent lets go of it in whatever way.
        self.lock = os.open(self.home / LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.command = mpiexec.command(group.world) if group.world else []
        self.starter = "mpiexec" if group.world else "it"
        self.began = time.monotonic()
        with open(self.home / OUTPUT, "wb") as output:
            self.process = subprocess.Popen(
                [
                    *self.command,
                    sys.executable,
                    "-m",
                    "pytest",
                    "--in-world",
                    "--world-dir",
                    str(self.home),
                    *arguments,
                ],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=None if show else output,
                start_new_session=True,  # so that Ctrl-C reaches the parent, which then ends the world
            )

    def poll(self) -> None:
        """Read what the ranks have written since the last call."""
        for path in self.home.glob("events-*.jsonl"):
            pid = int(path.stem.split("-")[1])
            rank = self.ranks.setdefault(pid, Rank(pid))
            with open(path, "rb") as file:
                file.seek(rank.offset)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            rank.offset += len(new)
            for line in new.splitlines():
                event = json.loads(line)
                if event["kind"] == "warning":
                    self.warnings.append(event)
                rank.take(event)
                self.segments.update(event.get("segments", []))

    def ended(self) -> bool:
        """Return whether mpiexec has ended."""
        with self.costs.reaping():
            return self.process.poll() is not None

    def cost(self, item: int) -> float:
        """Return the processor seconds of an item, on all ranks."""
        return sum(rank.agreed.get(item, 0.0) for rank in self.ranks.values())

    def start_costs(self) -> list[float]:
        """Return what each rank has used until it was ready."""
        return [rank.ready["cost"] for rank in self.ranks.values() if rank.ready]

    def numbered(self) -> list[Rank]:
        """Return the ranks that know their number, in its order."""
        return sorted((rank for rank in self.ranks.values() if rank.rank >= 0), key=lambda rank: rank.rank)

    def ready(self) -> bool:
        return sum(rank.ready is not None for rank in self.ranks.values()) == self.size

    def complete(self, item: int) -> bool:
        """Return whether every rank has done the item, and knows that the others have."""
        return sum(item in rank.agreed for rank in self.ranks.values()) == self.size

    def dirty(self, item: int) -> bool:
        """Return whether a rank failed this item, or ranks ended it in different ways."""
        codes = {rank.done[item][1] for rank in self.ranks.values()}
        return 2 in codes or len(codes) > 1

    def last_sign(self) -> float:
        return max([self.began, *(rank.last for rank in self.ranks.values())])

    def dead(self) -> bool:
        """Return whether mpiexec has ended, or a rank has gone without saying so."""
        if self.ended():
            return True
        return any(not rank.ended and not _alive(rank.pid) for rank in self.ranks.values())

    def tail(self) -> str:
        """Return the end of what mpiexec and the ranks wrote outside of tests."""
        with contextlib.suppress(OSError):
            return (self.home / OUTPUT).read_text(errors="replace")[-TAIL:].strip()
        return ""

    def named_by_mpiexec(self) -> list[int]:
        """Return the ranks whose process mpiexec complains about."""
        numbers = set(re.findall(r"\d+", self.tail()))
        return [rank.rank for rank in self.numbered() if str(rank.pid) in numbers]

    def exit_text(self) -> str:
        code = self.process.returncode
        if code is None:
            return f"{self.starter} was still running"
        return (
            f"{self.starter} was killed by signal {-code}"
            if code < 0
            else f"{self.starter} ended with exit status {code}"
        )

    def stacks(self, wait: float = 20.0) -> str:
        """Ask every rank for its Python stacks, wait until they are written in full, and merge the equal ones."""
        asked = [rank for rank in self.ranks.values() if _alive(rank.pid)]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        until = time.monotonic() + wait
        while time.monotonic() < until and not all(whole(self._stack_file(rank)) for rank in asked):
            time.sleep(0.05)
        # Ranks that hang before MPI has told them their number are shown under the next free ones.
        spare = (n for n in range(10**9) if n not in {rank.rank for rank in asked})
        shown = {}
        for rank in asked:
            number = rank.rank if rank.rank >= 0 else next(spare)
            path = self._stack_file(rank)
            text = path.read_text(errors="replace") if path.exists() else ""
            shown[number] = shorten(text) or f"no stack within {wait:g} s (pid {rank.pid})"
        return merge(shown, self.size)

    def _stack_file(self, rank: Rank) -> Path:
        return self.home / f"stacks-{rank.pid}.txt"

    def kill(self) -> None:
        """End every process of this world, at once and without asking."""
        if self.lock < 0:
            return
        self.poll()
        for rank in self.ranks.values():
            self.segments.update(segments(rank.pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rank.pid, signal.SIGKILL)
        if not self.ended():
            # mpiexec sees its ranks gone and tidies up; only if it does not, it goes the hard way too.
            self.process.terminate()
            until = time.monotonic() + 5
            while not self.ended() and time.monotonic() < until:
                time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        while not self.ended():
            time.sleep(0.01)
        for path in self.segments:
            Path(path).unlink(missing_ok=True)
        os.close(self.lock)
        self.lock = -1


def segments(pid: int) -> list[str]:
    """Return the shared memory that the MPI of this process uses: a process that is killed leaves it behind."""
    with contextlib.suppress(OSError):  # no /proc, or the process has gone
        return SEGMENTS.findall(Path(f"/proc/{pid}/maps").read_text())
    return []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
