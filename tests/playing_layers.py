"""All workers of a layer in one process: the layer's own plan, carried out on numpy arrays.

Only the local products themselves are numpy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from convolution import direct
from playing import Blocks, play, play_adjoint, shape_dtypes

import distdl_jax as dj
from distdl_jax.functional.products import ProductPlan
from distdl_jax.functional.sliding_windows import WindowsPlan
from distdl_jax.functional.weights import BroadcastWeightPlan, GatheredWeightPlan, WeightPlan

NOTHING = np.zeros(0)


class Fetched:
    """The input that the windows of the workers of P_x read."""

    def __init__(self, plan: WindowsPlan, x: Blocks) -> None:
        self.plan = plan
        self.moved = play(plan.movement, x)
        self.blocks = dict(self.moved)
        for worker in plan.workers:
            for d, sources in enumerate(plan.filling(worker)):
                if sources is not None:
                    self.blocks[worker] = self.blocks[worker].take(sources, axis=d + 2)
        assert shape_dtypes(self.blocks) == plan.after(shape_dtypes(x))

    def adjoint(self, dy: Blocks) -> Blocks:
        dy = dict(dy)
        for worker in self.plan.workers:
            for d, sources in enumerate(self.plan.filling(worker)):
                if sources is not None:
                    dy[worker] = direct.scatter(dy[worker], d + 2, sources, self.moved[worker].shape[d + 2])
        return play_adjoint(self.plan.movement, dy)


class Copied:
    """The copies of weight and bias on the workers that multiply."""

    def __init__(self, plan: WeightPlan, params: Mapping[str, Blocks], shapes: Mapping[int, tuple[int, ...]]) -> None:
        self.plan = plan
        self.params = params
        self.weights, self.biases = params["weight"], params["bias"]
        self.gathered = dict(plan.gathered) if isinstance(plan, GatheredWeightPlan) else {}
        if self.gathered:
            self.weights = play(self.gathered["weight"], self.weights)
            self.biases = play(self.gathered["bias"], self.biases) if "bias" in self.gathered else self.biases
        if isinstance(plan, BroadcastWeightPlan):
            packed = self._flat(play(plan.movement, self._packed(self.weights, self.biases)))
            self.weights = {worker: packed[worker][: prod(shape)].reshape(shape) for worker, shape in shapes.items()}
            self.biases = {worker: packed[worker][prod(shape) :] for worker, shape in shapes.items()}

    def adjoint(self, dw: Blocks, db: Blocks) -> tuple[Blocks, Blocks]:
        if self.gathered:
            dw = play_adjoint(self.gathered["weight"], dw)
            return dw, play_adjoint(self.gathered["bias"], db) if "bias" in self.gathered else db
        if not isinstance(self.plan, BroadcastWeightPlan):
            return dw, db
        packed = {worker: NOTHING for worker in self.params["weight"]} | self._packed(dw, db)
        back = self._flat(play_adjoint(self.plan.movement, packed))
        weights = {worker: back[worker][: w.size].reshape(w.shape) for worker, w in self.params["weight"].items()}
        biases = {worker: back[worker][w.size :] for worker, w in self.params["weight"].items()}
        return weights, biases

    def _flat(self, blocks: Blocks) -> Blocks:
        return {worker: block.ravel() for worker, block in blocks.items()}

    def _packed(self, weights: Blocks, biases: Blocks) -> Blocks:
        if "bias" not in self.plan.dtypes:
            return weights
        return {worker: np.concatenate([w.ravel(), biases[worker]]) for worker, w in weights.items()}


class Played(NamedTuple):
    """Every worker's results, by world rank."""

    y: Blocks
    dx: Blocks
    params: tuple[dict[int, tuple[slice, ...]], ...] = ()  # the weight's and the bias's boxes
    grads: tuple[Blocks, ...] = ()


Product = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Gradients = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


def play_product(
    layer: Any, world: int, x: Blocks, w: np.ndarray, b: np.ndarray, dy: Blocks, product: Product, gradients: Gradients
) -> Played:
    """Play forward and adjoint of a layer that multiplies on all workers; `layer` makes it from all workers."""
    made, given = layer(dj.planning_world(world)), {worker: x.get(worker, NOTHING) for worker in range(world)}
    specs = made.param_specs()
    boxes = boxes_of(specs["weight"]), boxes_of(specs["bias"]) if "bias" in specs else {}
    plan: ProductPlan = made.plan(shape_dtypes(given))
    assert plan == layer(dj.planning_world(world, world - 1)).plan(shape_dtypes(given))
    given = {worker: given[worker] for worker in plan.workers}
    params = {
        name: {worker: whole[of[worker]] if worker in of else NOTHING for worker in given}
        for name, whole, of in zip(("weight", "bias"), (w, b), boxes, strict=True)
    }
    fetched = None if plan.fetch is None else Fetched(plan.fetch, given)
    copies = play(plan.to_work, given if fetched is None else fetched.blocks)
    copied = Copied(plan.of_params, params, {worker: local.weight_shape for worker, local in plan.local.items()})
    products = {worker: np.zeros(of.shape) for worker, of in plan.products.items()}
    for worker, local in plan.local.items():
        products[worker] = product(local, copies[worker], copied.weights[worker], copied.biases[worker])
    y = play(plan.to_y, products)
    assert shape_dtypes(y) == plan.outputs

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
    grads = tuple(real(grad, of) for grad, of in zip(copied.adjoint(dw, db), boxes, strict=True))
    return Played(real(y, dy), real(dx, x), boxes, grads)


def real(blocks: Blocks, holders: Mapping[int, Any]) -> Blocks:
    """Return the blocks of the workers that have one."""
    assert all(blocks[worker].size == 0 for worker in blocks.keys() - holders.keys())
    return {worker: blocks[worker] for worker in holders}


def cuts(whole: np.ndarray, boxes: Mapping[int, tuple[slice, ...]]) -> Blocks:
    return {rank: whole[box] for rank, box in boxes.items()}


def boxes_of(spec: dj.TensorSpec) -> dict[int, tuple[slice, ...]]:
    """Return the box of each worker of the partition, by numpy's own rule."""
    lines = [
        [slice(part[0], part[-1] + 1) if len(part) else slice(0, 0) for part in np.array_split(np.arange(n), p)]
        for n, p in zip(spec.global_shape, spec.partition.shape, strict=True)
    ]
    cells = np.ndindex(spec.partition.shape)
    return {
        worker: tuple(line[i] for line, i in zip(lines, index, strict=True))
        for worker, index in zip(spec.partition.ranks, cells, strict=True)
    }


def differing(got: Blocks, want: Blocks) -> dict[int, str]:
    """Return the workers whose block is not the wanted one."""
    assert got.keys() == want.keys(), f"workers {sorted(got)} hold a block, not {sorted(want)}"
    return {
        rank: f"{got[rank]}\nnot\n{want[rank]}"
        for rank in want
        if not np.array_equal(got[rank], want[rank], equal_nan=True)
    }
