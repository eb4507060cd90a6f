"""A way round layers: their output and their input, added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.agreement.shapes import exchange_named_shapes, shape_dtype_of
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.layer.layer import Layer, applied, draws_numbers, keeps_state
from distdl_jax.layer.output_specs import output_spec, partition_of_output
from distdl_jax.layer.parameters import unboxed
from distdl_jax.nn.layer_compatibility import ends_of, in_equal_blocks, partition_of_input, rearranged
from distdl_jax.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.static import Static
from distdl_jax.tensors import TensorSpec, check_spec
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import check_key, checked_boolean
from distdl_jax.world import Workers

WAYS = ("body", "shortcut")
Params = dict[str, Any]


@dataclass(frozen=True)
class ResidualPlan(Plan):
    """The plans of the two ways, None where the shortcut is x as it is, and what all workers `hold` in the end."""

    body: Plan
    shortcut: Plan | None
    hold: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.hold))

    def output(self, worker: int) -> ShapeDtype:
        return self.hold[worker]


@dataclass(frozen=True)
class Residual(Static):
    """y = body(x) + shortcut(x): the block of residual networks. Nothing moves but what the two move.

    Both have to leave their output in the same blocks on the same workers. The parameters, and the state, are a
    dictionary: {"body": the body's, "shortcut": the shortcut's, {} where it is x}.

    **Arguments:**

    - `body`: a layer, for several an `nn.Sequential`; with a state or random numbers, or without.
    - `shortcut`: another one, a convolution with a kernel of 1, say, where the body changes x's shape, or a
      `Repartition` where it changes x's partition. Default: none, x as it is.

    It is called as `nn.Sequential` is: `y = block(params, x)`, or `y, state = block(params, x, state=state,
    training=True)`; `key` is split among the two.

    **Raises:** `InvalidTypeError`, on every worker, for what is no layer; `InvalidArgumentError` where the two leave
    their outputs on different partitions, or take x in other blocks of the same workers; when applied, `PlanError`
    where the outputs have different shapes.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> block = Residual(dj.nn.Sequential(dj.nn.DistributedLinear(P, P, P, 3, 3), jax.nn.relu))
    >>> block(block.init(jax.random.key(0)), jax.numpy.ones((5, 3))).shape
    (5, 3)

    Source: He et al. (2015), arXiv:1512.03385.
    """

    body: Any
    shortcut: Any = None

    def __post_init__(self) -> None:
        for name, layer in zip(WAYS, (self.body, self.shortcut), strict=True):
            if not isinstance(layer, Layer) and (name == "body" or layer is not None):
                raise InvalidTypeError(
                    f"`{name}` (={layer!r}) must be a layer{', or None' * (name != 'body')}; functions go into an "
                    "nn.Sequential."
                )
        if (P_x := self._P_x) is None:
            return  # nothing but functions
        ways = (self.body, self.shortcut)
        taken = [its for layer in self.layers if (its := ends_of(layer).P_x) is not None]
        if len(taken) > 1 and rearranged(*taken):
            raise InvalidArgumentError(
                f"`body` takes its input from {taken[0].describe()}, but `shortcut` from {taken[1].describe()}: both "
                "must take it from the same workers, in the same blocks."
            )
        P, other = (P_x if layer is None else partition_of_output((layer,), P_x) for layer in ways)
        if not in_equal_blocks(P, other):
            raise InvalidArgumentError(
                f"`body` leaves its output on {P.describe()}, but `shortcut` on {other.describe()}: both must leave it "
                "on the same workers, in the same blocks; a `Repartition` as the shortcut, or at its end, moves it."
            )

    @property
    def layers(self) -> tuple[Any, ...]:
        """The body, and the shortcut where there is one."""
        return (self.body,) if self.shortcut is None else (self.body, self.shortcut)

    @cached_property
    def _P_x(self) -> Partition | None:
        return partition_of_input(self.layers)

    @cached_property
    def _P_y(self) -> Partition | None:
        return partition_of_output(self.layers[::-1], self._P_x) if self._P_x else None

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """This worker's blocks of the initial parameters; each of the two has a key of its own, split off `key`."""
        check_key("key", key)
        pairs = zip(self._ways(), jax.random.split(key), strict=False)
        return {name: {} if layer is None else layer.init(k, dtype) for (name, layer), k in pairs}

    def param_specs(self) -> Params:
        """The global shape and the partition of each parameter: a dictionary like the parameters."""
        return {name: {} if layer is None else layer.param_specs() for name, layer in self._ways()}

    def init_state(self, dtype: DTypeLike = jnp.float32) -> Params:
        """This worker's part of the initial state: {"body", "shortcut"}, {} for what has none."""
        return {name: layer.init_state(dtype) if keeps_state(layer) else {} for name, layer in self._ways()}

    def state_specs(self) -> Params:
        """The global shape and the partition of each part of the state: a dictionary like the state."""
        return {name: layer.state_specs() if keeps_state(layer) else {} for name, layer in self._ways()}

    @property
    def draws(self) -> bool:
        """Whether one of the two draws random numbers in training, and needs a `key`."""
        return any(draws_numbers(layer) for layer in self.layers)

    def plan(self, x: ShapeDtypes, params: Mapping[int, Params] | None = None) -> ResidualPlan:
        """What the block makes of what all workers hold: without a message, and the same on every worker.

        **Raises:** `PlanError` where x or a parameter does not fit, or the two outputs have different shapes.
        """
        plans = {
            name: layer.plan(x, None if params is None else {worker: its[name] for worker, its in params.items()})
            for name, layer in self._ways()
            if layer is not None
        }
        y, other = (plans[name].after(x) if name in plans else dict(x) for name in WAYS)
        added = self._P_y.ranks if self._P_y else tuple(x)
        _check_shapes({worker: (y[worker], other[worker]) for worker in added})
        dtypes = {worker: np.dtype(jnp.promote_types(y[worker].dtype, other[worker].dtype)) for worker in added}
        hold = {worker: ShapeDtype(its.shape, dtypes.get(worker, its.dtype)) for worker, its in y.items()}
        return ResidualPlan(plans["body"], plans.get("shortcut"), hold)

    def output_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """The `TensorSpec` of the output, from that of the input; nothing moves.

        **Raises:** `PlanError` where x does not fit, or no spec describes the output.
        """
        check_spec(x_spec, "x_spec")
        return output_spec(self, x_spec, self._P_y or x_spec.partition)

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
        """The sum of the two, from this worker's blocks of the parameters and of the input.

        **Arguments:** as those of `nn.Sequential`.

        **Returns:** this worker's block of the output, and with `state` the new state; elsewhere a zero-volume array.

        **Raises:** `InvalidTypeError` where `training` is not True or False; `PlanError`, on every worker of the
        output's partition, where the two have different shapes.
        """
        training = checked_boolean("training", training)
        params = unboxed(params)
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        new = dict(state or {})
        with jax.named_scope("Residual"):
            ys = []
            for (name, layer), its_key in zip(self._ways(), keys, strict=True):
                its_state = None if state is None else state[name]
                y, new[name] = (
                    (x, {}) if layer is None else applied(layer, params[name], x, its_state, training, its_key)
                )
                ys.append(y)
            y = self._sum(*ys)
        return y if state is None else (y, new)

    apply = __call__

    def _sum(self, y: Array, other: Array) -> Array:
        P = self._P_y
        if P is not None and P.rank is None:
            return tie(y, other)
        names = "body(x)", "shortcut(x)"
        if P is None:
            _check_shapes({0: (shape_dtype_of(names[0], y), shape_dtype_of(names[1], other))})
        else:
            label = f"sum of two outputs on {P.describe()}"
            arrays = dict(zip(names, (y, other), strict=True))
            shapes = exchange_named_shapes(P.world, tuple(sorted(P.ranks)), label, arrays)
            _check_shapes({worker: (its[names[0]], its[names[1]]) for worker, its in shapes.items()})
        return y + other

    def _ways(self) -> tuple[tuple[str, Any], ...]:
        return tuple(zip(WAYS, (self.body, self.shortcut), strict=True))


def _check_shapes(held: Mapping[int, tuple[ShapeDtype, ShapeDtype]]) -> None:
    for worker, (y, other) in sorted(held.items()):
        if y.shape != other.shape:
            raise PlanError(
                f"On worker {worker}: the outputs of `body` ({shape_text(y.shape)}) and `shortcut` "
                f"({shape_text(other.shape)}) must have the same shape, to be added."
            )
