"""JAX's checks for NaN rerun a function to find its origin: not here, since it needs the other workers."""

from __future__ import annotations

from distdl_jax.jax_compat import found_not_finite


def refuse_to_run_again(worker: int) -> None:
    """Raise the error that JAX would raise in the end, when it is about to rerun a function on this worker.

    **Raises:** `FloatingPointError`.
    """
    if (found := found_not_finite()) is not None:
        program, what = found
        raise FloatingPointError(
            f"Worker {worker}: jax_debug_nans or jax_debug_infs found {what} in the output of {program}. JAX would now "
            "rerun it, operation by operation, on the workers that found it, to see where it arises; but its "
            "operations need all workers. To find the place, check the parts between two movements of data, each in "
            "its own jax.jit."
        )
