"""What a layer is: the contract that all layers satisfy, and that a layer of one's own has to.

    params = layer.init(key)  # this worker's blocks of the parameters
    specs = layer.param_specs()  # a pytree like them: whose blocks of what they are
    plan = layer.plan(x)  # from the shapes and dtypes of all workers' x to those of all workers' y
    y = layer(params, x)  # this worker's block of the output

A layer is an immutable, hashable value. It holds partitions and numbers, no arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields
from typing import Any, Protocol, TypeGuard, overload, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.layer.output_specs import output_spec, partition_of_output
from distdl_jax.partition import Partition
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.static import Static
from distdl_jax.tensors import TensorSpec, check_spec


@runtime_checkable
class Layer(Protocol):
    """The contract of a layer."""

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Any:
        """This worker's blocks of the initial parameters, zero-volume where it holds none.

        `key` is a JAX random key, the same on every worker. The global values are the same for one key whatever the
        partition. A layer without parameters has `{}`.
        """

    def param_specs(self) -> Any:
        """The global shape and the partition of each parameter: a pytree like the parameters, of `TensorSpec`."""

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """What the layer makes of what its workers hold: without a message, and the same on every worker.

        `x` has the shapes and dtypes of the blocks by world rank, of the layer's workers or of more, and `params` those
        of their parameters (default: as `param_specs` says, in x's dtype). The plan's `outputs` are what the layer's
        workers hold afterwards; `plan.after(x)` is what all do. Raises `PlanError` where something doesn't fit.
        """

    def __call__(self, params: Any, x: Array) -> Array:
        """This worker's block of the output, from its blocks of the parameters and of the input.

        Collective among the workers of the layer's partitions. A worker outside them gets its `x` back.
        """


@runtime_checkable
class StatefulLayer(Layer, Protocol):
    """A layer that keeps something from batch to batch, a running mean: `y, state = layer(params, x, state=state)`.

    With `training=False` it uses its state, and leaves it as it is. Without a state it gives y alone.
    """

    def init_state(self, dtype: DTypeLike = jnp.float32) -> Any:
        """This worker's part of the initial state: a pytree, zero-volume where it holds none."""

    def state_specs(self) -> Any:
        """The global shape and the partition of each part of the state: a pytree like it, of `TensorSpec`."""


@runtime_checkable
class RandomLayer(Layer, Protocol):
    """A layer that draws random numbers in training: `layer(params, x, key=key, training=True)`."""

    @property
    def draws(self) -> bool:
        """Whether it does; of a network, whether a layer of it does."""


def keeps_state(layer: Any) -> TypeGuard[StatefulLayer]:
    """Whether a layer is a `StatefulLayer`; one around another, which has the attributes of that, is if that is."""
    return isinstance(layer, Layer) and hasattr(layer, "init_state") and hasattr(layer, "state_specs")


def draws_numbers(layer: Any) -> TypeGuard[RandomLayer]:
    """Whether a layer is a `RandomLayer` that draws random numbers; as `keeps_state`."""
    return isinstance(layer, Layer) and getattr(layer, "draws", False) is True


def applied(layer: Layer, params: Any, x: Array, state: Any, training: bool, key: Array | None) -> tuple[Array, Any]:
    """The output of any layer, and its state afterwards: None where `state` is."""
    options: dict[str, Any] = {}
    if draws_numbers(layer):
        options |= {"key": key, "training": training}
    if keeps_state(layer):
        options |= {"state": state, "training": training}
    y: Any = layer(params, x, **options)
    return (y, state) if options.get("state") is None else y


class ParameterFreeLayer(Static):
    """The base of layers without parameters: called with the input alone, or with `{}` in front like the others."""

    __slots__ = ()

    def init(self, key: Array | None = None, dtype: DTypeLike = jnp.float32) -> dict[str, Array]:
        """No parameters: the empty dictionary."""
        return {}

    def param_specs(self) -> dict[str, Any]:
        """No parameters: the empty dictionary."""
        return {}

    @overload
    def __call__(self, x: Array, /) -> Array: ...
    @overload
    def __call__(self, params: dict[str, Array], x: Array, /) -> Array: ...
    def __call__(self, *args: Any) -> Array:
        """This worker's block of the output, from its input `x`: `layer(x)`, or `layer({}, x)`."""
        if len(args) == 2 and not (isinstance(args[0], dict) and not args[0]):
            raise InvalidArgumentError(
                f"`params` (={args[0]!r}) must be {{}}: {type(self).__name__} has no parameters. Give it the input "
                "alone, or with {} and the input."
            )
        if len(args) not in (1, 2):
            raise TypeError(f"{type(self).__name__} takes the input, or {{}} and the input, not {len(args)} arguments.")
        return self._apply(args[-1])

    def apply(self, params: dict[str, Array], x: Array) -> Array:
        """The layer with its (empty) parameters in front, like the layers that have some."""
        return self(params, x)

    @abstractmethod
    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What the layer makes of what its workers hold; see `Layer.plan`."""

    def output_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """The `TensorSpec` of the output, from that of the input; nothing moves.

        **Raises:** `InvalidArgumentError` where `x_spec` is not on the layer's P_x, `PlanError` where x does not fit,
        or no spec describes the output's blocks.
        """
        check_spec(x_spec, "x_spec")
        return output_spec(self, x_spec, partition_of_output((self,), x_spec.partition), self._copied)

    @property
    def _copied(self) -> tuple[int, ...]:
        """The dimensions of the output's partition along which workers hold copies."""
        return ()

    @abstractmethod
    def _apply(self, x: Array) -> Array:
        """This worker's block of the output."""


def purpose_of(layer: Any) -> str:
    """A layer, a dataclass, in words that are the same on every worker."""
    values = ((field.name, getattr(layer, field.name)) for field in fields(layer))
    shown = (f"{name}={value.describe() if isinstance(value, Partition) else repr(value)}" for name, value in values)
    return f"{type(layer).__name__}({', '.join(shown)})"
