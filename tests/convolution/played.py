"""All workers of a layer in one process: the layer's own plan, carried out on numpy arrays.

Only the local products themselves are numpy's.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from imaginary import partition_of
from playing import Blocks, held, play, play_adjoint

import distdl_jax as dj
from convolution import direct
from convolution.draws import Conv, Pool
from distdl_jax.nn.local.conv import LocalConvolution
from distdl_jax.nn.parameters import ParameterPlan
from distdl_jax.nn.pooling import PoolingPlan
from distdl_jax.nn.product import ProductPlan
from distdl_jax.nn.windows import WindowsPlan

NOTHING = np.zeros(0)


class Fetched:
    """What the windows of the workers of P_x read."""

    def __init__(self, plan: WindowsPlan, x: Blocks) -> None:
        self.plan = plan
        self.moved = play(plan.movement, x)
        self.blocks = dict(self.moved)
        for worker in plan.workers:
            for d, sources in enumerate(plan.filling(worker)):
                if sources is not None:
                    self.blocks[worker] = self.blocks[worker].take(sources, axis=d + 2)
        assert held(self.blocks) == plan.after(held(x))

    def adjoint(self, dy: Blocks) -> Blocks:
        dy = dict(dy)
        for worker in self.plan.workers:
            for d, sources in enumerate(self.plan.filling(worker)):
                if sources is not None:
                    dy[worker] = direct.scatter(dy[worker], d + 2, sources, self.moved[worker].shape[d + 2])
        return play_adjoint(self.plan.movement, dy)


class Copied:
    """The copies of weight and bias on the workers that multiply."""

    def __init__(
        self, plan: ParameterPlan, params: Mapping[str, Blocks], shapes: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.plan = plan
        self.params = params
        self.weights, self.biases = params["weight"], params["bias"]
        if plan.movement is not None:
            packed = play(plan.movement, self._packed(self.weights, self.biases))
            self.weights = {worker: packed[worker][: prod(shape)].reshape(shape) for worker, shape in shapes.items()}
            self.biases = {worker: packed[worker][prod(shape) :] for worker, shape in shapes.items()}

    def adjoint(self, dw: Blocks, db: Blocks) -> tuple[Blocks, Blocks]:
        if self.plan.movement is None:
            return dw, db
        packed = {worker: NOTHING for worker in self.params["weight"]} | self._packed(dw, db)
        back = play_adjoint(self.plan.movement, packed)
        weights = {worker: back[worker][: w.size].reshape(w.shape) for worker, w in self.params["weight"].items()}
        biases = {worker: back[worker][w.size :] for worker, w in self.params["weight"].items()}
        return weights, biases

    def _packed(self, weights: Blocks, biases: Blocks) -> Blocks:
        return {worker: np.concatenate([w.ravel(), biases[worker]]) for worker, w in weights.items()}


class Played(NamedTuple):
    """What each worker holds in the end, by world rank."""

    y: Blocks
    dx: Blocks
    params: tuple[dict[int, tuple[slice, ...]], ...] = ()  # the weight's and the bias's boxes
    grads: tuple[Blocks, ...] = ()


Product = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Gradients = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


def play_product(
    layer: Any, world: int, x: Blocks, w: np.ndarray, b: np.ndarray, dy: Blocks, product: Product, gradients: Gradients
) -> Played:
    """Forward and adjoint of a layer that multiplies, by all of its workers; `layer` makes it from all workers."""
    made, given = layer(partition_of(0, world)), {worker: x.get(worker, NOTHING) for worker in range(world)}
    specs = made.param_specs()
    boxes = boxes_of(specs["weight"]), boxes_of(specs["bias"]) if "bias" in specs else {}
    plan: ProductPlan = made.plan(held(given))
    assert plan == layer(partition_of(world - 1, world)).plan(held(given))
    given = {worker: given[worker] for worker in plan.workers}
    params = {
        name: {worker: whole[its[worker]] if worker in its else NOTHING for worker in given}
        for name, whole, its in zip(("weight", "bias"), (w, b), boxes, strict=True)
    }
    fetched = None if plan.fetch is None else Fetched(plan.fetch, given)
    copies = play(plan.to_work, given if fetched is None else fetched.blocks)
    copied = Copied(plan.of_params, params, {worker: local.weight_shape for worker, local in plan.local.items()})
    products = {worker: np.zeros(of.shape) for worker, of in plan.products.items()}
    for worker, local in plan.local.items():
        products[worker] = product(local, copies[worker], copied.weights[worker], copied.biases[worker])
    y = play(plan.to_y, products)
    assert held(y) == plan.outputs

    dparts = play_adjoint(plan.to_y, {worker: dy.get(worker, y[worker]) for worker in y})
    dx = {worker: np.zeros(copy.shape) for worker, copy in copies.items()}
    dw, db = (
        {worker: np.zeros(block.shape) for worker, block in each.items()} for each in (copied.weights, copied.biases)
    )
    for worker, local in plan.local.items():
        grads = gradients(local, dparts[worker], copies[worker], copied.weights[worker])
        dx[worker], dw[worker] = grads[:2]
        if local.adds_bias and copied.biases[worker].size:
            db[worker] = grads[2]
    dx = play_adjoint(plan.to_work, dx)
    dx = dx if fetched is None else fetched.adjoint(dx)
    grads = tuple(real(grad, its) for grad, its in zip(copied.adjoint(dw, db), boxes, strict=True))
    return Played(real(y, dy), real(dx, x), boxes, grads)


def real(blocks: Blocks, holders: Mapping[int, Any]) -> Blocks:
    """The blocks of those that hold a part; the others have nothing."""
    assert all(blocks[worker].size == 0 for worker in blocks.keys() - holders.keys())
    return {worker: blocks[worker] for worker in holders}


def play_conv(conv: Conv, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> Played:
    """Forward and adjoint of a convolution by all of its workers."""
    blocks = cuts(x, conv.x_boxes), cuts(dy, conv.y_boxes)
    return play_product(conv.layer, conv.world, blocks[0], w, b, blocks[1], convolved, convolved_adjoint)


def cuts(whole: np.ndarray, boxes: Mapping[int, tuple[slice, ...]]) -> Blocks:
    return {rank: whole[box] for rank, box in boxes.items()}


def boxes_of(spec: dj.TensorSpec) -> dict[int, tuple[slice, ...]]:
    """Which part of the whole each worker of the partition holds, by numpy's own rule."""
    lines = [
        [slice(part[0], part[-1] + 1) if len(part) else slice(0, 0) for part in np.array_split(np.arange(n), p)]
        for n, p in zip(spec.global_shape, spec.partition.shape, strict=True)
    ]
    cells = np.ndindex(spec.partition.shape)
    return {
        worker: tuple(line[i] for line, i in zip(lines, index, strict=True))
        for worker, index in zip(spec.partition.ranks, cells, strict=True)
    }


