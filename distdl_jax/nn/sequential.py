"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.layer.layer import Layer, applied, draws_numbers, keeps_state
from distdl_jax.layer.output_specs import output_spec, partition_of_output
from distdl_jax.layer.parameters import unboxed
from distdl_jax.nn.layer_compatibility import check_arrangement, check_taken, seams
from distdl_jax.nn.summary import layer_table
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.static import Static
from distdl_jax.tensors import TensorSpec, check_spec
from distdl_jax.validation import check_key, checked_boolean
from distdl_jax.world import Workers

Params = tuple[Any, ...]


@dataclass(frozen=True)
class FunctionPlan(Plan):
    """A plain function on every worker's block, of which `inputs` are the shapes and dtypes."""

    function: Callable[[Array], Array]
    inputs: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return self._of_input[self.inputs[worker]]

    @cached_property
    def _of_input(self) -> dict[ShapeDtype, ShapeDtype]:
        """Worked out once for each shape and dtype, of which many workers share one."""
        found = {}
        for x in set(self.inputs.values()):
            y = jax.eval_shape(self.function, jax.ShapeDtypeStruct(x.shape, x.dtype))
            found[x] = ShapeDtype(tuple(y.shape), np.dtype(y.dtype))
        return found


@dataclass(frozen=True)
class SequentialPlan(Plan):
    """The plans of layers, one after the other, and what all workers `hold` in the end."""

    plans: tuple[Plan, ...]
    hold: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.hold))

    def output(self, worker: int) -> ShapeDtype:
        return self.hold[worker]


