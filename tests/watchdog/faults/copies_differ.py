"""A replicated value is updated differently on one worker; the step asks whether the copies agree.

workers: 2
environment: DISTDL_JAX_DEBUG=1
says: worker 1: the copies agree
says: `tree['scale']` must be the same on all workers that hold copies of it, but is not on workers 0 and 1
says: (check_replicated at copies_differ.py:18 in step)
"""

from parts import P_all, dj, jnp, rank

specs = {"scale": dj.TensorSpec((3,), P_all, replicated=1), "shift": dj.TensorSpec((2,), P_all, replicated=0)}


@dj.jit
def step(params, rate):
    params = {name: dj.replicated(value, P_all, axes=1) - rate for name, value in params.items()}
    return dj.check_replicated(params, specs)


params = {"scale": jnp.ones(3), "shift": jnp.arange(1.0) + rank}
params = step(params, jnp.float32(0.5))
print(f"worker {rank}: the copies agree, {params['scale'][0]}")
step(params, jnp.float32(0.25 * rank))["scale"].block_until_ready()
