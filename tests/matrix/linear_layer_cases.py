"""Entries of the matrix that are layers without a bias, or of fixed parameters, which are linear in what they take."""

from math import prod
from typing import Any

import jax
import numpy as np
from blocks import block_of
from convolution import direct

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.plan import Plan
from distdl_jax.plans.shape_dtype import ShapeDtype
from matrix import reference
from matrix.case import Case, Operator
from matrix.movement_cases import listed
from matrix.painting import painted
from matrix.partitions import On, Shape, blocks


def linear(
    P_x: On,
    P_y: On,
    P_W: On,
    n_in: int,
    n_out: int,
    batch: int = 2,
    world: int = 4,
    of_params: bool = False,
    sharded: bool = False,
) -> Case:
    """The layer as a function of x with fixed parameters, or of the parameters with fixed x."""
    slices = P_W.grid.reshape(-1, *P_W.shape[-2:])  # along the batch, of which the first has the parameters
    stored = (slices if sharded else slices[:1]).swapaxes(0, 1).reshape(-1, P_W.shape[-1])
    weights = blocks(On(stored.shape, tuple(stored.flat)), n_out, n_in, world=world)
    biases = blocks(On(stored.shape[:1], tuple(stored[:, 0])), n_out, world=world)
    params = tuple({"weight": w, "bias": b} for w, b in zip(weights, biases, strict=True))
    xs = blocks(P_x, batch, n_in, world=world, elsewhere=(batch, 0))
    name = f"linear{'_of_parameters' * of_params} {P_x} -> {P_y}, weights{' sharded' * sharded} on {P_W}"
    fixed = painted(name, xs if of_params else params, np.float64)

    def layer(P: dj.Partition) -> nn.DistributedLinear:
        partitions = (each.partition(P) for each in (P_x, P_y, P_W))
        return nn.DistributedLinear(*partitions, n_in, n_out, sharded=sharded)

    def operator(P: dj.Partition) -> Operator:
        F, mine = layer(P), fixed[P.rank]
        if of_params:
            return lambda params: F(params, mine.astype(params["weight"].dtype))
        return lambda x: F(jax.tree.map(lambda p: p.astype(x.dtype), mine), x)

    def plan(P: dj.Partition, params: dict[int, Any]) -> Plan:
        if not of_params:
            return layer(P).plan(params)
        return layer(P).plan({worker: ShapeDtype(x, params[0]["weight"].dtype) for worker, x in enumerate(xs)}, params)

    def dense(arrays: list[Any]) -> list[Any]:
        both = (fixed, arrays) if of_params else (arrays, fixed)
        return reference.linear(*both, P_x.grid, P_y.grid, stored)

    return Case(name, world, params if of_params else xs, operator, dense, plan, any_dtype=False)


def conv(
    P_x: On, P_y: On | None, P_W: On | None, sizes: Shape, kernel: Shape, world: int = 4, batch: int = 1, **options: Any
) -> Case:
    """The convolution of two channels with a fixed weight, without a bias: linear in x of batch x 2 x `sizes`.

    `options` are stride and padding, an integer for each feature.
    """
    dims = len(kernel)
    name = f"conv {listed([sizes])} kernel {listed([kernel])} {options} {P_x} -> {P_y}, weights on {P_W}"
    (weight,) = painted(name, [(3, 2, *kernel)], np.float64)

    def layer(P: dj.Partition) -> Any:
        on = (None if each is None else each.partition(P) for each in (P_x, P_y, P_W))
        layer_type = getattr(nn, f"DistributedConv{dims}d")
        return layer_type(*on, in_channels=2, out_channels=3, kernel_size=kernel, bias=False, **options)

    def operator(P: dj.Partition) -> Operator:
        F = layer(P)
        mine = block_of(weight, F.param_specs()["weight"])
        return lambda x: F({"weight": mine.astype(x.dtype)}, x)

    def whole(x: np.ndarray) -> np.ndarray:
        padded = direct.pad(x, [(p, p) for p in options.get("padding", (0,) * dims)])
        return direct.convolve(padded, weight, options.get("stride", (1,) * dims), (1,) * dims, 1)

    xs = blocks(P_x, batch, 2, *sizes, world=world, elsewhere=(batch, 0))
    return Case(
        name,
        world,
        xs,
        operator,
        lambda xs: reference.windowed(xs, P_x.grid, (P_y or P_x).grid, whole),
        lambda P, x: layer(P).plan(x),
        any_dtype=False,
    )


def average_pool(P_x: On, sizes: Shape, kernel: Shape, stride: Shape, padding: Shape, world: int = 4) -> Case:
    """The pooling of three channels; kernels of a power of two, so that nothing is rounded."""
    xs = blocks(P_x, 2, 3, *sizes, world=world, elsewhere=(2, 0))

    def whole(x: np.ndarray) -> np.ndarray:
        return direct.sum_pool(direct.pad(x, [(p, p) for p in padding]), kernel, stride) / prod(kernel)

    def layer(P: dj.Partition) -> Any:
        return getattr(nn, f"DistributedAvgPool{len(kernel)}d")(P_x.partition(P), kernel, stride, padding)

    return Case(
        f"average_pool {listed([sizes])} {listed([kernel, stride, padding])} {P_x}",
        world,
        xs,
        layer,
        lambda xs: reference.windowed(xs, P_x.grid, P_x.grid, whole),
        lambda P, x: layer(P).plan(x),
        any_dtype=False,
    )
