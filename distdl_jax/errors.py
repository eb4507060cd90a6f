"""The errors that distdl_jax raises: all are `DistDLError`, and also the built-in error that they are a case of."""


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


ONE_PROGRAM = (
    "All workers must make the same calls in the same order, also those that hold no data: look for an `if` on the "
    "rank, for data that end sooner on one worker, and for a loop that one of them leaves first."
)
"""What most reports of programs that differ end with."""
