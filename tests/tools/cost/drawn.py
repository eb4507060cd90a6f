"""Networks that are drawn: layers of all families whose plans say what they do, with uneven and empty blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn_grids import Draw, grid, one_of
from predicted import Build, Network

import distdl_jax as dj
from distdl_jax import nn

Menu = Sequence[Callable[[Draw, dj.Partition, tuple[int, ...]], Any]]


def drawn(seed: int) -> tuple[Build, int]:
    """Return a network and its number of workers, 2 to 8."""
    draw = np.random.default_rng(seed)
    size, family = int(draw.integers(2, 9)), (images, sequences, vectors)[seed % 3]
    return lambda P: family(np.random.default_rng(seed + 1), P), size


def images(draw: Draw, P: dj.Partition) -> Network:
    """Layers of two feature dimensions; batch, channels and features may be split."""
    split = grid(draw, P, 4)
    spec = dj.TensorSpec(tuple(draw.integers((1, 1, 4, 4), (4, 7, 14, 14)).tolist()), split)
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
    """Return `first`, and some layers of the menu that fit."""
    layers, now = list(first), spec
    for layer in first:
        now = layer.output_spec(now)
    wanted = len(layers) + int(draw.integers(1, 5))
    for _ in range(30):
        if len(layers) == wanted:
            break
        try:
            layer = menu[draw.integers(len(menu))](draw, now.partition, now.global_shape)
            now = layer.output_spec(now) if isinstance(layer, nn.Layer) else now
        except dj.DistDLError:
            continue  # this one does not fit
        layers.append(layer)
    return nn.Sequential(*layers), spec


def convolution(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    options = {"kernel_size": one_of(draw, 1, 2, 3), "stride": one_of(draw, 1, 2), "padding": one_of(draw, 0, 1)}
    options |= {"dilation": one_of(draw, 1, 1, 2), "bias": draw.random() < 0.7, "sharded": draw.random() < 0.2}
    kind = one_of(draw, nn.DistributedConv2d, nn.DistributedConv2d, nn.DistributedConvTranspose2d)
    if kind is nn.DistributedConv2d:
        options["padding_mode"] = one_of(draw, "zeros", "zeros", "circular", "reflect", "replicate")
    layer = kind(P, in_channels=extent[1], out_channels=int(draw.integers(1, 5)), **options)
    return one_of(draw, layer, nn.Skip(layer, axis=one_of(draw, 1, 1, 2)))


def norm(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    several = np.prod(extent) > extent[1]
    return one_of(
        draw,
        lambda: nn.DistributedBatchNorm(P, extent[1]) if several else nn.DistributedRMSNorm(P, extent[-1:]),
        lambda: nn.DistributedGroupNorm(P, one_of(draw, 1, extent[1]), extent[1]),
        lambda: nn.DistributedLayerNorm(P, extent[-int(draw.integers(1, len(extent))) :]),
        lambda: nn.DistributedRMSNorm(P, extent[-1:]),
    )()


def spectral(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    n_in, n_out, modes = extent[1], int(draw.integers(1, 5)), one_of(draw, 1, 2, (3, 1))
    if draw.random() < 0.5:
        return nn.DistributedFNOBlock(P, n_in, n_out, modes)
    P_W = grid(draw, P, 2)
    frequencies = P_W.create_cartesian_topology_partition([1, 1, *P_W.shape])
    return nn.DistributedSpectralConv2d(P, n_in, n_out, modes, one_of(draw, None, frequencies))


def pointwise(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    dim = int(draw.integers(1, len(extent)))
    layer = nn.DistributedPointwise(P, extent[dim], one_of(draw, extent[dim], 5), dim=dim)
    return nn.Residual(layer) if layer.out_features == extent[dim] else layer


def attention(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    options = {"exchange": one_of(draw, "ring", "ring", "heads", "gather"), "causal": bool(draw.integers(2))}
    options |= {"num_key_heads": one_of(draw, None, 1, 2), "fused": bool(draw.integers(2))}
    options |= {"rotary": one_of(draw, None, 100.0), "bias": bool(draw.integers(2))}
    layer = nn.DistributedMultiHeadAttention(P, extent[2], one_of(draw, 2, 4), **options)
    return one_of(draw, layer, nn.Residual(layer))


def linear(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    features = {"in_features": extent[-1], "out_features": int(draw.integers(1, 14)), "bias": bool(draw.integers(2))}
    if len(extent) > 2 or draw.random() < 0.3:
        return nn.DistributedLinear(P, sharded=bool(draw.integers(2)), **features)
    (p_n, p_fi), p_fo = P.shape, int(draw.integers(1, P.world.size // P.size + 1))
    ranks = draw.permutation(P.world.size).tolist()
    P_y, P_W = P.grid([p_n, p_fo], ranks[: p_n * p_fo]), P.grid([p_n, p_fo, p_fi], ranks[: p_n * p_fo * p_fi])
    return nn.DistributedLinear(P, P_y, P_W, sharded=bool(draw.integers(2)), **features)


def mixture(draw: Draw, P: dj.Partition, extent: tuple[int, ...]) -> Any:
    ranks = draw.permutation(P.world.size)[: draw.integers(1, P.world.size + 1)].tolist()
    options = {"P_W": one_of(draw, None, P.grid([len(ranks)], ranks)), "group_axes": one_of(draw, None, (), (0, 1))}
    return nn.DistributedMixtureOfExperts(P, extent[2], int(draw.integers(2, 6)), hidden_dim=3, **options)


# Each makes a layer, from what draws, the partition and the shape of its input.
SIMPLE: Menu = (
    lambda draw, P, n: one_of(draw, jnp.tanh, jax.nn.gelu, nn.Dropout(P, 0.5), dj.map_blocks(jax.nn.sigmoid, P)),
    lambda draw, P, n: nn.DistributedPReLU(P, one_of(draw, 1, n[1])),
    lambda draw, P, n: nn.Repartition(P, grid(draw, P, P.dim)),
)
SHIFTED: Menu = (
    lambda draw, P, n: nn.Roll(P, int(draw.integers(-9, 9)), int(draw.integers(len(n)))),
    lambda draw, P, n: nn.Take(P, draw.integers(n[-1], size=4).tolist(), -1),
)
IMAGES: Menu = (
    *(convolution, convolution, norm, spectral, pointwise, *SIMPLE),
    lambda draw, P, n: nn.DistributedMaxPool2d(P, one_of(draw, 2, (3, 1)), stride=one_of(draw, None, 1)),
    lambda draw, P, n: nn.DistributedAvgPool2d(P, one_of(draw, 2, (3, 1)), stride=one_of(draw, None, 1)),
    lambda draw, P, n: nn.DistributedUpsample(P, mode=one_of(draw, "nearest", "linear"), scale_factor=1.5),
    lambda draw, P, n: nn.DistributedUpsample(P, grid(draw, P, 4), size=int(draw.integers(1, 12))),
    lambda draw, P, n: nn.DistributedAdaptiveAvgPool(P, int(draw.integers(1, 6))),
    lambda draw, P, n: nn.DistributedPad(P, [(1, 2), (0, 1)], mode=one_of(draw, "constant", "reflect", "circular")),
    lambda draw, P, n: nn.DistributedCrop(P, [(1, 0), (0, 1)]),
    lambda draw, P, n: nn.DistributedSqueezeExcitation(P, n[1], 2),
    lambda draw, P, n: one_of(draw, nn.DistributedGlobalAvgPool, nn.DistributedGlobalMaxPool)(P),
)
SEQUENCES: Menu = (attention, attention, attention, mixture, norm, pointwise, linear, *SIMPLE, *SHIFTED)
VECTORS: Menu = (linear, linear, norm, pointwise, *SIMPLE, *SHIFTED)
