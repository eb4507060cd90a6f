"""The world of one worker that is a thread, and its transport: messages and team operations of traced programs between
threads, as Python calls in the order of a token.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from distdl_jax.errors import SetupError
from distdl_jax.jax_compat import ordered_effect, wait_for_program
from distdl_jax.kernels.dtypes import wide_as
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.source_lines import user_line
from distdl_jax.tracing.program_reader import place_of
from distdl_jax.transports.nan_check import refuse_to_run_again
from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.participant import AGREEMENT
from distdl_jax.transports.threads.rendezvous import Rendezvous
from distdl_jax.transports.world import Reduction, Workers, World
from distdl_jax.watchdog.programs.ir import Operation, Place, Program


class ThreadWorld:
    """Worker `rank` of those that meet at `rendezvous`.

    - `stands_for`: the world whose partitions it represents; None for the program's own.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous, stands_for: World | None = None) -> None:
        self.stands_for = stands_for
        self.rank = rank
        self.size = len(rendezvous.workers)
        self.transport = ThreadTransport(rank, rendezvous)
        self.calls = None  # the places where its workers wait are known without it
        self.may_measure = False  # the other workers compute in this process, too
        self.records = False
        self._rendezvous = rendezvous

    def agree(
        self, team: Workers, label: str, contribution: Any, decide: Callable[[dict[int, Any]], Any] = dict
    ) -> Any:
        if simulated_world.value is not self:
            raise SetupError(
                f"A partition that worker {self.rank} of dj.simulate has made is used by another worker, or outside: "
                "every worker must make its own, in the program that it runs, not in a shared variable."
            )
        if len(team) == 1:
            return decide({self.rank: contribution})
        refuse_to_run_again(self.rank)
        # A program with inputs copied from elsewhere runs once they arrive, in another thread.
        wait_for_program(self.transport.effect)
        operation = Operation(AGREEMENT, team, op=label, place=Place(user_line()))
        # Pickled, as between processes: no worker holds an object that another may change.
        gathered = self._rendezvous.perform(self.rank, operation, pickle.dumps(contribution))
        if self.rank != team[0]:
            return pickle.loads(gathered)
        others = {worker: pickle.loads(packed) for worker, packed in gathered.items() if worker != self.rank}
        decision = decide({self.rank: contribution, **others})
        self._rendezvous.tell(team, pickle.dumps(decision))
        return decision

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Do nothing: the operations in which workers wait are known."""

    def check_devices(self) -> None:
        """Accept any devices: every worker has its own."""


class ThreadTransport:
    """The operations of this worker at the rendezvous of its world."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self._rank = rank
        self._rendezvous = rendezvous

    @property
    def effect(self) -> Any:
        return _effect

    def send(self, x: Array, dest: int, tag: int) -> Array:
        return self._message("send", x, dest, _nothing(x), None, tag)

    def receive(self, expected: ShapeDtype, source: int, tag: int, after: Array) -> Array:
        # An element of the preceding array is the operand: XLA starts operations without one as early as it can.
        operand = after if after.size == 0 else _first_element(after)
        return self._message("recv", operand, None, expected, source, tag)

    def sendrecv(self, x: Array, dest: int, expected: ShapeDtype, source: int, tag: int) -> Array:
        return self._message("sendrecv", x, dest, expected, source, tag)

    def broadcast(self, x: Array, team: Workers) -> Array:
        if self._rank == team[0]:
            return _together(x, self._collective("bcast", x, team, _nothing(x)))
        return self._collective("bcast", x, team, _like(x))

    def reduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        if self._rank == team[0]:
            return self._collective("reduce", x, team, _like(x), op)
        return _together(x, self._collective("reduce", x, team, _nothing(x), op))

    def allreduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        return self._collective("allreduce", x, team, _like(x), op)

    def sent_first(self, x: Array) -> Array:
        return x  # an order that only affects time

    def operation(self, equation: Any) -> Operation | None:
        operation: Operation | None = equation.params["operation"] if equation.primitive is _operation else None
        return operation

    def _message(
        self, kind: str, x: Array, dest: int | None, coming: ShapeDtype, source: int | None, tag: int
    ) -> Array:
        sent = coming if kind == "recv" else _like(x)
        operation = Operation(
            kind,
            tuple(range(len(self._rendezvous.workers))),
            dest=dest,
            source=source,
            send_tag=tag,
            recv_tag=tag,
            count=sent.size,
            received=coming.size,
            dtype=sent.dtype.name,
            received_dtype=coming.dtype.name if kind == "sendrecv" else "",
            itemsize=sent.dtype.itemsize,
        )
        return self._bind(x, operation, coming)

    def _collective(self, kind: str, x: Array, team: Workers, coming: ShapeDtype, op: str = "") -> Array:
        root = None if kind == "allreduce" else team[0]
        dtype = np.dtype(x.dtype)
        operation = Operation(
            kind, team, root=root, count=x.size, dtype=dtype.name, itemsize=dtype.itemsize, op=op.upper()
        )
        return self._bind(x, operation, coming)

    def _bind(self, x: Array, operation: Operation, coming: ShapeDtype) -> Array:
        result: Array = _operation.bind(x, transport=self, operation=operation, coming=coming)
        return result

    def perform(self, operation: Operation, given: np.ndarray, coming: ShapeDtype) -> np.ndarray:
        """Carry out one operation, while the program runs."""
        result = self._rendezvous.perform(self._rank, operation, given)
        return np.zeros(coming.shape, coming.dtype) if result is None else result.reshape(coming.shape)


def _like(x: Array) -> ShapeDtype:
    return ShapeDtype(tuple(x.shape), np.dtype(x.dtype))


def _nothing(x: Array) -> ShapeDtype:
    return ShapeDtype((0,), np.dtype(x.dtype))


def _together(x: Array, result: Array) -> Array:
    """Return `x`, tied to the result."""
    return lax.optimization_barrier((x, result))[0]


def _first_element(after: Array) -> Array:
    # Of it behind a barrier: XLA would move the slice into `after`'s computation, and compute that element separately.
    after = lax.optimization_barrier(after)
    return lax.slice(after, (0,) * after.ndim, (1,) * after.ndim).reshape(1)


_effect = ordered_effect("simulated messages")


class _Results(tuple[np.ndarray]):
    """The results of a callback. Outside of `jax.enable_x64` JAX would make them narrower when it reads them."""

    def __iter__(self) -> Iterator[np.ndarray]:
        with wide_as(tuple(super().__iter__())):
            yield from super().__iter__()


def _lowered(ctx: Any, x: Any, *, transport: ThreadTransport, operation: Operation, coming: ShapeDtype) -> Any:
    operation = replace(operation, place=place_of("", (str(ctx.name_stack),)))

    def call(given: np.ndarray) -> tuple[np.ndarray]:
        return _Results([transport.perform(operation, given, coming)])

    results, token, _ = mlir.emit_python_callback(
        ctx, call, ctx.tokens_in.get(_effect), [x], ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_effect: token})))
    return results


def _abstract(x: Any, *, coming: ShapeDtype, **_: Any) -> Any:
    return ShapedArray(coming.shape, coming.dtype), {_effect}


def _eager(x: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # it would come back here
        return jax.jit(lambda x: _operation.bind(x, **params))(x)


_operation = Primitive("simulated_operation")
_operation.def_impl(_eager)
_operation.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(_operation, _lowered, cacheable=False)
