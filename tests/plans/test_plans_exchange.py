"""Random exchanges, all workers simulated in one process, against arrays painted with global indices."""

import time
from collections import Counter
from math import prod

import numpy as np
import pytest
from launcher.examples import LONG
from plans.blocks_of_grids import blocks_of, needed_blocks, random_blocks
from simulator import DeadlockError, MismatchError, adjoint, simulate
from speed import python_slowdown

from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange, _Segments
from distdl_jax.plans.messages import ExchangePlan, Message, Piece, Round

BATCHES = 20
TEAMS = ("equal", "permuted", "overlapping", "disjoint")


def random_shape(rng, ndim, cells):
    """Draw a grid of at most `cells` cells."""
    shape = [1] * ndim
    for _ in range(8):
        d = int(rng.integers(ndim))
        grown = [*shape[:d], shape[d] + int(rng.integers(1, 4)), *shape[d + 1 :]]
        if prod(grown) <= cells:
            shape = grown
    return tuple(shape)


def random_teams(rng, kind, x_size, y_size):
    """Draw world ranks for two teams, not in order, and with some left over."""
    pool = [int(r) for r in rng.permutation(x_size + y_size + 2)]
    if kind == "equal":
        return pool[:x_size], pool[:x_size]
    if kind == "permuted":
        return pool[:x_size], [pool[i] for i in rng.permutation(x_size)]
    skip = x_size if kind == "disjoint" else int(rng.integers(0, x_size))
    return pool[:x_size], [pool[skip + i] for i in rng.permutation(y_size)]


def random_grids(rng, kind):
    """Draw owned blocks, and the shape and ranks of a grid that needs some."""
    ndim = int(rng.integers(1, 5))
    x_shape = random_shape(rng, ndim, min(64, int(2 ** rng.uniform(0, 6.1))))
    y_shape = random_shape(rng, ndim, min(64, int(2 ** rng.uniform(0, 6.1))))
    if kind in ("equal", "permuted"):
        y_shape = tuple(x_shape[d] for d in rng.permutation(ndim))
    limit = (40, 14, 8, 6)[ndim - 1]
    extent = tuple(0 if rng.random() < 0.02 else int(rng.integers(1, limit)) for _ in range(ndim))
    x_ranks, y_ranks = random_teams(rng, kind, prod(x_shape), prod(y_shape))
    owned = ProductGrid(tuple(x_ranks), tuple(random_blocks(rng, n, p) for n, p in zip(extent, x_shape, strict=True)))
    return owned, y_shape, tuple(y_ranks)


def index(box):
    return tuple(slice(start, stop) for start, stop in box)


def plan_all(exchange):
    """Return every worker's plan, and that of some worker that is in neither team."""
    ranks = [*exchange.team, max(exchange.team) + 1]
    return {rank: (exchange.plan(rank),) for rank in ranks}


def inner(a, b):
    """Return the inner product summed over all workers, exactly."""
    return sum(int(np.vdot(a[rank], b[rank])) for rank in a)


def check_messages(programs):
    """Check for one message per pair and direction, none to oneself, none empty, and equal pieces on both sides."""
    sends = {(r, m.partner): m.pieces for r, (plan,) in programs.items() for m in plan.sends}
    recvs = {(m.partner, r): m.pieces for r, (plan,) in programs.items() for m in plan.recvs}
    assert sends == recvs and all(source != dest for source, dest in sends)
    for rank, (plan,) in programs.items():
        assert len({m.partner for m in plan.sends}) == len(plan.sends)
        assert len({m.partner for m in plan.recvs}) == len(plan.recvs)
        assert all(piece.size > 0 for piece in plan.copies)
        assert all(piece.size > 0 for m in (*plan.sends, *plan.recvs) for piece in m.pieces), rank


def check_flags(programs):
    """Check the plan's promises, by counting how often each element of the blocks is in a piece."""
    for (plan,) in programs.values():
        counts = np.zeros(plan.in_shape, int), np.zeros(plan.out_shape, int)
        for piece in (*plan.copies, *(piece for m in plan.sends for piece in m.pieces)):
            counts[0][piece.source] += 1
        for piece in (*plan.copies, *(piece for m in plan.recvs for piece in m.pieces)):
            counts[1][piece.dest] += 1
        assert plan.in_disjoint == bool((counts[0] <= 1).all())
        assert plan.out_disjoint and bool((counts[1] <= 1).all())
        assert plan.reverse().covers_output == bool((counts[0] == 1).all())
        assert plan.covers_output == bool((counts[1] == 1).all())
        assert plan.reverse().reverse() == plan


