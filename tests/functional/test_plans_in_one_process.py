"""Plans of all workers in one process: the same on each, and, played on numpy arrays, what the reference says.

Random ones on twelve workers, on threads, too: forward and adjoint are exactly those of the reference.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from launcher.examples import LONG, examples
from matrix.case import Case, shapes_out
from matrix.cases import PRIMITIVES, shape_dtypes
from matrix.drawn_cases import (
    WORKERS,
    random_all_sum_reduce,
    random_all_to_all,
    random_gather,
    random_halo_exchange,
    random_repartition,
    random_replication,
    random_rows,
)
from matrix.programs import check_exactly
from playing import Blocks, planned, play, play_adjoint

import distdl_jax as dj
from distdl_jax import PlanError, nn
from distdl_jax.functional.all_gather import plan_all_gather
from distdl_jax.functional.halo_exchange import HaloExchangePlan, plan_ranges
from distdl_jax.functional.plan import MovementPlan, Plan
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype


@pytest.mark.parametrize("case", PRIMITIVES, ids=str)
def test_a_plan_is_the_same_on_every_worker(case: Case) -> None:
    """Primitives and layers: made on each worker the plans are equal, and they know what every worker will hold."""
    plan = planned(case.world, lambda P: case.plan(P, shape_dtypes(case)))
    shapes = shapes_out(case)
    assert plan.outputs == {worker: ShapeDtype(shapes[worker], np.dtype(float)) for worker in plan.workers}
    if set(map(type, case.shapes)) == {tuple}:
        everyone = plan.after(shape_dtypes(case))
        assert {worker: block.shape for worker, block in everyone.items()} == dict(enumerate(shapes))


EVERYWHERE = (random_replication, random_all_sum_reduce, random_repartition, random_all_to_all, random_halo_exchange)
IN_ONE_PROGRAM = 6


@pytest.mark.parametrize("draw", [*EVERYWHERE, random_gather, random_rows])
def test_random_movements_played(draw: Callable[[np.random.Generator], Case]) -> None:
    """Forward what the reference gives; <F x, y> = <x, F* y>, summed over all workers; exact, on integers."""
    for number in range(60 * LONG):
        rng = np.random.default_rng([5, number])
        case = draw(rng)
        xs, dys = (numbers(rng, shapes) for shapes in (case.shapes, shapes_out(case)))
        plan = case.plan(dj.planning_world(case.world, number % case.world), shape_dtypes(case))
        ys, dxs = forward(plan, xs), backward(plan, dys)
        for worker, want in enumerate(case.dense([xs[worker] for worker in range(case.world)])):
            np.testing.assert_array_equal(ys[worker], want, err_msg=f"worker {worker} of {case}")
        assert product(ys, dys) == product(xs, dxs), str(case)


@pytest.mark.simulated(WORKERS)
@pytest.mark.limit(1200)
@pytest.mark.parametrize("draw", EVERYWHERE)
def test_random_movements_on_threads(draw: Callable[[np.random.Generator], Case]) -> None:
    """Each program holds many operators; a failing one is named with all that it takes to make it again."""
    rng = np.random.default_rng(sum(map(ord, draw.__name__)))
    for start in range(0, examples(IN_ONE_PROGRAM), IN_ONE_PROGRAM):
        drawn = [draw(rng) for _ in range(IN_ONE_PROGRAM)]
        check_exactly([(replace(case, name=f"{start + n}: {case}"), "float64") for n, case in enumerate(drawn)])


def numbers(rng: np.random.Generator, shapes: Any) -> Blocks:
    return {worker: rng.integers(-1000, 1001, shape).astype(float) for worker, shape in enumerate(shapes)}


def product(a: Blocks, b: Blocks) -> float:
    assert {worker: x.shape for worker, x in a.items()} == {worker: x.shape for worker, x in b.items()}
    return sum(float(np.sum(a[worker] * b[worker])) for worker in a)


def forward(plan: Plan, xs: Blocks) -> Blocks:
    if isinstance(plan, MovementPlan):
        return play(plan, xs)
    assert isinstance(plan, HaloExchangePlan)
    widest = play(plan.movement, xs)
    return widest | {worker: widest[worker][_cut(plan, worker)] for worker in plan.workers}


def backward(plan: Plan, dys: Blocks) -> Blocks:
    if isinstance(plan, MovementPlan):
        return play_adjoint(plan, dys)
    assert isinstance(plan, HaloExchangePlan)
    wide = dict(dys)
    for worker in plan.workers:
        wide[worker] = np.zeros(plan.movement.output(worker).shape)
        wide[worker][_cut(plan, worker)] = dys[worker]
    return play_adjoint(plan.movement, wide)


def _cut(plan: HaloExchangePlan, worker: int) -> tuple[slice, ...]:
    return tuple(map(slice, *plan.cut(worker)))


def test_plans_of_thousands_of_workers() -> None:
    """One process makes the plan of a layer on 4,096 workers, and a worker's part in it, which knows its partners."""
    P = dj.planning_world(4096, 77)
    grid = P.grid([1, 1, 64, 64])
    layer = nn.DistributedConv2d(grid, in_channels=3, out_channels=5, kernel_size=5, padding=2)
    plan = layer.plan({worker: ShapeDtype((2, 3, 16, 16), np.dtype("float32")) for worker in range(4096)})
    assert plan.outputs == dict.fromkeys(range(4096), ShapeDtype((2, 5, 16, 16), np.dtype("float32")))
    part = plan.fetch.movement.part(77)
    assert [[message.partner for message in step.recvs] for step in part.steps] == [[13, 141], [76, 78]]
    move = nn.Repartition(P.grid([4096, 1]), P.grid([64, 64]))
    plan = move.plan({worker: ShapeDtype((4, 640), np.dtype("int8")) for worker in range(4096)})
    assert plan.output(77) == ShapeDtype((256, 10), np.dtype("int8"))
    assert len(plan.part(77).steps[0].recvs) == 63


