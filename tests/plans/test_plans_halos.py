"""Random halo exchanges, all workers simulated in one process, against slices of the padded global array."""

from math import prod

import numpy as np
import pytest
from launcher.examples import LONG
from plans.blocks_of_grids import blocks_of, needed_blocks, random_blocks
from simulator import adjoint, simulate

from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.halos import Halos, needed_ranges, own_box
from distdl_jax.plans.windows import WindowedAxis

BATCHES = 20


def random_owned(rng):
    """Draw a grid of 1 to 3 dimensions, blocks balanced or cut anywhere, workers in any order."""
    ndim = int(rng.integers(1, 4))
    shape = tuple(int(rng.integers(1, (13, 5, 4)[ndim - 1])) for _ in range(ndim))
    ranges = []
    for p in shape:
        n = int(rng.integers(0 if rng.random() < 0.05 else 1, (25, 12, 8)[ndim - 1]))
        ranges.append(random_blocks(rng, n, p))
    return ProductGrid(tuple(int(r) for r in rng.permutation(prod(shape) + 1)[: prod(shape)]), tuple(ranges))


def random_windows(rng, n, periodic):
    """Draw kernel, stride, dilation and padding that give an output; None where nothing is left to read."""
    low, high = (int(rng.integers(0, 5)) if rng.random() < 0.6 else 0 for _ in range(2))
    if n + low + high == 0:
        return None
    kernel, stride, dilation = (int(rng.integers(1, limit)) for limit in (6, 5, 4))
    kernel = min(kernel, (n + low + high - 1) // dilation + 1)
    return WindowedAxis(n, kernel, stride, dilation, (low, high), periodic)


def random_needed(rng, owned, periodic):
    """Draw the ranges that outputs' windows read, or widths at random, negative ones among them."""
    needed = []
    for n, ranges, wraps in zip(owned.extent, owned.ranges, periodic, strict=True):
        windows = random_windows(rng, n, wraps)
        kind = rng.random()
        if kind < 0.1:
            needed.append(ranges)
        elif kind < 0.3 or windows is None:
            starts = [start - int(rng.integers(-2, 6)) for start, _ in ranges]
            stops = [stop + int(rng.integers(-2, 6)) for _, stop in ranges]
            needed.append(tuple((a, max(a, b)) for a, b in zip(starts, stops, strict=True)))
        else:
            wanted = windows.input_ranges(len(ranges))
            clip = rng.random() < 0.5
            needed.append(tuple(windows.clipped(w)[0] for w in wanted) if clip else wanted)
    return tuple(needed)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_halo_exchange_gives_slices_of_the_padded_array_and_its_adjoint_is_exact(batch):
    """1,600 halo exchanges, in a long run 50,000: values, <Fx, y> = <x, F*y>, partners.

    Dimension by dimension, without barriers.
    """
    for case in range((50_000 if LONG > 1 else 1_600) // BATCHES):
        rng = np.random.default_rng([3, batch, case])
        owned = random_owned(rng)
        periodic = tuple(bool(n) and bool(rng.random() < 0.4) for n in owned.extent)
        needed = random_needed(rng, owned, periodic)
        halos = Halos(owned, needed, periodic)
        programs = {rank: halos.plans(rank) for rank in owned.ranks}
        painted = np.arange(1, prod(owned.extent) + 1).reshape(owned.extent)
        blocks, wanted = blocks_of(owned, painted), needed_blocks(painted, ProductGrid(owned.ranks, needed), periodic)
        moved = simulate(programs, blocks)
        context = f"batch {batch}, case {case}: {halos}"
        assert all(np.array_equal(moved[r], wanted[r]) for r in programs), context

        y = {r: rng.integers(-99, 99, block.shape) for r, block in moved.items()}
        back = simulate(adjoint(programs), y)
        pairs = [(moved[r], y[r], blocks[r], back[r]) for r in programs]
        assert sum(int(np.vdot(a, b)) for a, b, _, _ in pairs) == sum(int(np.vdot(a, b)) for *_, a, b in pairs), context
        assert all(back[r].shape == blocks[r].shape for r in programs), context

        assert len({len(plans) for plans in programs.values()}) == 1, context
        outsider = halos.plans(max(owned.ranks) + 1)
        assert len(outsider) == len(programs[owned.ranks[0]]) and not any(plan.rounds for plan in outsider), context
        lines = {r: {p for d in range(len(owned.shape)) for p in owned.line(owned.cell_of[r], d)} for r in programs}
        assert all(m.partner in lines[r] for r, plans in programs.items() for plan in plans for m in plan.sends), (
            context
        )


def test_narrow_halos_in_three_dimensions_take_six_messages_and_carry_the_corners():
    grid = ProductGrid.balanced((9, 9, 9), (3, 3, 3), range(27))
    needed = needed_ranges(grid, [[(1, 1)] * 3] * 27)
    plans = Halos(grid, needed).plans(13)
    assert [len(plan.sends) for plan in plans] == [len(plan.recvs) for plan in plans] == [2, 2, 2]
    assert [plan.out_shape for plan in plans] == [(5, 3, 3), (5, 5, 3), (5, 5, 5)]
    assert [sum(m.size for m in plan.recvs) for plan in plans] == [2 * 9, 2 * 15, 2 * 25]


def test_nothing_moves_where_nothing_more_is_needed():
    grid = ProductGrid.balanced((9, 6), (3, 2), range(6))
    assert Halos(grid, grid.ranges).plans(0) == ()
    (plan,) = Halos(grid, (grid.ranges[0], ((0, 4), (2, 6)))).plans(0)
    assert plan.in_shape == (3, 3) and plan.out_shape == (3, 4)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_periodic_dimension_of_one_worker_has_local_copies_only(turns):
    grid = ProductGrid.balanced((4,), (1,), (0,))
    (plan,) = Halos(grid, (((-4 * turns, 4 + 4 * turns),),), (True,)).plans(0)
    assert not plan.rounds and len(plan.copies) == 2 * turns + 1 and plan.covers_output
    assert not plan.reverse().out_disjoint  # the turns add up
    out = simulate({0: (plan,)}, {0: np.arange(4)})[0]
    assert np.array_equal(out, np.tile(np.arange(4), 2 * turns + 1))


def test_workers_of_equal_index_exchange_the_widest_and_each_has_its_own_box_in_it():
    grid = ProductGrid.balanced((8, 6), (2, 2), ranks=range(4))
    halos = [[(0, 1), (0, 2)], [(0, 3), (1, 0)], [(2, 0), (0, 0)], [(1, 0), (3, 0)]]
    needed = needed_ranges(grid, halos)
    assert needed == (((0, 7), (2, 8)), ((0, 5), (0, 6)))
    assert [own_box(grid, cell, halo) for cell, halo in enumerate(halos)] == [
        ((0, 5), (0, 5)),
        ((0, 7), (2, 6)),
        ((2, 8), (0, 3)),
        ((3, 8), (0, 6)),
    ]


def test_periodic_ranges_are_not_clipped():
    grid = ProductGrid.balanced((12, 10), (3, 2), range(6))
    needed = needed_ranges(grid, [[(2, 2), (1, 1)]] * 6, periodic=(True, False))
    assert needed == (((-2, 6), (2, 10), (6, 14)), ((0, 6), (4, 10)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: needed_ranges(g, [[(1, 1)]]), r"`halos` \(of length 1\) must have one entry for each of 2"),
        (lambda g: needed_ranges(g, [[(1, 1)]] * 2), "one pair of widths for each of 2 dimensions"),
        (lambda g: needed_ranges(g, [[(-3, 0), (0, 0)]] * 2), "removes more than there is from a block of 2"),
        (
            lambda g: needed_ranges(ProductGrid.balanced((0, 4), (2, 1), (0, 1)), [[(1, 0), (1, 1)]] * 2, (True, True)),
            "`halos` requests entries around the blocks in dimension 0, which is periodic and has no entries",
        ),
        (lambda g: Halos(g, (((0, 4),), ((0, 4),))), "`needed` has"),
        (lambda g: Halos(g, g.ranges, (True,)), "`periodic`"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(ProductGrid.balanced((4, 4), (2, 1), (0, 1)))
