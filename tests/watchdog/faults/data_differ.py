"""Data that differ, or don't fit.

workers: 2
"""

import contextlib
import sys

import jax
import jax.numpy as jnp
import mpi4jax
import optax
from mpi4py import MPI
from parts import P, P_all, P_root, add_up, large, on_root, rank, spread, sum_all

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional import roll

COMM = MPI.COMM_WORLD


def linear_on_one():
    """A layer on worker 0 alone, and its parameters."""
    linear = nn.DistributedLinear(P.create_partition_inclusive([0]).grid([1, 1]), in_features=3, out_features=3)
    return linear, linear.init(jax.random.key(0))


def batch_outside():
    """A worker outside of a layer's partition passes its batch, where a placeholder belongs.

    says: `x` is float32[4, 3] on worker 1, which is outside of its partition
    says: dj.zero_volume_tensor
    """
    linear, params = linear_on_one()
    dj.jit(dj.grad(lambda params, x: jnp.sum(linear(params, x))))(params, jnp.ones((4, 3), jnp.float32))


def batch_sizes_differ():
    """The last batch is shorter on one worker: what is summed has different shapes.

    when: long
    says: must have the same shape and dtype on all workers that are summed
    says: float32[4, 6] on worker 0
    says: float32[3, 6] on worker 1
    """
    dj.jit(add_up)(jnp.ones((4 - rank, 6), jnp.float32))


def both_send_first():
    """Both workers send before they receive, with mpi4jax itself: it works while MPI buffers, and hangs otherwise.

    says: The plan of both_send_first.swap
    says: worker 0 is in operation 1 of 2, send to worker 1
    says: worker 1 is in operation 1 of 2, send to worker 0
    says: neither can go on
    """

    @dj.jit
    def swap(x):
        mpi4jax.send(x, dest=1 - rank, comm=COMM)
        return mpi4jax.recv(x, source=1 - rank, comm=COMM)

    swap(jnp.ones(10))


def copies_differ():
    """A replicated value is updated differently on one worker; the step asks whether the copies agree.

    environment: DISTDL_JAX_DEBUG=1
    says: worker 1: the copies agree
    says: `tree['scale']` must be the same on all workers that hold copies of it, but is not on workers 0 and 1
    says: (compared at {file}:{+13} in step)
    """
    specs = {"scale": dj.TensorSpec((3,), P_all, replicated=1), "shift": dj.TensorSpec((2,), P_all, replicated=0)}

    @dj.jit
    def step(params, rate):
        params = params | {"scale": dj.replicated(params["scale"], P_all, axes=1) - rate}
        return dj.check_replicated(params, specs)

    params = {"scale": jnp.ones(3), "shift": jnp.arange(1.0) + rank}
    params = step(params, jnp.float32(0.5))
    print(f"worker {rank}: the copies agree, {params['scale'][0]}")
    step(params, jnp.float32(0.25 * rank))["scale"].block_until_ready()


def dtypes_differ():
    """One worker's data are of another dtype.

    when: long
    says: float32[4, 6] on worker 0
    says: float16[4, 6] on worker 1
    """
    dj.jit(add_up)(jnp.ones((4, 6), jnp.float16 if rank else jnp.float32))


def dtypes_of_messages_differ():
    """A message holds another dtype than its receive expects, in the program's own calls of mpi4jax.

    Before, all is well: with any tag, and from any worker.


    when: long
    says: worker 0 got [1. 1. 1. 1.]
    says: worker 0 heard 3.0
    says: (4 x float32 and 4 x int32)
    says: the two belong together, and must mean the same data
    """
    comm = COMM.Clone()

    def swapped(dtype):
        @dj.jit
        def swap(x):
            template = x.astype(dtype) if rank else x
            return mpi4jax.sendrecv(x, template, source=1 - rank, dest=1 - rank, comm=comm)

        return swap

    @dj.jit
    def hear(x):
        if rank:
            mpi4jax.send(x, 0, tag=7, comm=comm)
            return x
        return mpi4jax.recv(x, comm=comm)

    mine = swapped("float32")(jnp.full(4, 1.0 * rank))
    print(f"worker {rank} got {mine}")
    print(f"worker {rank} heard {hear(jnp.float32(3 * rank))}")
    swapped("int32")(mine)


def jit_disabled_later():
    """Jit is disabled on one worker, for a while: its operations run one by one, and agree on shapes each time.

    when: long
    says: refused: The workers' programs differ: worker
    says: the plan of jit_disabled_later.<lambda> ({file}:{+13}) (jax_disable_jit)
    says: Worker 1 traces jit_disabled_later.<lambda> ({file}:{+9}) again in call 2
    says: jax_disable_jit), but worker 0 did not: without jit
    """
    total = dj.jit(lambda x: sum_all(x))
    total(large)
    with jax.disable_jit() if rank else contextlib.nullcontext():
        try:
            dj.jit(lambda x: sum_all(x))(jnp.ones(4))
        except dj.PlanError as error:
            print(f"refused: {error}")
        total(large)


