"""The errors that distdl_jax raises: all are `DistDLError`, and also the built-in error that they are a case of."""

from __future__ import annotations

from collections.abc import Iterable


class DistDLError(Exception):
    """Base of every error that distdl_jax raises."""


class InvalidArgumentError(DistDLError, ValueError):
    """An argument has a value that is not accepted; the sentence says which, its value, and what is accepted."""


class InvalidTypeError(DistDLError, TypeError):
    """An argument has a type that is not accepted."""


class PlanError(DistDLError, ValueError):
    """What the workers hold does not fit together: shapes, dtypes or partitions that disagree between workers."""


class SetupError(DistDLError, RuntimeError):
    """The MPI library, the launcher or the way they were started does not allow what was asked for."""


class CheckpointError(DistDLError, OSError):
    """A checkpoint could not be written or read, or is damaged; on every worker, whichever it happened to."""


ONE_PROGRAM = (
    "All workers must make the same calls in the same order, also those that hold no data: look for an `if` on the "
    "rank, for data that end sooner on one worker, and for a loop that one of them leaves first."
)
"""What most reports of programs that differ end with."""

MAPPED_OVER = "how many a movement maps over (jax.vmap, jax.jacrev)"
"""What workers between which data moves agree on under `jax.vmap`."""

PLAN_OF = "the plan of "
"""What workers agree on where they trace a function of `dj.jit`, in front of its name."""

CONSTANTS = (
    "JAX makes one of y[array], y.at[...].set, y.at[...].add, insert and segment_sum where y has no elements. It has "
    "no derivative, and jax.vmap does not batch it: index outside of jax.vmap."
)
"""Of constants that one worker alone has."""


def one_program(labels: Iterable[str]) -> str:
    """The same, of workers that wait for others to agree on this with them."""
    labels = set(labels)
    if MAPPED_OVER not in labels:
        plans = {label for label in labels if label.startswith(PLAN_OF)}
        if len(plans) != 1 or plans == labels:
            return ONE_PROGRAM
        (plan,) = plans
        return (
            f"{ONE_PROGRAM} Or `{plan.removeprefix(PLAN_OF).split(' ')[0]}` has been called on all, and is traced anew "
            "on some: then the shapes, dtypes or static arguments of its call have changed on these alone."
        )
    return (
        "Under jax.vmap the workers between which data moves must map over as many, and one of them maps over nothing "
        f"there: what it moves is a constant. {CONSTANTS} dj.jit, in place of jax.jit, names the constant."
    )


def start_of_more(workers: int) -> str:
    """Return how a program is started on so many workers, for errors that take more than there are."""
    return (
        f" To start {workers} workers: `mpiexec -n {workers} python -m distdl_jax PROGRAM`, or, in one process without "
        f"MPI, `python -m distdl_jax --simulate {workers} PROGRAM`."
    )
