"""The program does not compile on one worker.

workers: 2
says: Worker 1 of 2 raised
says: compilation_fails.py
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def total(x):
    if rank == 1:
        x = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    return all_sum_reduce(x, P_all, axes_keep=())


total(jnp.ones(1_000_000))