class Sequential(Static):
    """A network whose layers are applied one after the other.

    **Arguments:**

    - `layers`: layers (all that satisfy `nn.Layer`, another `Sequential` too) and plain functions of an array, like
      `jax.nn.relu`. A function is applied to every worker's block by itself, also to the zero-volume ones.

    The parameters are a tuple with an entry for each layer, `{}` for what has none. The partitions of neighbours have
    to fit: where one layer leaves its output on other workers, or in other blocks, than the next one takes its input
    from, put a `Repartition` between them. A misfit is refused where it is known for one: between layers of this
    library, and functions of `jax.nn`.

    Printed, it is a table of the layers with their partitions, parameters and bytes per worker. `len`, indexing,
    slices and loops go over the layers; a slice is a `Sequential`.

    **Raises:** `InvalidTypeError` for what can't be called; `InvalidArgumentError`, on every worker, for layers on the
    same workers that are arranged in other ways.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> linear = dj.nn.DistributedLinear
    >>> network = Sequential(linear(P, P, P, 3, 4), jax.nn.relu, linear(P, P, P, 4, 2))
    >>> params = network.init(jax.random.key(0))
    >>> network(params, jax.numpy.ones((5, 3))).shape
    (5, 2)
    """

    __slots__ = ("_layers",)

    _layers: tuple[Callable[..., Any], ...]

    def __init__(self, *layers: Callable[..., Any]) -> None:
        for place, layer in enumerate(layers):
            if not callable(layer):
                raise InvalidTypeError(f"`layers[{place}]` (={layer!r}) must be a layer or a function of an array.")
        check_arrangement(layers)
        object.__setattr__(self, "_layers", layers)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A Sequential is immutable, so its `{name}` cannot be set; create another one.")

    @property
    def layers(self) -> tuple[Callable[..., Any], ...]:
        """The layers and functions, in order."""
        return self._layers

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """This worker's blocks of the initial parameters: for each layer a key of its own, split off `key`."""
        check_key("key", key)
        keys = jax.random.split(key, max(len(self._layers), 1))
        pairs = zip(self._layers, keys[: len(self._layers)], strict=True)
        return tuple(layer.init(key, dtype) if isinstance(layer, Layer) else {} for layer, key in pairs)

    def param_specs(self) -> Params:
        """The global shape and the partition of each parameter: a tuple like the parameters."""
        return tuple(layer.param_specs() if isinstance(layer, Layer) else {} for layer in self._layers)

    def init_state(self, dtype: DTypeLike = jnp.float32) -> Params:
        """This worker's part of the initial state: a tuple with an entry for each layer, `{}` for what has none."""
        return tuple(layer.init_state(dtype) if keeps_state(layer) else {} for layer in self._layers)

    def state_specs(self) -> Params:
        """The global shape and the partition of each part of the state: a tuple like the state."""
        return tuple(layer.state_specs() if keeps_state(layer) else {} for layer in self._layers)

    @property
    def draws(self) -> bool:
        """Whether a layer draws random numbers in training, and needs a `key`."""
        return any(draws_numbers(layer) for layer in self._layers)

    def plan(self, x: ShapeDtypes, params: Mapping[int, Params] | None = None) -> SequentialPlan:
        """What the layers make, one after the other, of what all workers hold; nothing moves.

        **Arguments:**

        - `x`: the shapes and dtypes of the blocks, by world rank, of all workers in the layers' partitions.
        - `params`: those of their parameters. Default: as `param_specs` says, in the dtype of each layer's input.

        **Returns:** the plan: `outputs` is what all workers hold in the end, `plans` has the plan of each layer.

        **Raises:** `PlanError` where x or a parameter does not fit, or a layer would leave out a block.

        >>> import jax, numpy, distdl_jax as dj
        >>> P = dj.Partition().grid([1, 1])
        >>> network = Sequential(dj.nn.Repartition(P, P), jax.nn.relu)
        >>> network.plan({0: dj.ShapeDtype((4, 3), numpy.dtype("float32"))}).outputs
        {0: float32[4, 3]}
        """
        plans: list[Plan] = []
        for place, (layer, seam) in enumerate(zip(self._layers, seams(self._layers), strict=True)):
            if seam is not None:
                check_taken(seam, {worker: held.shape for worker, held in x.items()})
            its_params = None if params is None else {worker: params[worker][place] for worker in params}
            plans.append(layer.plan(x, its_params) if isinstance(layer, Layer) else FunctionPlan(layer, x))
            x = plans[-1].after(x)
        return SequentialPlan(tuple(plans), x)

    def output_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """The `TensorSpec` of the last layer's output, from that of the first one's input; nothing moves.

        **Raises:** `PlanError` where x does not fit a layer, or no spec describes the output.
        """
        check_spec(x_spec, "x_spec")
        return output_spec(self, x_spec, partition_of_output(self._layers, x_spec.partition))

    @overload
    def __call__(
        self, params: Params, x: Array, *, state: None = None, training: bool = True, key: Array | None = None
    ) -> Array: ...
    @overload
    def __call__(
        self, params: Params, x: Array, *, state: Params, training: bool = True, key: Array | None = None
    ) -> tuple[Array, Params]: ...
    def __call__(
        self,
        params: Params,
        x: Array,
        *,
        state: Params | None = None,
        training: bool = True,
        key: Array | None = None,
    ) -> Any:
        """The output of the last layer, from this worker's blocks of the parameters and of the input.

        **Arguments:**

        - `params`, `x`: this worker's parameters, and its block of the input.
        - `state`: from `init_state`, or the last call, for the layers that have one. With it the result is a pair, of
          the output and the new state.
        - `training`: whether layers that tell training from evaluation are in training.
        - `key`: a JAX random key, the same on every worker, for the layers that draw random numbers in training; each
          gets one of its own, split off it.

        **Raises:** `InvalidTypeError` where `training` is not True or False; `InvalidArgumentError` where `params` or
        `state` has not an entry for each layer; `PlanError`, on this worker, where a layer would leave out its block.
        """
        training = checked_boolean("training", training)
        params = unboxed(params)
        self._check_entries("params", params)
        keys = [None] * len(self._layers) if key is None else list(jax.random.split(key, max(len(self._layers), 1)))
        states = [None] * len(self._layers) if state is None else list(self._check_entries("state", state))
        each = zip(self._layers, params, seams(self._layers), strict=True)
        for place, (layer, its_params, seam) in enumerate(each):
            if seam is not None:
                check_taken(seam, {seam.P_x.world.rank: jnp.shape(x)})
            if isinstance(layer, Layer):
                x, states[place] = applied(layer, its_params, x, states[place], training, keys[place])
            else:
                x = layer(x)
        return x if state is None else (x, tuple(states))

    def _check_entries(self, name: str, entries: Any) -> Any:
        if len(entries) != len(self._layers):
            raise InvalidArgumentError(
                f"`{name}` has {len(entries)} entries, but there are {len(self._layers)} layers; each has one, {{}} "
                f"where it has no {'parameters' if name == 'params' else name}."
            )
        return entries

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
