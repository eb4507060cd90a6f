"""Messages and team operations of traced programs over MPI: the only file that calls mpi4jax.

It handles, in one place, the tasks that mpi4jax leaves to its caller:

- *dtypes.* MPI has no bfloat16 or float16: they are sent as bits. (They are summed in float32, by the caller.)
- *Length.* MPI counts elements with a C int: longer messages are sent in chunks.
- *Hidden results.* On some workers mpi4jax returns its input, and drops the operation's own result; JAX may then drop
  the operation. Here the result depends on the operation on every worker.
- *Order.* XLA starts a receive without an operand as early as it can; here it has one.
- *Rematerialisation.* `jax.checkpoint` accepts the operations' effect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from mpi4py import MPI

from distdl_jax.errors import SetupError
from distdl_jax.jax_compat import add_dependency
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transports.mpi.compat import (
    as_parameter,
    import_mpi4jax,
    mpi_bcast,
    mpi_effect,
    mpi_operation,
    mpi_reduce,
)
from distdl_jax.transports.world import OutsideWorldError, Reduction, Workers
from distdl_jax.watchdog.programs.ir import Operation
from distdl_jax.watchdog.watch.abort import end_the_job
from distdl_jax.watchdog.watch.flight_recorder import recorded
from distdl_jax.watchdog.watch.log import log
from distdl_jax.watchdog.watch.thread_sampler import main_line

mpi4jax = import_mpi4jax()

MAX_ELEMENTS = 2**31 - 1
"""The largest number of elements in one MPI message."""

_OPS = {"sum": MPI.SUM, "max": MPI.MAX}

_MPI_DTYPES = {"bool", "float32", "float64", "complex64", "complex128"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}

BEFORE_ABORT = 2.0
"""Seconds that the watchdog is given when MPI fails: it compares the calls, and may find out more."""


class Communicators:
    """The communicators of the teams of one world, as created on one worker. Made by all workers of `comm`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        # A copy, since the user's may be freed.
        self._comm = comm.Dup()
        self.rank = comm.Get_rank()
        self._everyone = tuple(range(comm.Get_size()))
        # All operations use it for messages between two workers, so all workers create it now, at one place.
        self._of_team: dict[Workers, MPI.Intracomm] = {self._everyone: _reporting_errors(self._comm.Dup())}

    @property
    def messages(self) -> MPI.Intracomm:
        """The communicator of the whole world, in which every worker's rank is its world rank."""
        return self._of_team[self._everyone]

    def of_team(self, team: Workers) -> MPI.Intracomm:
        """Return the communicator of `team` (in the order of its ranks); its first use is collective in it."""
        if team not in self._of_team:
            if self.rank not in team:
                raise SetupError(f"Worker {self.rank} is not in the team {team}, so it has no communicator for it.")
            group = self._comm.Get_group().Incl(team)
            log.info("a communicator of the team %s is made", team)
            self._of_team[team] = _reporting_errors(self._comm.Create_group(group))
            group.Free()
        return self._of_team[team]

    def team_of(self, comm: MPI.Comm) -> Workers:
        """Return the world ranks of a communicator's workers, in the order of its ranks."""
        for team, known in self._of_team.items():
            if known == comm:
                return team
        return tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group()))

    @property
    def all_of_them(self) -> Iterable[tuple[Workers, MPI.Intracomm]]:
        """The existing ones, with their teams."""
        return self._of_team.items()

    def __len__(self) -> int:
        """Return the number of existing communicators."""
        return len(self._of_team)


def _reporting_errors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return `comm`, with an error handler that explains a failed operation before MPI's own message."""
    comm.Set_errhandler(_failed_operation())
    return comm


@cache
def _failed_operation() -> MPI.Errhandler:
    def end(comm: MPI.Comm, code: int) -> None:
        time.sleep(BEFORE_ABORT)
        end_the_job(
            f"Worker {MPI.COMM_WORLD.Get_rank()}: MPI failed in a compiled program, at {main_line()}. Most often the "
            "received message belongs to another operation, or has another length or dtype: the workers run different "
            f"programs. dj.jit compares them before they run. MPI says: {MPI.Get_error_string(code)}\n"
        )

    return MPI.Comm.Create_errhandler(end)


