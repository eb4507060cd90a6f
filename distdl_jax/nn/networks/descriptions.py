"""Layers without partitions: descriptions, from which `dj.advise` makes layers on the partitions that it chooses.

A layer is determined by its description and a grid of workers, in the dimensions of its input: the grid is the
partition of input and output, from which the layer's class derives the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.nn.conv.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from distdl_jax.nn.conv.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from distdl_jax.nn.dense.linear import DistributedLinear
from distdl_jax.nn.norm.batch import DistributedBatchNorm
from distdl_jax.nn.norm.normalization import DistributedNorm
from distdl_jax.nn.norm.per_sample import DistributedGroupNorm, DistributedInstanceNorm, DistributedLayerNorm
from distdl_jax.nn.pool.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from distdl_jax.nn.shape.flatten import Flatten
from distdl_jax.partitions.partition import CartesianPartition

_LENGTHS = {"in_channels": 1, "num_features": 1, "num_channels": 1, "in_features": -1}
"""Arguments that equal the length of the input along a dimension, and may be omitted."""


@dataclass(frozen=True)
class LayerDescription:
    """A layer without its partitions: the class, and its other arguments.

    >>> import distdl_jax as dj
    >>> conv = dj.nn.conv2d(out_channels=8, kernel_size=3, padding=1)
    >>> conv
    conv2d(out_channels=8, kernel_size=3, padding=1)
    >>> conv.layer(dj.planning_world(4).grid([1, 1, 2, 2]), (1, 3, 32, 32)).in_channels
    3
    """

    name: str
    layer_class: Callable[..., Any]
    arguments: tuple[tuple[str, Hashable], ...]

    def layer(self, P: CartesianPartition, x_shape: tuple[int, ...]) -> Any:
        """Return the layer whose input, of the global shape `x_shape`, is on the partition `P`.

        **Raises:** `InvalidArgumentError` if the layer does not accept such a partition or shape.
        """
        given = dict(self.arguments)
        for name in self._missing_lengths(given):
            if not -len(x_shape) <= _LENGTHS[name] < len(x_shape):
                raise InvalidArgumentError(f"`{name}` of {self.name} must be given: x has the shape {x_shape}.")
            given[name] = x_shape[_LENGTHS[name]]
        return self.layer_class(P, **given)

    @property
    def follows(self) -> bool:
        """Whether it always stays on the previous layer's partition, as normalisations do."""
        return isinstance(self.layer_class, type) and issubclass(self.layer_class, DistributedNorm)

    def _missing_lengths(self, given: dict[str, Any]) -> list[str]:
        return [name for name in _argument_names(self.layer_class) if name in _LENGTHS and name not in given]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"


@dataclass(frozen=True)
class Skip:
    """Layers with a skip connection around them; made by `skip`."""

    layers: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"skip({', '.join(map(repr, self.layers))})"


def skip(*layers: Any) -> Skip:
    """Describe y = x + layers(x), a residual, for `dj.advise`, which makes it an `nn.Residual`.

    **Arguments:**

    - `layers`: descriptions and functions of an array, in order; their output has the shape of x.

    **Returns:** the description, a `Skip`.

    **Raises:** nothing; `dj.advise` rejects layers that do not fit.

    >>> import jax, distdl_jax as dj
    >>> dj.nn.skip(dj.nn.conv1d(out_channels=4, kernel_size=3, padding="same"))
    skip(conv1d(out_channels=4, kernel_size=3, padding='same'))
    """
    return Skip(layers)


def describe(layer_class: Callable[..., Any], /, **arguments: Any) -> LayerDescription:
    """Describe a layer of any class, including your own, without its partitions, for `dj.advise`.

    `nn.conv2d(...)` is `nn.describe(nn.DistributedConv2d, ...)`, and so on for the other lower-case names.

    **Arguments:**

    - `layer_class`: the class; its first argument is the partition of the input, from which its other partitions are
      derived.
    - `arguments`: its other arguments, by name. `in_channels`, `in_features`, `num_channels` and `num_features` may be
      omitted: they are lengths of the input.

    **Returns:** the description, a `LayerDescription`.

    **Raises:** `InvalidTypeError` if the class has no such argument, or `arguments` has a partition.

    >>> import distdl_jax as dj
    >>> dj.nn.describe(dj.nn.DistributedPReLU, num_parameters=8)
    DistributedPReLU(num_parameters=8)
    """
    if not callable(layer_class):
        raise InvalidTypeError(f"`layer_class` (={layer_class!r}) must be the class of a layer.")
    return _description(getattr(layer_class, "__name__", repr(layer_class)), layer_class, arguments)


