"""Reads off a traced program what it communicates."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from jax._src import source_info_util
from jax.extend.core import jaxprs_in_params
from mpi4py import MPI

from distdl_jax.backends.mpi.board import is_library
from distdl_jax.backends.mpi.communicators import World
from distdl_jax.plans.programs import Choice, Loop, Operation, Place, Program

# What a primitive is made of. What these hold was traced once, for the first caller; the call has its own line.
_WRAPPERS = ("custom_vjp_call", "custom_vmap_call")


def read_program(world: World, jaxpr: Any) -> Program:
    """What a traced program communicates, in the order in which it does."""
    return tuple(_Reader(world).read(jaxpr, ()))


class _Reader:
    def __init__(self, world: World) -> None:
        self._world = world
        self._teams: dict[int, tuple[int, ...]] = {}

    def read(self, jaxpr: Any, around: tuple[Any, ...]) -> Iterator[Operation | Loop | Choice]:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            inside = (*around, eqn)
            if name.endswith("_mpi"):
                yield self._operation(name.removesuffix("_mpi"), eqn, _place(inside))
            elif name == "scan":
                yield Loop(eqn.params["length"], self._body(eqn.params["jaxpr"], inside), _place(inside))
            elif name == "while":
                test = self._body(eqn.params["cond_jaxpr"], inside)
                yield from test
                yield Loop(None, self._body(eqn.params["body_jaxpr"], inside) + test, _place(inside))
            elif name == "cond":
                yield Choice(tuple(self._body(branch, inside) for branch in eqn.params["branches"]), _place(inside))
            else:
                for inner in jaxprs_in_params(eqn.params):
                    yield from self.read(inner, inside)

    def _body(self, closed: Any, around: tuple[Any, ...]) -> Program:
        return tuple(self.read(closed.jaxpr, around))

    def _operation(self, kind: str, eqn: Any, place: Place) -> Operation:
        params = eqn.params
        team = self._team(params["comm"].wrapped)
        given = eqn.invars[0].aval

        def worker(name: str) -> int | None:
            rank = int(params.get(name, MPI.PROC_NULL))
            return None if rank == MPI.PROC_NULL else team[rank]

        dest, source = worker("dest"), worker("source")
        if kind == "sendrecv":
            # Half of one is how a message is sent, or received, in one operation that has an output.
            kind = "recv" if dest is None else "send" if source is None else kind
        return Operation(
            kind,
            team,
            dest=dest,
            source=source,
            send_tag=int(params.get("sendtag", params.get("tag", 0))),
            recv_tag=int(params.get("recvtag", params.get("tag", 0))),
            root=worker("root"),
            count=_size(given),
            received=_size(eqn.outvars[0].aval) if eqn.outvars else 0,
            dtype=given.dtype.name,
            itemsize=given.dtype.itemsize,
            op=_op_name(params["op"].wrapped) if "op" in params else "",
            place=place,
        )

    def _team(self, comm: MPI.Intracomm) -> tuple[int, ...]:
        handle = MPI._handleof(comm)
        if handle not in self._teams:
            self._teams[handle] = self._world.team_of(comm)
        return self._teams[handle]


def _size(aval: Any) -> int:
    return math.prod(aval.shape)


def _op_name(op: MPI.Op) -> str:
    return next((name for name in ("SUM", "MAX", "MIN", "PROD", "LAND", "LOR") if op == getattr(MPI, name)), "another")


def _place(eqns: tuple[Any, ...]) -> Place:
    """Where the innermost of `eqns` comes from."""
    return _place_of(_line(eqns), tuple(str(eqn.source_info.name_stack) for eqn in eqns))


@lru_cache(maxsize=4096)
def _place_of(line: str, stacks: tuple[str, ...]) -> Place:
    names = [name for stack in stacks for name in stack.split("/") if name]
    layers = [name for name in map(_bare, names) if name]
    return Place(line, "/".join(dict.fromkeys(layers)), any("transpose(" in name for name in names))


def _bare(name: str) -> str:
    """The scope's own name, out of the transformations around it: `transpose(jvp(DistributedLinear))`."""
    while name.endswith(")") and name.split("(", 1)[0] in ("transpose", "jvp", "vmap", "jit", "checkpoint", "rematted"):
        name = name.split("(", 1)[1][:-1]
    return "" if name in ("while", "body", "cond", "checkpoint", "closed_call") else name


def _line(eqns: tuple[Any, ...]) -> str:
    # Rather the line of a primitive's call than those of what is cached inside it.
    wrapped = next((n for n, eqn in enumerate(eqns) if eqn.primitive.name in _WRAPPERS), len(eqns) - 1)
    for eqn in (*reversed(eqns[: wrapped + 1]), *eqns[wrapped + 1 :]):
        for frame in _frames(eqn.source_info.traceback):
            file = frame.file_name.rsplit(os.sep, 1)[-1]
            return f"{file}:{frame.start_line} in {frame.function_name.rsplit('.', 1)[-1]}"
    return ""


def _frames(traceback: Any) -> Iterable[Any]:
    if traceback is None:
        return
    for frame in source_info_util.user_frames(traceback):
        if not is_library(frame.file_name):
            yield frame
