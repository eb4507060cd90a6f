"""The contract of recurrent layers: what they carry from step to step, and a call with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import outside
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes
from distdl_jax.partitions.tensors import TensorSpec, check_spec, zero_volume_tensor
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_dtype

Carry = Any
"""An array h, or where a layer has two, the tuple (h, c)."""

Parts = tuple[Array, ...]
"""The arrays of a carry."""


class Recurrent(PartitionedLayer):
    """The base of layers that carry something from step to step: `y, carry = layer(params, x, carry=carry)`.

    - `carried`: the names of the parts of a carry, all of one shape.
    """

    carried: ClassVar[tuple[str, ...]] = ("h",)

    @abstractmethod
    def _carry_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """Return the spec of each part of the carry, from the input's."""

    @abstractmethod
    def _advance(self, plan: Any, params: Params, x: Array, parts: Parts) -> tuple[Array, Parts]:
        """Return this worker's block of the output, and of the carry afterwards."""

    def carry_specs(self, x_spec: TensorSpec) -> Any:
        """Return the global shape and the partition of each part of the carry: a pytree like it.

        `x_spec` is the `TensorSpec` of an input. **Raises:** `InvalidArgumentError` where it is not on P_x.
        """
        check_spec(x_spec, "x_spec")
        if x_spec.replicated or (x_spec.partition.ranks, x_spec.partition.shape) != (self.P_x.ranks, self.P_x.shape):
            raise InvalidArgumentError(
                f"`x_spec` (={x_spec!r}) must be of a tensor on P_x, {self.P_x.describe()}, and without copies."
            )
        return self._tree((self._carry_spec(x_spec),) * len(self.carried))

    def init_carry(self, x_spec: TensorSpec, dtype: DTypeLike = jnp.float32) -> Carry:
        """Return this worker's blocks of a carry of zeros, for inputs of `x_spec`; outside P_x zero-volume arrays."""
        found = checked_dtype("dtype", dtype)
        specs = jax.tree.leaves(self.carry_specs(x_spec))
        blocks = (jnp.zeros(spec.local_shape, found) if spec.box else zero_volume_tensor(dtype=found) for spec in specs)
        return self._tree(tuple(blocks))

    @layer_call
    def __call__(self, params: Params, x: Array, *, carry: Carry | None = None) -> Any:
        """Apply the layer: `y, carry = layer(params, x, carry=carry)`, or `y = layer(params, x)` from a carry of zeros.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x, perhaps empty; outside P_x a zero-volume array.
        - `carry`: this worker's blocks of the carry, from `init_carry`, or the last call; outside P_x zero-volume
          arrays.

        **Returns:** this worker's block of y, and with `carry` the pair of it and of the new carry, in the dtypes of
        the old one; outside P_x, `x` and `carry`.

        **Raises:** `InvalidTypeError` where `carry` is not made of as many arrays; `PlanError`, on every worker of P_x,
        where x, a parameter or the carry does not fit.
        """
        given = self._parts(carry)
        if not self.P_x.active:
            outside(self.P_x.world, x)
            return x if carry is None else (x, carry)
        with jax.named_scope(type(self).__name__):
            params = self._opened(params)
            entries = dict(zip(self._entries, given, strict=False))
            plan = self._agree_on_plan({**params, **entries} if isinstance(params, Mapping) else params, x)
            parts = given or tuple(tie(jnp.zeros(self._carry_shape(plan), x.dtype), x) for _ in self.carried)
            y, new = self._advance(plan, params, x, parts)
            if carry is None:
                return y
            return y, self._tree(tuple(part.astype(old.dtype) for part, old in zip(new, given, strict=True)))

    apply = __call__

    def _carry_shape(self, plan: Any) -> tuple[int, ...]:
        """Return the shape of this worker's block of each part of the carry."""
        shape: tuple[int, ...] = plan.carry[self.P_x.world.rank]
        return shape

    @property
    def _entries(self) -> tuple[str, ...]:
        """How a user writes the parts of the carry; under these names workers exchange their shapes."""
        several = len(self.carried) > 1
        return tuple(f"carry[{k}]" if several else "carry" for k in range(len(self.carried)))

    def _tree(self, parts: tuple[Any, ...]) -> Any:
        return parts if len(self.carried) > 1 else parts[0]

    def _parts(self, carry: Carry | None) -> Parts:
        """Return the arrays of a carry; none where there is none."""
        if carry is None:
            return ()
        parts = (carry,) if len(self.carried) == 1 else carry
        is_whole = isinstance(parts, Sequence) and len(parts) == len(self.carried)
        if not is_whole or not all(hasattr(part, "dtype") and hasattr(part, "shape") for part in parts):
            kind = "an array" if len(self.carried) == 1 else f"the arrays ({', '.join(self.carried)})"
            raise InvalidTypeError(f"`carry` (={carry!r}) must be {kind}, as `init_carry` makes it.")
        return tuple(parts)

    def _check_carry(self, params: ParamShapeDtypes, expected: Mapping[int, tuple[int, ...]]) -> None:
        """Refuse carries that are not their workers' blocks, in the same words on all workers."""
        for worker in self.P_x.ranks:
            for name in self._entries:
                if (part := params[worker].get(name)) is None:
                    continue
                if part.shape != expected[worker] or not jnp.issubdtype(part.dtype, jnp.floating):
                    raise PlanError(
                        f"On worker {worker}: `{name}` must hold real floating-point numbers, "
                        f"{shape_text(expected[worker])}, where `x` is this worker's block, but is "
                        f"{part.dtype}{list(part.shape)}."
                    )
