"""All workers of a layer in one process: its own plans, their exchanges carried out on numpy arrays.

Every worker builds its layer in an imaginary world, which plans but can't move data. What each worker then does is what
the layer says: the exchange of its halos (by the simulator, under the rules of blocking messages), the teams of its
broadcasts and sums, its local product. Only the products themselves are numpy's.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from imaginary import partition_of
from simulator import adjoint, simulate

import distdl_jax as dj
from convolution import direct
from convolution.draws import Conv, Drawn, Pool
from distdl_jax.nn.local.conv import LocalConvolution
from distdl_jax.nn.windows import SlidingPlan
from distdl_jax.plans.broadcasting import BroadcastRule, Team, teams_of_worker
from distdl_jax.plans.shape_dtype import ShapeDtype

Blocks = dict[int, np.ndarray]
F64 = np.dtype(np.float64)


def taken(block: np.ndarray, filling: tuple[np.ndarray | None, ...]) -> np.ndarray:
    """The padding filled in from the block, as the plan says."""
    for d, sources in enumerate(filling):
        block = block if sources is None else block.take(sources, axis=d + 2)
    return block


def taken_adjoint(block: np.ndarray, filling: tuple[np.ndarray | None, ...], shape: tuple[int, ...]) -> np.ndarray:
    for d, sources in enumerate(filling):
        block = block if sources is None else direct.scatter(block, d + 2, sources, shape[d + 2])
    return block


class Fetched:
    """The exchange that gives the workers of P_x what their windows read."""

    def __init__(self, plans: Mapping[int, SlidingPlan], drawn: Drawn) -> None:
        self.programs = {rank: plans[rank].halos.plans(rank) for rank in drawn.P_x.ranks}
        self.filling = {
            rank: plans[rank].filling(index[2:])
            for rank, index in zip(drawn.P_x.ranks, np.ndindex(drawn.P_x.shape), strict=True)
        }
        self.shapes: dict[int, tuple[int, ...]] = {}

    def forward(self, x: Blocks) -> Blocks:
        moved = simulate(self.programs, x)
        self.shapes = {rank: block.shape for rank, block in moved.items()}
        return {rank: taken(block, self.filling[rank]) for rank, block in moved.items()}

    def backward(self, dy: Blocks) -> Blocks:
        back = {rank: taken_adjoint(dy[rank], self.filling[rank], self.shapes[rank]) for rank in self.programs}
        return simulate(adjoint(self.programs), back)


class Copies:
    """A broadcast from one partition to another, as every worker sees it, and its adjoint."""

    def __init__(self, partitions: Mapping[int, tuple[dj.Partition, dj.Partition]]) -> None:
        self.as_root: dict[int, Team] = {}
        self.as_member: dict[int, Team] = {}
        for rank, (source, copies) in partitions.items():
            rule = BroadcastRule(source.shape, copies.shape)
            root, member = teams_of_worker(rule, source.ranks, copies.ranks, rank)
            self.as_root |= {rank: root} if root else {}
            self.as_member |= {rank: member} if member else {}
        assert all(self.as_root[team.root] == team for team in self.as_member.values()), "workers disagree on a team"
        assert all(self.as_member[r] == team for team in self.as_root.values() for r in team.members)

    def spread(self, blocks: Blocks) -> Blocks:
        return {rank: blocks[team.root] for rank, team in self.as_member.items()}

    def sum(self, blocks: Blocks) -> Blocks:
        return {rank: sum(blocks[member] for member in team.members) for rank, team in self.as_root.items()}


class Played(NamedTuple):
    """What each worker holds in the end, by world rank."""

    y: Blocks
    dx: Blocks
    params: tuple[dict[int, tuple[slice, ...]], ...] = ()  # the weight's and the bias's boxes
    grads: tuple[Blocks, ...] = ()


def play_conv(conv: Conv, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> Played:
    """Forward and adjoint of a convolution by all of its workers."""
    layers = {rank: conv.layer(partition_of(rank, conv.world)) for rank in range(conv.world)}
    team = layers[0]._partitions.team
    layers = {rank: layers[rank] for rank in team}
    parts = {rank: layer._partitions for rank, layer in layers.items()}
    held = {rank: ShapeDtype(x[box].shape, F64) for rank, box in conv.x_boxes.items()}
    structures = {rank: held.get(rank, ShapeDtype((0,), F64)) for rank in team}
    plans = {rank: layer._plan(structures) for rank, layer in layers.items()}
    local = {rank: of for rank, layer in layers.items() if (of := layer._local(plans[rank])) is not None}

    fetched = Fetched(plans, conv)
    to_work = Copies({rank: (its.x, its.work) for rank, its in parts.items()})
    of_params = Copies({rank: (its.parameters.stored, its.work) for rank, its in parts.items()})
    to_y = Copies({rank: (its.y, its.work) for rank, its in parts.items()})
    specs = {rank: layer.param_specs() for rank, layer in layers.items()}
    boxes = _boxes(specs, "weight"), _boxes(specs, "bias")
    weights = {rank: w[box] for rank, box in boxes[0].items()}
    biases = {rank: b[boxes[1][rank]] if rank in boxes[1] else np.zeros(0) for rank in weights}

    copies = to_work.spread(fetched.forward(cuts(x, conv.x_boxes)))
    weights, biases = of_params.spread(weights), of_params.spread(biases)
    products = {rank: convolved(of, copies[rank], weights[rank], biases[rank]) for rank, of in local.items()}
    y = to_y.sum(products)

    dparts = to_y.spread(cuts(dy, conv.y_boxes))
    grads = {rank: convolved_adjoint(of, dparts[rank], copies[rank], weights[rank]) for rank, of in local.items()}
    dx, dw, db = ({rank: grad[i] for rank, grad in grads.items()} for i in range(3))
    db = {rank: grad if local[rank].adds_bias else np.zeros(biases[rank].shape) for rank, grad in db.items()}
    dx = fetched.backward(to_work.sum(dx))
    return Played(y, dx, boxes, (of_params.sum(dw), of_params.sum(db)))


def cuts(whole: np.ndarray, boxes: Mapping[int, tuple[slice, ...]]) -> Blocks:
    return {rank: whole[box] for rank, box in boxes.items()}


def _boxes(specs: Mapping[int, Any], name: str) -> dict[int, tuple[slice, ...]]:
    held = {rank: its[name].box for rank, its in specs.items() if name in its}
    return {rank: tuple(slice(*side) for side in box) for rank, box in held.items() if box is not None}


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
    layers = {rank: pool.layer(partition_of(rank, pool.world)) for rank in pool.P_x.ranks}
    structures = {rank: ShapeDtype(x[box].shape, F64) for rank, box in pool.x_boxes.items()}
    plans = {rank: SlidingPlan(layer.P_x, layer._windows, structures) for rank, layer in layers.items()}
    fetched = Fetched(plans, pool)
    blocks = fetched.forward(cuts(x, pool.x_boxes))
    y, dx = {}, {}
    for rank, index in zip(pool.P_x.ranks, np.ndindex(pool.P_x.shape), strict=True):
        counts = [stop - start for start, stop in plans[rank].outputs(index[2:])]
        shape = (*blocks[rank].shape[:2], *counts)
        padding = plans[rank].padding(index[2:])
        y[rank], dx[rank] = np.zeros(shape), np.zeros(blocks[rank].shape)
        if 0 not in counts:
            entries = layers[rank]._entries(blocks[rank].shape[2:], padding) if pool.kind == "Avg" else None
            y[rank], dx[rank] = pooled(pool, blocks[rank], padding, dy[pool.y_boxes[rank]], entries)
        assert y[rank].shape == shape
    return Played(y, fetched.backward(dx))


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
