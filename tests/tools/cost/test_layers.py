"""What plans of layers of each family say that workers communicate is what their programs do, and so are products."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from every_layer import LAYERS as EVERY_LAYER
from every_layer import spec_of_x
from predicted import Build, Network, check_predicted

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.tools.cost.program import flops_of
from distdl_jax.tracing.jaxprs import equations

Layers = Callable[[dj.Partition, dj.CartesianPartition], Sequence[Any]]


def on(grid: Sequence[int], shape: tuple[int, ...], layers: Layers) -> Build:
    """Return a network of the layers that are made from the world, and from the grid of workers that x is on."""

    def build(P: dj.Partition) -> Network:
        split = P.grid(grid)
        return nn.Sequential(*layers(P, split)), dj.TensorSpec(shape, split)

    return build


def conv(P: dj.Partition, channels: tuple[int, int], kernel: int = 3, **options: Any) -> nn.DistributedConv2d:
    options = {"padding": kernel // 2, **options}
    return nn.DistributedConv2d(P, in_channels=channels[0], out_channels=channels[1], kernel_size=kernel, **options)


def from_one_worker(P: dj.Partition, one: Any) -> Sequence[Any]:
    split = P.grid([1, 1, 2, 2])
    there = nn.Repartition(one, split), conv(split, (1, 6), 5), jax.nn.relu, nn.DistributedMaxPool2d(split, 2)
    back = conv(split, (6, 16), 5, padding=0), nn.DistributedAvgPool2d(split, 2), nn.Repartition(split, one)
    return *there, *back, conv(one, (16, 3), 1)


def attention(shape: list[int], **options: Any) -> Build:
    return on(shape, (3, 10, 12), lambda P, split: [nn.DistributedMultiHeadAttention(split, 12, 6, **options)] * 2)


def experts(shape: list[int], **options: Any) -> Build:
    """Return two mixtures of experts, the second one with experts on some workers."""

    def layers(P: dj.Partition, split: Any) -> Sequence[Any]:
        owners = P.grid([2], [3, 0])
        return [nn.DistributedMixtureOfExperts(split, 6, n, P_W=P_W, **options) for n, P_W in ((5, None), (3, owners))]

    return on(shape, (3, 5, 6), layers)


def movements(P: dj.Partition, split: Any) -> Sequence[Any]:
    turned, rows = P.grid([4, 1, 1]), nn.AllToAll(split, split_axis=2, concat_axis=1)
    return (
        nn.DistributedPointwise(split, 5, 5, dim=2),
        nn.Roll(split, shift=(1, -3), axis=(0, 1)),
        nn.Take(split, [2, 0, 0, 1, 4, 6], axis=1),
        nn.SegmentSum(split, [2, 0, 2, 1, 1, 0], 4, axis=1),
        nn.AllReduce(split, "mean", axes_reduce=1),
        rows,
        nn.Repartition(rows.output_partition, turned),
        nn.Reshape(turned, P.grid([1, 2]), (5, -1)),
        nn.AllReduce(P.grid([1, 2]), "max"),
    )


# Blocks are uneven, some are empty.
NETWORKS: dict[str, Build] = {
    "from an image on one worker and back": on([1, 1, 1, 1], (3, 1, 28, 28), from_one_worker),
    "residual block, with the batch split": on([2, 1, 1, 2], (3, 3, 9, 11), lambda P, split: (
        conv(split, (3, 3)),
        nn.Residual(nn.Sequential(conv(split, (3, 3)), jax.nn.relu, conv(split, (3, 3)))),
        conv(split, (3, 3)),
    )),
    "channels split, strided and sharded": on([1, 2, 1, 2], (3, 5, 19, 7), lambda P, split: (
        conv(split, (5, 6), stride=2), conv(split, (6, 1), padding=0, sharded=True)
    )),
    "normalisations": on([2, 1, 2, 1], (3, 4, 9, 7), lambda P, split: (
        nn.DistributedGroupNorm(split, 2, 4),
        nn.DistributedRMSNorm(split, (9, 7)),
        nn.DistributedLayerNorm(split, (4, 9, 7)),
        nn.DistributedBatchNorm(split, 4),
        nn.DistributedConvTranspose2d(split, in_channels=4, out_channels=3, kernel_size=3, stride=2),
    )),
    "skips along channels and rows that are split": on([1, 2, 2, 1], (2, 2, 9, 7), lambda P, split: (
        conv(split, (2, 3)),
        nn.Skip(nn.Sequential(conv(split, (3, 4)), jax.nn.relu)),
        nn.Skip(nn.Sequential(conv(split, (7, 7))), axis=2),
        nn.Skip(nn.Sequential(conv(split, (7, 7))), join="add"),
    )),
    "resampled": on([1, 1, 2, 2], (3, 1, 5, 7), lambda P, split: (
        conv(split, (1, 2), 1),
        nn.DistributedUpsample(split, scale_factor=1.5, mode="linear"),
        nn.DistributedPad(split, [(1, 2), (3, 0)], mode="circular"),
        nn.DistributedCrop(split, [(2, 0), (0, 1)]),
        nn.DistributedAdaptiveAvgPool(split, (4, 3)),
        nn.DistributedUpsample(split, P.grid([2, 1, 1, 1], [2, 1]), size=(3, 7)),
    )),
    "movements": on([2, 2, 1], (3, 7, 5), movements),
    "embedding, and the sequence cut behind it": on([2, 1], (1, 7), lambda P, row: (
        nn.DistributedEmbedding(row, P.grid([2, 2, 1]), P.grid([2, 2, 1]), 11, 5, padding_idx=2),
        nn.DistributedLayerNorm(P.grid([2, 2, 1]), (5,)),
    )),
    "spectral convolutions, with frequencies on workers of their own": on([1, 1, 2, 2], (3, 2, 7, 9), lambda P, split: (
        nn.DistributedSpectralConv2d(split, 2, 3, modes=(2, 3)),
        jax.nn.gelu,
        nn.DistributedSpectralConv2d(split, 3, 2, modes=2, P_W=P.grid([1, 1, 1, 3], [3, 1, 0])),
    )),
    "attention with heads split": attention([2, 1, 2]),
    "ring": attention([1, 4, 1], num_key_heads=2),
    "causal ring": attention([1, 4, 1], causal=True, rotary=100.0),
    "causal ring and heads": attention([1, 2, 2], causal=True, fused=True),
    "exchanged heads": attention([1, 4, 1], exchange="heads", bias=False),
    "exchanged heads, of fewer keys": attention([1, 4, 1], exchange="heads", num_key_heads=2, causal=True),
    "gathered sequence": attention([2, 2, 1], exchange="gather"),
    "experts for samples": experts([4, 1, 1]),
    "experts for a sequence that is cut": experts([1, 3, 1], group_axes=()),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_predict_every_operation_of_a_training_step(name: str) -> None:
    check_predicted(NETWORKS[name])


@pytest.mark.parametrize("name", [name for name in EVERY_LAYER if name != "HaloExchange"])  # which a network can't plan
def test_plans_predict_every_operation_of_every_layer(name: str) -> None:
    """Of what comes before, too, where there is a gradient of x."""

    def build(P: dj.Partition) -> Network:
        layer = EVERY_LAYER[name](P)
        spec = spec_of_x(name, layer)
        before = [] if layer.takes_indices else [nn.DistributedPReLU(spec.partition)]
        return nn.Sequential(*before, layer), spec

    check_predicted(build)


ALONE: dict[str, Build] = {
    "attention": attention([1, 1, 1]),
    "causal attention with fewer keys": attention([1, 1, 1], causal=True, num_key_heads=3),
    "fused attention": attention([1, 1, 1], fused=True, rotary=100.0),
    "spectral convolutions": on([1, 1, 1, 1], (3, 2, 7, 9), lambda P, one: (
        nn.DistributedSpectralConv2d(one, 2, 3, modes=(2, 3)), nn.DistributedSpectralConv2d(one, 3, 4, modes=2)
    )),
    "pointwise maps": on([1, 1, 1], (4, 3, 5), lambda P, one: (
        nn.DistributedPointwise(one, 5, 7, dim=2), jnp.tanh, nn.DistributedPointwise(one, 3, 2)
    )),
    "mixtures of experts": on([1, 1, 1], (3, 5, 6), lambda P, one: (
        [nn.DistributedMixtureOfExperts(one, embed_dim=6, num_experts=4, activation=jnp.tanh)] * 2
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_flops_of_matrix_products_are_what_xla_counts(name: str) -> None:
    """Of all products in the gradient of a network's parameters, one by one; the cost has them, and little else."""

    def flops() -> int:
        network, spec = ALONE[name](dj.Partition())
        params, x = network.init(jax.random.key(0), jnp.float32), jnp.zeros(spec.global_shape, jnp.float32)
        program = jax.make_jaxpr(jax.value_and_grad(lambda params: jnp.sum(network(params, x) ** 2)))(params)
        found = [eqn for eqn in equations(program.jaxpr.eqns) if eqn.primitive.name == "dot_general"]
        assert all(flops_of(eqn) == flops_of_product(eqn) for eqn in found)
        return sum(map(flops_of_product, found))

    (counted,) = dj.simulate(1, flops)
    (total,) = dj.cost(*ALONE[name](dj.planning_world(1))).flops
    assert counted <= total


def flops_of_product(eqn: Any) -> int:
    """Return XLA's count of a product in a program; it counts one of complex numbers as one of real ones."""
    product = jax.jit(partial(jax.lax.dot_general_p.bind, **eqn.params))
    flops = int(product.lower(*(operand.aval for operand in eqn.invars)).cost_analysis()["flops"])
    return 4 * flops if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating) else flops
