"""Nothing is wrong, though all takes longer than the clock allows a wait: compilation, a suspended job, a last program.

And all clear their caches, while one still runs the step before.

workers: 2
timeout: 2
status: 0
says: worker 0 is done
says: worker 1 is done
"""

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce

limit = float(os.environ["DISTDL_JAX_TIMEOUT"])


@dj.jit
def train(x):
    return all_sum_reduce(x, P_all, axes_keep=())


@dj.jit
def evaluate(x):
    return jnp.sum(all_sum_reduce(2 * x, P_all, axes_keep=()))


@dj.jit
def local(x):
    return x + 1


@dj.jit
def last(x):
    x = all_sum_reduce(x, P_all, axes_keep=())
    return jax.lax.while_loop(lambda state: state[0] < end, lambda state: (clock(), state[1]), (clock(), x))[1]


def clock():
    def passed():
        time.sleep(0.01)
        return np.float32(time.monotonic() - began)

    return jax.pure_callback(passed, jax.ShapeDtypeStruct((), jnp.float32))


x = jnp.ones(1_000_000)
train(x), local(x)

# A step still runs on worker 1 while it comes late to the trace of the next function.
if rank == 0:
    time.sleep(1.5)
train(x)
if rank == 1:
    time.sleep(1.5)
evaluate(x)

jax.clear_caches()
train(x), local(x), evaluate(x)


# Many compilations take longer than the limit, in a thread of the program's own. None of them is long: on a busy
# machine to trace and lower one, which counts as waiting, would take longer than the limit, too.
def compile_many():
    began, factor = time.monotonic(), 0.0
    while time.monotonic() - began < 1.3 * limit:
        factor += 1
        function = jax.jit(lambda x, factor=factor: [x := jnp.sin(factor * x) @ x for _ in range(8)][-1])
        function.lower(jnp.ones((2, 2))).compile()


if rank == 0:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compile_many).result()
train(x).block_until_ready()

# The whole job is suspended while one worker waits for the other.
pid, pause = os.getpid(), 1.3 * limit
subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {pid}; sleep {pause}; kill -CONT {pid}"])
if rank == 0:
    time.sleep(pause + 1)
train(x).block_until_ready()

# The last program is long on one worker; the other one leaves.
began, end = time.monotonic(), 1.3 * limit if rank == 0 else 0.0
last(x).block_until_ready()
print(f"worker {rank} is done", flush=True)
