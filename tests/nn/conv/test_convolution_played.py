"""Random convolutions and poolings, all workers played in one process without MPI, against the whole array in numpy.

Integers in float64: every comparison is exact.
"""

from collections import Counter
from math import prod

import numpy as np
import pytest
from convolution import whole
from convolution.draws import Conv, Draw, Drawn, Pool
from convolution.played import play_conv, play_pool
from launcher.settings import long_run
from playing_layers import cuts, differing

import distdl_jax as dj

CONVS, POOLS = (16_000, 8_000) if long_run() else (800, 400)
BATCHES = 20
WORLDS = (12, 12, 12, 30, 4)
DIMS = (*((1, 2, 3),) * 11, (4,))


def drawn_conv(case: int) -> tuple[Conv, list[np.ndarray]]:
    """A convolution with x, w, b and dy."""
    draw = Draw([1, case], WORLDS[case % len(WORLDS)], DIMS[case % len(DIMS)])
    conv = draw.conv()
    biases = (conv.out_channels,) if conv.bias else (0,)
    return conv, [integers(draw.rng, *shape) for shape in (conv.x_shape, conv.w_shape, biases, conv.y_shape)]


def drawn_pool(case: int) -> tuple[Pool, list[np.ndarray]]:
    """A pooling with x and dy."""
    draw = Draw([2, case], WORLDS[case % len(WORLDS)], DIMS[case % len(DIMS)])
    pool = draw.pool()
    return pool, [integers(draw.rng, *shape) for shape in (pool.x_shape, pool.y_shape)]


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-5, 6, shape).astype(np.float64)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_convolution(batch: int) -> None:
    """800 convolutions: output, input, weight and bias gradients are the blocks of the whole array's, exactly."""
    for case in range(batch, CONVS, BATCHES):
        conv, (x, w, b, dy) = drawn_conv(case)
        want = whole.conv_by_numpy(conv, x, w, b if conv.bias else np.zeros(1), dy)
        played = play_conv(conv, x, w, b, dy)
        context = f"case {case}: {conv}"
        assert not differing(played.y, cuts(want.y, conv.y_boxes)), context
        assert not differing(played.dx, cuts(want.dx, conv.x_boxes)), context
        weights, biases = played.params
        assert sum(w[box].size for box in weights.values()) == w.size, context
        assert not differing(played.grads[0], cuts(want.dw, weights)), context
        if conv.bias:
            assert sum(b[box].size for box in biases.values()) == b.size, context
            assert not differing({r: played.grads[1][r] for r in biases}, cuts(want.db, biases)), context


@pytest.mark.parametrize("batch", range(BATCHES))
def test_pooling(batch: int) -> None:
    """400 max and average poolings: output and input gradient are the blocks of the whole array's, exactly."""
    for case in range(batch, POOLS, BATCHES):
        pool, (x, dy) = drawn_pool(case)
        want = whole.pool_by_numpy(pool, x, dy)
        with np.errstate(invalid="ignore"):
            played = play_pool(pool, x, dy)
        context = f"case {case}: {pool}"
        assert not differing(played.y, cuts(want.y, pool.y_boxes)), context
        assert not differing(played.dx, cuts(want.dx, pool.x_boxes)), context


@pytest.mark.parametrize("case", range(0, 160, 20))
def test_references_are_those_of_jax(case: int) -> None:
    """Numpy gives what `conv_general_dilated` and `reduce_window` give on the whole array, ties of maxima included."""
    conv, (x, w, b, dy) = drawn_conv(case)
    b = b if conv.bias else np.zeros(1)
    by_lax, by_numpy = whole.conv_by_lax(conv, x, w, b, dy), whole.conv_by_numpy(conv, x, w, b, dy)
    for name in ("y", "dx", "dw") + ("db",) * conv.bias:
        assert np.array_equal(getattr(by_lax, name), getattr(by_numpy, name)), f"{name} of {conv}"
    pool, (x, dy) = drawn_pool(case)
    of_sums = dy if pool.kind == "Max" else dy / whole.entries(pool)
    by_lax, by_numpy = whole.pool_by_lax(pool, x, dy), whole.pool_by_numpy(pool, x, of_sums)
    np.testing.assert_allclose(by_lax.y, by_numpy.y, rtol=1e-15, err_msg=str(pool))  # XLA divides by multiplying
    np.testing.assert_allclose(by_lax.dx, by_numpy.dx, rtol=1e-14, atol=1e-14, err_msg=str(pool))


def traits(drawn: Drawn) -> set[str]:
    """What makes a case worth having."""
    lines, own = drawn.cuts[2:], isinstance(drawn, Conv)
    reach = [d * (k - 1) for k, d in zip(drawn.kernel, drawn.dilation, strict=True)]
    lengths = [{b - a for a, b in line} for line in lines]
    found = {
        f"{drawn.dims}-D": True,
        "blocks smaller than the kernel": any(
            len(line) > 1 and 0 < min(its) < r for line, its, r in zip(lines, lengths, reach, strict=True)
        ),
        "blocks of different lengths": any(len(its) > 1 for its in lengths),
        "empty blocks of x": any(0 in its for its in lengths),
        "more workers than outputs": any(m < p for m, p in zip(drawn.lengths, drawn.P_x.shape[2:], strict=True)),
        "stride and dilation": max(drawn.stride) > 1 and max(drawn.dilation) > 1,
        "padding wider than the kernel": any(max(p) > r for p, r in zip(drawn.pairs, reach, strict=True)),
        "batch split": len(drawn.cuts[0]) > 1,
        "two or more dimensions split": sum(p > 1 for p in drawn.P_x.shape[2:]) > 1,
        drawn.layer(dj.planning_world(drawn.world)).kind if own else drawn.kind: True,
    }
    if own:
        spread = drawn.P_W is not None and prod(drawn.P_W.shape) > 1
        found |= {
            f"mode {drawn.mode}": True,
            "groups and channels split": drawn.groups > 1 and drawn.P_x.shape[1] > 1,
            "teams that differ": spread and {*drawn.P_W.ranks} != {*drawn.P_x.ranks, *drawn.P_y.ranks},
        }
    return {name for name, is_there in found.items() if is_there}


@pytest.mark.parametrize(("draw", "least", "kinds"), [(drawn_conv, 20, 21), (drawn_pool, 10, 13)])
def test_draws_hold_every_kind_of_case(draw, least: int, kinds: int) -> None:
    """The first cases hold each kind that is to be tested, at least so often."""
    counts = Counter(trait for case in range(32 * least) for trait in traits(draw(case)[0]))
    assert len(counts) == kinds and min(counts.values()) >= least, counts