class MPITransport:
    """The operations of this worker over the communicators of its world."""

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators

    @property
    def effect(self) -> Any:
        return mpi_effect()

    def send(self, x: Array, dest: int, tag: int) -> Array:
        return _together([self._exchange(chunk, dest, None, MPI.PROC_NULL, tag) for chunk in _chunks(_as_sendable(x))])

    def receive(self, expected: ShapeDtype, source: int, tag: int, after: Array) -> Array:
        parts = [self._receive(chunk, source, tag, after) for chunk in _chunk_shape_dtypes(expected)]
        return _assembled(parts, expected)

    def sendrecv(self, x: Array, dest: int, expected: ShapeDtype, source: int, tag: int) -> Array:
        sent, coming = _chunks(_as_sendable(x)), _chunk_shape_dtypes(expected)
        both = min(len(sent), len(coming))
        parts = [
            self._exchange(chunk, dest, arriving, source, tag)
            for chunk, arriving in zip(sent[:both], coming[:both], strict=True)
        ]
        rest = [self._exchange(chunk, dest, None, MPI.PROC_NULL, tag) for chunk in sent[both:]]
        parts += [self._receive(arriving, source, tag, x) for arriving in coming[both:]]
        return _together([_assembled(parts, expected), *rest])

    def broadcast(self, x: Array, team: Workers) -> Array:
        # mpi4jax.bcast returns the root's input and hides the operation's own result: bind it, to tie the two.
        comm = as_parameter(self._communicators.of_team(team))
        results = []
        for chunk in _chunks(_as_sendable(x)):
            with recorded(f"bcast in the team {list(team)} ({chunk.size} x {chunk.dtype})", mpi_effect()):
                results.append(mpi_bcast().bind(chunk, root=0, comm=comm))
        if self._communicators.rank == team[0]:
            return sent_first(_together([x, *results]))
        return _assembled(results, ShapeDtype(tuple(x.shape), np.dtype(x.dtype)))

    def reduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        comm, mpi_op = as_parameter(self._communicators.of_team(team)), as_parameter(_OPS[op])
        results = []
        for chunk in _chunks(x):
            with recorded(f"reduce in the team {list(team)} ({chunk.size} x {chunk.dtype})", mpi_effect()):
                results.append(mpi_reduce().bind(chunk, op=mpi_op, root=0, comm=comm))
        if self._communicators.rank != team[0]:
            return _together([x, *results])
        return _assembled(results, ShapeDtype(tuple(x.shape), np.dtype(x.dtype)))

    def allreduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        comm = self._communicators.of_team(team)
        results = []
        for chunk in _chunks(x):
            with recorded(f"allreduce in the team {list(team)} ({chunk.size} x {chunk.dtype})", mpi_effect()):
                results.append(mpi4jax.allreduce(chunk, op=_OPS[op], comm=comm))
        return _assembled(results, ShapeDtype(tuple(x.shape), np.dtype(x.dtype)))

    def sent_first(self, x: Array) -> Array:
        return sent_first(x)

    def operation(self, equation: Any) -> Operation | None:
        named = mpi_operation(equation)
        if named is None:
            return None
        operation = _operation(*named, equation, self._communicators.team_of)
        if MPI.UNDEFINED in (*operation.team, operation.dest, operation.source):
            raise OutsideWorldError
        return operation

    def _receive(self, expected: ShapeDtype, source: int, tag: int, after: Array) -> Array:
        if after.size == 0:
            template = _not_before(after, jnp.zeros(expected.shape, expected.dtype))
            with recorded(f"recv from worker {source} ({expected.size} x {expected.dtype})", mpi_effect()):
                received: Array = mpi4jax.recv(template, source=source, tag=tag, comm=self._communicators.messages)
            return received
        # The operand is the preceding array, sent to no worker: all of it if the two will be summed, on a CPU, which
        # needs no copy for it. XLA's schedule depends on the number of steps before an operation: with one step more
        # than on the sender, this worker ran later computations before the message, and the sender had to wait.
        # Otherwise one element: an array that would be fused with its use need not be in memory.
        summed = after.shape == expected.shape and jax.default_backend() == "cpu"
        operand = after if summed else _first_element(after)
        return self._exchange(_as_sendable(operand), MPI.PROC_NULL, expected, source, tag)

    def _exchange(self, x: Array, dest: int, coming: ShapeDtype | None, source: int, tag: int) -> Array:
        expected = coming or ShapeDtype((0,), np.dtype(x.dtype))
        halves = [] if dest == MPI.PROC_NULL else [f"send to worker {dest} ({x.size} x {x.dtype})"]
        halves += [] if coming is None else [f"recv from worker {source} ({coming.size} x {coming.dtype})"]
        template = _not_before(x, jnp.zeros(expected.shape, expected.dtype))
        comm = self._communicators.messages
        with recorded(" and ".join(halves), mpi_effect()):
            received: Array = mpi4jax.sendrecv(
                x, template, source=source, dest=dest, sendtag=tag, recvtag=tag, comm=comm
            )
        return received


# XLA runs ready operations in its own order, and an optimization barrier is gone before it decides on that. So a worker
# that both sends an array and multiplies it might multiply first, while the others wait for it.
def sent_first(x: Array) -> Array:
    """Order the uses of `x` after the messages traced so far, without a copy. Only on CPUs."""
    result: Array = _sent_first.bind(x)
    return result


