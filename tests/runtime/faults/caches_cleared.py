"""Nothing is wrong: one worker alone loses what JAX has kept, and traces again what all have agreed on.

Under jax.jit, under a dj.jit in a jax.jit, in a function that two others share, in a loop that is not jitted.

workers: 2
timeout: 10
status: 0
says: worker 0 is done: 29.0
says: worker 1 is done: 29.0
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


def total(x):
    return all_sum_reduce(x, P_all, axes_keep=())


def body(x):
    return total(total(x) / 2)


def looped(carry, x):
    return carry + total(x), None


@jax.jit
def shared(x):
    return body(x)


in_another, plain = jax.jit(lambda x: dj.jit(body)(x) + 1), jax.jit(body)
nested = dj.jit(body)
around = jax.jit(lambda x: nested(x) + nested(2 * x))
new_each_time = jax.jit(lambda x: jax.jit(lambda y: body(y))(x))
first, second = dj.jit(lambda x: shared(x) + 1), dj.jit(lambda x: total(x) + shared(x))

x, results = jnp.ones(8), []
for step in range(3):
    if step == 1 and rank == 1:
        jax.clear_caches()
    if step == 2 and rank == 0:
        jax.clear_caches()
    results = [f(x)[0] for f in (second, in_another, plain, around, new_each_time, first)]
    results.append(jax.lax.scan(looped, x, jnp.ones((3, 8)))[0][0])
# Others have `shared`; this worker traces it in a function that is new to all.
if rank == 1:
    jax.clear_caches()
results.append(dj.jit(lambda x: shared(x) * 1)(x)[0])
print(f"worker {rank} is done: {sum(map(float, results))}", flush=True)
