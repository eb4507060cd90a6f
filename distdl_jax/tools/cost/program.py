"""Traced programs as lists of operations, without the calls that JAX nests them in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from distdl_jax.functional.mark import Mark, mark_of
from distdl_jax.tools.cost.flops import flops_of
from distdl_jax.tracing.jaxprs import Branches, Call, Scan, While, structure


class Value(NamedTuple):
    """An array of a program: its number, and its shape and dtype."""

    number: int
    aval: Any

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.aval.shape) * int(getattr(self.aval.dtype, "itemsize", 0))


class Step(NamedTuple):
    """An operation of a program, from its arguments, constants left out, to its results."""

    eqn: Any
    args: tuple[Value, ...]
    results: tuple[Value, ...]

    @property
    def name(self) -> str:
        """JAX's name of the operation."""
        return str(self.eqn.primitive.name)

    @property
    def mark(self) -> Mark | None:
        """The movement that it is, if it is one."""
        return mark_of(self.eqn)

    @property
    def is_passed(self) -> bool:
        """Whether it is a movement in which the worker has no part."""
        return self.mark is not None and not self.mark.moves


class Program(NamedTuple):
    """A program without calls: loops and branches are operations of it."""

    args: tuple[Value, ...]
    steps: tuple[Step, ...]
    results: tuple[Value | None, ...]

    @classmethod
    def of(cls, jaxpr: Any) -> Program:
        """Return the program of a jaxpr."""
        reader = _Reader()
        args = [reader.value(var.aval) for var in jaxpr.invars]
        results = reader.read(jaxpr, args)
        return cls(tuple(args), tuple(reader.steps), tuple(results))

    def needed_for(self, results: Iterable[Value | None]) -> Program:
        """Return the part of the program that makes some of its results."""
        wanted = {value for value in results if value is not None}
        kept: list[Step] = []
        for step in reversed(self.steps):
            if any(value in wanted for value in step.results):
                kept.append(step)
                wanted.update(step.args)
        return Program(self.args, tuple(reversed(kept)), tuple(results))

    @property
    def flops(self) -> int:
        """Its multiplications and additions, as XLA counts them."""
        return sum(flops_of(step.eqn) for step in self.steps)

    @property
    def marks(self) -> list[Mark]:
        """The movements, in order: in a loop as often as it runs, once where that is not known."""
        return [mark for step in self.steps for mark in marks_in(step.eqn)]

    @property
    def has_loops(self) -> bool:
        """Whether it has operations that are programs themselves."""
        return any(structure(step.eqn) is not None for step in self.steps)


class _Reader:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.zeros: set[Value | None] = set()
        self._count = 0

    def value(self, aval: Any) -> Value:
        self._count += 1
        return Value(self._count, aval)

    def read(self, jaxpr: Any, args: Sequence[Value | None]) -> list[Value | None]:
        values: dict[Any, Value | None] = dict(zip(jaxpr.invars, args, strict=True))

        def of(atom: Any) -> Value | None:
            return None if isinstance(atom, Literal) else values.get(atom)

        for eqn in jaxpr.eqns:
            of_eqn = [of(atom) for atom in eqn.invars]
            rest = [value for value in of_eqn if value not in self.zeros]
            if eqn.primitive.name == "add_any" and len(rest) == 1:  # the other is the cotangent of what is only tied
                values[eqn.outvars[0]] = rest[0]
                continue
            match structure(eqn):
                case Call(_, body) if len(body.jaxpr.invars) == len(of_eqn):
                    results = self.read(body.jaxpr, of_eqn)
                case _:
                    made = [self.value(var.aval) for var in eqn.outvars]
                    results = list(made)
                    given = tuple(value for value in of_eqn if value is not None)
                    self.steps.append(Step(eqn, given, tuple(made)))
                    if _is_zero(eqn) or (eqn.primitive.name == "tie" and of_eqn[0] in self.zeros):
                        self.zeros.update(made)
            values.update(zip(eqn.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]


def _is_zero(eqn: Any) -> bool:
    """Return whether an equation makes an array of zeros."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    value, *others = eqn.invars
    return not others and isinstance(value, Literal) and not np.any(value.val)


def marks_in(eqn: Any) -> Iterator[Mark]:
    """Yield the movements of an equation, and of the programs in it."""
    if (mark := mark_of(eqn)) is not None:
        yield mark
        return
    match structure(eqn):
        case Scan(body, length):
            yield from length * _marks(body)
        case While(condition, body):
            yield from (*_marks(condition), *_marks(body))
        case Branches(branches):
            yield from max(map(_marks, branches), key=len)
        case Call(_, body):
            yield from _marks(body)


def _marks(program: Any) -> list[Mark]:
    return [mark for eqn in program.jaxpr.eqns for mark in marks_in(eqn)]
