"""The contract that every layer satisfies, and the base classes of this library's layers.

    params = layer.init(key)  # this worker's blocks of the parameters
    specs = layer.param_specs()  # a pytree like them: the global shape and the partition of each parameter
    plan = layer.plan(x)  # from the shapes and dtypes of all workers' x to those of all workers' y
    y = layer(params, x)  # this worker's block of the output

A layer is an immutable, hashable value of partitions and numbers. To write one: derive from `PartitionedLayer`
(`ParameterFreeLayer` if there is nothing to train), define `param_specs` and `init`, and plan in `_plan` how x moves,
what each worker computes, and how y moves. The base class checks shapes and parameters, and executes the plan. A class
with its own `__call__` decorates it with `layer_call`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeGuard, overload, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, Removed
from distdl_jax.functional.block_checks import by_class, check_placeholders, outside
from distdl_jax.functional.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.output_specs import spec_of_blocks
from distdl_jax.nn.base.parameters import ParamShapeDtypes, agree_on_shapes, check_params, spec_shapes, unboxed
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.static import Static
from distdl_jax.partitions.tensors import TensorSpec, check_spec
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import union
from distdl_jax.source_lines import user_line
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.marks import passed_to
from distdl_jax.tracing.scopes import name_and_line
from distdl_jax.transports.agreement import MovesDataError, structure_text
from distdl_jax.transports.world import Workers
from distdl_jax.validation import check_key


@runtime_checkable
class Layer(Protocol):
    """The contract of a layer: the methods that networks, optimisers and checkpoints use.

    A layer whose output is on another partition than its input may have the attributes `input_partition` and
    `output_partition`, for networks around it.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(1).grid([1, 1])
    >>> isinstance(dj.nn.DistributedLinear(P, in_features=3, out_features=2), dj.nn.Layer), isinstance(P, dj.nn.Layer)
    (True, False)
    """

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Any:
        """Return this worker's blocks of the initial parameters, zero-volume if it holds none.

        `key` is a JAX random key, the same on every worker. The global values for a key do not depend on the partition.
        A layer without parameters returns `{}`.
        """

    def param_specs(self) -> Any:
        """Return the global shape and the partition of each parameter: a pytree of `TensorSpec`."""

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan the layer for all workers' blocks: without communication, with the same result on every worker.

        `x` has the shapes and dtypes of the blocks by world rank, for the layer's workers at least, and `params` the
        shapes and dtypes of their parameters (default: from `param_specs`, in x's dtype). The plan's `outputs` are the
        blocks that the layer's workers hold afterwards; `plan.after(x)` has those of all workers. Raises `PlanError` if
        a block does not fit.
        """

    def __call__(self, params: Any, x: Array) -> Array:
        """Return this worker's block of the output, from its blocks of the parameters and of the input.

        Collective among the workers of the layer's partitions. A worker outside them gets its `x` back.
        """


@runtime_checkable
class StatefulLayer(Layer, Protocol):
    """A layer with state across batches, such as a running mean: `y, state = layer(params, x, state=state)`.

    With `training=False` it uses its state without changing it. Without a state it returns y alone.
    """

    def init_state(self, dtype: DTypeLike = jnp.float32) -> Any:
        """Return this worker's part of the initial state: a pytree, zero-volume if it holds none."""

    def state_specs(self) -> Any:
        """Return the global shape and the partition of each part of the state: a pytree like it, of `TensorSpec`."""


@runtime_checkable
class RandomLayer(Layer, Protocol):
    """A layer that draws random numbers in training: `layer(params, x, key=key, training=True)`."""

    @property
    def draws(self) -> bool:
        """Whether the layer draws random numbers; for a network, whether any of its layers does."""


def keeps_state(layer: Any) -> TypeGuard[StatefulLayer]:
    """Say whether a layer is a `StatefulLayer`, or a wrapper around one."""
    # `isinstance` does not see attributes that a wrapper looks up in its layer.
    return isinstance(layer, Layer) and hasattr(layer, "init_state") and hasattr(layer, "state_specs")


def draws_numbers(layer: Any) -> TypeGuard[RandomLayer]:
    """Say whether a layer is a `RandomLayer` that draws random numbers."""
    return isinstance(layer, Layer) and getattr(layer, "draws", False) is True


def apply_layer(
    layer: Layer, params: Any, x: Array, state: Any, training: bool, key: Array | None
) -> tuple[Array, Any]:
    """Return the output of any layer, and its state afterwards: None if `state` is None."""
    options: dict[str, Any] = {}
    if draws_numbers(layer):
        options |= {"key": key, "training": training}
    if keeps_state(layer):
        options |= {"state": state, "training": training}
    y: Any = layer(params, x, **options)
    return (y, state) if options.get("state") is None else y


