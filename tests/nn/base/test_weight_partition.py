"""Layers with P_y and P_W derived from P_x and one word: beside the sequential ones, and as values."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside

import distdl_jax as dj
from distdl_jax import nn


def linear(P_x: On, n_in: int, n_out: int, P_y: On | None = None, sizes: Any = (3,), **options: Any) -> Beside:
    def layer(P: dj.Partition) -> nn.DistributedLinear:
        on_them = P_x.partition(P), P_y and P_y.partition(P)
        return nn.DistributedLinear(*on_them, in_features=n_in, out_features=n_out, **options)

    def whole(params: Any, x: Any) -> Any:
        return x @ params["weight"].T + params.get("bias", 0)

    name, y_sizes = f"linear {P_x} -> {P_y} {n_in} -> {n_out} {options}", (*sizes, n_out)
    return Beside(name, (*sizes, n_in), layer, whole, _with_dims(P_x, sizes), P_y and _with_dims(P_y, sizes), y_sizes)


def _with_dims(P: On, sizes: Any) -> On:
    """P as a partition of tensors with more dimensions, of which it cuts the first and the last."""
    return On((P.shape[0], *(1,) * (len(sizes) - 1), P.shape[-1]), P.ranks)


def conv(
    P_x: On, n_in: int, n_out: int, sizes: Any, P_y: On | None = None, transposed: bool = False, **options: Any
) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        w = params["weight"]
        if transposed:  # of stride 1: the convolution with the kernel turned round
            w = jnp.flip(w, 2).swapaxes(0, 1)
        y = lax.conv_general_dilated(x, w, (1,), [(1, 1)], feature_group_count=options.get("groups", 1))
        return y + params["bias"].reshape(-1, 1)

    kind, y_sizes = f"Conv{'Transpose' * transposed}1d", (sizes[0], n_out, int(np.sum(sizes[2])))
    channels = {"in_channels": n_in, "out_channels": n_out}
    return beside(kind, sizes, whole, P_x, P_y, kernel_size=3, padding=1, y_sizes=y_sizes, **channels, **options)


CASES = [
    linear(on(1, 4, ranks=(3, 1, 0, 2)), 7, 3),  # sums are scattered, as y is the smaller: one block is empty
    linear(on(2, 2), 5, 3, split="out_features", sharded=True, bias=False, sizes=((2, 1), 2)),
    linear(on(1, 3), 2, 5, P_y=on(1, 3, ranks=(0, 1, 2))),  # x is gathered, and one of its blocks is empty
    linear(on(1, 1, ranks=(2,)), 4, 3, P_y=on(1, 2)),  # Megatron's column parallel layer
    linear(on(4, 1), 3, 2, sizes=((2, 0, 1, 3),)),  # data parallelism
    conv(on(1, 2, 2), 3, 5, (2, 3, (4, 1)), split="in_channels"),
    conv(on(2, 2, 1, ranks=(3, 1, 0, 2)), 5, 3, ((1, 2), 5, 4), sharded=True, split="out_channels"),
    conv(on(1, 2, 2), 4, 8, (2, 4, 5), groups=4),
    conv(on(1, 2, 2), 3, 5, (2, 3, 5), P_y=on(1, 1, 2, ranks=(3, 0))),
    conv(on(1, 2, 2), 3, 4, (2, 3, 5), transposed=True),
    *(conv(on(2, 1, 1), 2, 3, (n, 2, 5)) for n in (0, 1)),  # of no sample on both workers, or on one
]


@pytest.mark.simulated(4)
def test_beside_the_sequential_ones() -> None:
    """Output and all gradients, where x is gathered, sums are scattered, or neither; evenly or not, on any teams."""
    check_beside(CASES)


def both(P_x: dj.CartesianPartition, **options: Any) -> tuple[Any, Any]:
    """A convolution and a linear layer of these options, on a partition of 1 x p x q workers."""
    along = {"in": ("in_channels", "in_features"), "out": ("out_channels", "out_features"), None: (None, None)}
    of_conv, of_linear = along[options.pop("split", None)]
    channels, features = ({f"in_{of}": 4, f"out_{of}": 6, **options} for of in ("channels", "features"))
    conv = nn.DistributedConv1d(P_x, **channels, kernel_size=3, split=of_conv)
    return conv, nn.DistributedLinear(P_x.slice(2, keepdims=False), **features, split=of_linear)


def test_derived_partitions_are_those_that_one_would_give() -> None:
    """A layer is equal to the one that is given them, and to its copies: there is one form of each layer."""
    P = dj.planning_world(4).grid([1, 2, 2])
    P_two, space = P.slice(2, keepdims=False), P.slice(1)
    for split, P_W in (("out", [2, 1, 2]), ("in", [1, 2, 2]), (None, [2, 1, 2])):
        conv, linear = both(P, split=split)
        given = nn.DistributedConv1d(P, P, P.grid(P_W), in_channels=4, out_channels=6, kernel_size=3)
        assert conv == given and hash(conv) == hash(given) and repr(conv) == repr(given) and replace(conv) == conv
        assert linear == nn.DistributedLinear(P_two, P_two, P_two.grid(P_W[:2]), 4, 6) == replace(linear)
    narrowing = nn.DistributedConv1d(P, in_channels=6, out_channels=4, kernel_size=3)
    assert narrowing.P_W.shape == (1, 2, 2), "less moves where sums are scattered"
    assert both(space)[0] == both(space, split="in")[0], "where no channels are cut, there is nothing to choose"
    column = nn.DistributedLinear(P_two.slice(1), P_two, in_features=4, out_features=6)
    row = nn.DistributedLinear(P_two, P_two.slice(1), in_features=6, out_features=4, split="in_features")
    assert (column.P_W.shape, row.P_W.shape) == ((2, 1), (1, 2)), "Megatron's pair"
