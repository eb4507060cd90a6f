"""The cost of a step that is any function of blocks, such as a distributed function: from workers' traced programs.

A distributed function's program is derived from specs, so one worker can trace its own alone: on up to `ALL` workers
each is traced in turn, on more those at the corners, edges and inside of the grid. A layer's plan needs the shapes of
all workers' blocks; then all trace together, in threads. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.kernels.convolution import as_operations
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.source_lines import function_name
from distdl_jax.tools.cost.amounts import Amounts
from distdl_jax.tools.cost.memory import CompiledMemory
from distdl_jax.tools.cost.program import flops_in
from distdl_jax.tools.cost.traced import MOST_WORKERS
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.transforms.any_leaves import is_array
from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.lone_worker import OthersNeededError, alone
from distdl_jax.transports.threads.workers import on_stand_ins
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_dtype
from distdl_jax.watchdog.programs.ir import Operation, operations

ALL = 16
"""Up to so many workers each is traced."""


class Counted(NamedTuple):
    """What workers do: by the source line that sends, and in total; memory by XLA of the worker with the most."""

    lines: dict[str, Amounts]
    workers: Amounts
    compiled: CompiledMemory | None


def count_step(step: Callable[..., Any], specs: Sequence[Any], dtype: np.dtype, compiled: bool) -> Counted:
    """Count a function of arguments that `specs` describe: trees of TensorSpecs, for blocks of `dtype`, and arrays."""
    found = [leaf.partition for leaf in jax.tree.leaves(specs) if isinstance(leaf, TensorSpec)]
    if not found:
        raise InvalidArgumentError("`specs` must hold a TensorSpec: its partition says which workers there are.")
    world = found[0].world
    args = partial(_arguments, specs, dtype=dtype)
    traced = _traced_alone(world, _representatives(world, found), step, args)
    if traced is None:
        traced = _traced_together(world, step, args)
    lines, workers = _amounts(world.size, traced)
    # The one with the largest arguments, and of these the one that sends most.
    fullest = int(np.lexsort((-workers.bytes, -workers.parameters))[0])
    return Counted(lines, workers, _compiled(world, fullest, step, args) if compiled else None)


# --- one worker's program ---------------------------------------------------------------------------------------------


class OneProgram(NamedTuple):
    """What one worker does, on behalf of `workers`: operations with the number of times, flops, bytes of arguments."""

    workers: np.ndarray
    operations: list[tuple[Operation, int]]
    flops: int
    argument_bytes: int


def _arguments(specs: Sequence[Any], worker: int, dtype: np.dtype) -> tuple[Any, ...]:
    """Return the arguments of a worker: types in place of arrays."""

    def leaf(value: Any) -> Any:
        if _is_block(value):
            spec, of_block = (value, dtype) if isinstance(value, TensorSpec) else value
            return jax.ShapeDtypeStruct(spec.shape_on(worker), checked_dtype("dtype", of_block))
        if not is_array(value):
            return value
        x = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))

    return tuple(jax.tree.map(leaf, tuple(specs), is_leaf=_is_block))


def _is_block(value: Any) -> bool:
    """Say whether a value is a spec, or a spec and a dtype."""
    match value:
        case TensorSpec() | (TensorSpec(), np.dtype() | type() | str()):
            return True
    return False


def _trace(step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the traced program. Programs aren't compared between workers: there may be one only."""
    leaves, tree = jax.tree.flatten(args)
    arrays = [n for n, leaf in enumerate(leaves) if is_array(leaf)]

    def of_arrays(*values: Any) -> Any:
        given = dict(zip(arrays, values, strict=True))
        results = step(*jax.tree.unflatten(tree, [given.get(n, leaf) for n, leaf in enumerate(leaves)]))
        return [leaf for leaf in jax.tree.leaves(results) if is_array(leaf)]

    with trace_context.set(compared=True, sizes_agreed=True):
        if len(arrays) == len(leaves) and hasattr(step, "trace"):  # with the arguments that it donates
            return step.trace(*args)
        return jax.jit(of_arrays).trace(*(leaves[n] for n in arrays))


