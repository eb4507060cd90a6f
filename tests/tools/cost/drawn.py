"""Networks that are drawn: layers of all families whose plans say what they do, with uneven and empty blocks.

`PYTHONPATH=tests python tests/tools/cost/drawn.py FIRST COUNT` checks so many of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn_grids import Draw, grid, one_of
from predicted import Build, Network, check_predicted

import distdl_jax as dj
from distdl_jax import nn

Menu = Sequence[Callable[[Draw, dj.Partition, tuple[int, ...]], Any]]
"""Makes layers for an input on a partition, of a global shape."""


def drawn(seed: int) -> tuple[Build, int]:
    """Return a network and its number of workers, 2 to 8."""
    draw = np.random.default_rng(seed)
    size, family = int(draw.integers(2, 9)), (images, sequences, vectors)[seed % 3]
    return lambda P: family(np.random.default_rng(seed + 1), P), size


def images(draw: Draw, P: dj.Partition) -> Network:
    """Layers of two feature dimensions; batch, channels and features may be split."""
    split = grid(draw, P, 4)
    spec = dj.TensorSpec(tuple(draw.integers(1, (4, 7, 12, 12)).tolist()), split)
    return network(draw, spec, IMAGES)


def sequences(draw: Draw, P: dj.Partition) -> Network:
    """Layers of sequences of 12 features, perhaps of indices; batch, sequence and features may be split."""
    extent = tuple(draw.integers(1, (4, 11)).tolist())
    if draw.random() < 0.6:
        return network(draw, dj.TensorSpec((*extent, 12), grid(draw, P, 3)), SEQUENCES)
    work = grid(draw, P, 3)
    p_n, p_v, p_e = work.shape
    team = draw.permutation(P.size).tolist()
    P_x, P_y = P.grid([p_n, 1], team[:p_n]), P.grid([p_n, 1, p_e], team[-p_n * p_e :])
    cuts = draw.random() < 0.5 and p_v > 1
    P_y = work.create_cartesian_topology_partition([p_n, p_v, p_e]) if cuts else P_y
    options = {"padding_idx": 1 if draw.random() < 0.3 else None, "sharded": draw.random() < 0.3}
    embedding = nn.DistributedEmbedding(P_x, P_y, work, int(draw.integers(2, 15)), 12, **options)
    return network(draw, dj.TensorSpec(extent, P_x), SEQUENCES, [embedding])


def vectors(draw: Draw, P: dj.Partition) -> Network:
    """Products whose weights are cut on both sides, and what stands between them."""
    spec = dj.TensorSpec(tuple(draw.integers(1, (6, 14)).tolist()), grid(draw, P, 2))
    return network(draw, spec, VECTORS)


def network(draw: Draw, spec: dj.TensorSpec, menu: Menu, first: Sequence[Any] = ()) -> Network:
    """Return `first`, and a few layers of the menu that fit."""
    layers, now = list(first), spec
    for layer in first:
        now = layer.output_spec(now)
    wanted = len(layers) + int(draw.integers(1, 4))
    for _ in range(20):
        if len(layers) == wanted:
            break
        try:
            layer = menu[draw.integers(len(menu))](draw, now.partition, now.global_shape)
            now = layer.output_spec(now) if isinstance(layer, nn.Layer) else now
        except dj.DistDLError:
            continue  # this one does not fit
        layers.append(layer)
    return nn.Sequential(*layers), spec


def moved(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a repartition."""
    return nn.Repartition(P, grid(draw, P, P.dim))


