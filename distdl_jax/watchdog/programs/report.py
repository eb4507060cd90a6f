"""The result of `dj.check`: each worker's operations, messages and bytes, as text and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distdl_jax.text import Drawing, aligned
from distdl_jax.watchdog.programs.diagnosis import describe
from distdl_jax.watchdog.programs.ir import Operation, Program, operations
from distdl_jax.watchdog.programs.matching import play_back

SHOWN_OPERATIONS = 12
"""The number of each worker's operations in the printed report."""


@dataclass(frozen=True)
class Report:
    """Whether the workers' programs complete together, and their communication.

    - `name`: the function.
    - `programs`: the communication of each worker, by world rank.
    - `problem`: the mismatch, as a sentence; None if the programs complete.

    A loop of unknown length counts as one pass.
    """

    name: str
    programs: Mapping[int, Program]
    problem: str | None

    @property
    def ok(self) -> bool:
        """Whether the programs complete together."""
        return self.problem is None

    def messages(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Count messages, and bytes, from one worker to another: `{(source, destination): (messages, bytes)}`."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for worker, program in sorted(self.programs.items()):
            for op, times in operations(program):
                if op.is_message and op.dest is not None:
                    count, size = found.get((worker, op.dest), (0, 0))
                    found[worker, op.dest] = count + (times or 1), size + (times or 1) * op.bytes_sent
        return found

    def table(self) -> str:
        """Return a line for each worker: operations, messages and bytes sent, and team operations."""
        columns = ("operations", "sends", "bytes sent", "receives", "of teams", "bytes of teams")
        rows: list[tuple[str, ...]] = [("worker", *columns)]
        for worker, program in sorted(self.programs.items()):
            counts: Counter[str] = Counter()
            for op, times in operations(program):
                n = times or 1
                counts["operations"] += n
                if op.is_message:
                    counts["sends"] += n * (op.dest is not None)
                    counts["receives"] += n * (op.source is not None or op.from_any)
                    counts["bytes sent"] += n * op.bytes_sent
                else:
                    counts["of teams"] += n
                    counts["bytes of teams"] += n * op.bytes_sent
            rows.append((str(worker), *(f"{counts[column]:,}" for column in columns)))
        return "\n".join(aligned(rows, ()))

    def matrix(self) -> str:
        """Return the bytes sent between workers: a line for each source, a column for each destination."""
        found, workers = self.messages(), sorted(self.programs)
        rows = [("from \\ to", *map(str, workers))]
        for source in workers:
            sent = (found.get((source, dest), (0, 0))[1] for dest in workers)
            rows.append((str(source), *(f"{size:,}" if size else "." for size in sent)))
        return "\n".join(aligned(rows, ()))

    def listing(self, worker: int, limit: int | None = None) -> str:
        """List a worker's operations in order, with their layers and source lines; the first `limit` of them."""
        found = list(operations(self.programs[worker]))
        lines = []
        for place, (op, times) in enumerate(found[:limit], 1):
            often = "" if times == 1 else " (as often as the data decide)" if times is None else f" ({times} times)"
            lines.append(f"{place:5}. {describe(op)}{often}")
        if limit is not None and len(found) > limit:
            lines.append(f"       ... and {len(found) - limit} more")
        return "\n".join(lines)

    def draw(self) -> Drawing:
        """Draw the messages in order: a line for each worker, and an arrow for each message, with its bytes.

        If the programs don't complete, it shows how far they get, and in which operations workers wait. A loop's body
        is drawn once, with the number of passes; for a conditional, the first branch. There is no communication, and
        every worker gets the same picture. It shows at most 64 workers and 160 messages.

        **Returns:** a `Drawing`: SVG, which Jupyter shows by itself, with `save`; printed, it is text.
        """
        from distdl_jax.tools.draw.messages import DrawnEvent, draw_messages

        happened, waiting = play_back(self.programs)
        listed = {rank: list(operations(program, first_branch=True)) for rank, program in self.programs.items()}
        events = [
            DrawnEvent(
                "message" if op.is_message else op.kind, tuple(team), op.bytes_sent, _what(*listed[team[0]][place - 1])
            )
            for op, team, place in happened
        ]
        total = sum(size for _, size in self.messages().values())
        count = sum(count for count, _ in self.messages().values())
        title = f"{self.name}: {count:,} messages, {total:,} bytes, in order"
        waits = {worker: describe(op) for worker, op in waiting.items()}
        return draw_messages(title, sorted(self.programs), events, waits, [self.problem] if self.problem else [])

    def picture(self, path: str | Path | None = None) -> Drawing:
        """Draw the messages and bytes between workers; the SVG is also written to `path` if given.

        **Returns:** a `Drawing`, as in `draw`; its text is the `matrix`.
        """
        from distdl_jax.tools.draw.messages import draw_amounts

        plain = f"{self.name}: bytes sent\n{self.matrix()}"
        drawing = draw_amounts(self.name, sorted(self.programs), self.messages(), plain)
        if path is not None:
            drawing.save(path)
        return drawing

    def __str__(self) -> str:
        verdict = "completes on all workers" if self.ok else self.problem
        parts = [f"{self.name}: {verdict}", self.table()]
        if self.messages() and len(self.programs) <= 16:
            parts.append(f"Bytes sent:\n{self.matrix()}")
        for worker in sorted(self.programs)[:4]:
            if listing := self.listing(worker, SHOWN_OPERATIONS):
                parts.append(f"Worker {worker}:\n{listing}")
        return "\n\n".join(parts)


def _what(op: Operation, times: int | None) -> str:
    """Return the layer that an operation is part of, whether backward, and how often."""
    parts = [op.place.layer.rsplit("/", 1)[-1], "backward" * op.place.backward]
    often = "" if times == 1 else "as often as the data decide" if times is None else f"{times} times"
    return ", ".join(part for part in (*parts, often) if part)
