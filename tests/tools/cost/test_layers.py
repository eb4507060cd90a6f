"""What plans of layers of each family say that workers communicate is what their programs do, and so are products."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from predicted import Build, Network, check_predicted

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.tools.cost.program import flops_of
from distdl_jax.tracing.jaxprs import equations


def embedding(P: dj.Partition) -> Network:
    """Indices of a vocabulary that is cut, as the sequence is behind it."""
    row, split = P.grid([2, 1]), P.grid([2, 2, 1])
    layers = nn.Sequential(
        nn.DistributedEmbedding(row, split, split, 11, 5, padding_idx=2), nn.DistributedLayerNorm(split, (5,))
    )
    return layers, dj.TensorSpec((3, 7), row)


def attention(shape: list[int], **options: Any) -> Build:
    """Return a network of two attentions on a partition of this shape."""

    def build(P: dj.Partition) -> Network:
        split = P.grid(shape)
        layer = nn.DistributedMultiHeadAttention(split, embed_dim=12, num_heads=6, **options)
        return nn.Sequential(layer, layer), dj.TensorSpec((3, 10, 12), split)

    return build


def spectral(P: dj.Partition) -> Network:
    """Spectral convolutions: with two features split, unevenly, and frequencies on workers of their own."""
    split, few = P.grid([1, 1, 2, 2]), P.grid([1, 1, 1, 3], [3, 1, 0])
    layers = nn.Sequential(
        nn.DistributedSpectralConv2d(split, 2, 3, modes=(2, 3)),
        jax.nn.gelu,
        nn.DistributedSpectralConv2d(split, 3, 2, modes=2, P_W=few),
    )
    return layers, dj.TensorSpec((3, 2, 7, 9), split)


def fourier_operator(P: dj.Partition) -> Network:
    """Two blocks in three dimensions, with the batch split too."""
    split = P.grid([2, 1, 2, 1, 1])
    block = nn.DistributedFNOBlock(split, 2, 2, modes=2)
    return nn.Sequential(block, nn.Residual(block)), dj.TensorSpec((3, 2, 6, 5, 4), split)


def entry_by_entry(P: dj.Partition) -> Network:
    """Maps of channels that are split, and of channels that are not, with learned slopes and scales of channels."""
    split = P.grid([2, 2, 1, 1])
    layers = nn.Sequential(
        nn.DistributedPointwise(split, 5, 6),
        nn.DistributedPReLU(split, 6),
        nn.DistributedSqueezeExcitation(split, 6, 3),
        nn.Residual(nn.DistributedPointwise(split, 4, 4, dim=3, bias=False)),
        nn.DistributedPReLU(split),
        dj.map_blocks(jnp.tanh, split),
    )
    return layers, dj.TensorSpec((3, 5, 3, 4), split)


def resampled(P: dj.Partition) -> Network:
    """Layers whose outputs read some inputs each, with features split, unevenly."""
    split, other = P.grid([1, 1, 2, 2]), P.grid([2, 1, 1, 1], [2, 1])
    layers = nn.Sequential(
        nn.DistributedConv2d(split, in_channels=1, out_channels=2, kernel_size=1),
        nn.DistributedUpsample(split, scale_factor=1.5, mode="linear"),
        nn.DistributedPad(split, [(1, 2), (3, 0)], mode="circular"),
        nn.DistributedCrop(split, [(2, 0), (0, 1)]),
        nn.DistributedAdaptiveAvgPool(split, (4, 3)),
        nn.DistributedUpsample(split, other, size=(3, 7)),
    )
    return layers, dj.TensorSpec((3, 1, 5, 7), split)


def pooled(copies: bool, layer: Any) -> Build:
    """Return a network that ends with a pool of all features, or of copies on all workers."""

    def build(P: dj.Partition) -> Network:
        split = P.grid([1, 2, 2, 1])
        convolution = nn.DistributedConv2d(split, in_channels=2, out_channels=3, kernel_size=1)
        linear = nn.DistributedLinear(P.grid([1, 4]), in_features=3, out_features=2)
        more = () if copies else (nn.Flatten(split), linear)
        return nn.Sequential(convolution, layer(split, copies), *more), dj.TensorSpec((3, 2, 5, 4), split)

    return build


def movements(P: dj.Partition) -> Network:
    """Movements as layers."""
    split, turned = P.grid([2, 2, 1]), P.grid([4, 1, 1])
    rows = nn.AllToAll(split, split_axis=2, concat_axis=1)
    layers = nn.Sequential(
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
    return layers, dj.TensorSpec((3, 7, 5), split)


def experts(shape: list[int], **options: Any) -> Build:
    """Return two mixtures of experts, the second one with experts on some workers."""

    def build(P: dj.Partition) -> Network:
        split, owners = P.grid(shape), P.grid([2], [3, 0])
        layers = (
            nn.DistributedMixtureOfExperts(split, embed_dim=6, num_experts=5, **options),
            nn.DistributedMixtureOfExperts(split, embed_dim=6, num_experts=3, P_W=owners, **options),
        )
        return nn.Sequential(*layers), dj.TensorSpec((3, 5, 6), split)

    return build


NETWORKS: dict[str, Build] = {
    "entry by entry": entry_by_entry,
    "resampled": resampled,
    "mean of all features": pooled(False, nn.DistributedGlobalAvgPool),
    "copies of the maximum of all features": pooled(True, nn.DistributedGlobalMaxPool),
    "movements": movements,
    "embedding": embedding,
    "spectral convolutions": spectral,
    "Fourier neural operator": fourier_operator,
    "attention with heads split": attention([2, 1, 2]),
    "ring": attention([1, 4, 1], num_key_heads=2),
    "causal ring": attention([1, 4, 1], causal=True, rotary=100.0),
    "causal ring and heads": attention([1, 2, 2], causal=True, fused=True),
    "exchanged heads": attention([1, 4, 1], exchange="heads", bias=False),
    "exchanged heads, of fewer keys": attention([1, 4, 1], exchange="heads", num_key_heads=2, causal=True),
    "experts for samples": experts([4, 1, 1]),
    "experts for a sequence that is cut": experts([1, 3, 1], group_axes=()),
    "gathered sequence": attention([2, 2, 1], exchange="gather"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_predict_every_operation_of_a_training_step(name: str) -> None:
    """In order, with partners, tags, lengths and dtypes."""
    check_predicted(NETWORKS[name])


def spectral_alone(P: dj.Partition) -> Network:
    """Two spectral convolutions on one worker."""
    split = P.grid([1, 1, 1, 1])
    first = nn.DistributedSpectralConv2d(split, 2, 3, modes=(2, 3))
    return nn.Sequential(first, nn.DistributedSpectralConv2d(split, 3, 4, modes=2)), dj.TensorSpec((3, 2, 7, 9), split)


def pointwise_alone(P: dj.Partition) -> Network:
    """Two maps of features on one worker."""
    split = P.grid([1, 1, 1])
    first = nn.DistributedPointwise(split, 5, 7, dim=2)
    return nn.Sequential(first, jnp.tanh, nn.DistributedPointwise(split, 3, 2)), dj.TensorSpec((4, 3, 5), split)


def experts_alone(P: dj.Partition) -> Network:
    """Two mixtures of experts on one worker."""
    layer = nn.DistributedMixtureOfExperts(P.grid([1, 1, 1]), embed_dim=6, num_experts=4, activation=jnp.tanh)
    return nn.Sequential(layer, layer), dj.TensorSpec((3, 5, 6), P.grid([1, 1, 1]))


ALONE: dict[str, Build] = {
    "attention": attention([1, 1, 1]),
    "causal attention with fewer keys": attention([1, 1, 1], causal=True, num_key_heads=3),
    "fused attention": attention([1, 1, 1], fused=True, rotary=100.0),
    "spectral convolutions": spectral_alone,
    "pointwise maps": pointwise_alone,
    "mixtures of experts": experts_alone,
}


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
