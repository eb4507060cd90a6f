"""Layers, and functions of x, of an `nn.Sequential` that is drawn, each beside the same in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from drawn_grids import Draw, grid, one_of
from jax import lax

import distdl_jax as dj
from distdl_jax import nn

Run = Callable[[Any, Any], Any]
"""From parameters and x to y."""


class Part(NamedTuple):
    """A part of a program.

    - `run`: of this worker's blocks. - `whole`: the same of the whole tensors, in plain JAX.
    - `params`: the specs of its parameters. - `spec`: of its output. - `text`: what it is.
    """

    run: Run
    whole: Run
    params: Any
    spec: dj.TensorSpec
    text: str


class Link(NamedTuple):
    """A layer, or a function of x, in an `nn.Sequential`; the same in plain JAX, from parameters and x; its output."""

    layer: Any
    whole: Run
    spec: dj.TensorSpec


def chain(draw: Draw, spec: dj.TensorSpec, *, keeps: bool = False) -> Part:
    """Return a Sequential of one to three layers; where it `keeps` the shape, the output has that of the input."""
    links: list[Link] = []
    wanted = int(draw.integers(1, 4))
    for _ in range(20):
        if len(links) == wanted:
            break
        try:
            link = one_of(draw, *LINKS)(draw, links[-1].spec if links else spec)
            if keeps and link.spec.global_shape != spec.global_shape:
                continue
            nn.Sequential(*(each.layer for each in links), link.layer)
        except dj.DistDLError:
            continue  # this one does not fit
        links.append(link)
    network = nn.Sequential(*(link.layer for link in links))

    def whole(params: Any, x: Any) -> Any:
        for link, its in zip(links, params, strict=True):
            x = link.whole(its, x)
        return x

    text = " > ".join(getattr(link.layer, "__name__", type(link.layer).__name__) for link in links)
    return Part(network, whole, network.param_specs(), links[-1].spec if links else spec, f"[{text}]")


def all_workers(P: dj.Partition) -> dj.Partition:
    return dj.Partition.of_workers(P.world, range(P.world.size))


def of_layer(layer: Any, spec: dj.TensorSpec, whole: Run) -> Link:
    return Link(layer, whole, layer.output_spec(spec))


def linear(draw: Draw, spec: dj.TensorSpec) -> Link:
    P, features = spec.partition, int(draw.integers(1, 9))
    sizes = {"in_features": spec.global_shape[-1], "out_features": one_of(draw, spec.global_shape[-1], features)}
    if P.dim > 2 or draw.random() < 0.3:
        layer = nn.DistributedLinear(P, sharded=bool(draw.integers(2)), **sizes)
    else:
        (p_n, p_fi), p_fo = P.shape, int(draw.integers(1, P.world.size // P.size + 1))
        ranks = draw.permutation(P.world.size).tolist()
        world = all_workers(P)
        P_y = world.grid([p_n, p_fo], ranks[: p_n * p_fo])
        P_W = world.grid([p_n, p_fo, p_fi], ranks[: p_n * p_fo * p_fi])
        layer = nn.DistributedLinear(P, P_y, P_W, sharded=bool(draw.integers(2)), **sizes)
    return of_layer(layer, spec, lambda params, x: x @ params["weight"].T + params["bias"])


def pointwise(draw: Draw, spec: dj.TensorSpec) -> Link:
    dim = int(draw.integers(1, len(spec.global_shape)))
    features = spec.global_shape[dim]
    layer = nn.DistributedPointwise(spec.partition, features, one_of(draw, features, 5), dim=dim)

    def whole(params: Any, x: Any) -> Any:
        return jnp.moveaxis(jnp.moveaxis(x, dim, -1) @ params["weight"].T + params["bias"], -1, dim)

    return of_layer(layer, spec, whole)


def convolution(draw: Draw, spec: dj.TensorSpec) -> Link:
    k, stride, d = one_of(draw, 1, 3), one_of(draw, 1, 1, 2), len(spec.global_shape) - 2
    if d < 1:
        raise dj.InvalidArgumentError("No features.")
    kind = getattr(nn, f"DistributedConv{d}d")
    n_in = spec.global_shape[1]
    layer = kind(spec.partition, in_channels=n_in, out_channels=one_of(draw, n_in, 2), kernel_size=k, padding=k // 2,
                 stride=stride)  # fmt: skip

    def whole(params: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, params["weight"], (stride,) * d, [(k // 2, k // 2)] * d)
        return y + params["bias"].reshape(-1, *(1,) * d)

    return of_layer(layer, spec, whole)


def pooling(draw: Draw, spec: dj.TensorSpec) -> Link:
    d = len(spec.global_shape) - 2
    if d < 1 or min(spec.global_shape[2:]) < 2:
        raise dj.InvalidArgumentError("No windows.")
    window, mean = (1, 1, *(2,) * d), bool(draw.integers(2))
    layer = getattr(nn, f"Distributed{'Avg' if mean else 'Max'}Pool{d}d")(spec.partition, 2)

    def whole(params: Any, x: Any) -> Any:
        start, operation = (0.0, lax.add) if mean else (-jnp.inf, lax.max)
        y = lax.reduce_window(x, start, operation, window, window, "VALID")
        return y / 2**d if mean else y

    return of_layer(layer, spec, whole)


def norm(draw: Draw, spec: dj.TensorSpec) -> Link:
    P, shape = spec.partition, spec.global_shape
    dims = int(draw.integers(1, len(shape)))
    axes, root = tuple(range(len(shape) - dims, len(shape))), bool(draw.integers(2))
    layer = (nn.DistributedRMSNorm if root else nn.DistributedLayerNorm)(P, shape[-dims:], eps=1e-2)

    def whole(params: Any, x: Any) -> Any:
        x = x if root else x - x.mean(axes, keepdims=True)
        return x / jnp.sqrt((x**2).mean(axes, keepdims=True) + 1e-2) * params["weight"] + params.get("bias", 0)

    return of_layer(layer, spec, whole)


def moved(draw: Draw, spec: dj.TensorSpec) -> Link:
    layer = nn.Repartition(spec.partition, grid(draw, spec.partition, spec.partition.dim))
    return of_layer(layer, spec, lambda params, x: x)


def shifted(draw: Draw, spec: dj.TensorSpec) -> Link:
    axis, shift = int(draw.integers(len(spec.global_shape))), int(draw.integers(-9, 9))
    return of_layer(nn.Roll(spec.partition, shift, axis), spec, lambda params, x: jnp.roll(x, shift, axis))


def taken(draw: Draw, spec: dj.TensorSpec) -> Link:
    axis = int(draw.integers(1, len(spec.global_shape)))
    rows = draw.integers(spec.global_shape[axis], size=4).tolist()
    return of_layer(nn.Take(spec.partition, rows, axis), spec, lambda params, x: jnp.take(x, np.array(rows), axis))


def swish(x: Any) -> Any:
    return x * jax.nn.sigmoid(x)


def shifted_and_scaled(x: Any) -> Any:
    return jnp.where(x > 0, 0.5 * x, 0.1 * x) + jnp.ones_like(x) / 3


def elementwise(draw: Draw, spec: dj.TensorSpec) -> Link:
    function = one_of(draw, jnp.tanh, jax.nn.gelu, swish, shifted_and_scaled, jnp.arctan)
    layer = function if draw.random() < 0.7 else dj.map_blocks(function, spec.partition)
    return Link(layer, lambda params, x: function(x), spec)


def along_a_whole_dimension(draw: Draw, spec: dj.TensorSpec) -> Link:
    """A function that reduces, scans or reverses along a dimension that is not split, on blocks."""
    P = spec.partition
    dims = [d for d in range(P.dim) if P.shape[d] == 1]
    if not dims:
        raise dj.InvalidArgumentError("All are split.")
    function = partial(one_of(draw, jax.nn.softmax, jnp.cumsum, jnp.flip, centred), axis=one_of(draw, *dims))
    everywhere = P.size == P.world.size and draw.random() < 0.5
    layer = function if everywhere else dj.map_blocks(function, P)
    return Link(layer, lambda params, x: function(x), spec)


def centred(x: Any, axis: int) -> Any:
    return x - x.mean(axis, keepdims=True)


LINKS = (linear, linear, pointwise, convolution, convolution, pooling, norm, moved, shifted, taken, elementwise,
         elementwise, along_a_whole_dimension)  # fmt: skip
