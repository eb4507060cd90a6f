"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.nn.layer import Layer
from distdl_jax.nn.layer_table import layer_table
from distdl_jax.static import Static

Params = tuple[Any, ...]


class Sequential(Static):
    """A network whose layers are applied one after the other.

    **Arguments:**

    - `layers`: layers (all that satisfy `nn.Layer`, another `Sequential` too) and plain functions of an array, like
      `jax.nn.relu`. A function is applied to every worker's block by itself, also to the zero-volume ones.

    The parameters are a tuple with an entry for each layer, `{}` for what has none. The partitions of neighbours have
    to fit: where one layer leaves its output on other workers than the next one takes its input from, put a
    `Repartition` between them.

    Printed, it is a table of the layers with their partitions, parameters and bytes per worker. `len`, indexing,
    slices and loops go over the layers; a slice is a `Sequential`.

    **Raises:** `InvalidTypeError` for what can't be called.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
    >>> network = Sequential(DistributedLinear(P, P, P, 3, 4), jax.nn.relu, DistributedLinear(P, P, P, 4, 2))
    >>> params = network.init(jax.random.key(0))
    >>> network(params, jax.numpy.ones((5, 3))).shape
    (5, 2)
    >>> print(network)
    """

    __slots__ = ("_layers",)

    _layers: tuple[Callable[..., Any], ...]

    def __init__(self, *layers: Callable[..., Any]) -> None:
        for place, layer in enumerate(layers):
            if not callable(layer):
                raise InvalidTypeError(f"`layers[{place}]` (={layer!r}) must be a layer or a function of an array.")
        object.__setattr__(self, "_layers", layers)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A Sequential is immutable, so its `{name}` cannot be set; create another one.")

    @property
    def layers(self) -> tuple[Callable[..., Any], ...]:
        """The layers and functions, in order."""
        return self._layers

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """This worker's blocks of the initial parameters: for each layer a key of its own, split off `key`."""
        keys = jax.random.split(key, max(len(self._layers), 1))
        pairs = zip(self._layers, keys[: len(self._layers)], strict=True)
        return tuple(layer.init(key, dtype) if isinstance(layer, Layer) else {} for layer, key in pairs)

    def param_specs(self) -> Params:
        """The global shape and the partition of each parameter: a tuple like the parameters."""
        return tuple(layer.param_specs() if isinstance(layer, Layer) else {} for layer in self._layers)

    def __call__(self, params: Params, x: Array) -> Array:
        """The output of the last layer, from this worker's blocks of the parameters and of the input.

        **Raises:** `InvalidArgumentError` where `params` has not an entry for each layer.
        """
        if len(params) != len(self._layers):
            raise InvalidArgumentError(
                f"`params` has {len(params)} entries, but there are {len(self._layers)} layers; each has one, {{}} "
                "where it has no parameters."
            )
        for layer, its_params in zip(self._layers, params, strict=True):
            x = layer(its_params, x) if isinstance(layer, Layer) else layer(x)
        return x

    apply = __call__

    def table(self, dtype: DTypeLike = jnp.float32) -> str:
        """The layers, their partitions, how many parameters they have, and how many bytes of them each worker holds.

        `dtype` is that of the parameters.
        """
        return layer_table(self._layers, np.dtype(dtype))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(_name, self._layers))})"

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._layers)

    @overload
    def __getitem__(self, place: int) -> Callable[..., Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequential: ...
    def __getitem__(self, place: int | slice) -> Any:
        return Sequential(*self._layers[place]) if isinstance(place, slice) else self._layers[place]

    def __eq__(self, other: object) -> bool:
        return self._layers == other._layers if isinstance(other, Sequential) else NotImplemented

    def __hash__(self) -> int:
        return hash((Sequential, self._layers))


def _name(layer: Callable[..., Any]) -> str:
    return repr(layer) if isinstance(layer, Layer) else getattr(layer, "__name__", repr(layer))