def keys_differ():
    """`init` gets another random key on one worker, so that the weights are a mixture of two draws.

    environment: DISTDL_JAX_DEBUG=1
    says: worker 1 has y of shape (4, 4)
    says: must have the same `key` in `init` of weight (6 x 8) and bias (6)
    """
    for features, key in ((8, 0), (6, rank)):
        linear = nn.DistributedLinear(P_root, P_all, P.grid([2, 1]), in_features=8, out_features=features)
        y = dj.jit(linear)(linear.init(jax.random.key(key)), on_root(4, 8))
        print(f"worker {rank} has y of shape {y.shape}")


def lengths_differ():
    """The terms of an all-reduce, made with mpi4jax itself, have different lengths.

    when: long
    says: The plan of lengths_differ.<lambda>
    says: (10 x float32)
    says: (11 x float32)
    """
    dj.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=COMM))(jnp.ones(10 + rank))


def masks_differ():
    """The mask of an optimiser looks at the dimensions of arrays, of which placeholders have one.

    when: long
    says: is masked on worker 1, but not on worker 0
    says: jax.tree.map(lambda spec: len(spec.global_shape) > 1, specs)
    """
    _, params = linear_on_one()
    mask = lambda params: jax.tree.map(lambda param: param.ndim > 1, params)  # noqa: E731
    dj.jit(optax.masked(optax.adam(0.1), mask).init)(params)


def message_too_long():
    """Under plain jax.jit one worker's batch grows, but it is not traced anew on the other: a longer message comes in.

    says: Worker 1: MPI failed in a compiled program, at {file}
    says: another length or dtype: the workers run different programs
    """
    comm = P.world.communicators.messages

    @jax.jit
    def pass_on(x):
        if rank == 0:
            mpi4jax.send(x, dest=1, comm=comm)
            return x
        return mpi4jax.recv(x, source=0, comm=comm)

    jax.block_until_ready(pass_on(jnp.ones(20 if rank == 0 else 10)))
    COMM.Barrier()


def nan_check():
    """jax_debug_nans finds a NaN on one worker in a later call, where JAX would run the function again, alone.

    says: Worker 1 of 2 raised
    says: FloatingPointError: Worker 1: jax_debug_nans or jax_debug_infs found nan in the output of jit
    """
    logarithm = dj.jit(lambda x: jnp.log(sum_all(roll(x, P, 1, 0)) - 5.0 * rank))
    jax.config.update("jax_debug_nans", True)
    for value in (9.0, 9.0, 1.0):
        logarithm(value * jnp.ones(4))


def closes_over_a_block():
    """A softmax in a network goes over features that are split, but closes over a block: what is the whole of it?

    says: mixes entries of the block with other workers' (`reduce_max`
    says: it is split along dimension 1 over 2 workers
    says: `nn.Local(function)` applies it to each block separately
    """
    shift = jnp.arange(2.0) + rank
    network = nn.Sequential(
        nn.DistributedLinear(P_all, in_features=4, out_features=4), lambda x: jax.nn.softmax(x + shift)
    )
    dj.jit(network)(network.init(jax.random.key(0)), jnp.ones((3, 2)))


def tags_differ():
    """A message is sent with one tag and expected with another.

    when: long
    says: The plan of tags_differ.pass_on
    says: the message has tag 7, and one with tag 8 is expected
    """

    @dj.jit
    def pass_on(x):
        if rank == 0:
            mpi4jax.send(x, dest=1, tag=7, comm=COMM)
            return x
        return mpi4jax.recv(x, source=0, tag=8, comm=COMM)

    pass_on(jnp.ones(10))


def whole_in_place_of_a_block():
    """Each worker passes the whole batch of images where its block belongs.

    when: long
    says: `x` is 1 x 2 x 8 x 8, the whole tensor, but must be this worker's block
    says: `spec.block(x)` cuts it
    """
    P_x = P.grid([1, 1, 2, 1])
    spec = dj.TensorSpec((1, 2, 8, 8), P_x)
    conv = nn.DistributedConv2d(P_x, in_channels=2, out_channels=2, kernel_size=3, padding=1)
    network = nn.Sequential(conv, jax.nn.relu, x_spec=spec)
    dj.jit(network)(network.init(jax.random.key(0)), jnp.ones(spec.global_shape))


def x64_changed_later():
    """64-bit numbers are switched on on one worker after the partitions were made.

    when: long
    says: All workers must have the same jax_enable_x64
    """
    if rank == 1:
        jax.config.update("jax_enable_x64", True)
    dj.jit(lambda x: spread(x))(on_root(4, 6))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
