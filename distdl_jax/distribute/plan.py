"""`f.plan`: what moves in a distributed function, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distdl_jax.distribute.movements import Moved
from distdl_jax.text import aligned, bytes_text


@dataclass(frozen=True)
class Plan:
    """What one worker sends in a call of a distributed function, in order; `print` shows it as a table.

    - `moved`: the movements.
    """

    moved: tuple[Moved, ...]

    @property
    def messages(self) -> int:
        """The number of this worker's messages and collective operations."""
        return sum(moved.times * len(moved.operations) for moved in self.moved)

    @property
    def bytes(self) -> int:
        """The number of bytes that this worker sends."""
        return sum(moved.times * operation.bytes_sent for moved in self.moved for operation in moved.operations)

    def __str__(self) -> str:
        moving = [moved for moved in self.moved if moved.operations]
        if not moving:
            return "Nothing moves."
        rows: list[Sequence[str]] = [("line", "primitive", "what moves", "array", "blocks", "messages", "sent")]
        for moved in moving:
            before, after = (" x ".join(map(str, numbers)) or "1" for numbers in (moved.before, moved.after))
            rows.append(
                (
                    moved.line,
                    moved.primitive,
                    moved.what,
                    f"{moved.dtype}{list(moved.shape)}",
                    before if before == after else f"{before} -> {after}",
                    str(moved.times * len(moved.operations)),
                    bytes_text(moved.times * sum(operation.bytes_sent for operation in moved.operations)),
                )
            )
        rows.append(("all", "", "", "", "", str(self.messages), bytes_text(self.bytes)))
        return "\n".join(line.rstrip() for line in aligned(rows, left=(0, 1, 2, 3, 4)))
