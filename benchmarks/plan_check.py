"""What the plan check costs: mpiexec -n 4 python benchmarks/plan_check.py

Once a trace: reading the program, exchanging it and playing it, beside the trace itself; for a program of 500
operations a worker. In each step: a call of `dj.jit` beside one of `jax.jit`.
"""

import itertools

import distdl_jax as dj
import jax
import jax.numpy as jnp
from distdl_jax.functional import all_sum_reduce
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.watchdog.programs.ir import operations
from distdl_jax.watchdog.programs.matching import find_mismatch

from harness import Table, Way

OPERATIONS = 500
P_all = dj.Partition()
everyone = tuple(range(P_all.size))
around = dj.nn.HaloExchange(P_all.grid([P_all.size]), [(1, 1)])
_agreements = itertools.count()


def many(x):
    """Add many halo exchanges, of two operations each inside the line and one at its ends; with adjoints."""
    return sum(jnp.sum(around(x) ** 2) for _ in range(OPERATIONS // 4))


traced = jax.jit(jax.grad(many)).trace(jnp.ones(8))
program = read_program(P_all.world.transport, traced.jaxpr.jaxpr)
programs = dict(enumerate(P_all.allgather_data(program)))


def agreement():
    P_all.world.agree(everyone, f"agreement {next(_agreements)}", program, lambda programs: None)


def whole():
    own = read_program(P_all.world.transport, traced.jaxpr.jaxpr)
    P_all.world.agree(everyone, f"agreement {next(_agreements)}", own, find_mismatch)


def trace():
    jax.jit(lambda x: jax.grad(many)(x)).trace(jnp.ones(8))


table = Table("plan_check")
count = sum(1 for _ in operations(program))
table.row(
    f"{count} operations on worker {P_all.rank}",
    [
        Way("the plan check", whole),
        Way("reading", lambda: read_program(P_all.world.transport, traced.jaxpr.jaxpr)),
        Way("agreement", agreement),
        Way("playing", lambda: find_mismatch(programs)),
        Way("tracing", trace),
    ],
)


def step(x):
    return all_sum_reduce(x, P_all, axes_keep=())


def calls(jitted, x, count=200):
    def run():
        for _ in range(count):
            jitted(x).block_until_ready()

    return run


x = jnp.ones(8)
table.row("a step", [Way("jax.jit", calls(jax.jit(step), x), 200), Way("dj.jit", calls(dj.jit(step), x), 200)])
table.write()
