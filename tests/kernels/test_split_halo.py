"""Halos in buffers of their own: the exchange that oneDNN's convolutions use, here without oneDNN."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from matrix.partitions import On, on

import distdl_jax as dj
from distdl_jax.layer.split_halo import SplitHaloPlan, plan_split_halo
from distdl_jax.plans.decomposition import ProductGrid, ranges_of_sizes
from distdl_jax.plans.halos import Halos
from distdl_jax.primitives.halo_exchange import plan_ranges


class Case(NamedTuple):
    """Blocks of these `sizes`, along each dimension in `around` what is needed before and after each, and which
    dimensions are periodic."""

    P: On
    sizes: tuple[tuple[int, ...], ...]
    around: dict[int, tuple[tuple[int, int], ...]]
    periodic: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.sizes))

    def plan(self, P_world: dj.Partition) -> SplitHaloPlan:
        owned = ProductGrid(self.P.ranks, tuple(map(ranges_of_sizes, self.sizes)))
        needed = list(owned.ranges)
        for axis, around in self.around.items():
            pairs = zip(owned.ranges[axis], around, strict=True)
            needed[axis] = tuple((start - before, stop + after) for (start, stop), (before, after) in pairs)
        shapes = {
            worker: tuple(stop - start for start, stop in owned.box(cell)) for worker, cell in owned.cell_of.items()
        }
        blocks = {rank: dj.ShapeDtype(shapes.get(rank, (0,)), np.dtype(float)) for rank in range(P_world.size)}
        wraps = tuple(d in self.periodic for d in range(len(self.sizes)))
        plan = plan_split_halo(plan_ranges("x", blocks, self.P.partition(P_world), Halos(owned, tuple(needed), wraps)))
        assert plan is not None
        return plan

    def places(self, worker: int, wide: bool) -> tuple[np.ndarray, ...]:
        """Where a worker's block is in the whole tensor, or the same with what is around it."""
        index, found = np.unravel_index(self.P.ranks.index(worker), self.P.shape), []
        for d, (sizes, i) in enumerate(zip(self.sizes, index, strict=True)):
            start, stop = list(pairwise(accumulate(sizes, initial=0)))[i]
            before, after = self.around[d][i] if wide and d in self.around else (0, 0)
            found.append(np.arange(start - before, stop + after) % sum(sizes))
        return np.ix_(*found)


CASES = {
    "one by one": (
        Case(on(4, ranks=(2, 0, 3, 1)), ((5, 4, 4, 2),), {0: ((0, 2), (1, 1), (2, 0), (1, 0))}),
        Case(on(2, 2, ranks=(3, 1, 2, 0)), ((2, 3), (4, 5)), {1: ((0, 3), (2, 0))}),
        Case(on(2, 2, ranks=(1, 3, 0, 2)), ((3, 4), (4, 3)), {0: ((0, 1), (2, 0)), 1: ((0, 2), (1, 0))}),
        Case(on(3, 1, ranks=(1, 0, 2)), ((4, 4, 3), (5,)), {0: ((1, 2), (1, 1), (2, 2)), 1: ((2, 1),)}, (0, 1)),
    ),
    "mapped over": (
        Case(on(2, 2), ((3, 5), (1, 2)), {0: ((0, 0), (2, 0))}),
        Case(on(1, 3, ranks=(1, 3, 0)), ((2,), (2, 3, 2)), {1: ((0, 2), (2, 1), (1, 0))}),
        Case(on(2, 2, 1), ((3, 3), (4, 3), (3,)), {0: ((1, 0), (2, 1)), 1: ((0, 1), (0, 0)), 2: ((1, 2),)}, (0, 2)),
    ),
}


@pytest.mark.simulated(4)
@pytest.mark.parametrize("how", CASES)
def test_halos_and_gradients(how: str) -> None:
    """A halo is what is there in the whole tensor. The adjoint adds it to where it came from.

    The adjoint of that is the exchange again. Exact, on integers; also for the two tensors of a vmap.
    """
    P, lead = dj.Partition(), (2,) * (how == "mapped over")
    cases = {n: case for n, case in enumerate(CASES[how]) if P.rank in case.P.ranks}

    def drawn(seed: int, case: Case) -> np.ndarray:
        return np.random.default_rng(seed).integers(-99, 100, (*lead, *case.shape)).astype(float)

    def there_and_back(plan: SplitHaloPlan, x: Any, dy: Any, v: Any) -> Any:
        y, back = jax.vjp(lambda x: plan.run(P.world, x), x)
        (dx,), there = jax.vjp(back, dy)
        return y, dx, there((v,))[0]

    def parts(of_all: np.ndarray, n: int) -> tuple[np.ndarray, ...]:
        """Of what this worker has when joined, the block and what is around it."""
        return jax.vmap(halos[n].split)(of_all) if lead else halos[n].split(of_all)

    def cotangent(case: Case, worker: int) -> np.ndarray:
        return drawn(10 + worker, case)[(..., *case.places(worker, True))]

    plans = {n: case.plan(P) for n, case in cases.items()}
    halos, given = {n: plan.split_halo(P.rank) for n, plan in plans.items()}, {}
    for n, case in cases.items():
        x, v = (drawn(seed, case)[(..., *case.places(P.rank, False))] for seed in (0, 1))
        given[n] = (x, parts(cotangent(case, P.rank), n), v)

    @dj.jit
    def program(given: Any) -> Any:
        of = {n: partial(there_and_back, plan) for n, plan in plans.items()}
        return {n: (jax.vmap(of[n]) if lead else of[n])(*each) for n, each in given.items()}

    for n, (y, dx, again) in program(given).items():
        case, total = cases[n], np.zeros((*lead, *cases[n].shape))
        for worker in case.P.ranks:
            np.add.at(total, (..., *case.places(worker, True)), cotangent(case, worker))
        np.testing.assert_array_equal(dx, total[(..., *case.places(P.rank, False))])
        for seed, got in ((0, y), (1, again)):
            expected = parts(drawn(seed, case)[(..., *case.places(P.rank, True))], n)
            assert len(got) == len(expected) == 1 + len(case.around)
            for part, want in zip(got, expected, strict=True):
                np.testing.assert_array_equal(part, want)