class Ends(NamedTuple):
    """The partitions of a layer's input and output, if known for certain; None if open."""

    P_x: Partition | None = None
    P_y: Partition | None = None


def ends_of(layer: Any) -> Ends:
    """Return what is certain of a layer's partitions: nothing for functions, or classes outside this library."""
    is_ours = isinstance(layer, BaseLayer) and type(layer).__module__.startswith("distdl_jax.")
    return layer._ends if is_ours else Ends()


class BaseLayer(Static):
    """The base of all layers and networks of this library.

    A layer without parameters may be called with the input alone: `layer(x)`.
    """

    def _begin(self) -> None:
        if "_built_at" not in vars(self):
            self._store(_built_at=user_line())  # for messages; equal layers may be built at different lines

    @abstractmethod
    def param_specs(self) -> Any:
        """Return the global shape and the partition of each parameter: a pytree like the parameters."""

    @property
    @abstractmethod
    def input_partition(self) -> Partition | None:
        """The partition of the input. None for a network of functions alone."""

    @property
    @abstractmethod
    def output_partition(self) -> Partition | None:
        """The partition of the output. None for a network of functions alone."""

    @property
    def _ends(self) -> Ends:
        """The same two, if certain: the next layer may be able to use an output with copies as it is."""
        return Ends(self.input_partition, None if self._copied else self.output_partition)

    @property
    def takes_indices(self) -> bool:
        """Whether the input holds only integers."""
        return False

    @property
    def _copied(self) -> tuple[int, ...]:
        """The dimensions of the output's partition along which workers hold copies."""
        return ()

    @abstractmethod
    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan the layer for all workers' blocks; see `Layer.plan`."""

    def output_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """Return the `TensorSpec` of the output, from that of the input, without communication.

        **Raises:** `InvalidArgumentError` if `x_spec` is not on the partition of the input, `PlanError` if x does not
        fit, or no spec describes the output's blocks.
        """
        check_spec(x_spec, "x_spec")
        P_x = self._expected_partition or x_spec.partition
        if x_spec.replicated or (x_spec.partition.ranks, x_spec.partition.shape) != (P_x.ranks, P_x.shape):
            raise InvalidArgumentError(
                f"`x_spec` (={x_spec!r}) must be the spec of a tensor on P_x, {P_x.describe()}, without copies."
            )
        dtype = np.dtype(np.int32 if self.takes_indices else np.float32)  # the shapes don't depend on it
        x = {worker: ShapeDtype(x_spec.shape_on(worker), dtype) for worker in range(P_x.world.size)}
        return spec_of_blocks(name_and_line(self), self.plan(x).after(x), self.output_partition or P_x, self._copied)

    draw = Removed("dj.draw(layer, x_spec)")

    @property
    def _expected_partition(self) -> Partition | None:
        """The partition that x has to be on; None if the first layer of a network determines it."""
        return None


