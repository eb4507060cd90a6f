"""Every refusal of convolutions and poolings: one sentence that names argument and value, the same on every worker."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax import nn


def conv(P_world: Any, *shapes: tuple[int, ...], kind: str = "", **changed: Any) -> Any:
    """A convolution on grids of the given shapes, P_x, P_y, P_W; a good one but for what is changed."""
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3} | changed
    partitions = [P_world.grid(shape) for shape in shapes or ((1, 1, 2, 2),)]
    return getattr(nn, f"Distributed{kind}Conv2d")(*partitions, **arguments)


ARGUMENTS = (
    ({"kernel_size": (3, 3, 3)}, "`kernel_size` (=(3, 3, 3)) must be an integer, 1 or more, or"),
    ({"kernel_size": 0}, "`kernel_size` (=0) must be an integer, 1 or more"),
    ({"stride": (1, 0)}, "`stride` (=(1, 0)) must be an integer, 1 or more"),
    ({"stride": True}, "`stride` (=True) must be an integer"),
    ({"dilation": -1}, "`dilation` (=-1) must be an integer, 1 or more"),
    ({"padding": -1}, "`padding` (=-1) must be 'same', 'valid', an integer of 0 or more, or for each of 2"),
    ({"padding": (1,)}, "`padding` (=(1,)) must be"),
    ({"padding": ((1, 1, 1), (1, 1, 1))}, "`padding` (=((1, 1, 1), (1, 1, 1))) must be"),
    ({"padding": [1.5, 1]}, "`padding` (=[1.5, 1]) must be"),
    ({"padding": "full"}, "`padding` (='full') must be 'same', 'valid'"),
    ({"padding": "same", "stride": 2}, "requires a stride of 1, but `stride` is (2, 2)"),
    ({"padding_mode": "mirror"}, "`padding_mode` (='mirror') must be one of ('zeros', 'circular', 'reflect'"),
    ({"in_channels": 0}, "`in_channels` (=0) must be an integer, 1 or more"),
    ({"groups": 0}, "`groups` (=0) must be an integer, 1 or more"),
    ({"groups": 3}, "`in_channels` (=4) must be divisible by `groups` (=3)"),
    ({"groups": 4}, "`out_channels` (=6) must be divisible by `groups` (=4)"),
)  # fmt: skip


@pytest.mark.parametrize(("changed", "sentence"), ARGUMENTS)
def test_arguments_of_a_convolution(changed: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(4, lambda P: conv(P, **changed), dj.InvalidArgumentError)


PARTITIONS = (
    ([(1, 2, 2)], {}, "`P_x` (1 x 2 x 2) must have 4 dimensions: batch, channels, and 2"),
    ([(1, 2, 1, 1), (1, 4, 1, 1)], {},
     "`P_W` is not given, and can't be derived from `P_x`, 1 x 2 x 1 x 1 (0, 1), and `P_y`, 1 x 4 x 1 x 1 (0-3)"),
    ([(1, 2, 1, 1)], {"split": "out_features"},
     "`split` (='out_features') must be 'in_channels', 'out_channels', or None"),
    ([(1, 1, 1, 1), (1, 2, 1, 1)], {"split": "in_channels"},
     "`split` (='in_channels') must be 'out_channels' or None if `P_x` is 1 x 1 x 1 x 1, `P_y` 1 x 2 x 1 x 1"),
    ([(1, 2, 1, 1)], {"split": "in_channels", "groups": 2},
     "must be 'out_channels' or None if `P_x` is 1 x 2 x 1 x 1, `P_y` 1 x 2 x 1 x 1 and there are groups"),
    ([(1, 2, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1)], {"split": "out_channels"},
     "`split` (='out_channels') must be None if `P_W` is given"),
    ([(1, 1, 2, 2), (1, 1, 4, 1), (1, 1, 2, 2)], {},
     "`P_y` (1 x 1 x 4 x 1) must split batch and features as `P_x` (1 x 1 x 2 x 2) does"),
    ([(2, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1)], {}, "`P_y` (1 x 2 x 1 x 1) must split batch and"),
    ([(1, 2, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1)], {},
     "`P_W` (2 x 2 x 1 x 1) must be 4 x 2 x 1 x 1, workers along the output channels, the input channels and the"),
    ([(2, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1)], {}, "must be 2 x 1 x 1 x 1 x 1, workers"),
    ([(1, 2, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1)], {"groups": 2},
     "the input channels and the features: each worker along the channels has whole groups"),
    ([(1, 2, 1, 1), (1, 4, 1, 1), (4, 1, 1, 1)], {"groups": 2},
     "With `groups` (=2) and input channels split over 2 workers, the output channels must be split over as "
     "many: `P_y` is 1 x 4 x 1 x 1, `P_x` 1 x 2 x 1 x 1"),
    ([(1, 1, 1, 1), (1, 4, 1, 1), (4, 1, 1, 1)], {"groups": 2},
     "`groups` (=2) must be divisible by the number of workers along the output channels (4)"),
)  # fmt: skip


@pytest.mark.parametrize(("shapes", "changed", "sentence"), PARTITIONS)
def test_partitions_of_a_convolution(shapes: Any, changed: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(8, lambda P: conv(P, *shapes, **changed), dj.InvalidArgumentError)


def test_partitions_must_be_partitions_of_one_world() -> None:
    arguments = {"in_channels": 2, "out_channels": 2, "kernel_size": 1}
    for make in (lambda P: nn.DistributedConv1d(3, **arguments), lambda P: nn.DistributedMaxPool1d(3, 2)):
        assert refusal(2, make, dj.InvalidTypeError) == "`P_x` (=3) must be a partition."

    def two_worlds(P: Any) -> Any:
        other = dj.planning_world(2, P.rank).grid([1, 1, 1])
        return nn.DistributedConv1d(P.grid([1, 1, 1]), other, other, **arguments)

    assert "`P_y` is on another communicator" in refusal(2, two_worlds, dj.InvalidArgumentError)


@pytest.mark.parametrize(("kind", "asked"), [("Feature", "channel"), ("Channel", "feature"), ("General", "channel")])
def test_classes_of_one_algorithm_take_no_other(kind: str, asked: str) -> None:
    shapes = [(1, 1, 2, 2)] if asked == "feature" else [(1, 2, 1, 1), (1, 1, 1, 1), (1, 2, 1, 1)]
    sentence = refusal(4, lambda P: conv(P, *shapes, kind=kind), dj.InvalidArgumentError)
    assert sentence == f"P_x, P_y and P_W need the {asked} algorithm, but this class implements the {kind.lower()} one."


POOLS = (
    ({}, {"kernel_size": 0}, "`kernel_size` (=0) must be an integer, 1 or more, or 2 of them"),
    ({}, {"stride": (2,)}, "`stride` (=(2,)) must be an integer, 1 or more, or 2 of them"),
    ({}, {"dilation": 0}, "`dilation` (=0) must be an integer, 1 or more"),
    ({}, {"padding": -1}, "`padding` (=-1) must be 'same', 'valid'"),
    ({}, {"padding": ((0, 1), (0, 2))},
     "`padding` (=((0, 1), (0, 2))) must be at most 1 for a kernel of 2 and a dilation of 1"),
    ({"shape": (2, 2)}, {}, "`P_x` (2 x 2) must have 4 dimensions: batch, channels, and 2 feature dimensions"),
)  # fmt: skip


@pytest.mark.parametrize(("on_them", "changed", "sentence"), POOLS)
def test_arguments_of_a_pooling(on_them: Any, changed: dict[str, Any], sentence: str) -> None:
    def pool(P: dj.Partition) -> Any:
        return nn.DistributedMaxPool2d(P.grid(**{"shape": [1, 1, 2, 2]} | on_them), **{"kernel_size": 2} | changed)

    assert sentence in refusal(4, pool, dj.InvalidArgumentError)


def test_repr_names_the_algorithm() -> None:
    P = dj.planning_world(8)
    channel = conv(P, (1, 2, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), groups=2, stride=2)
    general = conv(P, (2, 1, 1, 2), (2, 2, 1, 2), (2, 2, 1, 1, 2))
    for layer, text in (
        (conv(P, padding=(1, 0)), "[feature](4 -> 6, kernel 3 x 3, padding ((1, 1), (0, 0)) zeros, "
         "P_x 1 x 1 x 2 x 2, P_W 1 x 1 x 2 x 2)"),
        (channel, "[channel](4 -> 6, kernel 3 x 3, stride (2, 2), groups 2, P_x 1 x 2 x 1 x 1, P_W 2 x 1 x 1 x 1)"),
        (general, "[general](4 -> 6, kernel 3 x 3, P_x 2 x 1 x 1 x 2, P_W 2 x 2 x 1 x 1 x 2)"),
    ):  # fmt: skip
        assert repr(layer) == f"DistributedConv2d{text}"


def test_layers_are_values() -> None:
    """Equal layers are equal keys, however their arguments were given; numpy's integers are integers."""
    P = dj.planning_world(4)
    assert {conv(P), conv(P, kernel_size=[3, 3], padding="valid"), conv(P, stride=np.int64(1))} == {conv(P)}
    P_x = P.grid([1, 1, 2, 2])
    assert nn.DistributedMaxPool2d(P_x, 2) == nn.DistributedMaxPool2d(P_x, (2, 2), 2)


