"""What plans say that workers communicate in a training step is, operation by operation, what their programs do."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from predicted import Build, Network, blocks, check_predicted

import distdl_jax as dj
from distdl_jax import nn


def lenet(P: dj.Partition) -> Network:
    """A small network on four workers, from an image on one of them to scores on one."""
    conv, one = P.grid([1, 1, 2, 2]), P.grid([1, 1, 1, 1], [0])
    layers = nn.Sequential(
        nn.Repartition(one, conv),
        nn.DistributedConv2d(conv, in_channels=1, out_channels=6, kernel_size=5, padding=2),
        jax.nn.relu,
        nn.DistributedMaxPool2d(conv, 2),
        nn.DistributedConv2d(conv, in_channels=6, out_channels=16, kernel_size=5),
        nn.DistributedAvgPool2d(conv, 2),
        nn.Repartition(conv, one),
        nn.DistributedConv2d(one, in_channels=16, out_channels=3, kernel_size=1),
    )
    return layers, dj.TensorSpec((3, 1, 28, 28), one)


def residual(P: dj.Partition) -> Network:
    """A residual block with the batch and two features split, unevenly."""
    conv = P.grid([2, 1, 1, 2])

    def layer() -> nn.DistributedConv2d:
        return nn.DistributedConv2d(conv, in_channels=3, out_channels=3, kernel_size=3, padding=1)

    block = nn.Residual(nn.Sequential(layer(), jax.nn.relu, layer()))
    return nn.Sequential(layer(), block, layer()), dj.TensorSpec((3, 3, 9, 11), conv)


def channels(P: dj.Partition) -> Network:
    """Convolutions whose channels are split, with a stride, with sharded parameters, and with empty blocks."""
    conv = P.grid([1, 2, 1, 2])
    layers = nn.Sequential(
        nn.DistributedConv2d(conv, in_channels=5, out_channels=6, kernel_size=3, padding=1, stride=2),
        nn.DistributedConv2d(conv, in_channels=6, out_channels=1, kernel_size=3, sharded=True),
    )
    return layers, dj.TensorSpec((3, 5, 19, 7), conv)


def norms(P: dj.Partition) -> Network:
    """Normalisations over all workers and over some, and a transposed convolution; workers hold copies of weights."""
    conv = P.grid([2, 1, 2, 1])
    layers = nn.Sequential(
        nn.DistributedGroupNorm(conv, 2, 4),
        nn.DistributedRMSNorm(conv, (9, 7)),
        nn.DistributedLayerNorm(conv, (4, 9, 7)),
        nn.DistributedBatchNorm(conv, 4),
        nn.DistributedConvTranspose2d(conv, in_channels=4, out_channels=3, kernel_size=3, stride=2),
    )
    return layers, dj.TensorSpec((3, 4, 9, 7), conv)


def skips(P: dj.Partition) -> Network:
    """Skips that are added, and concatenated along channels that are split and along rows, whose pieces move."""
    conv = P.grid([1, 2, 2, 1])

    def layer(c_in: int, c_out: int) -> nn.DistributedConv2d:
        return nn.DistributedConv2d(conv, in_channels=c_in, out_channels=c_out, kernel_size=3, padding=1)

    layers = nn.Sequential(
        layer(2, 3),
        nn.Skip(nn.Sequential(layer(3, 4), jax.nn.relu)),
        nn.Skip(nn.Sequential(layer(7, 7)), axis=2),
        nn.Skip(nn.Sequential(layer(7, 7)), join="add"),
    )
    return layers, dj.TensorSpec((2, 2, 9, 7), conv)


@pytest.mark.parametrize("build", [lenet, residual, channels, norms, skips])
def test_plans_predict_every_operation_of_a_training_step(build: Build) -> None:
    """In order, with partners, tags, lengths and dtypes."""
    check_predicted(build)


@pytest.mark.parametrize("seed", range(24))
def test_plans_predict_every_operation_of_drawn_networks(seed: int) -> None:
    """Of layers of all families, with uneven and empty blocks, on 2 to 8 workers."""
    check_predicted(*drawn(seed))


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 2, 2)])
def test_flops_of_a_convolution_are_what_xla_counts(stride: int, padding: int, dilation: int) -> None:
    """Products with padding don't count."""
    P = dj.planning_world(1).grid([1, 1, 1, 1])
    options = {"kernel_size": (3, 2), "stride": stride, "padding": min(padding, 1), "dilation": dilation}
    layer = nn.DistributedConv2d(P, in_channels=4, out_channels=6, groups=2, bias=False, **options)
    spec = dj.TensorSpec((2, 4, 9, 8), P)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        pads = [(min(padding, 1),) * 2] * 2
        return jax.lax.conv_general_dilated(
            x, w, (stride,) * 2, pads, rhs_dilation=(dilation,) * 2, feature_group_count=2
        )

    args = (jnp.zeros((2, 4, 9, 8)), jnp.zeros((6, 2, 3, 2)))
    counted = jax.jit(convolve).lower(*args).cost_analysis()["flops"]
    y = layer.plan(blocks(spec, np.dtype("float32"))).output(0).shape
    assert y == jax.eval_shape(convolve, *args).shape
    assert dj.cost(layer, spec, backward=False).flops[0] == counted
    assert math.prod(y) > 0


