"""Steps that `dj.cost` estimates, beside the same steps measured: ten networks on three partitions each.

mpiexec -n 2 python benchmarks/cost.py [--machine NAME] [words: networks whose title has one of them]

Without a name, the machine's five numbers are measured first. A step is value, gradient and adam, as in
benchmarks/networks.py. Two partitions of one network are a pair where the measured steps differ by over 10 %; their
order is right where the estimated one is the same.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np

from harness import Table, Way
from harness.cost_networks import Case, cases
from harness.steps import step

APART = 0.1
"""By how much two partitions differ that have an order."""

FOLDER = Path("out/benchmarks")

P_all = dj.Partition()


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


def measure(machine: dj.Machine, words: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measure and estimate all networks, and return a row for each partition."""
    table, rows = Table("cost-rounds", lasting=0.06), []
    for case in cases():
        if words and not any(word in case.title for word in words):
            continue
        grids = case.grids(P_all.size)
        table.row(case.title, [way(case, name, grid) for name, grid in grids.items()], rounds)
        seconds: Any = table.rows[-1]["all_seconds"]
        for name, grid in grids.items() if P_all.rank == 0 else ():
            network, spec = case.build(dj.planning_world(P_all.size), grid)
            row = {"network": case.title, "partition": name, "grid": grid, "measured": float(np.median(seconds[name]))}
            rows.append(row | {"estimated": dj.cost(network, spec, machine=machine).seconds})
    return rows


def error(row: dict[str, Any]) -> float:
    """Return how much longer, relatively, the estimated step is."""
    return float(row["estimated"] / row["measured"] - 1)


def pairs(rows: Sequence[dict[str, Any]]) -> Iterator[bool]:
    """Yield for each pair of partitions of a network that are apart whether their order is the estimated one."""
    for one, other in combinations(rows, 2):
        if one["network"] != other["network"]:
            continue
        slower, faster = (one, other) if one["measured"] > other["measured"] else (other, one)
        if slower["measured"] > (1 + APART) * faster["measured"]:
            yield slower["estimated"] > faster["estimated"]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return median and worst error, and how many pairs are in order."""
    errors, right = [abs(error(row)) for row in rows], list(pairs(rows))
    return (
        f"{P_all.size} workers, {len(rows)} steps: error {statistics.median(errors):.0%} in the median, "
        f"{max(errors):.0%} at worst; {sum(right)} of {len(right)} pairs in order"
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each network."""
    lines = ["| network | partitions | measured, ms | estimated, ms |", "|---|---|---|---|"]
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        cells = [row["partition"] for row in mine], *([f"{1e3 * row[key]:.3g}" for row in mine] for key in KEYS)
        lines.append(f"| {network} | {' | '.join(map(', '.join, cells))} |")
    return "\n".join(lines)


KEYS = ("measured", "estimated")


def main() -> None:
    """Measure, estimate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help=f"one of {', '.join(dj.machine.names())}; without, it is measured")
    parser.add_argument("--rounds", type=int, default=9, help="of measurement, whose median counts")
    parser.add_argument("words", nargs="*", help="networks whose title has one of them; none for all")
    given = parser.parse_args()
    machine = dj.machine.load(given.machine) if given.machine else dj.machine.measure()
    rows = measure(machine, given.words, given.rounds)
    if P_all.rank == 0 and rows:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"cost-{P_all.size}.json").write_text(json.dumps(rows, indent=1))
        print(f"{machine}\n\n{markdown(rows)}\n\n{summary(rows)}")


if __name__ == "__main__":
    main()