def test_input_channels_split_alone_split_the_weight() -> None:
    """The original takes the feature algorithm for them, unchecked."""
    P_x = dj.planning_world(4).grid([1, 4, 1])
    layer = nn.DistributedConv1d(P_x, in_channels=4, out_channels=4, kernel_size=3)
    assert layer.kind == "channel" and layer.P_W.size == 4 and layer.P_y == P_x


def refused_alike(work: Callable[[], Any]) -> str:
    """The sentence of the PlanError that every worker raises, the same on all; it says whose it is, if not of all."""
    with pytest.raises(dj.PlanError) as caught:
        work()
    (sentence,) = set(MPI.COMM_WORLD.allgather(str(caught.value)))
    return re.sub(r"^On worker \d+: ", "", sentence)


@pytest.mark.world(4)
def test_inputs_and_parameters() -> None:
    """Raised while tracing, on all workers of the layer, those included that hold no part of x: no worker waits."""
    P_world = dj.Partition()
    rank = P_world.rank
    P_x, P_y, P_W = (P_world.grid(shape) for shape in ([1, 1, 2], [1, 2, 2], [2, 1, 2]))

    def made(**options: Any) -> Any:
        return nn.DistributedConv1d(P_x, P_y, P_W, in_channels=2, out_channels=4, kernel_size=3, **options)

    def x(*shape: int) -> Any:
        return jnp.zeros(shape if P_x.active else (0,), jnp.float64)

    layer, good = made(), x(2, 2, 4)
    params = layer.init(jax.random.key(0), jnp.float64)
    weight, pool = params["weight"], nn.DistributedMaxPool1d(P_world.grid([1, 1, 4]), 3)
    mixed = good.astype(jnp.float32) if rank == 1 else good
    integers = good if P_x.active else jnp.zeros((0,), jnp.int32)
    wide = "`padding` (=(9, 9)) in feature dimension 0 must be at most {} there"
    for sentence, its, block, given in (
        ("`x` must have as many dimensions as its partition (1 x 1 x 2)", layer, x(2, 8), params),
        ("`x` has 3 channels, but in_channels=2.", layer, x(2, 3, 4), params),
        ("In feature dimension 0: `kernel` (=3) with dilation 1 spans 3 inputs", layer, x(2, 2, 1), params),
        ("The blocks of `x` don't form a 1 x 1 x 2 grid: workers with the same index in", layer, x(2 + rank, 2, 4),
         params),
        ("`x` must have one dtype on all workers that hold a part of it, but is float64 on", layer, mixed, params),
        ("`x` is int32[0] on worker 2, but the data is float64", layer, integers, params),
        (wide.format(8), made(padding=9, padding_mode="circular"), good, params),
        (wide.format(7), made(padding=9, padding_mode="reflect"), good, params),
        ('`params["weight"]` has shape (2, 2, 2), but this worker\'s block of 4 x 2 x 3 on 2 x 1 x 1', layer, good,
         params | {"weight": weight[..., :2] if rank == 2 else weight}),
        ("`params` must hold \"bias\" on every worker, but holds ['weight']", layer, good,
         {"weight": weight} if rank == 3 else params),
        ("`kernel` (=3) with dilation 1 spans 3 inputs, which must be at most", pool,
         jnp.zeros((1, 1, 1 if rank < 2 else 0)), {}),
    ):  # fmt: skip
        found = refused_alike(lambda its=its, block=block, given=given: jax.jit(its.apply)(given, block))
        assert sentence in found and (its in (layer, pool) or its.padding_mode in found)
    # The workers are together still.
    assert jax.jit(layer.apply)(params, good).shape == (2, 2, 3)