def _on_cpu(context: Any, x: Any) -> list[Any]:
    effect = mpi_effect()
    token = context.tokens_in.get(effect)
    context.set_tokens_out(mlir.TokenSet({effect: token}))
    return [add_dependency(context, x, token)]


def _elsewhere(context: Any, x: Any) -> list[Any]:
    context.set_tokens_out(context.tokens_in)
    return [x]


_sent_first = Primitive("sent_first")
_sent_first.def_impl(lambda x: x)
_sent_first.def_effectful_abstract_eval(lambda x: (x, {mpi_effect()}))
batching.primitive_batchers[_sent_first] = lambda args, dims: (sent_first(*args), *dims)
mlir.register_lowering(_sent_first, _elsewhere)
mlir.register_lowering(_sent_first, _on_cpu, platform="cpu")


def _not_before(earlier: Array, x: Array) -> Array:
    """Order `x` after `earlier`."""
    return lax.optimization_barrier((x, earlier))[0]


def _together(results: list[Array]) -> Array:
    """Return the first array, tied to all of them."""
    return results[0] if len(results) == 1 else lax.optimization_barrier(tuple(results))[0]


def _first_element(x: Array) -> Array:
    # Of x behind a barrier: XLA would move the slice into the computation of x, and compute that element separately.
    x = lax.optimization_barrier(x)
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(1)


def _sendable_dtype(dtype: np.dtype) -> np.dtype:
    """Return `dtype`, or the unsigned integer of its width if MPI does not know it."""
    return np.dtype(dtype) if np.dtype(dtype).name in _MPI_DTYPES else np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def _as_sendable(x: Array) -> Array:
    dtype = _sendable_dtype(np.dtype(x.dtype))
    return x if dtype == x.dtype else lax.bitcast_convert_type(x, dtype)


def _chunk_shape_dtypes(whole: ShapeDtype) -> list[ShapeDtype]:
    """Return the shapes and dtypes of the messages for an array."""
    dtype = _sendable_dtype(whole.dtype)
    if whole.size <= MAX_ELEMENTS:
        # Not flat: XLA's loops over a reshaped array are several times slower.
        return [ShapeDtype(whole.shape, dtype)]
    full, rest = divmod(whole.size, MAX_ELEMENTS)
    return [ShapeDtype((size,), dtype) for size in [MAX_ELEMENTS] * full + [rest] * (rest > 0)]


def _chunks(x: Array) -> list[Array]:
    """Cut `x` into messages."""
    if x.size <= MAX_ELEMENTS:
        return [x]
    starts = range(0, x.size, MAX_ELEMENTS)
    return [x.reshape(-1)[start : start + MAX_ELEMENTS] for start in starts]


def _assembled(parts: list[Array], whole: ShapeDtype) -> Array:
    """Assemble the array that arrived as `parts`."""
    array = parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])
    if array.dtype != whole.dtype:
        array = lax.bitcast_convert_type(array, whole.dtype)
    return array.reshape(whole.shape)


def _operation(
    kind: str, params: dict[str, Any], equation: Any, team_of: Callable[[MPI.Intracomm], Workers]
) -> Operation:
    """Translate one of mpi4jax's equations into an operation of a program."""
    team, given = team_of(params["comm"]), equation.invars[0].aval

    def worker(name: str) -> int | None:
        rank = int(params.get(name, MPI.PROC_NULL))
        return None if rank in (MPI.PROC_NULL, MPI.ANY_SOURCE) else team[rank]

    dest, source = worker("dest"), worker("source")
    from_any = params.get("source") == MPI.ANY_SOURCE
    recv_tag = int(params.get("recvtag", params.get("tag", 0)))
    if kind == "sendrecv":
        # A message is sent, or received, as one half of an operation that has an output.
        kind = "recv" if dest is None else "send" if source is None and not from_any else kind
    arriving = equation.outvars[0].aval if equation.outvars else given
    if kind == "recv":
        given = arriving  # the input only orders the message
    return Operation(
        kind,
        team,
        dest=dest,
        source=source,
        send_tag=int(params.get("sendtag", params.get("tag", 0))),
        recv_tag=None if recv_tag == MPI.ANY_TAG else recv_tag,
        root=worker("root"),
        count=math.prod(given.shape),
        received=math.prod(arriving.shape) if equation.outvars else 0,
        dtype=given.dtype.name,
        received_dtype=arriving.dtype.name if kind == "sendrecv" else "",
        itemsize=given.dtype.itemsize,
        op=_op_name(params["op"]) if "op" in params else "",
        from_any=from_any,
    )


def _op_name(op: MPI.Op) -> str:
    return next((name for name in ("SUM", "MAX", "MIN", "PROD", "LAND", "LOR") if op == getattr(MPI, name)), "another")