def _description(name: str, layer_class: Callable[..., Any], arguments: dict[str, Any]) -> LayerDescription:
    known = _argument_names(layer_class)
    for argument in arguments:
        if known and (argument not in known or argument.startswith("P_")):
            accepted = ", ".join(each for each in known if not each.startswith("P_"))
            raise InvalidTypeError(f"{name} has no argument `{argument}`; it takes {accepted or 'none'}.")
    return LayerDescription(name, layer_class, tuple((key, _hashable(value)) for key, value in arguments.items()))


def _argument_names(layer_class: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a dataclass; none if they are not known."""
    is_known = hasattr(layer_class, "__dataclass_fields__")
    return tuple(inspect.signature(layer_class).parameters) if is_known else ()


def _hashable(value: Any) -> Hashable:
    found: Hashable = tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
    return found


def _describing(layer_class: Callable[..., Any], name: str, example: str) -> Callable[..., LayerDescription]:
    """Return the function that describes layers of a class; `example`: arguments as they are printed."""

    def describing(**arguments: Any) -> LayerDescription:
        return _description(name, layer_class, arguments)

    describing.__name__ = describing.__qualname__ = name
    class_name = layer_class.__name__
    describing.__doc__ = f"""Describe an `nn.{class_name}` without its partitions, for `dj.advise`.

    **Arguments:**

    - `arguments`: the arguments of `{class_name}` by name, without the partitions. Lengths of dimensions of the input,
      such as `in_channels`, may be omitted.

    **Returns:** the description, a `LayerDescription`.

    **Raises:** `InvalidTypeError` for an argument that the class does not have.

    >>> import distdl_jax as dj
    >>> dj.nn.{name}({example})
    {name}({example})
    """
    return describing


conv1d = _describing(DistributedConv1d, "conv1d", "out_channels=8, kernel_size=3")
conv2d = _describing(DistributedConv2d, "conv2d", "out_channels=8, kernel_size=3")
conv3d = _describing(DistributedConv3d, "conv3d", "out_channels=8, kernel_size=3")
conv_transpose1d = _describing(DistributedConvTranspose1d, "conv_transpose1d", "out_channels=8, kernel_size=3")
conv_transpose2d = _describing(DistributedConvTranspose2d, "conv_transpose2d", "out_channels=8, kernel_size=3")
conv_transpose3d = _describing(DistributedConvTranspose3d, "conv_transpose3d", "out_channels=8, kernel_size=3")
max_pool1d = _describing(DistributedMaxPool1d, "max_pool1d", "kernel_size=2")
max_pool2d = _describing(DistributedMaxPool2d, "max_pool2d", "kernel_size=2")
max_pool3d = _describing(DistributedMaxPool3d, "max_pool3d", "kernel_size=2")
avg_pool1d = _describing(DistributedAvgPool1d, "avg_pool1d", "kernel_size=2")
avg_pool2d = _describing(DistributedAvgPool2d, "avg_pool2d", "kernel_size=2")
avg_pool3d = _describing(DistributedAvgPool3d, "avg_pool3d", "kernel_size=2")
batch_norm = _describing(DistributedBatchNorm, "batch_norm", "")
group_norm = _describing(DistributedGroupNorm, "group_norm", "num_groups=4")
instance_norm = _describing(DistributedInstanceNorm, "instance_norm", "")
layer_norm = _describing(DistributedLayerNorm, "layer_norm", "normalized_shape=16")
linear = _describing(DistributedLinear, "linear", "out_features=10")
flatten = _describing(Flatten, "flatten", "")
