"""Programs that differ.

workers: 2
"""

import sys
import time

import jax
import jax.numpy as jnp
from parts import P, P_root, large, on_root, rank, scatter, spread, sum_all, total

import distdl_jax as dj
from distdl_jax import nn


@dj.jit
def train(x):
    return jnp.sum(spread(x))


@dj.jit
def evaluate(x):
    return jnp.sum(spread(jnp.concatenate([x, x])))


def arguments_differ():
    """A plain argument of a function is another one on one worker.

    says: worker 0 is about to run var along (0,), keepdims True, ddof 0, on 2 (0, 1) ({file}
    """
    dj.functional.var(jnp.arange(2.0) + rank, P.grid([2]), ddof=rank)


def caches_cleared():
    """One worker alone loses what JAX keeps of a function of dj.jit, and traces again what the others do not.

    says: Worker 1 traces caches_cleared.total ({file}:{+7}) again in call 2 (at {file}:{+9} in total), but worker 0
    says: Or that worker alone has lost what JAX keeps of traces: call jax.clear_caches()
    """

    @dj.jit
    def total(x):
        return sum_all(x)

    total(jnp.ones(8))
    if rank == 1:
        jax.clear_caches()
    total(jnp.ones(8))


def call_skipped():
    """One worker leaves out a call whose messages MPI keeps: those of the next function would take their place.

    says: The workers call different functions: worker 0 traces evaluate
    says: after 3 calls of functions that all workers must call, worker 1 after 2.
    """
    x = on_root(4, 4)
    for number in range(3):
        if rank == 0 or number != 1:
            train(x)
    evaluate(x)


def different_functions():
    """The workers jit different functions.

    when: long
    says: The workers' programs differ
    says: the plan of different_functions.sum_of
    says: the plan of different_functions.mean_of
    """

    def sum_of(x):
        return jnp.sum(x)

    def mean_of(x):
        return jnp.mean(x)

    dj.jit(mean_of if rank else sum_of)(jnp.ones(3))


def eager_movement_left_out():
    """One worker leaves out a movement without jit, and waits in a function of jax.jit that the other comes to later.

    timeout: 3
    says: Worker 0 asks for what others hold
    says: worker 1 did not come to that
    says: Or a call without jit is left out on worker 1
    """
    total = jax.jit(lambda x: sum_all(x))
    total(large).block_until_ready()
    if rank == 0:
        sum_all(large[:3])
    total(large).block_until_ready()


def ends_early():
    """One worker's data end sooner, so it leaves the loop and the program, whose last line ends MPI.

    says: Worker 1 has ended its program, after 3 calls
    says: worker 0 is in call 4, of total
    """
    from mpi4py import MPI

    for _ in range(4 - rank):
        total(large)
    MPI.Finalize()


def evaluates_more_often():
    """One worker evaluates in every round, the other in every second.

    when: long
    says: The workers call different functions: call
    says: evaluate
    says: train
    """
    x = on_root(1000, 1000)
    train(x), evaluate(x)
    for number in range(10):
        train(x)
        if rank == 0 or number % 2 == 0:
            evaluate(x)


def fields_mixed():
    """Fields are moved in another order on one worker, as in a loop over a set: all calls fit each other.

    says: The workers' programs differ. In the plan of fields_mixed.shifted
    says: passes fields['rho'], but worker 1 is in
    says: passes fields['vp']
    says: look for a loop over a set
    """

    @dj.jit
    def shifted(fields):
        names = ["rho", "vp"] if rank == 0 else ["vp", "rho"]
        return {name: dj.functional.roll(fields[name], P, 1, 0) for name in names}

    shifted({"rho": jnp.zeros(2), "vp": jnp.ones(2)})


def if_rank_zero():
    """A layer stands under `if rank == 0`, in a plain loop without jit: the others end without it.

    when: long
    says: Worker 1 has ended its program
    says: worker 0 is about to run broadcast from 1 x 1 (0) to 1 x 2 (0, 1) ({file}
    """
    if rank == 0:
        spread(on_root(4, 6))


