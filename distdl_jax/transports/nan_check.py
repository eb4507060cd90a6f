"""JAX's checks for NaN run a function again, to find where one arises: not here, for it needs the other workers."""

from __future__ import annotations

from distdl_jax.jax_compat import found_not_finite


def refuse_to_run_again(worker: int) -> None:
    """Raise what JAX would raise in the end, where it is about to run a function again on this worker.

    **Raises:** `FloatingPointError`.
    """
    if (found := found_not_finite()) is not None:
        program, what = found
        raise FloatingPointError(
            f"Worker {worker}: jax_debug_nans or jax_debug_infs found {what} in the output of {program}. JAX would now "
            "run it again, operation by operation, on the workers that have found it, to see where it arises; but its "
            "operations need all workers. To find the place, check the parts between two movements of data, each in "
            "its own jax.jit."
        )
