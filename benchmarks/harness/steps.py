"""Training steps as ways to do the same work: of ours, of plain JAX, of JAX's own sharding, of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import numpy as np
import optax
from distdl_jax.watchdog.programs.ir import operations
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from harness import Way, jax_sharding
from harness.asked import Asked

OPTIMISER = optax.adam(1e-3)

PYTORCH = os.environ.get("BENCH_PYTORCH", "")
"""A Python that has PyTorch; empty where there is none."""


def step(
    name: str,
    jit: Callable,
    value_and_grad: Callable,
    params: Any,
    *batch: Any,
    here: bool = True,
    distributed: Callable[[Callable], Callable] = lambda step: step,
) -> Way:
    """Run one step, again and again from the parameters that the last one left."""
    if not here:
        return Way(name, lambda: None)

    def one(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = value_and_grad(params, *batch)
        updates, state = OPTIMISER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    stepped, state = jit(distributed(one)), jit(OPTIMISER.init)(params)
    batch = jax.tree.map(lambda a: a if isinstance(a, jax.Array) else jax.device_put(a), batch)

    def run() -> None:
        nonlocal params, state
        params, state, _ = jax.block_until_ready(stepped(params, state, *batch))

    report = dj.check(stepped, params, state, *batch) if jit is dj.jit else None
    return Way(name, run, communication=None if report is None else most_communication(report))


def unmodified(value_and_grad: Callable, whole: Any, of_params: Any, *batch: tuple[Any, Any]) -> Way:
    """Return the step in plain JAX, derivative and update inside, on blocks: `dj.distribute` of it.

    `whole` are worker 0's parameters, `of_params` their specs, or None; `batch`: whole arrays with their specs.
    """
    of_state = (optax.ScaleByAdamState(None, of_params, of_params), None)
    of_batch = [specs for _, specs in batch]

    def distributed(step: Callable) -> Callable:
        return dj.distribute(step, (of_params, of_state, *of_batch), (of_params, of_state, None))

    params, *blocks = (_blocks(arrays, specs) for arrays, specs in ((everywhere(whole), of_params), *batch))
    return step("unmodified", dj.jit, value_and_grad, params, *blocks, distributed=distributed)


def _blocks(arrays: Any, specs: Any) -> Any:
    """Return this worker's blocks; the arrays themselves where the spec is None."""

    def block(spec: Any, tree: Any) -> Any:
        return jax.tree.map(jax.numpy.asarray if spec is None else spec.block, tree)

    return jax.tree.map(block, specs, arrays, is_leaf=lambda spec: spec is None or isinstance(spec, dj.TensorSpec))


def most_communication(report: Any) -> tuple[int, int, int]:
    """Return the most that a worker sends: messages, team operations, and the bytes of both."""
    found = []
    for program in report.programs.values():
        sent = [(op, times or 1) for op, times in operations(program) if not op.is_message or op.dest is not None]
        messages = sum(times for op, times in sent if op.is_message)
        total = sum(times * op.bytes_sent for op, times in sent)
        found.append((messages, sum(times for _, times in sent) - messages, total))
    return tuple(map(max, zip(*found, strict=True)))


def everywhere(tree: Any) -> Any:
    """Give worker 0's arrays to all workers, as numpy arrays."""
    return dj.Partition().broadcast_data(jax.tree.map(np.asarray, tree), root=0)


def shared(array: np.ndarray, grid: Sequence[int] = ()) -> jax.Array:
    """As JAX shares it between all workers, cut as `grid` says, which has a number for each dimension; or copied."""
    sharding = jax_sharding.sharding(grid or (1,) * (array.ndim - 1) + (dj.Partition().size,))
    where = sharding if grid else NamedSharding(sharding.mesh, Spec())
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def by_jax(value_and_grad: Callable, params: Any, *batch: Any) -> list[Way]:
    """Return the step over all workers by JAX alone; nothing on one worker."""
    return [step("JAX sharding", jax.jit, value_and_grad, params, *batch)] if dj.Partition().size > 1 else []


def by_pytorch(name: str, shape: Sequence[int], widths: Sequence[int]) -> list[Way]:
    """Return the step in PyTorch, in a process that worker 0 starts; nothing where there is no PyTorch."""
    if not PYTORCH:
        return []
    description = [name, [*shape], [*widths]]
    run = _pytorch("pytorch.py", description).run if dj.Partition().rank == 0 else lambda: None
    return [Way("PyTorch", run)]


@contextmanager
def block_by_pytorch(asked: dict[str, Any] | None, calls: int) -> Iterator[list[Way]]:
    """So many calls of a layer in PyTorch, on each worker in a process of its own that ends with this; or nothing."""
    if not PYTORCH or asked is None:
        yield []
        return
    process = _pytorch("pytorch_layer.py", {**asked, "calls": calls})
    try:
        yield [Way("PyTorch, a block", process.run, calls)]
    finally:
        process.close()


def _pytorch(program: str, description: Any) -> Asked:
    return Asked([PYTORCH, str(Path(__file__).with_name(program))], description)