def moved_as_wanted(exchange, context):
    """Check what all workers get; return their programs, blocks before and after, and the traffic."""
    programs, traffic = plan_all(exchange), Counter()
    painted = np.arange(1, prod(exchange.owned.extent) + 1).reshape(exchange.owned.extent)
    wanted = needed_blocks(painted, exchange.needed, exchange.wraps, programs)
    blocks = blocks_of(exchange.owned, painted, programs)
    moved = simulate(programs, blocks, traffic)
    assert all(np.array_equal(moved[r], wanted[r]) for r in programs), context
    check_messages(programs)
    return programs, blocks, moved, traffic


@pytest.mark.parametrize("batch", range(BATCHES))
def test_repartition_moves_each_element_to_the_worker_that_needs_it(batch):
    """1,600 repartitions, in a long run 50,000: values, bytes between each pair, the inverse, promises, order."""
    for case in range((50_000 if LONG > 1 else 1_600) // BATCHES):
        rng = np.random.default_rng([1, batch, case])
        owned, y_shape, y_ranks = random_grids(rng, TEAMS[case % 4])
        ranges = tuple(random_blocks(rng, n, p) for n, p in zip(owned.extent, y_shape, strict=True))
        exchange = Exchange(owned, ProductGrid(y_ranks, ranges))
        context = f"batch {batch}, case {case}: {exchange}"
        programs, blocks, moved, traffic = moved_as_wanted(exchange, context)

        owner = np.zeros(owned.extent, int)
        for cell, rank in enumerate(owned.ranks):
            owner[index(owned.box(cell))] = rank
        seen = Counter()
        for cell, rank in enumerate(exchange.needed.ranks):
            counts = np.bincount(owner[index(exchange.needed.box(cell))].ravel())
            seen.update({(int(source), rank): int(counts[source]) for source in counts.nonzero()[0]})
        assert traffic == seen, context

        back = simulate(adjoint(programs), moved)
        assert all(np.array_equal(back[r], blocks[r]) for r in programs), context
        if case % 10 == 0:
            check_flags(programs)
        assert not exchange.is_identity or all(plan.is_identity for (plan,) in programs.values()), context


def random_wanted(rng, n, own):
    """Draw a range that may lie anywhere: around `own`, across a boundary, several turns away, nowhere."""
    kind = rng.integers(4)
    if kind == 0:
        return own
    if kind == 1:
        return own[0] - int(rng.integers(0, 4)), own[1] + int(rng.integers(0, 4))
    start = int(rng.integers(-3 - n, 2 * n + 3))
    return start, start + int(rng.integers(0, n + 4))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_any_boxes_overlapping_with_gaps_outside_or_wrapped(batch):
    """600 exchanges (10,000) in one go, not dimension by dimension: forward and adjoint, between any teams."""
    for case in range((10_000 if LONG > 1 else 600) // BATCHES):
        rng = np.random.default_rng([2, batch, case])
        owned, y_shape, y_ranks = random_grids(rng, TEAMS[case % 4])
        periodic = tuple(bool(n) and bool(rng.random() < 0.5) for n in owned.extent)
        ranges = tuple(
            tuple(random_wanted(rng, n, own) for own in random_blocks(rng, n, p))
            for n, p in zip(owned.extent, y_shape, strict=True)
        )
        exchange = Exchange(owned, ProductGrid(y_ranks, ranges), periodic)
        context = f"batch {batch}, case {case}: {exchange}"
        programs, blocks, moved, _ = moved_as_wanted(exchange, context)
        y = {r: rng.integers(-99, 99, block.shape) for r, block in moved.items()}
        assert inner(moved, y) == inner(blocks, simulate(adjoint(programs), y)), context
        check_flags(programs)


def test_worker_in_neither_team_has_nothing_to_do():
    rows = ProductGrid.balanced((4, 4), (2, 1), ranks=(5, 3))
    plan = Exchange(rows, rows).plan(4)
    assert plan == ExchangePlan((0, 0), (0, 0), (), ()) and plan.is_identity


def test_same_partition_is_the_identity_and_an_unbalanced_one_is_not():
    balanced = ProductGrid.balanced((5, 3), (2, 1), ranks=(0, 1))
    uneven = ProductGrid((0, 1), (((0, 4), (4, 5)), ((0, 3),)))
    same, rebalance = Exchange(balanced, balanced), Exchange(uneven, balanced)
    assert same.is_identity and all(same.plan(r).is_identity for r in (0, 1))
    assert not rebalance.is_identity and not any(rebalance.plan(r).is_identity for r in (0, 1))


def test_scatter_sends_one_message_to_each_and_gather_reverses_it():
    root, rows = ProductGrid.balanced((8,), (1,), ranks=(2,)), ProductGrid.balanced((8,), (4,), ranks=range(4))
    scatter, gather = Exchange(root, rows), Exchange(rows, root)
    assert [m.partner for m in scatter.plan(2).sends] == [3, 0, 1] and not scatter.plan(2).recvs
    for rank in range(4):
        there, back = scatter.plan(rank).reverse(), gather.plan(rank)
        assert there.copies == back.copies
        assert {m.partner: m for m in there.sends} == {m.partner: m for m in back.sends}
        assert {m.partner: m for m in there.recvs} == {m.partner: m for m in back.recvs}


def test_message_of_several_pieces_where_a_neighbour_is_on_both_sides():
    ring = ProductGrid.balanced((6,), (2,), ranks=(0, 1))
    plan = Exchange(ring, ProductGrid((0, 1), (((-1, 4), (2, 7)),)), periodic=(True,)).plan(0)
    assert plan.recvs == (Message(1, (Piece((2,), (0,), (1,)), Piece((0,), (4,), (1,)))),)
    assert plan.recvs[0].size == 2 and len(plan.rounds) == 1


def test_stencils_take_two_rounds():
    owned = ProductGrid.balanced((64,), (16,), range(16))
    needed = ProductGrid(owned.ranks, (tuple((a - 1, b + 1) for a, b in owned.ranges[0]),))
    for periodic in (False, True):
        exchange = Exchange(owned, needed, (periodic,))
        assert all(len(exchange.plan(rank).rounds) <= 2 for rank in owned.ranks)


def test_simulator_sees_deadlock_and_mismatch():
    """What the other tests rely on: a ring in which all send before they receive hangs, sendrecv does not."""

    def ring(r, n=3, size=1):
        piece = Piece((0,), (0,), (size,))
        return Message((r + 1) % n, (piece,)), Message((r - 1) % n, (Piece((0,), (0,), (1,)),))

    blocks = {r: np.array([r, r]) for r in range(3)}

    def programs(rounds, **options):
        return {r: (ExchangePlan((2,), (1,), (), rounds(*ring(r, **options))),) for r in range(3)}

    assert simulate(programs(lambda s, r: (Round(s, r),)), blocks)[0] == [2]
    with pytest.raises(DeadlockError):
        simulate(programs(lambda s, r: (Round(s, None), Round(None, r))), blocks)
    with pytest.raises(MismatchError):
        simulate(programs(lambda s, r: (Round(s, r),), size=2), blocks)


@pytest.mark.parametrize("x_shape, y_shape", [((16, 16, 16), (64, 64, 1)), ((64, 64, 1), (16, 16, 16))])
def test_cost_of_planning_for_4096_workers(x_shape, y_shape, monkeypatch):
    """Each worker looks at as many ranges as it has partners per dimension, not at all workers."""
    looked = 0
    plain = _Segments.overlapping

    def counted(self, start, stop):
        nonlocal looked
        found = plain(self, start, stop)
        looked += len(found)
        return found

    monkeypatch.setattr(_Segments, "overlapping", counted)
    grids = (ProductGrid.balanced((512,) * 3, shape, range(4096)) for shape in (x_shape, y_shape))
    begin = time.process_time()
    exchange = Exchange(*grids)
    plans = [exchange.plan(rank) for rank in range(4096)]
    seconds = time.process_time() - begin
    assert sum(len(plan.sends) + len(plan.copies) for plan in plans) == 64 * 64 * 16  # overlaps by arithmetic
    assert sum(plan.copied + sum(m.size for m in plan.recvs) for plan in plans) == 512**3
    assert looked <= 4096 * (4 + 4 + 1 + 1 + 1 + 16)
    assert seconds < 10 * python_slowdown(), f"{seconds:.2f} s of processor time; less than 1 s where nothing else runs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda g: (g, ProductGrid((0,), (((0, 4),),))), r"`needed` \(of shape \(1,\)\) must have 2 dimensions"),
        (lambda g: (g, g, (True,)), r"`periodic` \(=\(True,\)\) must have one entry for each of 2"),
        (lambda g: (ProductGrid((0,), (((1, 4),), ((0, 2),))), g), "`owned` must have"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Exchange(*arguments(ProductGrid.balanced((4, 4), (2, 1), (0, 1))))
