"""jax.jacrev where the workers' blocks of the output have different lengths: they would map over different numbers.

workers: 2
status: 0
says: jitted: worker 0 maps over 3, but worker 1 over 2
says: eager: worker 0 maps over 3, but worker 1 over 2
says: the whole Jacobian: [[2. 0. 0.] [0. 2. 0.] [0. 0. 2.] [4. 4. 4.] [6. 6. 6.]]
"""

import numpy as np
from parts import P, dj, jax, jnp, rank

P_x = P.grid([2])
spec = dj.TensorSpec((5,), P_x)


def f(x):
    """Twice x on worker 0; on worker 1, multiples of the sum of all."""
    total = dj.functional.all_sum_reduce(jnp.sum(x), P_x, axes_reduce=0)
    return 2 * x + 0 * total if rank == 0 else jnp.array([4.0, 6.0]) * total


x = jnp.arange(spec.local_shape[0]) + 1.0
for how, jacobian in (("jitted", jax.jit(jax.jacrev(f))), ("eager", jax.jacrev(f))):
    try:
        jacobian(x)
    except dj.PlanError as error:
        print(f"{how}: {str(error).split(': ', 1)[1]}")
columns = jnp.eye(5)[:, slice(*spec.box[0])]
y, pullback = jax.vjp(f, x)
(rows,) = jax.vmap(pullback)(columns)
if rank == 0:
    print("the whole Jacobian:", str(np.asarray(rows)).replace("\n", ""))
