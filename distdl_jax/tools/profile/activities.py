"""The activity of one worker in its steps: each executed instruction, with its layer, its pass and its kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import distdl_jax.nn as nn
from distdl_jax.tools.profile.compiled_text import Instruction, compiled_programs, containers, operation
from distdl_jax.tools.profile.recording import Execution, Recording
from distdl_jax.tracing.scopes import read_scopes
from distdl_jax.watchdog.programs.ir import Operation

ARITHMETIC, PACKING, MESSAGE = 0, 1, 2
FORWARD, BACKWARD = 0, 1

LOSS, UPDATE = "loss", "update, rest"
"""Instructions outside layers: differentiated, or not."""


class Row(NamedTuple):
    """The key for adding up times: a layer, by its place and name, in one pass."""

    place: str
    name: str
    direction: int


class Activity(NamedTuple):
    """One executed instruction.

    - `row`: the number of its row. `kind`: arithmetic, packing for messages, or a message.
    - `start`, `end`: in ns. `instruction`: its name.
    - `operation`: its communication, for a message with known partners, otherwise None.
    """

    row: int
    kind: int
    start: int
    end: int
    instruction: str
    operation: Operation | None = None


@dataclass(frozen=True)
class Activities:
    """The activity of a worker, ordered by start, and the start and end of its steps."""

    rows: tuple[Row, ...]
    steps: tuple[tuple[int, int], ...]
    activities: tuple[Activity, ...]

    @property
    def messages(self) -> list[Activity]:
        """The messages, and the collective operations, with known partners."""
        return [each for each in self.activities if each.operation is not None]


def activities_of(recording: Recording, teams: Mapping[int, tuple[int, ...]], nobody: int) -> Activities:
    """Join executed instructions with the scopes of compiled programs; `teams`, `nobody`: as for `operation`."""
    rows: dict[Row, int] = {}
    activities = list[Activity]()
    by_program: defaultdict[int, list[Execution]] = defaultdict(list)
    for event in recording.events:
        by_program[event.number].append(event)
    for events in by_program.values():
        instructions = _program(events)
        others = containers(instructions, {event.instruction for event in events})
        known = {name: _described(each, teams, nobody) for name, each in instructions.items()}
        # The executed instruction need not have the name: another one of the place may, or a fused one.
        names = {row.place: row.name for row, _, _ in known.values() if row.place and row.name}
        for event in events:
            if event.instruction in others:
                continue
            row, kind, op = known.get(event.instruction, (Row("", UPDATE, FORWARD), ARITHMETIC, None))
            row = row._replace(name=names.get(row.place, row.name))
            place = rows.setdefault(row, len(rows))
            activities.append(Activity(place, kind, event.start, event.end, event.instruction, op))
    activities.sort(key=lambda each: (each.start, each.end))
    return Activities(tuple(rows), recording.steps, tuple(activities))


def _program(events: list[Execution]) -> dict[str, Instruction]:
    """Return the program that has most of the executed instructions, since names of programs need not be unique."""
    seen = {event.instruction for event in events}
    programs = compiled_programs({events[0].program})
    return max(programs, key=lambda program: len(seen & program.keys()), default={})


def _described(
    instruction: Instruction, teams: Mapping[int, tuple[int, ...]], nobody: int
) -> tuple[Row, int, Operation | None]:
    scopes = instruction.scopes.split(";")[0].rpartition("/")[0]  # the first of several that XLA merged
    row = row_of(scopes)
    if instruction.message is not None:
        return row, MESSAGE, operation(instruction, teams, nobody)
    return row, PACKING if read_scopes(scopes).movement else ARITHMETIC, None


def row_of(scopes: str) -> Row:
    """Return the row for these scopes: a place in a network, or the names of layers and users' scopes.

    >>> row_of("jit(step)/transpose(jvp(.3))/Residual/.body/.0/DistributedConv2d/#7/windows")
    Row(place='3.body.0', name='DistributedConv2d', direction=1)
    """
    found = read_scopes(scopes)
    direction = BACKWARD if found.backward else FORWARD
    if found.place:
        return Row(found.place, next(iter((*found.layers, *found.functions)), found.movement), direction)
    layer = next((number for number, name in enumerate(found.layers) if hasattr(nn, name)), len(found.layers))
    name = "/".join(found.layers[: layer + 1]) or found.movement
    return Row("", name or (LOSS if found.differentiated else UPDATE), direction)
