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


def conv(P_world: Any, *shapes: tuple[int, ...], dims: int = 2, **changed: Any) -> Any:
    """A convolution on grids of the given shapes, P_x, P_y, P_W; a good one but for what is changed."""
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3} | changed
    partitions = [P_world.grid(shape) for shape in shapes or ((1, 1, 2, 2),)]
    return getattr(nn, f"DistributedConv{dims}d")(*partitions, **arguments)


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
     "`P_W` (2 x 2 x 1 x 1) must be 2 x 1 x 1 x 1, workers along the output channels, the input channels and "
     "the features: each worker along the channels has whole groups"),
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
    sentence = refusal(2, lambda P: nn.DistributedConv1d(3, **arguments), dj.InvalidTypeError)
    assert sentence == "`P_x` (=3) must be a partition."
    sentence = refusal(2, lambda P: nn.DistributedMaxPool1d("P", 2), dj.InvalidTypeError)
    assert sentence == "`P_x` (='P') must be a partition."

    def two_worlds(P: Any) -> Any:
        other = dj.planning_world(2, P.rank).grid([1, 1, 1])
        return nn.DistributedConv1d(P.grid([1, 1, 1]), other, other, **arguments)

    assert "`P_y` is on another communicator" in refusal(2, two_worlds, dj.InvalidArgumentError)


@pytest.mark.parametrize(
    ("kind", "shapes", "asked"),
    [
        ("Feature", [(1, 2, 1, 1), (1, 1, 1, 1), (1, 2, 1, 1)], "channel"),
        ("Channel", [(1, 1, 2, 2)], "feature"),
        ("General", [(1, 2, 1, 1), (1, 1, 1, 1), (1, 2, 1, 1)], "channel"),
    ],
)
def test_classes_of_one_algorithm_take_no_other(kind: str, shapes: Any, asked: str) -> None:
    layer = getattr(nn, f"Distributed{kind}Conv2d")
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
    sentence = refusal(4, lambda P: layer(*(P.grid(s) for s in shapes), **arguments), dj.InvalidArgumentError)
    assert sentence == f"P_x, P_y and P_W need the {asked} algorithm, but this class implements the {kind.lower()} one."


POOLS = (
    ({"kernel_size": 0}, "`kernel_size` (=0) must be an integer, 1 or more, or 2 of them"),
    ({"kernel_size": 2, "stride": (2,)}, "`stride` (=(2,)) must be an integer, 1 or more, or 2 of them"),
    ({"kernel_size": 2, "dilation": 0}, "`dilation` (=0) must be an integer, 1 or more"),
    ({"kernel_size": 2, "padding": -1}, "`padding` (=-1) must be 'same', 'valid'"),
    ({"kernel_size": 2, "padding": ((0, 1), (0, 2))},
     "`padding` (=((0, 1), (0, 2))) must be at most 1 for a kernel of 2 and a dilation of 1"),
)  # fmt: skip


@pytest.mark.parametrize(("changed", "sentence"), POOLS)
def test_arguments_of_a_pooling(changed: dict[str, Any], sentence: str) -> None:
    pool = refusal(4, lambda P: nn.DistributedMaxPool2d(P.grid([1, 1, 2, 2]), **changed), dj.InvalidArgumentError)
    assert sentence in pool


def test_dimensions_of_a_pooling() -> None:
    sentence = refusal(4, lambda P: nn.DistributedAvgPool2d(P.grid([2, 2]), 2), dj.InvalidArgumentError)
    assert sentence.startswith("`P_x` (2 x 2) must have 4 dimensions: batch, channels, and 2 feature dimensions")


def test_repr_names_the_algorithm() -> None:
    P = dj.planning_world(8)
    assert repr(conv(P, padding=(1, 0))) == (
        "DistributedConv2d[feature](4 -> 6, kernel 3 x 3, padding ((1, 1), (0, 0)) zeros, P_x 1 x 1 x 2 x 2, "
        "P_W 1 x 1 x 2 x 2)"
    )
    channel = conv(P, (1, 2, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), groups=2, stride=2)
    assert repr(channel) == (
        "DistributedConv2d[channel](4 -> 6, kernel 3 x 3, stride (2, 2), groups 2, P_x 1 x 2 x 1 x 1, "
        "P_W 2 x 1 x 1 x 1)"
    )
    general = conv(P, (2, 1, 1, 2), (2, 2, 1, 2), (2, 2, 1, 1, 2))
    assert repr(general) == (
        "DistributedConv2d[general](4 -> 6, kernel 3 x 3, P_x 2 x 1 x 1 x 2, P_W 2 x 2 x 1 x 1 x 2)"
    )


