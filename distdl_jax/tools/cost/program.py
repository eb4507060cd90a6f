"""Traced programs as flat lists of operations, without JAX's nested calls, and their arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from distdl_jax.functional.mark import Mark, mark_of
from distdl_jax.tracing.jaxprs import Branches, Call, Scan, While, bodies, structure


class Value(NamedTuple):
    """An array of a program: its number, shape and dtype."""

    number: int
    aval: Any

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.aval.shape) * int(getattr(self.aval.dtype, "itemsize", 0))


class ProgramStep(NamedTuple):
    """An operation of a program, from its arguments, without constants, to its results."""

    eqn: Any
    args: tuple[Value, ...]
    results: tuple[Value, ...]

    @property
    def name(self) -> str:
        """JAX's name of the operation."""
        return str(self.eqn.primitive.name)

    @property
    def mark(self) -> Mark | None:
        """The movement in it, if it is one."""
        return mark_of(self.eqn)

    @property
    def is_passed(self) -> bool:
        """Whether it is a movement in which the worker takes no part."""
        return self.mark is not None and not self.mark.moves


class Program(NamedTuple):
    """A program without calls; loops and branches are operations of it."""

    args: tuple[Value, ...]
    steps: tuple[ProgramStep, ...]
    results: tuple[Value | None, ...]

    @classmethod
    def of(cls, jaxpr: Any) -> Program:
        """Return the program of a jaxpr."""
        reader = _StepReader()
        args = [reader.value(var.aval) for var in jaxpr.invars]
        results = reader.read(jaxpr, args)
        return cls(tuple(args), tuple(reader.steps), tuple(results))

    def needed_for(self, results: Iterable[Value | None]) -> Program:
        """Return the part of the program that computes some of its results."""
        wanted = {value for value in results if value is not None}
        kept: list[ProgramStep] = []
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
        """The movements, in order: in a loop as often as it runs, or once if that is not known."""
        return [mark for step in self.steps for mark in marks_in(step.eqn)]


class _StepReader:
    def __init__(self) -> None:
        self.steps: list[ProgramStep] = []
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
            if eqn.primitive.name == "add_any" and len(rest) == 1:  # the other is a tied value's cotangent
                values[eqn.outvars[0]] = rest[0]
                continue
            match structure(eqn):
                case Call(_, body) if len(body.jaxpr.invars) == len(of_eqn):
                    results = self.read(body.jaxpr, of_eqn)
                case _:
                    made = [self.value(var.aval) for var in eqn.outvars]
                    results = list(made)
                    given = tuple(value for value in of_eqn if value is not None)
                    self.steps.append(ProgramStep(eqn, given, tuple(made)))
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


_PASSED = {
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "concatenate", "pad", "convert_element_type"),
    *("copy", "optimization_barrier", "dynamic_slice", "gather", "iota", "rev", "stop_gradient", "select_n"),
    *("dynamic_update_slice", "bitcast_convert_type", "split", "real", "imag", "complex", "copy_p"),
    *("moved", "cotangent", "layout_constraint", "random_seed", "random_wrap", "random_unwrap"),
    *("tie", "passed_to_layer", "tangent_of_a_parameter"),
}
"""Operations that only rearrange numbers."""


def flops_in(jaxpr: Any) -> int:
    """Return the flops of a program."""
    return sum(map(flops_of, jaxpr.eqns))


def flops_of(eqn: Any) -> int:
    """Return the flops of an equation.

    Loops count as often as they run, or once if that is unknown; the most expensive branch counts.
    """
    match structure(eqn):
        case Scan(body, length):
            return length * flops_in(body.jaxpr)
        case While(condition, body):
            return flops_in(condition.jaxpr) + flops_in(body.jaxpr)
        case Branches(branches):
            return max(flops_in(branch.jaxpr) for branch in branches)
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](eqn)
    if inner := bodies(eqn):
        return flops_in(inner[0])
    if name in _PASSED or not eqn.outvars or not hasattr(eqn.outvars[0].aval, "shape"):
        return 0
    if name.startswith(("reduce_", "arg", "cum")):
        return _size(eqn.invars[0].aval)
    return _size(eqn.outvars[0].aval)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _product(eqn: Any) -> int:
    """Return twice the number of products; a complex product is four real ones."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    y = eqn.outvars[0].aval
    return (
        (8 if np.issubdtype(y.dtype, np.complexfloating) else 2)
        * _size(y)
        * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    )


def _convolution(eqn: Any) -> int:
    """Return twice the number of products, without those on padding and on zeros of a dilated input."""
    x, weight, y = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    lhs, rhs, out = eqn.params["dimension_numbers"]
    pairs = 1
    for d, (low, _) in enumerate(eqn.params["padding"]):
        outputs, taps = np.arange(y[out[d + 2]]), np.arange(weight[rhs[d + 2]])
        dilation = eqn.params["lhs_dilation"][d]
        at = outputs[:, None] * eqn.params["window_strides"][d] + taps * eqn.params["rhs_dilation"][d] - low
        inside = (at >= 0) & (at < (x[lhs[d + 2]] - 1) * dilation + 1) & (at % dilation == 0)
        pairs *= int(inside.sum())
    batch = x[lhs[0]] // eqn.params["batch_group_count"]
    return 2 * batch * weight[rhs[0]] * weight[rhs[1]] * pairs


def _fourier_transform(eqn: Any) -> int:
    n = math.prod(eqn.params["fft_lengths"])
    return int(5 * max(_size(eqn.invars[0].aval), _size(eqn.outvars[0].aval)) * math.log2(max(n, 2)))


_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "fft": _fourier_transform,
    "simulated_operation": lambda eqn: 0,
    "ffi_call": lambda eqn: 0,
}
