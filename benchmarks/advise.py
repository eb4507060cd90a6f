"""How good the advice of `dj.advise` is: the chosen plan against the obvious ones, and against the best of the list.

mpiexec -n 2 python benchmarks/advise.py [--measure 60] [words: networks whose title has one of them]

A plan's step is value, gradient and update. After the advice, all plans of its list are timed again in rounds that
choose nothing. Of these rounds are: the chosen plan's time against that of the better one of the obvious plans, the
batch split and the split of the longest dimension; its regret, the time against that of the best plan; and how many
pairs of plans that differ by over 5 % the estimate had in order. With --every, plans that have one grid throughout, and
are not on the list, are timed too, to see whether the best was on it.
"""

import argparse
import itertools
import json
import os
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import distdl_jax as dj
import jax
import numpy as np
from distdl_jax import nn
from distdl_jax.tools.advise.advise import USUAL, advice, shortlist, trials
from distdl_jax.tools.advise.measure import measured_plans, typical
from distdl_jax.tools.advise.network import DescribedNetwork
from distdl_jax.tools.advise.search import Prices, Search

P_all = dj.Partition()
if hasattr(os, "sched_setaffinity"):  # each worker on a core of its own, as far as there are
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[P_all.rank % len(CORES)]})
FLOAT = np.dtype(np.float32)


@dataclass(frozen=True)
class Described:
    """A network without partitions."""

    title: str
    layers: list[Any]
    x_shape: tuple[int, ...]


def conv(dims: int, channels: int, kernel: int = 3) -> Any:
    """Return a convolution that leaves the size as it is."""
    return getattr(nn, f"conv{dims}d")(out_channels=channels, kernel_size=kernel, padding="same")


def level(channels: int) -> list[Any]:
    """Return a level of a U-Net: a convolution, a norm, and a residual."""
    return [conv(2, channels), nn.group_norm(num_groups=4), jax.nn.relu, nn.skip(conv(2, channels), jax.nn.relu)]


def stage(channels: int, blocks: int) -> list[Any]:
    """Return blocks of a ResNet."""
    body = (conv(2, channels), nn.batch_norm(), jax.nn.relu, conv(2, channels), nn.batch_norm())
    return [each for _ in range(blocks) for each in (nn.skip(*body), jax.nn.relu)]


NETWORKS = (
    Described(
        "U-Net, 128², batch 4",
        [
            *level(8),
            nn.max_pool2d(kernel_size=2),
            *level(16),
            nn.max_pool2d(kernel_size=2),
            *level(32),
            nn.conv_transpose2d(out_channels=16, kernel_size=2, stride=2),
            *level(16),
            nn.conv_transpose2d(out_channels=8, kernel_size=2, stride=2),
            *level(8),
            conv(2, 1, 1),
        ],
        (4, 1, 128, 128),
    ),
    Described(
        "1-D, 65,536 long, batch 2",
        [conv(1, 16, 9), jax.nn.relu, conv(1, 16, 9), jax.nn.relu, nn.max_pool1d(kernel_size=4), conv(1, 32, 9)],
        (2, 4, 65_536),
    ),
    Described(
        "perceptron, 2048 wide, batch 64",
        [
            nn.linear(out_features=2048),
            jax.nn.relu,
            nn.linear(out_features=2048),
            jax.nn.relu,
            nn.linear(out_features=10),
        ],
        (64, 1024),
    ),
    Described(
        "FNO, 64², batch 8",
        [
            conv(2, 16, 1),
            nn.describe(nn.DistributedFNOBlock, out_channels=16, modes=(8, 8)),
            nn.describe(nn.DistributedFNOBlock, out_channels=16, modes=(8, 8)),
            conv(2, 1, 1),
        ],
        (8, 3, 64, 64),
    ),
    Described(
        "transformer block, 512 tokens, batch 4",
        [
            nn.skip(
                nn.layer_norm(normalized_shape=128),
                nn.describe(nn.DistributedMultiHeadAttention, embed_dim=128, num_heads=4),
            ),
            nn.skip(
                nn.layer_norm(normalized_shape=128),
                nn.describe(nn.DistributedPointwise, out_features=512, dim=-1),
                jax.nn.gelu,
                nn.describe(nn.DistributedPointwise, out_features=128, dim=-1),
            ),
        ],
        (4, 512, 128),
    ),
    Described("ResNet stage, 32², batch 16", [conv(2, 32), *stage(32, 3)], (16, 3, 32, 32)),
    Described(
        "3-D, 48³, batch 1",
        [conv(3, 8), jax.nn.relu, conv(3, 16), jax.nn.relu, nn.max_pool3d(kernel_size=2), conv(3, 32)],
        (1, 1, 48, 48, 48),
    ),
    Described(
        "classifier, 28², batch 32",
        [
            *(nn.conv2d(out_channels=16, kernel_size=5), jax.nn.relu, nn.max_pool2d(kernel_size=2)),
            *(nn.conv2d(out_channels=32, kernel_size=5), jax.nn.relu, nn.max_pool2d(kernel_size=2)),
            *(nn.flatten(), nn.linear(out_features=256), jax.nn.relu, nn.linear(out_features=10)),
        ],
        (32, 1, 28, 28),
    ),
)