def convolved(of: LocalConvolution, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The local product, in numpy."""
    assert w.shape == of.weight_shape
    own = x[:, slice(*of.channels)]
    assert own.shape[1] == w.shape[1] * of.groups
    shape = (x.shape[0], w.shape[0], *of.outputs)
    if 0 in of.outputs:
        y = np.zeros(shape)
    else:
        y = direct.convolve(direct.pad(own, of.padding), w, of.windows.stride, of.windows.dilation, of.groups)
    assert y.shape == shape, f"{y.shape}, not {shape}"
    return y + b.reshape(-1, *(1,) * len(of.outputs)) if of.adds_bias and b.size else y


def convolved_adjoint(
    of: LocalConvolution, dy: np.ndarray, x: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients with respect to x, w and b."""
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    if 0 not in of.outputs:
        own = x[:, slice(*of.channels)]
        padded = direct.pad(own, of.padding)
        its, dw = direct.convolve_adjoint(dy, padded, w, of.windows.stride, of.windows.dilation, of.groups)
        dx[:, slice(*of.channels)] = direct.pad_adjoint(its, own.shape[2:], of.padding)
    return dx, dw, dy.sum(axis=(0, *range(2, dy.ndim)))


def play_pool(pool: Pool, x: np.ndarray, dy: np.ndarray) -> Played:
    """Forward and adjoint of a pooling by all of its workers; `dy` is that of the sums, for an average."""
    layer = pool.layer(partition_of(0, pool.world))
    given = cuts(x, pool.x_boxes)
    plan: PoolingPlan = layer.plan(held(given))
    assert plan == pool.layer(partition_of(pool.world - 1, pool.world)).plan(held(given))
    fetched = Fetched(plan.fetch, given)
    y, dx = {}, {}
    for rank, block in fetched.blocks.items():
        shape, padding = plan.output(rank).shape, plan.padding(rank)
        y[rank], dx[rank] = np.zeros(shape), np.zeros(block.shape)
        if 0 not in shape[2:]:
            entries = layer._entries(block.shape[2:], padding) if pool.kind == "Avg" else None
            y[rank], dx[rank] = pooled(pool, block, padding, dy[pool.y_boxes[rank]], entries)
        assert y[rank].shape == shape
    return Played(y, fetched.adjoint(dx))


def pooled(
    pool: Pool, x: np.ndarray, pairs: Any, dy: np.ndarray, entries: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Pooling and its adjoint: of a worker's block, with `pairs` its own padding, or of the whole array."""
    if pool.kind == "Max":
        padded = direct.pad(x, pairs, value=-np.inf)
        y = direct.max_pool(padded, pool.kernel, pool.stride, pool.dilation)
        back = direct.max_pool_adjoint(dy, padded, pool.kernel, pool.stride, pool.dilation)
        return y, direct.pad_adjoint(back, x.shape[2:], pairs)
    padded = direct.pad(x, pairs)
    total = direct.sum_pool(padded, pool.kernel, pool.stride)
    y = total / (prod(pool.kernel) if pool.count_include_pad else entries)
    back = direct.sum_pool_adjoint(dy, padded.shape, pool.kernel, pool.stride)
    return y, direct.pad_adjoint(back, x.shape[2:], pairs)
