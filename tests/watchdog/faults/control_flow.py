"""Derivatives and control flow.

workers: 2
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from parts import P, large, on_root, rank, scatter, spread, sum_all

import distdl_jax as dj


def cond_branches_differ():
    """A condition that depends on each worker's own data: it holds on one worker only.

    when: long
    timeout: 4
    says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT
    says: has waited, or computed, for
    says: taken different branches of a cond
    says: {file}
    """

    @dj.jit
    def step(x):
        y = jax.lax.cond(jnp.sum(x) > 0.5, lambda x: jnp.sum(spread(x)), lambda x: jnp.sum(scatter(x)), x)
        return y + jnp.sum(spread(x))

    jax.block_until_ready(step(on_root(1000, 1000)))


def constant_placeholder():
    """Parameters on one worker, a constant in their place on the other: JAX differentiates on one of them only.

    says: The plan of constant_placeholder.step {...} in the backward pass, {...} no constant in their place
    """

    @dj.jit
    def step(weight):
        return jax.grad(lambda weight: jnp.sum(spread(weight if rank == 0 else jnp.zeros((4, 0))) ** 2))(weight)

    step(on_root(4, 6))


def jacobian_of_unequal_blocks():
    """jax.jacrev where the workers' blocks of the output have different lengths: they would map over different numbers.

    status: 0
    says: jitted: worker 0 maps over 3, but worker 1 over 2
    says: eager: worker 0 maps over 3, but worker 1 over 2
    says: the whole Jacobian: [[2. 0. 0.] [0. 2. 0.] [0. 0. 2.] [4. 4. 4.] [6. 6. 6.]]
    """
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
    _, pullback = jax.vjp(f, x)
    (rows,) = jax.vmap(pullback)(columns)
    if rank == 0:
        print("the whole Jacobian:", str(np.asarray(rows)).replace("\n", ""))


def nan_in_while_condition():
    """An iteration goes on until the residual is small; on one worker it is NaN, so it stops at once there.

    timeout: 2
    says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT
    says: left a while loop after different numbers of passes
    says: {file}
    """
    solve = dj.jit(lambda x: jax.lax.while_loop(lambda x: jnp.max(x) > 1e-3, lambda x: 0.5 * x + 0 * sum_all(x), x))
    jax.block_until_ready(solve(large * jnp.nan if rank else large))


def scan_lengths_differ():
    """A scan takes more steps on one worker, over data that end later there.

    when: long
    says: The plan of scan_lengths_differ.<lambda>
    says: ends, after 1 operations, without its part in that
    says: {file}
    """
    step = lambda total, batch: (total + jnp.sum(sum_all(batch)), None)  # noqa: E731
    dj.jit(lambda batches: jax.lax.scan(step, 0.0, batches)[0])(jnp.ones((1000 + rank, 8)))


def trip_counts_differ():
    """A while loop is left after different numbers of passes, and the worker that is through first is gone.

    when: long
    timeout: 6
    says: Worker 1 has ended its program
    says: left a while loop after different numbers of passes
    """

    @dj.jit
    def sums(x, passes):
        def add(state):
            return state[0] + 1, sum_all(state[1])

        return jax.lax.while_loop(lambda state: state[0] < passes, add, (0, x))

    sums(large, 3 - rank)


def unused_output():
    """An output is not used on one worker, and the gradient is taken with jax.grad.

    when: long
    says: The plan of unused_output.step {...} in the backward pass, {...} let the loss use every output on every worker
    """

    @dj.jit
    def step(x):
        def loss(x):
            y = spread(x)
            return jnp.sum(y**2) if rank == 0 else jnp.sum(x)

        return jax.grad(loss)(x)

    step(on_root(4, 6))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
