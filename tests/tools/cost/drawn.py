"""Networks that are drawn: a few layers, of those that fit, with uneven and empty blocks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from drawn_grids import Draw, grid, one_of
from drawn_layers import elementwise, linear, moved, norm, pointwise, pooling, shifted, taken
from predicted import Build, Network

import distdl_jax as dj
from distdl_jax import nn

Maker = Callable[[Draw, dj.Partition, tuple[int, ...]], Any]


def drawn(seed: int, most: int = 8) -> tuple[Build, int]:
    """Return a network, and its number of workers, 2 to `most`."""

    def build(P: dj.Partition) -> Network:
        draw, (least, below, menu) = np.random.default_rng(seed + 1), FAMILIES[seed % 3]
        spec = now = dj.TensorSpec(tuple(draw.integers(least, below).tolist()), grid(draw, P, len(least)))
        layers: list[Any] = []
        wanted = int(draw.integers(2, 6))
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

    return build, int(np.random.default_rng(seed).integers(2, most + 1))


def convolution(draw: Draw, P: dj.Partition, n: tuple[int, ...]) -> Any:
    options = {"kernel_size": one_of(draw, 1, 2, 3), "stride": one_of(draw, 1, 2), "padding": one_of(draw, 0, 1)}
    options |= {"dilation": one_of(draw, 1, 1, 2), "bias": draw.random() < 0.7, "sharded": draw.random() < 0.2}
    kind = one_of(draw, nn.DistributedConv2d, nn.DistributedConv2d, nn.DistributedConvTranspose2d)
    if kind is nn.DistributedConv2d:
        options["padding_mode"] = one_of(draw, "zeros", "zeros", "circular", "reflect", "replicate")
    layer = kind(P, in_channels=n[1], out_channels=int(draw.integers(1, 5)), **options)
    return one_of(draw, layer, nn.Skip(layer, axis=one_of(draw, 1, 1, 2)))


def spectral(draw: Draw, P: dj.Partition, n: tuple[int, ...]) -> Any:
    n_out, modes, P_W = int(draw.integers(1, 5)), one_of(draw, 1, 2, (3, 1)), grid(draw, P, 2)
    if draw.random() < 0.5:
        return nn.DistributedFNOBlock(P, n[1], n_out, modes)
    frequencies = P_W.create_cartesian_topology_partition([1, 1, *P_W.shape])
    return nn.DistributedSpectralConv2d(P, n[1], n_out, modes, one_of(draw, None, frequencies))


def attention(draw: Draw, P: dj.Partition, n: tuple[int, ...]) -> Any:
    options = {"exchange": one_of(draw, "ring", "ring", "heads", "gather"), "causal": bool(draw.integers(2))}
    options |= {"num_key_heads": one_of(draw, None, 1, 2), "fused": bool(draw.integers(2))}
    options |= {"rotary": one_of(draw, None, 100.0), "bias": bool(draw.integers(2))}
    layer = nn.DistributedMultiHeadAttention(P, n[2], one_of(draw, 2, 4), **options)
    return one_of(draw, layer, nn.Residual(layer))


def mixture(draw: Draw, P: dj.Partition, n: tuple[int, ...]) -> Any:
    ranks = draw.permutation(P.world.size)[: draw.integers(1, P.world.size + 1)].tolist()
    options = {"P_W": one_of(draw, None, P.grid([len(ranks)], ranks)), "group_axes": one_of(draw, None, (), (0, 1))}
    return nn.DistributedMixtureOfExperts(P, n[2], int(draw.integers(2, 6)), hidden_dim=3, **options)


def as_maker(link: Callable[..., Any]) -> Maker:
    return lambda draw, P, n: link(draw, dj.TensorSpec(n, P)).layer


# Each makes a layer, from what draws, the partition and the shape of its input.
LINKS = [as_maker(link) for link in (linear, linear, pointwise, norm, moved, shifted, taken, elementwise)]
SIMPLE: list[Maker] = [
    lambda draw, P, n: one_of(draw, nn.Dropout(P, 0.5), nn.DistributedPReLU(P, one_of(draw, 1, n[1]))),
    lambda draw, P, n: nn.DistributedGroupNorm(P, one_of(draw, 1, n[1]), n[1]),
    lambda draw, P, n: nn.Residual(nn.Sequential(nn.DistributedPointwise(P, n[1], n[1]), jnp.tanh)),
]
IMAGES: list[Maker] = [
    *(convolution, convolution, convolution, spectral, spectral, as_maker(pooling), as_maker(pooling)),
    lambda draw, P, n: nn.DistributedBatchNorm(P, n[1]),
    lambda draw, P, n: nn.DistributedUpsample(P, mode=one_of(draw, "nearest", "linear"), scale_factor=1.5),
    lambda draw, P, n: nn.DistributedUpsample(P, grid(draw, P, 4), size=int(draw.integers(1, 12))),
    lambda draw, P, n: nn.DistributedAdaptiveAvgPool(P, int(draw.integers(1, 6))),
    lambda draw, P, n: nn.DistributedPad(P, [(1, 2), (0, 1)], mode=one_of(draw, "constant", "reflect", "circular")),
    lambda draw, P, n: nn.DistributedCrop(P, [(1, 0), (0, 1)]),
    lambda draw, P, n: nn.DistributedSqueezeExcitation(P, n[1], 2),
    lambda draw, P, n: one_of(draw, nn.DistributedGlobalAvgPool, nn.DistributedGlobalMaxPool)(P),
]
FAMILIES: list[tuple[tuple[int, ...], tuple[int, ...], list[Maker]]] = [
    ((1, 1, 4, 4), (4, 7, 14, 14), IMAGES + LINKS + SIMPLE),
    ((1, 1, 12), (4, 11, 13), [attention, attention, attention, mixture, *LINKS, *SIMPLE]),
    ((1, 1), (6, 14), LINKS + SIMPLE),
]
"""The least lengths of x, those that it is below, and the layers: of images, sequences and vectors."""