def test_layers_are_values() -> None:
    """Equal layers are equal keys, however their arguments were given; numpy's integers are integers."""
    P = dj.planning_world(4)
    assert {conv(P), conv(P, kernel_size=[3, 3], padding="valid"), conv(P, stride=np.int64(1))} == {conv(P)}
    one, same = (
        nn.DistributedMaxPool2d(P.grid([1, 1, 2, 2]), 2),
        nn.DistributedMaxPool2d(P.grid([1, 1, 2, 2]), (2, 2), 2),
    )
    assert {one, same} == {one}


def test_input_channels_split_alone_split_the_weight() -> None:
    """The original takes the feature algorithm for them, unchecked."""
    P_x = dj.planning_world(4).grid([1, 4, 1])
    layer = nn.DistributedConv1d(P_x, in_channels=4, out_channels=4, kernel_size=3)
    assert layer.kind == "channel" and layer.P_W.size == 4 and layer.P_y == P_x


def refused_alike(work: Callable[[], Any]) -> str:
    """The sentence of the PlanError that every worker raises; on all but its own, it says whose it is."""
    with pytest.raises(dj.PlanError) as caught:
        work()
    (sentence,) = set(MPI.COMM_WORLD.allgather(re.sub(r"^On worker \d+: ", "", str(caught.value))))
    return sentence


@pytest.mark.world(4)
def test_inputs_and_parameters() -> None:
    """Raised while tracing, on all workers of the layer, those included that hold no part of x: no worker waits."""
    P_world = dj.Partition()
    rank = P_world.rank
    P_x, P_W = P_world.grid([1, 1, 2]), P_world.grid([2, 1, 2])
    layer = nn.DistributedConv1d(P_x, P_world.grid([1, 2, 2]), P_W, in_channels=2, out_channels=4, kernel_size=3)
    key = jax.random.key(0)
    params = layer.init(key, jnp.float64)

    def x(*shape: int) -> Any:
        return jnp.zeros(shape if P_x.active else (0,), jnp.float64)

    def of(layer: Any, x: Any, params: Any = params) -> str:
        return refused_alike(lambda: jax.jit(layer.apply)(params, x))

    def changed(**arguments: Any) -> Any:
        return nn.DistributedConv1d(
            P_x, layer.P_y, P_W, **{"in_channels": 2, "out_channels": 4, "kernel_size": 3} | arguments
        )

    assert "`x` must have as many dimensions as its partition (1 x 1 x 2)" in of(layer, x(2, 8))
    assert "`x` has 3 channels, but in_channels=2." in of(layer, x(2, 3, 4))
    assert "In feature dimension 0: `kernel` (=3) with dilation 1 spans 3 inputs" in of(layer, x(2, 2, 1))
    grown = x(2 + rank, 2, 4)
    assert "The blocks of `x` don't form a 1 x 1 x 2 grid: workers with the same index in" in of(layer, grown)
    mixed = x(2, 2, 4).astype(jnp.float32) if rank == 1 else x(2, 2, 4)
    assert "`x` must have one dtype on all workers that hold a part of it, but is float64 on" in of(layer, mixed)
    integers = x(2, 2, 4) if P_x.active else jnp.zeros((0,), jnp.int32)
    assert "`x` is int32[0] on worker 2, but the data is float64" in of(layer, integers)
    for mode, limit in (("circular", 8), ("reflect", 7)):
        sentence = of(changed(padding=9, padding_mode=mode), x(2, 2, 4))
        assert f"`padding` (=(9, 9)) in feature dimension 0 must be at most {limit} there" in sentence
        assert mode in sentence

    weight = params["weight"]
    wrong = params | {"weight": weight[..., :2] if rank == 2 else weight}
    sentence = of(layer, x(2, 2, 4), wrong)
    assert '`params["weight"]` has shape (2, 2, 2), but this worker\'s block of 4 x 2 x 3 on 2 x 1 x 1' in sentence
    missing = {"weight": weight} if rank == 3 else params
    assert "`params` must hold \"bias\" on every worker, but holds ['weight']" in of(layer, x(2, 2, 4), missing)

    pool = nn.DistributedMaxPool1d(P_world.grid([1, 1, 4]), 3)
    assert "`kernel` (=3) with dilation 1 spans 3 inputs, which must be at most" in refused_alike(
        lambda: pool(jnp.zeros((1, 1, 1 if rank < 2 else 0)))
    )
    # The workers are together still.
    assert jax.jit(layer.apply)(params, x(2, 2, 4)).shape == (2, 2, 3)