def convolution(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a convolution, perhaps a transposed one."""
    options = {"kernel_size": one_of(draw, 1, 2, 3), "stride": one_of(draw, 1, 2), "padding": one_of(draw, 0, 1)}
    kind = one_of(draw, nn.DistributedConv2d, nn.DistributedConv2d, nn.DistributedConvTranspose2d)
    options |= {"sharded": True} if draw.random() < 0.2 else {}
    return kind(P, in_channels=extent[1], out_channels=int(draw.integers(1, 5)), **options)


def pooling(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a pooling."""
    kind = one_of(draw, nn.DistributedMaxPool2d, nn.DistributedAvgPool2d)
    return kind(P, one_of(draw, 2, (3, 1)), stride=one_of(draw, None, 1))


def norm(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a normalisation."""
    several = np.prod(extent) > extent[1]
    return one_of(
        draw,
        lambda: nn.DistributedBatchNorm(P, extent[1]) if several else nn.DistributedRMSNorm(P, extent[-1:]),
        lambda: nn.DistributedGroupNorm(P, one_of(draw, 1, extent[1]), extent[1]),
        lambda: nn.DistributedLayerNorm(P, extent[-int(draw.integers(1, len(extent))) :]),
        lambda: nn.DistributedRMSNorm(P, extent[-1:]),
    )()


def resampling(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a layer whose outputs read some inputs each."""
    return one_of(
        draw,
        lambda: nn.DistributedUpsample(P, scale_factor=one_of(draw, 2, 1.5), mode=one_of(draw, "nearest", "linear")),
        lambda: nn.DistributedUpsample(P, grid(draw, P, 4), size=int(draw.integers(1, 12))),
        lambda: nn.DistributedAdaptiveAvgPool(P, int(draw.integers(1, 6))),
        lambda: nn.DistributedPad(P, [(1, 2), (0, 1)], mode=one_of(draw, "constant", "reflect", "circular")),
        lambda: nn.DistributedCrop(P, [(1, 0), (0, 1)]),
    )()


def spectral(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a spectral convolution, or a block of a Fourier neural operator."""
    n_in, n_out, modes = extent[1], int(draw.integers(1, 5)), one_of(draw, 1, 2, (3, 1))
    if draw.random() < 0.5:
        return nn.DistributedFNOBlock(P, n_in, n_out, modes)
    P_W = grid(draw, P, 2)
    frequencies = P_W.create_cartesian_topology_partition([1, 1, *P_W.shape])
    return nn.DistributedSpectralConv2d(P, n_in, n_out, modes, one_of(draw, None, frequencies))


def pointwise(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a map of one dimension, perhaps around itself."""
    dim = int(draw.integers(1, len(extent)))
    layer = nn.DistributedPointwise(P, extent[dim], one_of(draw, extent[dim], 5), dim=dim)
    return nn.Residual(layer) if layer.out_features == extent[dim] else layer


def simple(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a layer that works entry by entry, or a function."""
    return one_of(
        draw,
        jnp.tanh,
        jax.nn.gelu,
        nn.Dropout(P, 0.5),
        nn.DistributedPReLU(P, one_of(draw, 1, extent[1])),
        dj.map_blocks(jax.nn.sigmoid, P),
    )


def excitation(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return scales of channels, or a mean of all features."""
    if draw.random() < 0.7:
        return nn.DistributedSqueezeExcitation(P, extent[1], 2)
    return one_of(draw, nn.DistributedGlobalAvgPool, nn.DistributedGlobalMaxPool)(P)


def shifted(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a movement along a dimension."""
    axis = int(draw.integers(len(extent)))
    rows = draw.integers(extent[axis], size=4).tolist()
    return one_of(draw, nn.Roll(P, int(draw.integers(-9, 9)), axis), nn.Take(P, rows, axis))


def attention(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return an attention, perhaps with a way around it."""
    options = {"exchange": one_of(draw, "ring", "ring", "heads", "gather"), "causal": bool(draw.integers(2))}
    options |= {"num_key_heads": one_of(draw, None, 1, 2), "fused": bool(draw.integers(2))}
    layer = nn.DistributedMultiHeadAttention(P, extent[2], one_of(draw, 2, 4), **options)
    return one_of(draw, layer, nn.Residual(layer))


def linear(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a linear layer to another partition, or to the same one."""
    features = {"in_features": extent[-1], "out_features": int(draw.integers(1, 14)), "bias": bool(draw.integers(2))}
    if len(extent) > 2 or draw.random() < 0.3:
        return nn.DistributedLinear(P, sharded=bool(draw.integers(2)), **features)
    (p_n, p_fi), p_fo = P.shape, int(draw.integers(1, P.world.size // P.size + 1))
    ranks = draw.permutation(P.world.size).tolist()
    P_y, P_W = P.grid([p_n, p_fo], ranks[: p_n * p_fo]), P.grid([p_n, p_fo, p_fi], ranks[: p_n * p_fo * p_fi])
    return nn.DistributedLinear(P, P_y, P_W, sharded=bool(draw.integers(2)), **features)


def mixture(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    """Return a mixture of experts."""
    ranks = draw.permutation(P.world.size)[: draw.integers(1, P.world.size + 1)].tolist()
    options = {"P_W": one_of(draw, None, P.grid([len(ranks)], ranks)), "group_axes": one_of(draw, None, (), (0, 1))}
    return nn.DistributedMixtureOfExperts(P, extent[2], int(draw.integers(2, 6)), hidden_dim=3, **options)


IMAGES = (convolution, convolution, pooling, norm, resampling, spectral, spectral, pointwise, simple, excitation, moved)
SEQUENCES = (attention, attention, attention, mixture, norm, pointwise, linear, simple, shifted, moved)
VECTORS = (linear, linear, norm, pointwise, simple, shifted, moved)


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        build, size = drawn(seed)
        try:
            check_predicted(build, size)
        except BaseException as error:
            print(
                f"seed {seed}, {size} workers, {build(dj.planning_world(size))}: {type(error).__name__}: {error}"[
                    :3000
                ],
                flush=True,
            )
    print(f"{count} networks from seed {first} on are checked.")
