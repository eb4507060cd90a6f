"""What the examples share: a linear data movement and its adjoint, drawn worker by worker."""

import os
import sys
from collections.abc import Callable

# One thread a worker, because the workers share the machine's cores. JAX reads both when it is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import numpy as np

import launch


def world(at_least: int) -> dj.Partition:
    """Return all workers; end the program where there are fewer than the example needs. Takes `--simulate N`."""
    launch.simulate_if_asked()
    P_world = dj.Partition()
    if P_world.size < at_least:
        say(
            P_world,
            f"This needs {at_least} workers: mpirun -n {at_least} python -m distdl_jax {sys.argv[0]}, "
            f"or --simulate {at_least}",
        )
        sys.exit(2)
    return P_world


def say(P_world: dj.Partition, text: str) -> None:
    """Print on worker 0 alone."""
    if P_world.rank == 0:
        print(text, flush=True)


def movement(P_world: dj.Partition, F: Callable[[jax.Array], jax.Array], x: jax.Array) -> None:
    """Draw x, y = F x, a cotangent dy, and dx = F* dy on all workers, and compare <F x, dy> with <x, F* dy>.

    On worker r all of dy is 10^r, so that the digits of dx tell which workers' cotangents were added: 101 is the sum of
    those of workers 0 and 2.
    """
    y, adjoint = jax.vjp(jax.jit(F), x)
    dy = jax.numpy.full_like(y, 10**P_world.rank)
    (dx,) = adjoint(dy)
    tensor(P_world, "x", x)
    tensor(P_world, "y = F x", y)
    tensor(P_world, "dy, 10^r on worker r", dy)
    tensor(P_world, "dx = F* dy", dx)
    say(P_world, f"<F x, dy> = {inner(P_world, y, dy):.10g}   <x, F* dy> = {inner(P_world, x, dx):.10g}\n")


def tensor(P_world: dj.Partition, name: str, x: jax.Array) -> None:
    """Draw what every worker holds of a tensor of one or two dimensions, side by side."""
    blocks = [_drawn(block) for block in P_world.allgather_data(np.asarray(x))]
    columns = [[f"worker {rank}", *lines] for rank, lines in enumerate(blocks)]
    height, width = max(map(len, columns)), max(len(line) for column in columns for line in column)
    say(P_world, name)
    for i in range(height):
        cells = (column[i] if i < len(column) else "" for column in columns)
        say(P_world, "   " + " | ".join(cell.ljust(width) for cell in cells).rstrip(" |"))
    say(P_world, "")


def inner(P_world: dj.Partition, x: jax.Array, y: jax.Array) -> float:
    """Compute the inner product of two distributed tensors: the sum over all workers of their own."""
    return sum(P_world.allgather_data(float(np.sum(np.asarray(x) * np.asarray(y)))))


def _drawn(block: np.ndarray) -> list[str]:
    """Return a block as lines of text."""
    if block.size == 0:
        return ["nothing"]
    numbers = [[f"{number:g}" for number in row] for row in np.atleast_2d(block)]
    width = max(len(number) for row in numbers for number in row)
    return [" ".join(number.rjust(width) for number in row) for row in numbers]
