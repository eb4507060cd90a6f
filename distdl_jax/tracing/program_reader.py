"""Determines the communication of a traced program, and the empty arrays that it moves as constants."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import jax

from distdl_jax.errors import CONSTANTS
from distdl_jax.jax_compat import name_and_params, source_frames
from distdl_jax.source_lines import is_library
from distdl_jax.tracing.adjoint_order import anchor_of
from distdl_jax.tracing.closures import paths_of
from distdl_jax.tracing.jaxprs import Branches, DataFlow, OperationReader, Scan, While, is_opaque_call, structure
from distdl_jax.tracing.marks import is_start_of_movement, layer_called
from distdl_jax.tracing.scopes import movement_numbers, movements_around, read_scopes
from distdl_jax.watchdog.programs.ir import (
    Cond,
    Flow,
    LayerCall,
    Loop,
    Operation,
    Origin,
    PartOf,
    Place,
    Program,
    Result,
)

# Primitives' own operations. The contents of these were traced once, for the first caller; the call has its own line.
_WRAPPERS = ("custom_vjp_call", "custom_vmap_call")


def read_program(transport: OperationReader, jaxpr: Any) -> Program:
    """Return the communication of a traced program, in order."""
    reader, _ = _read(transport, jaxpr, ())
    return tuple(reader.items)


def read_flow(
    transport: OperationReader, jaxpr: Any, consts: Sequence[Any] = (), variables: Mapping[str, Any] | None = None
) -> tuple[Program, Flow]:
    """Return the communication of a traced program, and the origins of its results.

    - `consts`: the values of its constants.
    - `variables`: the traced function and its static arguments, in which constants are found.
    """
    reader, flow = _read(transport, jaxpr, consts)
    flow = flow._replace(constants=_named_constants(reader, flow, variables or {}))
    taken = (_read(transport, jaxpr, consts, branch)[1] for branch in range(reader.branches))
    return tuple(reader.items), flow._replace(branches=tuple(one._replace(constants=flow.constants) for one in taken))


def _read(
    transport: OperationReader, jaxpr: Any, consts: Sequence[Any], branch: int | None = None
) -> tuple[_Reader, Flow]:
    """Read a program, with the values of any branch of its conditionals, or of one; numbers are the same each time."""
    reader = _Reader(transport, len(jaxpr.invars), branch)
    origins = reader.run(jaxpr, [1 << leaf for leaf in range(len(jaxpr.invars))], consts)
    names, paths = (list(found or ()) for found in (jaxpr.debug_info.arg_names, jaxpr.debug_info.result_paths))
    names += [""] * (len(jaxpr.invars) - len(names))
    results = (
        Result(path or "", atom.aval.str_short(), origin)
        for path, atom, origin in zip(paths, jaxpr.outvars, origins, strict=False)
    )
    return reader, Flow(
        tuple(name or "" for name in names), tuple(reader.movements), tuple(reader.layers.values()), tuple(results)
    )


def _named_constants(reader: _Reader, flow: Flow, variables: Mapping[str, Any]) -> tuple[tuple[int, str], ...]:
    """Return the numbers and the paths of the constants that are passed to movements and layers."""
    passed = reduce(or_, (*flow.movements, *(layer.origin for layer in flow.layers)), 0) >> len(flow.arguments)
    constants = {number: value for number, value in reader.constants.items() if passed >> number & 1}
    if not constants or not variables:
        return ()
    paths = paths_of(list(constants.values()), variables)
    return tuple((number, path) for number, path in zip(constants, paths, strict=True) if path)


class _Reader(DataFlow[Origin]):
    """Collects the operations of a program, while it follows the origin of each value.

    - `items`: the operations, loops and conditionals of the current body.
    - `movements`: the origins of the inputs of each call of a movement. `layers`: the calls of layers.
    - `constants`: the arrays that are constants, by their numbers, which no movement has.
    - `branches`: the most branches of a conditional that deliver different values; 0 if there is none.
    """

    of_literals = of_constants = unknown = 0

    def __init__(self, transport: OperationReader, leaves: int, branch: int | None = None) -> None:
        self._transport = transport
        self._leaves = leaves
        self._branch = branch
        self.branches = 0
        self.items: list[Operation | Loop | Cond] = []
        self.movements: list[Origin] = []
        self.constants: dict[int, Any] = {}
        self.layers: dict[tuple[int, ...], LayerCall] = {}
        self._around: tuple[Any, ...] = ()
        self._read: dict[int, Program] = {}  # the bodies read last, by identity
        self._began: tuple[list[str], int] = [], 0  # the last movement started: its scopes' numbers, and its own
        # Numbered in order, so that a program traced again is the same.
        self._numbers: dict[str | tuple[str, ...], int] = {}
        self._calls: dict[tuple[int, ...], int] = {}

    def equation(self, eqn: Any, args: list[Origin]) -> list[Origin]:
        if (operation := self._transport.operation(eqn)) is not None:
            return [self._add(operation, eqn, args)] * len(eqn.outvars)
        if eqn.primitive.name == "tie":
            # The order of movements is not a passed value; the output of a layer without data there is.
            return [args[0] or reduce(or_, args)]
        if is_start_of_movement(eqn):
            return [self._begin(eqn, args[0])]
        if (layer := layer_called(eqn)) is not None:
            eqns = (*self._around, eqn)
            self.layers[tuple(map(id, eqns))] = LayerCall(layer, _line(eqns), args[0])
            return args
        if isinstance(parts := structure(eqn), While):
            origins = self._while(eqn, parts, args)
        else:
            found = self.through_bodies(eqn, args)
            origins = [reduce(or_, args, 0)] * len(eqn.outvars) if found is None else found
        match parts:
            case Scan(body, length) if items := self._read.get(id(body.jaxpr)):
                self.items.append(Loop(length, items, _place((*self._around, eqn))))
            case Branches(branches):
                programs = tuple(self._read[id(branch.jaxpr)] for branch in branches)
                if any(programs):
                    self.items.append(Cond(programs, _place((*self._around, eqn))))
        return origins

    def taken(self, of_branches: Sequence[Sequence[Origin]]) -> list[Origin]:
        if any(origins != of_branches[0] for origins in of_branches):
            self.branches = max(self.branches, len(of_branches))
        if self._branch is None:
            return super().taken(of_branches)
        return list(of_branches[min(self._branch, len(of_branches) - 1)])

    def constant(self, value: Any) -> Origin:
        number = self._calls.setdefault((id(value),), len(self._calls))
        if number not in self.constants:
            self.constants[number] = value
            self.movements.append(0)
        return 1 << self._leaves + number

    def literal(self, value: Any) -> Origin:
        # Also a constant, under jax_use_simplified_jaxpr_constants. Numbers are no data: workers may choose signs.
        return self.constant(value) if isinstance(value, jax.Array) or getattr(value, "ndim", 0) > 0 else 0

    def join(self, one: Origin, other: Origin) -> Origin:
        return one | other

    def body(self, eqn: Any, jaxpr: Any, args: Sequence[Origin], consts: Sequence[Any] = ()) -> list[Origin]:
        items, around = self.items, self._around
        is_called = not isinstance(structure(eqn), Scan | While | Branches)
        self.items, self._around = items if is_called else [], (*around, eqn)
        origins = self.run(jaxpr, args, consts)
        if not is_called:
            self._read[id(jaxpr)] = tuple(self.items)
        self.items, self._around = items, around
        return origins

    def _while(self, eqn: Any, loop: While, args: list[Origin]) -> list[Origin]:
        constants, of_body = args[: loop.condition_constants], args[loop.condition_constants :]
        first = slice(loop.body_constants, None)
        self.body(eqn, loop.condition.jaxpr, [*constants, *of_body[first]], loop.condition.consts)
        test = self._read[id(loop.condition.jaxpr)]
        origins = self.through_loop(eqn, loop.body, of_body, first)
        body = self._read[id(loop.body.jaxpr)]
        self.items += test
        if body or test:
            self.items.append(Loop(None, body + test, _place((*self._around, eqn))))
        return list(map(self.join, of_body[first], origins))

    def _begin(self, eqn: Any, origin: Origin) -> Origin:
        """Record the start of a movement; return the origin of all its results."""
        eqns = (*self._around, eqn)
        number = self._calls.setdefault(tuple(map(id, eqns)), len(self._calls))
        self.movements[number:] = [origin, *self.movements[number + 1 :]]  # once more, if a loop is read again
        self._began = movement_numbers("/".join(_stacks(eqns)))[-1:], number
        return 1 << self._leaves + number

    def _add(self, operation: Operation, eqn: Any, args: list[Origin]) -> Origin:
        eqns = (*self._around, eqn)
        stacks = _stacks(eqns)
        scopes, place = "/".join(stacks), place_of(_line(eqns), stacks)
        scope, number = self._began
        call = number if scope and scope == movement_numbers(scopes)[-1:] else None
        movements = [
            PartOf(self._numbers.setdefault(key, len(self._numbers) + 1), is_adjoint)
            for key, is_adjoint in movements_around(scopes)
        ]
        self.items.append(replace(operation, movements=tuple(movements), call=call, place=place))
        return reduce(or_, args, 0) if call is None else 1 << self._leaves + call


def line_of_equation(eqn: Any) -> str:
    """Return the source line of an equation in a traced program; "" if unknown."""
    return _line((eqn,))


def own_line_of_equation(eqn: Any) -> str:
    """Return the source line of an equation in the user's own files, outside of installed packages if there is one."""
    for frame in source_frames(eqn.source_info.traceback):
        if not is_library(frame.file_name) and f"{os.sep}site-packages{os.sep}" not in frame.file_name:
            return _frame_text(frame)
    return line_of_equation(eqn)