def _program(world: World, workers: np.ndarray, step: Callable[..., Any], args: tuple[Any, ...]) -> OneProgram:
    token = as_operations.set(True)
    try:
        jaxpr = _trace(step, args).jaxpr.jaxpr
    finally:
        as_operations.reset(token)
    found = [(op, 1 if times is None else times) for op, times in operations(read_program(world.transport, jaxpr))]
    nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(args) if hasattr(x, "shape"))
    return OneProgram(workers, found, flops_in(jaxpr), nbytes)


def _traced_alone(
    world: World, representatives: dict[int, np.ndarray], step: Callable[..., Any], args: Callable[[int], Any]
) -> list[OneProgram] | None:
    """Return the programs of some workers; None if they can't be traced without the others."""
    found = []
    try:
        for worker, workers in representatives.items():
            with alone(world, worker) as lone:
                found.append(_program(lone, workers, step, args(worker)))
    except OthersNeededError:
        return None
    return found


def _traced_together(world: World, step: Callable[..., Any], args: Callable[[int], Any]) -> list[OneProgram]:
    if world.size > MOST_WORKERS:
        raise InvalidArgumentError(
            f"`network` (={function_name(step)}) has layers, so all workers trace it: at most {MOST_WORKERS}, but "
            f"there are {world.size}. Give dj.cost the network itself."
        )

    def on_worker(worker: int) -> OneProgram:
        return _program(simulated_world.value, np.array([worker]), step, args(worker))

    return on_stand_ins(world, on_worker)


def _representatives(world: World, partitions: Sequence[Any]) -> dict[int, np.ndarray]:
    """Return, by a traced worker, the workers that it stands for.

    Along each dimension of the finest grid these are the first, the last, and for those between the second one.
    """
    if world.size <= ALL:
        return {worker: np.array([worker]) for worker in range(world.size)}
    P = max(partitions, key=lambda P: (P.size, sum(p > 1 for p in P.shape)))
    ranks = np.reshape(np.asarray(P.ranks), P.shape)
    result: dict[int, np.ndarray] = {}
    for kinds in product(*([slice(0, 1), slice(1, p - 1), slice(p - 1, p)] for p in P.shape)):
        own = ranks[kinds].ravel()
        if len(own):
            result.setdefault(int(own[0]), own)
    outside = np.setdiff1d(np.arange(world.size), ranks.ravel())
    return {**result, int(outside[0]): outside} if len(outside) else result


# --- all workers' numbers ---------------------------------------------------------------------------------------------


def _amounts(size: int, programs: Sequence[OneProgram]) -> tuple[dict[str, Amounts], Amounts]:
    """Return all workers' numbers line by line, and of all lines together."""
    total, lines = Amounts.none(size), dict[str, Amounts]()
    for program in programs:
        workers = program.workers
        total.flops_forward[workers] += program.flops
        total.parameters[workers] += program.argument_bytes
        for operation, times in program.operations:
            own = lines.setdefault(operation.place.line or "elsewhere", Amounts.none(size))
            for amounts in (own, total):
                _add(amounts, workers, operation, times)
    return lines, total


def _add(amounts: Amounts, workers: np.ndarray, operation: Operation, times: int) -> None:
    back = "backward" if operation.place.backward else "forward"
    if not operation.is_message:
        getattr(amounts, f"collectives_{back}")[workers] += times
        getattr(amounts, f"team_bytes_{back}")[workers] += times * operation.bytes_sent
    elif operation.dest is not None:
        getattr(amounts, f"messages_{back}")[workers] += times
        getattr(amounts, f"bytes_{back}")[workers] += times * operation.bytes_sent


def _compiled(world: World, worker: int, step: Callable[..., Any], args: Callable[[int], Any]) -> CompiledMemory:
    """Return the memory of a worker's compiled program."""

    def memory() -> CompiledMemory:
        sizes: Any = _trace(step, args(worker)).lower().compile().memory_analysis()
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return CompiledMemory(worker, sizes.argument_size_in_bytes, results, sizes.temp_size_in_bytes)

    try:
        with alone(world, worker):
            return memory()
    except OthersNeededError:
        return on_stand_ins(world, lambda rank: memory() if rank == worker else _trace(step, args(rank)))[worker]