def jit_and_eager():
    """One worker calls the layer jitted, the other without jit.

    timeout: 2
    says: Worker 0 is about to run the plan of jit_and_eager.<lambda>
    says: Worker 1 is in a compiled program ({file}
    """
    forward = dj.jit(lambda x: spread(x)) if rank == 0 else spread
    forward(on_root(4, 6))


def layer_skipped():
    """One worker skips a layer.

    when: long
    workers: 3
    says: The workers' programs differ
    says: repartition from 1 x 1 (0) to 1 x 3 (0-2) ({file}
    says: the plan of layer_skipped.<lambda>
    """
    dj.jit(lambda x: (spread(x), None if rank == 2 else scatter(x)))(on_root(4, 6))


def layers_in_a_cycle():
    """Three layers, each on two of three workers, begun at another one by each worker: everyone waits for the next.

    when: long
    workers: 3
    says: The workers wait for each other in a cycle
    says: all_sum_reduce
    """
    pairs = [P.create_partition_inclusive([i, (i + 1) % 3]) for i in range(3)]
    for i in range(3):
        dj.functional.all_sum_reduce(jnp.ones(3), pairs[(rank + i) % 3], axes_keep=())


def layers_swapped():
    """Two layers are called in a different order on one worker.

    when: long
    says: The workers' programs differ
    says: broadcast from 1 x 1 (0) to 1 x 2 (0, 1) ({file}
    says: repartition from 1 x 1 (0) to 1 x 2 (0, 1) ({file}
    """
    layers = (scatter, spread) if rank == 0 else (spread, scatter)
    dj.jit(lambda x: [layer(x) for layer in layers])(on_root(4, 6))


def never_joined():
    """One worker makes a partition and a layer of its own, and waits for company, under plain jax.jit.

    timeout: 3
    says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT
    says: Worker 0 is about to run broadcast from 1 x 1 (0) to 1 x 2 (0, 1) ({file}
    says: Worker 1 is at {file}:{+9} in never_joined
    """
    if rank == 1:
        time.sleep(10_000)
    jax.jit(spread)(on_root(4, 6))


def partitions_differ():
    """The workers make a partition of different shapes.

    when: long
    workers: 4
    says: The workers' programs differ
    says: to 1 x 4 (0-3)
    says: to 2 x 2 (0-3)
    """
    P_grid = P.grid([1, 4] if rank < 2 else [2, 2])
    dj.jit(nn.Repartition(P_root, P_grid))(on_root(4, 6))


def retraced_on_one_side():
    """The batch changes on one worker, under plain jax.jit: that worker traces anew, and the other one does not.

    timeout: 2
    says: Worker 1 asks for what others hold
    says: worker 0 did not come to that. Most often a shape, a dtype
    says: or a static argument of a jax.jit function has changed
    """
    total = jax.jit(lambda x: sum_all(x))
    for length in (4, 4 + rank):
        total(jnp.ones(length)).block_until_ready()


def shape_changes_on_one_side():
    """A shape changes on one worker only, so the function is traced anew there and not on the others.

    says: Worker 0 traces train {...} again in call 2 {...}, but worker 1 did not
    """
    train(on_root(4, 600_000))
    train(on_root(4, 500_000))


def remainder_on_one_side():
    """A loader of the user's own: three samples in place of four are 2 + 1, and worker 1 catches its error.

    says: Worker 1 can't run its program of call 2, of remainder_on_one_side.step ({file}:{+8}), and worker 0, which
    says: Worker 1 says: PlanError: Worker 1 traces remainder_on_one_side.step ({file}:{+8}) again in call 2
    says: omit it (`drop_last=True`), pad it to the usual size
    """

    @dj.jit
    def step(x):
        return sum_all(x)

    try:
        for samples in (4, 3):
            step(dj.TensorSpec((samples,), P.grid([2])).block(jnp.ones(samples))).block_until_ready()
    except dj.PlanError:
        time.sleep(3600)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