def test_a_linear_layer_counts_two_flops_for_each_product() -> None:
    """Forward, for the input where it has a gradient, and for the weight."""
    P = dj.planning_world(1).grid([1, 1])
    layers = [nn.DistributedLinear(P, P, P, *sizes, bias=False) for sizes in ((5, 7), (7, 3))]
    (first, second) = dj.cost(nn.Sequential(*layers), dj.TensorSpec((4, 5), P)).layers
    assert first.amounts.flops[0] == 2 * (2 * 4 * 5 * 7)
    assert second.amounts.flops[0] == 3 * (2 * 4 * 7 * 3)


def test_parameters_and_what_the_optimiser_stores() -> None:
    """On the workers that hold them, in bytes."""
    P = dj.planning_world(2).grid([1, 1, 2])
    layer = nn.DistributedConv1d(P, in_channels=1, out_channels=2, kernel_size=3)
    spec = dj.TensorSpec((1, 1, 8), P)
    adam, sgd = (dj.cost(layer, spec, optimiser=name).workers for name in ("adam", "sgd"))
    assert adam.parameters.tolist() == adam.gradients.tolist() == [4 * (2 * 3 + 2), 0]
    assert adam.optimiser.tolist() == [2 * 32, 0]
    assert sgd.optimiser.tolist() == [0, 0]
    forward = dj.cost(layer, spec, backward=False).workers
    assert not forward.gradients.any()
    assert not forward.optimiser.any()


def test_what_can_not_be_predicted_is_refused() -> None:
    """By the argument's name, or the plan's class."""
    P = dj.planning_world(1).grid([1, 1])
    layer, spec = nn.DistributedLinear(P, P, P, 5, 7), dj.TensorSpec((4, 5), P)
    with pytest.raises(dj.InvalidArgumentError, match=r"`optimiser` .*'nadam'.* must be one of sgd, "):
        dj.cost(layer, spec, optimiser="nadam")
    with pytest.raises(dj.InvalidTypeError, match=r"`network` .* must be a layer"):
        dj.cost(jax.nn.relu, spec)
    with pytest.raises(dj.PlanError, match="`x` has shape"):
        dj.cost(layer, dj.TensorSpec((4, 6), P))
    with pytest.raises(dj.InvalidTypeError, match=r"`backward` \(='no'\) must be True or False"):
        dj.cost(layer, spec, backward="no")  # type: ignore[arg-type]
    with pytest.raises(dj.InvalidTypeError, match=r"`dtype` \(='foo'\) must be a dtype"):
        dj.cost(layer, spec, dtype="foo")
    many = dj.planning_world(300).grid([300, 1, 1])
    again = nn.Remat(nn.DistributedConv1d(many, in_channels=1, out_channels=2, kernel_size=1))
    with pytest.raises(dj.PlanError, match=r"Remat can't .* traced on all of them: at most 256"):
        dj.cost(again, dj.TensorSpec((300, 1, 5), many))


def by_value(x: jax.Array) -> jax.Array:
    """Depends on a value in Python."""
    return x if x.sum() > 0 else -x


def until(x: jax.Array) -> jax.Array:
    """Has no derivative in reverse."""
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


@pytest.mark.parametrize(
    ("function", "words"),
    [(by_value, "`network` can't be planned: a part of it depends on values"), (until, "1 Local.*Reverse-mode")],
)
def test_a_program_that_can_not_be_traced_is_refused_in_a_sentence(function: Any, words: str) -> None:
    P = dj.planning_world(2).grid([2, 1])
    network = nn.Sequential(nn.DistributedLinear(P, in_features=4, out_features=4), nn.Local(function))
    with pytest.raises(dj.PlanError, match=words):
        dj.cost(network, dj.TensorSpec((8, 4), P))


def test_a_spec_of_another_planning_world_will_do() -> None:
    """Counts, and the picture, are those of a spec of the layers' own world."""
    layers, own = lenet(dj.planning_world(4))
    other = dj.TensorSpec(own.global_shape, dj.planning_world(4).grid([1, 1, 1, 1], [0]))
    assert dj.cost(layers, other).to_json() == dj.cost(layers, own).to_json()
    assert layers.draw(other).text == layers.draw(own).text