def timed(steps: list[Any], rounds: int) -> np.ndarray:
    """Return seconds of the slowest worker, rounds x plans: in shuffled order, the same on all workers."""
    order, rows = random.Random(1), []
    ready = partial(P_all.allgather_data, None)
    for step in steps:
        step.seconds(2)
    for _ in dj.progress(range(rounds), label="all plans again", unit="round"):
        row = [0.0] * len(steps)
        for plan in order.sample(range(len(steps)), len(steps)):
            row[plan] = steps[plan].seconds(3, ready)
        rows.append(np.max(P_all.allgather_data(row), axis=0))
    return np.array(rows)


def judged(described: Described, seconds: float, rounds: int, every: bool) -> dict[str, Any]:
    """Advise, time all plans again, and return what the advice was worth."""
    start = perf_counter()
    network = DescribedNetwork(described.layers, described.x_shape, FLOAT)
    search = Search(Prices(network, P_all.size, USUAL, "adam", 2, FLOAT))
    found = shortlist(search, P_all)
    plans, obvious = list(found.grids), found.obvious
    counted = perf_counter() - start
    steps = trials(search, P_all, plans)
    measured = measured_plans(P_all.world, steps, obvious.values(), seconds)
    advised = advice(search, P_all, replace(found, measured=measured))
    took = perf_counter() - start
    listed = len(plans)
    if every:
        uniform = [search.uniform(grid).grids for grid in search.states(0)]
        more = [grids for grids in dict.fromkeys(uniform) if grids not in plans]
        steps += trials(search, P_all, more)
        plans += more
    times = timed(steps, rounds)
    typicals = [typical(times[:, plan]) for plan in range(len(plans))]
    chosen = plans.index(advised.grids)
    estimates = [search.plan(grids).seconds for grids in plans]
    pairs = [
        (typicals[a] < typicals[b]) == (estimates[a] < estimates[b])
        for a, b in itertools.combinations(range(len(plans)), 2)
        if abs(np.log(typicals[a] / typicals[b])) > np.log(1.05)
    ]
    return {
        "network": described.title,
        "chosen": [list(grid) for grid in advised.grids],
        "verdict": advised.verdict,
        "milliseconds": 1e3 * typicals[chosen],
        "against the better obvious one": typicals[chosen] / min(typicals[plan] for plan in obvious.values()) - 1,
        "against the worse obvious one": typicals[chosen] / max(typicals[plan] for plan in obvious.values()) - 1,
        "regret": typicals[chosen] / min(typicals[:listed]) - 1,
        "listed": listed,
        "best was on the list": min(typicals) > 0.98 * min(typicals[:listed]),
        "pairs in order": sum(pairs),
        "pairs": len(pairs),
        "seconds to count": counted,
        "seconds to advise": took,
    }


def main() -> None:
    """Advise, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=float, default=60.0, help="seconds for the rounds of an advice, at most")
    parser.add_argument("--rounds", type=int, default=15, help="in which all plans are timed again")
    parser.add_argument("--every", action="store_true", help="time plans that are not on the list, too")
    parser.add_argument("words", nargs="*", help="networks whose title has one of them; none for all")
    given = parser.parse_args()
    rows = []
    for described in NETWORKS:
        if given.words and not any(word in described.title for word in given.words):
            continue
        row = judged(described, given.measure, given.rounds, given.every)
        rows.append(row)
        if P_all.rank == 0:
            print(
                f"{row['network']:<40} {row['milliseconds']:7.1f} ms, "
                f"{100 * row['against the better obvious one']:+5.1f} % against the better obvious plan "
                f"({100 * row['against the worse obvious one']:+.0f} the worse), "
                f"regret {100 * row['regret']:4.1f} % of {row['listed']} plans, "
                f"{row['pairs in order']} of {row['pairs']} pairs in order, "
                f"{'best on the list, ' if row['best was on the list'] else 'BEST NOT ON THE LIST, '}"
                f"{row['seconds to count']:.0f} + {row['seconds to advise'] - row['seconds to count']:.0f} s\n"
                f"{'':<40} {row['verdict']}",
                flush=True,
            )
    if P_all.rank == 0:
        regrets = [row["regret"] for row in rows]
        print(f"regret: {100 * np.median(regrets):.1f} % in the median, {100 * max(regrets):.1f} % at worst")
        path = Path("out/benchmarks") / f"advise-{P_all.size}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