def _frame_text(frame: Any) -> str:
    file = frame.file_name.rsplit(os.sep, 1)[-1]
    return f"{file}:{frame.start_line} in {frame.function_name.rsplit('.', 1)[-1]}"


def _place(eqns: tuple[Any, ...]) -> Place:
    """Return the origin of the innermost of `eqns`."""
    return place_of(_line(eqns), _stacks(eqns))


def _stacks(eqns: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the scopes of each of `eqns`, the outermost equation first."""
    return tuple(str(eqn.source_info.name_stack) for eqn in eqns)


@lru_cache(maxsize=4096)
def place_of(line: str, stacks: tuple[str, ...]) -> Place:
    """Return the origin of an operation, from the name stacks around it, the outermost first."""
    scopes = read_scopes("/".join(stacks))
    layers = f"{scopes.place} {'/'.join(scopes.names)}".strip()
    return Place(line, layers, scopes.backward)


def _line(eqns: tuple[Any, ...]) -> str:
    # Prefer the line of a primitive's call to those of cached code inside it.
    wrappers = (n for n, eqn in enumerate(eqns) if name_and_params(eqn)[0] in _WRAPPERS and not is_opaque_call(eqn))
    wrapped = next(wrappers, len(eqns) - 1)
    for eqn in (*reversed(eqns[: wrapped + 1]), *eqns[wrapped + 1 :]):
        for frame in source_frames(eqn.source_info.traceback):
            if not is_library(frame.file_name):
                return _frame_text(frame)
    return ""


# --- constants --------------------------------------------------------------------------------------------------------


def moved_constants(jaxpr: Any) -> tuple[str, ...]:
    """Describe each constant without elements that a program, before differentiation if that is known, moves.

    JAX returns a constant from `y[array]`, `.at[].set`, `.at[].add`, `insert` and `segment_sum` if y has no elements.
    It has no derivative, and `jax.vmap` gives it no dimension, so that this worker's program differs from the others'.
    """
    flow = _Constants()
    flow.run(jaxpr, [None] * len(jaxpr.invars))
    return tuple(flow.moved)


def constants_text(moved: Mapping[int, tuple[str, ...]]) -> str:
    """Return the addition to an error that all workers raise, from their `moved_constants`: "" without any."""
    found = [f"on worker {worker} {constant}" for worker, constants in sorted(moved.items()) for constant in constants]
    if not found:
        return ""
    return f" Beware of constants: {'; '.join(found[:3])}. {CONSTANTS}"


class _Constants(DataFlow[str | None]):
    """How each constant was made: "" with elements, None for other values.

    - `moved`: a description of each moved constant without elements.
    """

    of_literals = ""
    of_constants = None
    unknown = None

    def __init__(self) -> None:
        self.moved: dict[str, None] = {}

    def equation(self, eqn: Any, args: list[str | None]) -> list[str | None]:
        if anchor_of(eqn) is not None:
            if args[-1]:
                self.moved[f"{args[-1]} moves in {line_of_equation(eqn)}"] = None
            return [None] * len(eqn.outvars)
        scan = structure(eqn)
        # Carried, or scanned, values may change.
        same = args if not isinstance(scan, Scan) else args[: scan.constants] + [None] * (len(args) - scan.constants)
        self.through_bodies(eqn, same)
        if eqn.effects or None in args:
            return [None] * len(eqn.outvars)
        before = next(filter(None, args), None)
        line = line_of_equation(eqn)
        return ["" if var.aval.size else before or f"{var.aval.str_short()}, made in {line}," for var in eqn.outvars]

    def join(self, one: str | None, other: str | None) -> str | None:
        return one if one == other else None
