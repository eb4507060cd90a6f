"""`dj.simulate`: a program on many workers in one process."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, SetupError
from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.worker_output import shown_by_worker
from distdl_jax.transports.threads.workers import Workers

R = TypeVar("R")


def simulate(n: int, program: Callable[..., R], *args: Any) -> list[R]:
    """Run `program(*args)` on `n` workers in this process, each in a thread, without `mpirun` and without MPI.

    In the program `dj.Partition()` is the partition of the `n` workers, and everything works as over MPI: jit, all
    transformations, agreements, `dj.jit` and `dj.check`, and the errors. Every worker has a CPU device of its own.
    A function that the workers share is traced and compiled for each of them, and anew in every call of `simulate`.

    A mistake that would have workers wait for ever is found where they begin to: all of them raise at once. An
    exception on one worker ends the others. As in the comparison of `dj.jit`, a send waits for its receive: what
    completes over MPI only because small messages are buffered there, raises here.

    In a Jupyter notebook, what workers print stands side by side, a column for each worker. Ctrl-C, or the button that
    interrupts the kernel, ends all workers.

    **Arguments:**

    - `n`: how many workers, 1 or more.
    - `program`: called on each worker. It must make its partitions itself; what it changes outside itself (globals,
      files, `jax.config`) all workers share.
    - `args`: what it is called with. All workers get the same objects.

    **Returns:** the list of what `program` returns on worker 0, 1, ...

    **Raises:** the first error of any worker, with a note that names it; `PlanError` where workers would wait for
    ever; `SetupError` inside another `simulate`.

    >>> import jax, distdl_jax as dj
    >>> def program(n):
    ...     P = dj.Partition()
    ...     return int(dj.functional.all_sum_reduce(n + jax.numpy.arange(P.rank, P.rank + 1), P, axes_keep=())[0])
    >>> dj.simulate(4, program, 10)
    [46, 46, 46, 46]
    """
    if simulated_world.value is not None:
        raise SetupError("A program that runs in dj.simulate can't call dj.simulate in its turn.")
    if not callable(program):
        raise InvalidTypeError(f"`program` (={program!r}) must be a function; it is called on every worker.")
    try:
        size = operator.index(n)
    except TypeError:
        raise InvalidTypeError(f"`n` (={n!r}) must be an integer: the number of workers.") from None
    if size < 1:
        raise InvalidArgumentError(f"`n` (={n!r}) must be 1 or more: the number of workers.")
    with shown_by_worker() as columns:
        workers = Workers(size, each_turn=columns.show if columns else None)
        try:
            return workers.run(program, *args)
        finally:
            workers.close()
