"""Steps that `dj.cost` foresees, beside the same steps measured: ten networks on three partitions each.

mpiexec -n 2 python benchmarks/cost.py [--machine machine.toml] [words: networks whose title has one of them]

The machine's file is to be measured with as many workers on a host as there are here; without one, it is measured
first. A step is value, gradient and adam, as in benchmarks/networks.py. The speed of a virtual machine changes from
minute to minute. So a matrix product that the file has is timed in turns with the steps, and measured times are
divided by how much longer it takes now. An error is that of the foreseen mean, relative to that. Two
partitions of one network are a pair where the measured steps differ by over 10 %; their order is right where the
foreseen one is the same. Results of other numbers of workers, in out/benchmarks, are summed up along with these.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax.machine.timed_loops import repeated
from distdl_jax.plans.work import Work

from harness import Table, Way
from harness.cost_networks import Case, cases
from harness.steps import step

APART = 0.1
"""By how much two partitions differ that have an order."""

FOLDER = Path("out/benchmarks")
WORKERS = (1, 2, 4)

SHAPE, OFTEN = (256, 256, 256), 200
"""Rows, inputs and outputs of the product that the machine's present speed is told by, and how often it is computed."""

P_all = dj.Partition()


def product_seconds(machine: dj.Machine) -> float:
    """Return what the machine's file says that the product takes."""
    work = Work("matrix product", 2 * math.prod(SHAPE), shape=SHAPE)
    return float(machine.work_seconds(work, "forward", "float32"))


def product_way() -> Way:
    """Return the product, on every worker at once."""
    rows, inputs, outputs = SHAPE
    seconds = repeated(lambda x, w: x @ w.T, jnp.ones((rows, inputs), "f"), jnp.ones((outputs, inputs), "f"))
    return Way("product", lambda: seconds(OFTEN), OFTEN)


def way(case: Case, name: str, grid: tuple[int, ...]) -> Way:
    """Return the network's step, of a loss that is the sum of squares."""
    network, spec = case.build(P_all, grid)
    params, state = network.init(jax.random.key(0), jnp.float32), network.init_state(jnp.float32)
    x = jnp.asarray(np.random.default_rng(P_all.rank).random(spec.local_shape, np.float32))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if jax.tree.leaves(state):
            return jnp.sum(network(params, x, state=state)[0] ** 2)
        return jnp.sum(network(params, x) ** 2)

    return step(name, dj.jit, dj.value_and_grad(loss), params, x)


def foreseen(case: Case, grid: tuple[int, ...], machine: dj.Machine) -> dict[str, Any]:
    """Return the foreseen step, and what its layers take."""
    network, spec = case.build(dj.planning_world(P_all.size), grid)
    cost = dj.cost(network, spec, machine=machine)
    return {"foreseen": cost.seconds[:3], "table": cost.table()} if cost.seconds is not None else {}


def measure(machine: dj.Machine, words: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measure and foresee all networks, and return a row for each partition."""
    table, rows = Table("cost-rounds", lasting=0.06), []
    for case in cases():
        if words and not any(word in case.title for word in words):
            continue
        grids = case.grids(P_all.size)
        table.row(case.title, [product_way(), *(way(case, name, grid) for name, grid in grids.items())], rounds)
        seconds: Any = table.rows[-1]["all_seconds"]
        # Round by round, since the speed changes within a row, too.
        slower = np.array(seconds["product"]) / product_seconds(machine)
        for name, grid in grids.items() if P_all.rank == 0 else ():
            row = {"workers": P_all.size, "network": case.title, "partition": name, "grid": grid}
            row |= {"measured": float(np.median(seconds[name] / slower)), "slower": float(np.median(slower))}
            rows.append(row | foreseen(case, grid, machine))
            print(line(rows[-1]), flush=True)
    return rows


def error(row: dict[str, Any]) -> float:
    """Return how much longer, relatively, the foreseen step is."""
    return float(row["foreseen"][1] / row["measured"] - 1)


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    low, mean, high = (1e3 * seconds for seconds in row["foreseen"])
    holds = "" if low <= 1e3 * row["measured"] <= high else "  outside"
    return (
        f"  {row['workers']}  {row['network']:<40} {row['partition']:<8} measured {1e3 * row['measured']:8.2f} ms  "
        f"foreseen {mean:8.2f} ({low:.2f} to {high:.2f})  {error(row):+6.0%}{holds}  (speed 1 / {row['slower']:.2f})"
    )


def pairs(rows: Sequence[dict[str, Any]]) -> Iterator[bool]:
    """Yield for each pair of partitions of a network that are apart whether their order is foreseen."""
    for one, other in combinations(rows, 2):
        if (one["workers"], one["network"]) != (other["workers"], other["network"]):
            continue
        slower, faster = (one, other) if one["measured"] > other["measured"] else (other, one)
        if slower["measured"] > (1 + APART) * faster["measured"]:
            yield slower["foreseen"][1] > faster["foreseen"][1]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return median and worst error, and how many pairs are in order."""
    errors, right = [abs(error(row)) for row in rows], list(pairs(rows))
    inside = sum(row["foreseen"][0] <= row["measured"] <= row["foreseen"][2] for row in rows)
    return (
        f"{len(rows)} steps: error {statistics.median(errors):.0%} in the median, {max(errors):.0%} at worst; "
        f"{sum(right)} of {len(right)} pairs in order; {inside} inside the interval"
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each network, as docs/cost.md has it."""
    lines = ["| network | partitions | measured, ms | foreseen, ms | error |", "|---|---|---|---|---|"]
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        cells = (
            [row["partition"] for row in mine],
            [f"{1e3 * row['measured']:.3g}" for row in mine],
            [f"{1e3 * row['foreseen'][1]:.3g}" for row in mine],
            [f"{100 * error(row):+.0f} %" for row in mine],
        )
        lines.append(f"| {network} | {' | '.join(map(', '.join, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, foresee, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="path of a machine file, or a name; without, it is measured")
    parser.add_argument("--rounds", type=int, default=9, help="of measurement, whose median counts")
    parser.add_argument("words", nargs="*", help="networks whose title has one of them; none for all")
    given = parser.parse_args()
    machine = dj.machine.load(given.machine) if given.machine else dj.machine.measure()
    rows = measure(machine, given.words, given.rounds)
    if P_all.rank == 0 and rows:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"cost-{P_all.size}.json").write_text(json.dumps(rows, indent=1))
        print(f"{markdown(rows)}\n\n{P_all.size} workers, {summary(rows)}")
        files = [path for n in WORKERS if (path := FOLDER / f"cost-{n}.json").exists()]
        print(f"all, {summary([row for path in files for row in json.loads(path.read_text())])}")


if __name__ == "__main__":
    main()
