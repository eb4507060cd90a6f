"""Checkpoints beside plain np.save of the same bytes: mpiexec -n 4 python benchmarks/checkpoint.py [MiB each] [folder]

On one worker also orbax, where it is installed. np.save comes twice: as it is, and with a sync of its files, since what
is not on disk is no checkpoint. Beside the times of the clock stand those of the processor.
"""

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from harness import CORES, Table, Way

MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 128
ROUNDS = 7

P = dj.Partition()
n = MPI.COMM_WORLD.size
folder = Path(P.broadcast_data(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None)))

# Eight leaves; each worker holds MIB of them in all.
rows, columns = 128 * n, MIB * 2**20 // (8 * 128 * 4)
by_rows = dj.TensorSpec((rows, columns), P.grid([n, 1]))
by_columns = dj.TensorSpec((rows, columns), P.grid([1, n]))
tree = [jax.random.normal(jax.random.key(i), by_rows.local_shape, jnp.float32) for i in range(8)]
specs, other_specs = [by_rows] * 8, [by_columns] * 8
arrays = [np.asarray(x) for x in tree]
mine = folder / f"plain-{P.rank}"


def emptied(path: Path) -> Callable[[], None]:
    """Return a function that empties a folder."""

    def empty() -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, exist_ok=True)

    return empty if path == mine or P.rank == 0 else lambda: None


def np_save(synced: bool = True) -> None:
    for i, array in enumerate(arrays):
        with open(mine / f"{i}.npy", "wb") as file:
            np.save(file, array)
            if synced:
                file.flush()
                os.fsync(file.fileno())


def np_load() -> None:
    jax.block_until_ready([jnp.asarray(np.load(mine / f"{i}.npy")) for i in range(8)])


def save() -> None:
    dj.checkpoint.save(folder / "ours", tree, specs)


def restore(its: list) -> None:
    jax.block_until_ready(dj.checkpoint.restore(folder / "ours", its))


saves = [
    Way("np.save and fsync", np_save, before=emptied(mine)),
    Way("dj.checkpoint.save", save, before=emptied(folder / "ours")),
    Way("np.save", lambda: np_save(synced=False), before=emptied(mine)),
]
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

    saves.append(Way("orbax", orbax_save, before=emptied(folder / "orbax")))
    loads.append(Way("orbax", lambda: jax.block_until_ready(checkpointer.restore(folder / "orbax", tree))))


def measured(way: Way, seconds: list[float]) -> Way:
    """The same; `seconds` gets the processor time of each round."""

    def run() -> None:
        begin = time.process_time()
        way.run()
        seconds.append(time.process_time() - begin)

    return replace(way, run=run)


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


def train(goes_on: Callable[[], bool]) -> tuple[float, int]:
    """Seconds of a step, as long as that is true, and how many steps there were."""
    count, begin = 0, time.perf_counter()
    while goes_on() or not count:
        jax.block_until_ready(step(x))
        count += 1
    return (time.perf_counter() - begin) / count, count


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def beside(way: Callable[[], None]) -> tuple[float, int]:
    emptied(mine)()
    P.allgather_data(None)
    thread = threading.Thread(target=way)
    thread.start()
    return train(thread.is_alive)


def beside_a_checkpoint(number: int) -> tuple[float, int]:
    emptied(folder / "manager")()  # new files in memory that the system has at hand, as above
    P.allgather_data(None)
    manager.save(tree, specs, number)
    thread = next(thread for thread in threading.enumerate() if thread.name.startswith("checkpoint of step"))
    return train(thread.is_alive)


train(for_seconds(0.2))
for cores in ({CORES[P.rank % len(CORES)]}, set(CORES)):
    for thread in os.listdir("/proc/self/task"):  # those of JAX and of the watchdog, too
        os.sched_setaffinity(int(thread), cores)
    seconds: dict[str, list[tuple[float, int]]] = {}
    for name in ("alone", "beside np.save and fsync", "beside a checkpoint"):
        seconds[name] = []
    with dj.checkpoint.Manager(folder / "manager", keep=1) as manager:
        for number in range(ROUNDS):
            seconds["alone"].append(train(for_seconds(0.3)))
            seconds["beside np.save and fsync"].append(beside(np_save))
            seconds["beside a checkpoint"].append(beside_a_checkpoint(number))
            manager.wait()
    alone = float(np.median([its for its, _ in seconds["alone"]]))
    mine_ = {
        name: (float(np.median([its for its, _ in found])), float(np.median([(its - alone) * n for its, n in found])))
        for name, found in seconds.items()
    }
    for_all = P.allgather_data(mine_)
    if P.rank == 0:
        slowest = {name: [max(its[name][i] for its in for_all) for i in (0, 1)] for name in mine_}
        cells = [
            f"{name} {1e3 * its:.2f} ms ({its / slowest['alone'][0]:.2f}x, {1e3 * late:.0f} ms late in all)"
            for name, (its, late) in slowest.items()
        ]
        print(f"a step, on {len(cores)} cores: " + ", ".join(cells), flush=True)
table.write()
P.allgather_data(None)
if P.rank == 0:
    shutil.rmtree(folder)
