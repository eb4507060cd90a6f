"""Reads off a traced program what it communicates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from distdl_jax.compat import source_frames
from distdl_jax.programs.ir import Cond, Loop, Operation, PartOf, Place, Program
from distdl_jax.source_lines import is_library
from distdl_jax.tracing.jaxprs import Branches, Scan, While, bodies, is_opaque_call, structure
from distdl_jax.tracing.scopes import movement_numbers, read_scopes
from distdl_jax.world import Transport

# What a primitive is made of. What these hold was traced once, for the first caller; the call has its own line.
_WRAPPERS = ("custom_vjp_call", "custom_vmap_call")


def read_program(transport: Transport, jaxpr: Any) -> Program:
    """Return what a traced program communicates, in the order in which it does."""
    return tuple(_Reader(transport).read(jaxpr, ()))


class _Reader:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # Numbered anew, as they come: a program traced again is the same.
        self._numbers: dict[str | tuple[str, ...], int] = {}

    def read(self, jaxpr: Any, around: tuple[Any, ...]) -> Iterator[Operation | Loop | Cond]:
        for eqn in jaxpr.eqns:
            eqns = (*around, eqn)
            if (operation := self._transport.operation(eqn)) is not None:
                stacks = _stacks(eqns)
                place = place_of(_line(eqns), stacks)
                yield replace(operation, movements=self._movements_of("/".join(stacks)), place=place)
                continue
            match structure(eqn):
                case Scan(body, length):
                    yield Loop(length, self._body(body, eqns), _place(eqns))
                case While(condition, body):
                    test = self._body(condition, eqns)
                    yield from test
                    yield Loop(None, self._body(body, eqns) + test, _place(eqns))
                case Branches(branches):
                    yield Cond(tuple(self._body(branch, eqns) for branch in branches), _place(eqns))
                case _:
                    for inner in bodies(eqn):
                        yield from self.read(inner, eqns)

    def _movements_of(self, scopes: str) -> tuple[PartOf, ...]:
        """Return the movement that an operation is part of, told in two ways, each of which sees what the other can't.

        By all scopes around it: two uses of a body that JAX traced once differ in the scopes of their calls alone. By
        the innermost scope: in a derivative that is differentiated again, the adjoints of the first one count as
        movements by their outer scopes, and as adjoints by their inner ones.
        """
        numbers = movement_numbers(scopes)
        if not numbers:
            return ()
        path, first = tuple(dict.fromkeys(numbers)), scopes.index(f"#{numbers[0]}")
        number_of = self._numbers.setdefault
        return (
            PartOf(number_of(path, len(self._numbers) + 1), "transpose(" in scopes[:first]),
            PartOf(number_of(numbers[-1], len(self._numbers) + 1), "transpose(" in scopes),
        )

    def _body(self, closed: Any, around: tuple[Any, ...]) -> Program:
        return tuple(self.read(closed.jaxpr, around))


def line_of_equation(eqn: Any) -> str:
    """Return the source line that an equation of a traced program comes from; "" where none is known."""
    return _line((eqn,))


def _place(eqns: tuple[Any, ...]) -> Place:
    """Return where the innermost of `eqns` comes from."""
    return place_of(_line(eqns), _stacks(eqns))


def _stacks(eqns: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the scopes of each of `eqns`, the outermost equation first."""
    return tuple(str(eqn.source_info.name_stack) for eqn in eqns)


@lru_cache(maxsize=4096)
def place_of(line: str, stacks: tuple[str, ...]) -> Place:
    """Return where an operation comes from, from the name stacks around it, the outermost first."""
    scopes = read_scopes("/".join(stacks))
    layers = f"{scopes.place} {'/'.join(scopes.names)}".strip()
    return Place(line, layers, scopes.backward)


def _line(eqns: tuple[Any, ...]) -> str:
    # Rather the line of a primitive's call than those of what is cached inside it.
    wrappers = (n for n, eqn in enumerate(eqns) if eqn.primitive.name in _WRAPPERS and not is_opaque_call(eqn))
    wrapped = next(wrappers, len(eqns) - 1)
    for eqn in (*reversed(eqns[: wrapped + 1]), *eqns[wrapped + 1 :]):
        for frame in source_frames(eqn.source_info.traceback):
            if not is_library(frame.file_name):
                file = frame.file_name.rsplit(os.sep, 1)[-1]
                return f"{file}:{frame.start_line} in {frame.function_name.rsplit('.', 1)[-1]}"
    return ""