def test_a_plan_that_wants_what_nobody_has_is_refused() -> None:
    """It would be zeros, in silence: what the library plans is in the tensor, but where it wraps around."""
    owned = ProductGrid.balanced((6,), (2,), (0, 1))
    blocks = {worker: ShapeDtype((3,), np.dtype("float32")) for worker in (0, 1)}
    for ranges in (((0, 3), (3, 7)), ((0, 3), (4, 6)), ((0, 3), (3, 5)), ((0, 4), (3, 6))):
        exchange = Exchange(owned, ProductGrid((0, 1), (ranges,)))
        with pytest.raises(PlanError, match=r"must cover the tensor, of shape \(6,\), and nothing outside"):
            RepartitionPlan("repartition", blocks, np.dtype("float32"), exchange, True)
    P = dj.planning_world(2)
    outside = ((-1, 3), (3, 6))
    with pytest.raises(PlanError, match=r"in dimension 0, of length 6, they need \(\(-1, 3\), \(3, 6\)\)"):
        plan_ranges("x", blocks, P, Halos(owned, (outside,)))
    assert plan_ranges("x", blocks, P, Halos(owned, (outside,), (True,))).output(0).shape == (4,)


@pytest.mark.parametrize("p", [9, 12, 16, 17, 33])
def test_a_long_line_gathers_by_doubling(p: int) -> None:
    """On 2 x p workers with blocks of 0 to 3 rows: the whole, everywhere; back the sums; messages and elements sent."""
    rng = np.random.default_rng(p)
    lengths = [int(n) for n in rng.integers(0, 4, p)]
    xs = {w: rng.integers(-9, 10, (lengths[w % p], 2)).astype(float) for w in range(2 * p)}
    P = dj.planning_world(2 * p).grid([p, 2], [w + p * c for w in range(p) for c in range(2)])
    plan = plan_all_gather({w: ShapeDtype(x.shape, x.dtype) for w, x in xs.items()}, P, 0)
    wholes = [np.concatenate([xs[w + p * c] for w in range(p)]) for c in range(2)]
    ys = play(plan, xs)
    for worker, y in ys.items():
        np.testing.assert_array_equal(y, wholes[worker // p])
    for worker, dx in play_adjoint(plan, ys).items():
        np.testing.assert_array_equal(dx, p * xs[worker])
    for adjoint in (False, True):
        of_workers = [plan.operations(worker, adjoint=adjoint) for worker in range(2 * p)]
        assert max(map(len, of_workers)) == (p - 1).bit_length()
        received = sum(op.count if op.kind == "recv" else op.received for ops in of_workers for op in ops)
        assert received == 2 * 2 * (p - 1) * sum(lengths)


def test_a_sharded_weight_is_gathered_by_doubling() -> None:
    """Cut over 16 workers of a data-parallel convolution: 4 messages for the weight, 4 for the bias."""
    P = dj.planning_world(16).grid([16, 1, 1])
    layer = nn.DistributedConv1d(P, in_channels=3, out_channels=20, kernel_size=3, sharded=True)
    plan = layer.plan({w: ShapeDtype((2, 3, 8), np.dtype("float32")) for w in range(16)})
    assert [len(gather.operations(5)) for gather in plan.of_params.gathered.values()] == [4, 4]
