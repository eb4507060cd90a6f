"""The context of the current trace, for code that runs while JAX traces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jax import Array


@dataclass
class Anchors:
    """The anchors of a differentiated function: its trace, its movements' anchors so far, its chain if any."""

    trace: Any
    found: list[Array]
    link: Array | None


@dataclass
class LossesOfTrace:
    """The losses found so far in the trace of a function that returns them, and their values."""

    trace: Any
    found: list[tuple[Any, Array]]


class TraceContext(threading.local):
    """The state of this thread's trace.

    - `anchors`: of the innermost function whose adjoints are ordered; see `adjoint_order`.
    - `movements_as_calls`: whether movements stay calls of a jitted function; otherwise they are inlined.
    - `sizes_agreed`: whether workers need not agree on the size of a `jax.vmap`, as in a program that is compared with
      the others'. A worker that maps nothing, since JAX replaced `y[array]` for an empty y by a constant, could not
      know that the others agree; the comparison names that constant.
    - `compared`: whether the program is compared between the workers as a whole, so that its parts need not be.
    - `adds_up`: the function that adds up the workers' results of the function that is traced; empty if none does.
    - `called_with`: the arguments of the outermost call of a checked function, which its trace sees as tracers.
    - `values`: the values of tracers where that call has them, by the tracer's id; see `known_values`.
    - `losses`: of the innermost checked function that is traced; None outside of one.
    - `is_first_call`: whether the current call of a checked function traced it.
    - `whole_program`: whether a function of whole arrays is traced, which will be distributed: nothing in it may move.
    - `to_compile`: whether all workers have agreed on the plan of a call that has yet to compile its program;
      `handled`: the exception that was being handled when they did.
    """

    anchors: Anchors | None = None
    movements_as_calls = False
    sizes_agreed = False
    compared = False
    adds_up = ""
    called_with: Any = None
    values: dict[int, tuple[Any, Any]] | None = None
    losses: LossesOfTrace | None = None
    is_first_call = False
    whole_program = False
    to_compile = False
    handled: BaseException | None = None

    @contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Set attributes inside."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)


trace_context = TraceContext()
