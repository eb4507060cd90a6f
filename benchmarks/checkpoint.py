"""Checkpoints beside plain np.save of the same bytes: mpiexec -n 4 python benchmarks/checkpoint.py [MiB each] [folder]

On one worker also orbax, where it is installed. np.save's file is synced, too: what is not on disk is no checkpoint.
"""

import os
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from harness import Table, Way

MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 128
ROUNDS = 5

P = dj.Partition()
n = MPI.COMM_WORLD.size
folder = Path(P.broadcast_data(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None)))

# Eight leaves; each worker holds MIB of them in all.
rows, columns = 128 * n, MIB * 2**20 // (8 * 128 * 4)
by_rows = dj.TensorSpec((rows, columns), P.create_cartesian_topology_partition([n, 1]))
by_columns = dj.TensorSpec((rows, columns), P.create_cartesian_topology_partition([1, n]))
tree = [jax.random.normal(jax.random.key(i), by_rows.local_shape, jnp.float32) for i in range(8)]
specs, other_specs = [by_rows] * 8, [by_columns] * 8
arrays = [np.asarray(x) for x in tree]
mine = folder / f"plain-{P.rank}"
mine.mkdir()


def np_save() -> None:
    for i, array in enumerate(arrays):
        with open(mine / f"{i}.npy", "wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())


def np_load() -> None:
    jax.block_until_ready([jnp.asarray(np.load(mine / f"{i}.npy")) for i in range(8)])


def save() -> None:
    dj.checkpoint.save(folder / "ours", tree, specs)


def restore(its: list) -> None:
    jax.block_until_ready(dj.checkpoint.restore(folder / "ours", its))


saves = [Way("np.save and fsync", np_save), Way("dj.checkpoint.save", save)]
loads = [
    Way("np.load", np_load),
    Way("restore, same partition", lambda: restore(specs)),
    Way("restore, rows to columns", lambda: restore(other_specs)),
]
if n == 1 and find_spec("orbax") is not None:
    import orbax.checkpoint as orbax

    checkpointer = orbax.StandardCheckpointer()

    def orbax_save() -> None:
        checkpointer.save(folder / "orbax", tree, force=True)
        checkpointer.wait_until_finished()

    saves.append(Way("orbax", orbax_save))
    loads.append(Way("orbax", lambda: jax.block_until_ready(checkpointer.restore(folder / "orbax", tree))))


def measured(way: Way, seconds: list[float]) -> Way:
    """The same; `seconds` gets the processor time of each round."""

    def run() -> None:
        begin = time.process_time()
        way.run()
        seconds.append(time.process_time() - begin)

    return Way(way.name, run)


table = Table("checkpoint")
for what, ways in (("save", saves), ("load", loads)):
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    table.row(f"{what}, {MIB} MiB a worker, {n} workers", [measured(way, seconds[way.name]) for way in ways], ROUNDS)
    used = {name: max(P.allgather_data(float(np.median(its[1:])))) for name, its in seconds.items()}
    if P.rank == 0:
        rates = [f"{name} {MIB * 2**20 / 1e9 / each:.2f} GB/s" for name, each in used.items()]
        print(f"{'':<44}of processor time: " + ", ".join(rates), flush=True)


# A training step beside a write: arithmetic on this worker alone, so that it is the write that is felt.
@jax.jit
def step(x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jnp.tanh(x @ x)
    return x


x = jnp.ones((512, 512)) / 512


def train(seconds: float) -> float:
    """Seconds of a step."""
    count, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        jax.block_until_ready(step(x))
        count += 1
    return passed / count


train(0.2)
alone, beside, called = [], [], []
with dj.checkpoint.Manager(folder / "manager", keep=1) as manager:
    for number in range(ROUNDS):
        alone.append(train(0.5))
        begin = time.perf_counter()
        manager.save(tree, specs, number)
        called.append(time.perf_counter() - begin)
        beside.append(train(0.1))
        manager.wait()
alone_, beside_, called_ = (max(P.allgather_data(float(np.median(values)))) for values in (alone, beside, called))
if P.rank == 0:
    print(f"a step alone {1e3 * alone_:.2f} ms, while a checkpoint is written {1e3 * beside_:.2f} ms", end="")
    print(f" ({beside_ / alone_:.2f}x); Manager.save returns after {1e3 * called_:.0f} ms", flush=True)
table.write()
P.allgather_data(None)
if P.rank == 0:
    shutil.rmtree(folder)
