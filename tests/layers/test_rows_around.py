"""The rows around a worker's block, brought without being joined to it: what oneDNN takes, here without oneDNN."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from matrix.partitions import On, on

import distdl_jax as dj
from distdl_jax.nn.local.apart import Apart
from distdl_jax.nn.rows_around import RowsAroundPlan, rows_around
from distdl_jax.plans.decomposition import ProductGrid, ranges_of_sizes
from distdl_jax.plans.halos import Halos
from distdl_jax.primitives.halo_exchange import plan_ranges


class Case(NamedTuple):
    """Blocks of these `sizes`, and along dimension `axis` how many rows are needed before and after each."""

    P: On
    sizes: tuple[tuple[int, ...], ...]
    axis: int
    around: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.sizes))

    def plan(self, P_world: dj.Partition) -> RowsAroundPlan:
        owned = ProductGrid(self.P.ranks, tuple(map(ranges_of_sizes, self.sizes)))
        rows = zip(owned.ranges[self.axis], self.around, strict=True)
        needed = list(owned.ranges)
        needed[self.axis] = tuple((start - before, stop + after) for (start, stop), (before, after) in rows)
        shapes = {
            worker: tuple(stop - start for start, stop in owned.box(cell)) for worker, cell in owned.cell_of.items()
        }
        held = {rank: dj.ShapeDtype(shapes.get(rank, (0,)), np.dtype(float)) for rank in range(P_world.size)}
        plan = rows_around(plan_ranges("x", held, self.P.partition(P_world), Halos(owned, tuple(needed))))
        assert plan is not None
        return plan

    def block(self, worker: int) -> tuple[slice, ...]:
        """Where a worker's block is in the whole tensor."""
        index = np.unravel_index(self.P.ranks.index(worker), self.P.shape)
        ends = [list(pairwise(accumulate(its, initial=0))) for its in self.sizes]
        return tuple(slice(*its[i]) for its, i in zip(ends, index, strict=True))

    def rows(self, worker: int) -> tuple[Any, ...]:
        """The same of the rows around it: those before it, and then those after it."""
        block = self.block(worker)
        before, after = self.around[int(np.unravel_index(self.P.ranks.index(worker), self.P.shape)[self.axis])]
        start, stop = block[self.axis].start, block[self.axis].stop
        numbers = [*range(start - before, start), *range(stop, stop + after)]
        return *block[: self.axis], np.array(numbers, int), *block[self.axis + 1 :]


CASES = {
    "one by one": (
        Case(on(4, ranks=(2, 0, 3, 1)), ((5, 4, 4, 2),), 0, ((0, 2), (1, 1), (2, 0), (1, 0))),
        Case(on(2, 2, ranks=(3, 1, 2, 0)), ((2, 3), (4, 5)), 1, ((0, 3), (2, 0))),
    ),
    "mapped over": (
        Case(on(2, 2), ((3, 5), (1, 2)), 0, ((0, 0), (2, 0))),
        Case(on(1, 3, ranks=(1, 3, 0)), ((2,), (2, 3, 2)), 1, ((0, 2), (2, 1), (1, 0))),
    ),
}


@pytest.mark.simulated(4)
@pytest.mark.parametrize("how", CASES)
def test_rows_and_gradients(how: str) -> None:
    """Around each block what is there in the whole tensor. The way back adds it to where it came from, and the way back
    of that is the way there. Exact, on integers; also of the two tensors of a vmap."""
    P, lead = dj.Partition(), (2,) * (how == "mapped over")
    cases = {n: case for n, case in enumerate(CASES[how]) if P.rank in case.P.ranks}

    def drawn(seed: int, case: Case) -> np.ndarray:
        return np.random.default_rng(seed).integers(-99, 100, (*lead, *case.shape)).astype(float)

    def there_and_back(plan: RowsAroundPlan, x: Any, dy: Any, drows: Any, v: Any) -> Any:
        y, back = jax.vjp(lambda x: plan.run(P.world, x), x)
        (dx,), there = jax.vjp(back, (dy, drows))
        return y, dx, there((v,))[0]

    def cotangents(case: Case, worker: int) -> tuple[np.ndarray, np.ndarray]:
        """Those of a worker's block, and of the rows around it."""
        return drawn(10 + worker, case)[(..., *case.block(worker))], drawn(20 + worker, case)[(..., *case.rows(worker))]

    given, plans = {}, {n: case.plan(P) for n, case in cases.items()}
    for n, case in cases.items():
        x, v = (drawn(seed, case)[(..., *case.block(P.rank))] for seed in (0, 1))
        given[n] = (x, *cotangents(case, P.rank), v)

    @dj.jit
    def program(given: Any) -> Any:
        of = {n: partial(there_and_back, plan) for n, plan in plans.items()}
        return {n: (jax.vmap(of[n]) if lead else of[n])(*its) for n, its in given.items()}

    for n, (y, dx, again) in program(given).items():
        case, total = cases[n], np.zeros((*lead, *cases[n].shape))
        for worker in case.P.ranks:
            for place, more in zip((case.block(worker), case.rows(worker)), cotangents(case, worker), strict=True):
                total[(..., *place)] += more
        np.testing.assert_array_equal(dx, total[(..., *case.block(P.rank))])
        for seed, (block, rows) in ((0, y), (1, again)):
            np.testing.assert_array_equal(block, drawn(seed, case)[(..., *case.block(P.rank))])
            np.testing.assert_array_equal(rows, drawn(seed, case)[(..., *case.rows(P.rank))])
        index = np.unravel_index(case.P.ranks.index(P.rank), case.P.shape)[case.axis]
        assert plans[n].apart(P.rank) == Apart(case.axis, *case.around[index])
        movement = plans[n].movement
        moved = movement.output(P.rank).shape[case.axis] - movement.inputs[P.rank].shape[case.axis]
        assert moved == sum(case.around[index])
