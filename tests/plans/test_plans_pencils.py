"""Where transforms make no dimension longer, the grids a tensor goes through are the cheapest of all that there are."""

from itertools import product
from math import prod

import numpy as np
import pytest
from launcher.examples import LONG

from distdl_jax.plans.pencils import MOVEMENT, Reals, Stage, factorizations, pencils


def cost(stages, extent, lengths, reals):
    """Return the reals that the busiest worker transforms, and holds before or after a movement."""
    done, total = set(), 0.0

    def volume(shape):
        sizes = (lengths[a] if a in done else n for a, n in enumerate(extent))
        real = (reals.before and not done) or (reals.after and len(done) == len(lengths))
        return prod(-(-n // p) for n, p in zip(sizes, shape, strict=True)) * (1 if real else 2)

    for before, stage in zip((None, *stages), stages, strict=False):
        total += 0 if before is None else MOVEMENT * max(volume(before.shape), volume(stage.shape))
        done |= {*stage.axes}
        total += len(stage.axes) * volume(stage.shape)
    return total


def all_ways(start, target, axes, same_team):
    """Yield all ways with three movements at most, in which each grid transforms all that is whole there."""
    grids = [*factorizations(prod(start), len(start)), (1,) * len(start)]
    for count in range(3):
        for between in product(grids, repeat=count):
            for last in ((target,), ()) if same_team else ((target,),):
                shapes, done, stages = (start, *between, *last), set(), []
                for shape in shapes:
                    here = tuple(a for a in axes if a not in done and shape[a] == 1)
                    stages.append(Stage(shape, here))
                    done |= {*here}
                if shapes[-1] == target and done == {*axes}:
                    yield tuple(stages)


def drawn(rng):
    dims = int(rng.integers(1, 4))
    workers = int(rng.choice([2, 3, 4, 6]))
    extent = tuple(int(n) for n in rng.integers(2, 13, dims))
    start, target = (tuple(choice[rng.integers(len(choice))]) for choice in [[*factorizations(workers, dims)]] * 2)
    axes = sorted(int(a) for a in rng.choice(dims, rng.integers(1, dims + 1), replace=False))
    lengths = {a: int(rng.choice([extent[a], extent[a] // 2 + 1])) for a in axes}
    reals = Reals(*(bool(choice) for choice in rng.random(2) < 0.4))
    same_team = start == target and bool(rng.random() < 0.7)
    return extent, start, lengths, start if same_team else target, same_team, reals


@pytest.mark.parametrize("batch", range(4))
def test_no_way_is_cheaper(batch):
    for number in range(150 * LONG):
        extent, start, lengths, target, same_team, reals = drawn(np.random.default_rng([batch, number]))
        given = (extent, start, tuple(lengths.items()), target)
        stages = pencils(*given, same_team=same_team, reals=reals)
        context = f"{given} {same_team} {reals}: {stages}"
        assert stages[0].shape == start and stages[-1].shape == target, context
        assert sorted(a for stage in stages for a in stage.axes) == sorted(lengths), context
        assert all(stage.shape[a] == 1 for stage in stages for a in stage.axes), context
        ways = all_ways(start, target, sorted(lengths), same_team)
        assert cost(stages, extent, lengths, reals) == min(cost(way, extent, lengths, reals) for way in ways), context
