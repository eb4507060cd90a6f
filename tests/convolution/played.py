"""All workers of a convolution or a pooling in one process: the layer's own plan, the local products in numpy."""

from math import prod

import numpy as np
from playing import shape_dtypes
from playing_layers import Fetched, Played, cuts, play_product

import distdl_jax as dj
from convolution import direct, whole
from convolution.draws import Conv, Pool
from distdl_jax.functional.convolutions import LocalConvolution
from distdl_jax.nn.pool.pooling import PoolingPlan


def play_conv(conv: Conv, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> Played:
    blocks = cuts(x, conv.x_boxes), cuts(dy, conv.y_boxes)
    return play_product(conv.layer, conv.world, blocks[0], w, b, blocks[1], convolved, convolved_adjoint)


def convolved(of: LocalConvolution, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert w.shape == of.weight_shape
    own = x[:, slice(*of.channels)]
    problem, window = of.problem, of.problem.window
    assert own.shape[1] == w.shape[1] * problem.groups
    if 0 in problem.y[2:]:
        y = np.zeros(problem.y)
    else:
        y = direct.convolve(direct.pad(own, window.padding), w, window.stride, window.dilation, problem.groups)
    assert y.shape == problem.y, f"{y.shape}, not {problem.y}"
    return y + b.reshape(-1, *(1,) * (y.ndim - 2)) if of.adds_bias and b.size else y


def convolved_adjoint(
    of: LocalConvolution, dy: np.ndarray, x: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    problem, window = of.problem, of.problem.window
    if 0 not in problem.y[2:]:
        own = x[:, slice(*of.channels)]
        padded = direct.pad(own, window.padding)
        d_padded, dw = direct.convolve_adjoint(dy, padded, w, window.stride, window.dilation, problem.groups)
        dx[:, slice(*of.channels)] = direct.pad_adjoint(d_padded, own.shape[2:], window.padding)
    return dx, dw, dy.sum(axis=(0, *range(2, dy.ndim)))


def play_pool(pool: Pool, x: np.ndarray, dy: np.ndarray) -> Played:
    """Forward and adjoint of a pooling by all of its workers; `dy` is that of the sums, for an average."""
    layer = pool.layer(dj.planning_world(pool.world))
    given = cuts(x, pool.x_boxes)
    plan: PoolingPlan = layer.plan(shape_dtypes(given))
    assert plan == pool.layer(dj.planning_world(pool.world, pool.world - 1)).plan(shape_dtypes(given))
    fetched = Fetched(plan.fetch, given)
    y, dx = {}, {}
    for rank, block in fetched.blocks.items():
        shape, padding = plan.output(rank).shape, plan.padding(rank)
        y[rank], dx[rank] = np.zeros(shape), np.zeros(block.shape)
        if 0 not in shape[2:]:
            entries = prod(pool.kernel)
            if pool.kind == "Avg" and not pool.count_include_pad:
                entries = layer._entries(block.shape[2:], padding)
            y[rank], dx[rank] = whole.pooled(pool, block, padding, dy[pool.y_boxes[rank]], entries)
        assert y[rank].shape == shape
    return Played(y, fetched.adjoint(dx))
