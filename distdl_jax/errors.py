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