class PartitionedLayer(BaseLayer):
    """The base of layers made of a movement, a local computation and a movement, from P_x to P_y (default: P_x)."""

    P_x: Partition

    @property
    def input_partition(self) -> Partition:
        """The partition of the input, P_x."""
        return self.P_x

    @property
    def output_partition(self) -> Partition:
        """The partition of the output: the layer's P_y if it has one, else P_x."""
        P_y: Partition | None = vars(self).get("P_y")
        return P_y or self.P_x

    @property
    def _expected_partition(self) -> Partition:
        return self.input_partition

    @cached_property
    def _team(self) -> Workers:
        """The world ranks of the workers that take part, ascending."""
        return union(self.P_x.ranks, self.output_partition.ranks)

    def plan(self, x: ShapeDtypes, params: ParamShapeDtypes | None = None) -> Plan:
        """Plan the layer for the blocks of all its workers: without communication, with the same result on each.

        **Arguments:**

        - `x`: the shapes and dtypes of the blocks, by world rank, for the layer's workers at least.
        - `params`: the shapes and dtypes of their parameters. Default: from `param_specs`, in x's dtype.

        **Returns:** the plan; its `outputs` are the resulting blocks of the layer's workers. All others keep theirs.

        **Raises:** `PlanError` if x or a parameter does not fit.
        """
        plan: Plan = self._plan(*self._checked(x, params))
        return plan

    def _checked(self, x: ShapeDtypes, params: ParamShapeDtypes | None) -> tuple[ShapeDtypes, ParamShapeDtypes]:
        """Return the shapes and dtypes of the layer's workers only; reject parameters that don't match their specs."""
        x = by_class("x", self.P_x, taking_part(x, self._team))
        check_placeholders("x", x, self.input_partition.ranks)
        if params is None:
            return x, self._param_shapes(self._param_dtype(x))
        check_params(params, self.param_specs())
        return x, params

    def _param_shapes(self, dtype: np.dtype) -> ParamShapeDtypes:
        """Return the shapes of parameters of `dtype` that match `param_specs`."""
        return spec_shapes(self.param_specs(), self._team, dtype)

    def _param_dtype(self, x: ShapeDtypes) -> np.dtype:
        """Return the default dtype of parameters for an input of these shapes and dtypes."""
        return x[self.P_x.ranks[0]].dtype

    @abstractmethod
    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> Any:
        """Plan from the result of `_checked`."""

    @layer_call
    def __call__(self, params: Any, x: Array) -> Array:
        """Apply the layer.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on the partition of the input, which may be empty; elsewhere a zero-volume array.

        **Returns:** this worker's block on the partition of the output; elsewhere a zero-volume array. Workers outside
        all partitions of the layer get `x`.

        **Raises:** `PlanError`, on every worker of the layer, if x or a parameter does not fit.
        """
        return self._applied(params, x)

    apply = __call__

    def _applied(self, params: Any, x: Array) -> Array:
        """Return this worker's block of the output."""
        if trace_context.whole_program:
            return self._formula(params, x)
        if self.P_x.world.rank not in self._team:
            return outside(self.P_x.world, x)
        with jax.named_scope(type(self).__name__):
            params = self._opened(params)
            return self._run(self._agree_on_plan(params, x), params, x)

    def _formula(self, params: Any, x: Array) -> Array:
        """Return the output from whole arrays, inside of a distributed function; only some layers have a formula."""
        raise MovesDataError.by(f"the layer `{type(self).__name__}`")

    def _opened(self, params: Any) -> Any:
        """Return a call's parameters without flax's variables, marked as this layer's in the traced program."""
        return passed_to(describe(self), unboxed(params))

    def _agree_on_plan(self, params: Any, x: Array) -> Any:
        """Return the plan of a call, agreed on by all of the layer's workers while JAX traces."""
        if self.P_x.world.records:
            return self.P_x.world.plan_of(describe(self))  # type: ignore[attr-defined]
        return self.plan(*self._agree_on_shapes(params, x))

    def _agree_on_shapes(self, params: Any, x: Array) -> tuple[ShapeDtypes, ParamShapeDtypes]:
        """Return the shapes and dtypes of x and of the parameters on all of the layer's workers."""
        return agree_on_shapes(self.P_x.world, self._team, describe(self), self.param_specs(), params, x)

    def _run(self, plan: Any, params: Any, x: Array) -> Any:
        """Return this worker's block of the output, by `plan`."""
        return plan.run(self.P_x.world, params, x)


class ParameterFreeLayer(PartitionedLayer):
    """The base of layers without parameters: called with the input alone, or with `{}` in front of it."""

    def init(self, key: Array | None = None, dtype: DTypeLike = jnp.float32) -> dict[str, Array]:
        """Return the empty dictionary, since there are no parameters."""
        if key is not None:
            check_key("key", key)
        return {}

    def param_specs(self) -> dict[str, Any]:
        """Return the empty dictionary, since there are no parameters."""
        return {}

    def _param_shapes(self, dtype: np.dtype) -> ParamShapeDtypes:
        return {}

    @overload
    def __call__(self, x: Array, /) -> Array: ...
    @overload
    def __call__(self, params: dict[str, Array], x: Array, /) -> Array: ...
    @layer_call
    def __call__(self, *args: Any) -> Array:
        """Return this worker's block of the output, from its input `x`: `layer(x)`, or `layer({}, x)`."""
        if len(args) == 2 and not (isinstance(args[0], dict) and not args[0]):
            raise InvalidArgumentError(
                f"`params` is {structure_text(args[0])}, but must be {{}}: {type(self).__name__} has no parameters. "
                "Give it the input alone, or with {} and the input."
            )
        if len(args) not in (1, 2):
            raise TypeError(f"{type(self).__name__} takes the input, or {{}} and the input, not {len(args)} arguments.")
        return self._apply(args[-1])

    @layer_call
    def apply(self, params: dict[str, Array], x: Array) -> Array:
        """Apply the layer with its (empty) parameters in front, like layers that have some."""
        return self(params, x)

    def _apply(self, x: Array) -> Array:
        """Return this worker's block of the output."""
        return self._applied({}, x)

    def _run(self, plan: Any, params: Any, x: Array) -> Any:
        return plan.run(self.P_x.world, x)


def describe(layer: Any) -> str:
    """Describe a layer, a dataclass, with the same text on every worker."""
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    shown = (f"{k}={x.describe() if isinstance(x, Partition | TensorSpec) else repr(x)}" for k, x in values.items())
    # The address of a function differs between workers.
    return re.sub(" at 0x[0-9a-f]+", "", f"{type(layer).__name__}({', '.join(shown)})")
