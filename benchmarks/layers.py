"""Every layer beside the sequential one on one thread, and JAX's own sharding of that: forward, and backward too.

mpiexec -n 2 python benchmarks/layers.py [words: rows whose title has one of them]

"one thread" is the whole layer in plain JAX on worker 0 alone; NPROC=1 gives every worker one thread. "JAX sharding" is
the same jitted over all workers, inputs cut as ours are, and copies where ours are on some workers only. Workers that
wait for a slower one sleep. The last columns are the seconds of processor time that a call takes on one thread, and on
the worker of ours that takes most: they tell something on a loaded machine, too. "PyTorch, a block" is what DistDL
computes, without its messages: each worker's block in eager PyTorch, on all workers at once; where BENCH_PYTORCH names
a Python that has it, and DistDL has such a layer. Rows whose results differ are named, and the run then fails. The
cases are in layer_cases/.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from harness import Table, Way, jax_sharding
from harness.processor_time import processor_time
from harness.sequential import both_ways
from harness.steps import block_by_pytorch
from layer_cases import Case, Tensor
from layer_cases.everything import all_cases

ROUNDS, PAUSE = 5, 0.02
MOST_CALLS, LONG_ENOUGH = 20, 0.02
"""How many calls a run makes of those that don't take so many seconds together."""

jax_sharding.start()
P_all = dj.Partition()
N = P_all.size
table = Table("layers", width=92, pause=PAUSE)
differ: list[str] = []


def rows(case: Case) -> None:
    """Measure a row forward, and one forward and backward."""
    layer = case.layer()
    has_params = hasattr(layer, "init")
    params, specs = (layer.init(jax.random.key(0)), layer.param_specs()) if has_params else ({}, {})
    whole = P_all.broadcast_data(jax.tree.map(np.asarray, dj.gather(params, specs)) if specs else {}, root=0)
    xs = [given.whole(seed) for seed, given in enumerate(case.inputs)]
    mine = [given.own(x) for given, x in zip(case.inputs, xs, strict=True)]
    everything = [jnp.asarray(x) for x in xs]
    shared = [cut(x, given) for given, x in zip(case.inputs, xs, strict=True)]
    copies = jax.tree.map(lambda a: cut(a, None), whole)

    def ours(params: Any, *inputs: Any) -> Any:
        return case.call(layer, params, *inputs)

    for direction, wrap in (("forward", lambda f: f), ("forward + backward", both_ways)):
        if wrap is both_ways and not case.backward:
            continue
        alone = Called("one thread", wrap(case.plain), whole, *everything, here=P_all.rank == 0)
        split = Called("distdl_jax", wrap(ours), params, *mine)
        ways = [alone, split]
        ways += [Called("JAX sharding", wrap(case.plain), copies, *shared)] if N > 1 else []
        title = f"{case.title}, {direction}"
        for way in ways:
            way.repeat_short_calls()
        timed = [Way(way.name, way.run, way.calls) for way in ways]
        asked = case.torch and case.torch.asked(case.inputs, N, wrap is both_ways)
        with block_by_pytorch(asked, split.calls) as torch:
            table.row(title, timed + torch, ROUNDS, partial(processor_seconds, alone, split))
        if case.tolerance is not None:
            compare(title, sums(alone.result), sums(split.result), case.tolerance)


class Called:
    """Calls of the jitted `function`, waited for, and the processor time of each; nothing on workers not `here`.

    - `calls`: how many a run makes.
    """

    def __init__(self, name: str, function: Callable[..., Any], *arguments: Any, here: bool = True) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.result: Any = None
        self.calls = 1
        self._function, self._arguments, self._here = jax.jit(function), arguments, here

    def repeat_short_calls(self) -> None:
        """Have a run last for a while: right after a rest a call takes up to five times as long."""
        self._call()  # compiles
        start = time.perf_counter()
        self._call()
        took = max(P_all.allgather_data(time.perf_counter() - start))
        self.calls = max(1, min(MOST_CALLS, int(LONG_ENOUGH / took)))

    def run(self) -> None:
        """Run the calls."""
        for _ in range(self.calls):
            self.seconds.append(processor_time(self._call) if self._here else 0.0)

    def _call(self) -> None:
        if not self._here:
            return
        self.result = jax.block_until_ready(self._function(*self._arguments))


def processor_seconds(*ways: Called) -> dict[str, float]:
    """By way, what the worker that takes most needs for a call; a wait for a message that spins is work, too."""
    own = {way.name: statistics.median(way.seconds[1:]) for way in ways}  # the first one compiled
    everyone = P_all.allgather_data(own)
    return {name: max(each[name] for each in everyone) for name in own}


def sums(result: Any) -> list[float]:
    """Return the sums of absolute values of the output, and of x's gradient if any; of a loss, its part."""
    y, x = (result[0], result[1][1]) if isinstance(result, tuple) else (result, None)
    found = [] if y is None else [float(jnp.sum(y)) if y.ndim == 0 else float(jnp.sum(jnp.abs(y).astype(float)))]
    return found + ([] if x is None else [float(jnp.sum(jnp.abs(x).astype(float)))])


def compare(title: str, want: list[float], parts: list[float], tolerance: float) -> None:
    """Note a row of which the workers' parts do not add up to what one thread has."""
    got = np.sum(P_all.allgather_data(parts), axis=0)
    if P_all.rank == 0 and not np.allclose(got, want, rtol=tolerance, atol=1e-30):
        differ.append(f"{title}: {got.tolist()}, and on one thread {want}")


def cut(x: Any, given: Tensor | None) -> jax.Array:
    """As JAX shares it between all workers: cut over all of them, or copied."""
    whole_grid = given is not None and given.grid is not None and int(np.prod(given.grid)) == N
    where = jax_sharding.sharding(given.grid if whole_grid else (N,))
    where = where if whole_grid else NamedSharding(where.mesh, Spec())
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


for case in all_cases(N):
    if not sys.argv[1:] or any(word in case.title for word in sys.argv[1:]):
        rows(case)
table.write()
if P_all.broadcast_data(differ, root=0):
    sys.exit("\n".join(["These differ:", *differ]) if P_all.rank == 0 else 1)
