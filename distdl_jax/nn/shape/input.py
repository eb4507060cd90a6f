"""The expected input block of a network, given by a spec."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.functional.plan import Plan, ShapeDtypes, Unmoved
from distdl_jax.nn.base.layer import Ends, ParameterFreeLayer
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec, check_spec
from distdl_jax.plans.alike import representatives
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.worker_ranks import union
from distdl_jax.transports.agreement import exchange_shapes


@dataclass(frozen=True)
class Input(ParameterFreeLayer):
    """Check that each worker's input has the shape of its block of the tensor that a spec describes, and return it.

    A layer can't distinguish a whole tensor, passed on every worker, from blocks of a larger one: the result would be p
    concatenated copies. As the first part of an `nn.Sequential`, this layer compares shapes while JAX traces, without
    communication. The argument `x_spec` of `nn.Sequential` does the same without changing the parameters' tuple. The
    first dimension, the batch, may have another length than the spec's, as in the last batch of an epoch; the whole
    tensor's length in place of the block's is rejected.

    **Arguments:**

    - `spec`: the global shape and the partition of the input.

    **Raises:** `InvalidTypeError` if `spec` is not a spec; when applied, `PlanError`, on every worker, if any worker's
    block has another shape than in `spec`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> spec = dj.TensorSpec((4, 3), dj.Partition().grid([1, 1]))
    >>> Input(spec)(spec.block(jnp.ones((4, 3)))).shape
    (4, 3)
    """

    spec: TensorSpec

    def __post_init__(self) -> None:
        check_spec(self.spec)

    @property
    def P_x(self) -> Partition:  # type: ignore[override]
        """The partition of the spec."""
        return self.spec.partition

    @property
    def _ends(self) -> Ends:
        return Ends() if self.spec.replicated else Ends(self.P_x, self.P_x)

    def _plan(self, x: ShapeDtypes, params: object) -> Plan:
        for worker in sorted(representatives(x)):
            shape, expected, whole_shape = x[worker].shape, self.spec.block_shapes[worker], self.spec.global_shape
            is_other_batch = len(shape) == len(expected) and shape[1:] == expected[1:] and shape != whole_shape
            if shape == expected or is_other_batch:
                continue
            whole = ", the whole tensor" * (shape == whole_shape)
            raise PlanError(
                f"On worker {worker}: `x` is {shape_text(shape)}{whole}, but must be this worker's block of "
                f"{self.spec.describe()}, {shape_text(expected)}: `spec.block(x)` cuts it from a whole tensor x."
            )
        return Unmoved(x)

    def _formula(self, params: object, x: Array) -> Array:
        if x.shape[1:] != self.spec.global_shape[1:]:
            raise PlanError(f"`x` is {shape_text(x.shape)}, but must be like the whole of {self.spec.describe()}.")
        return x

    def check(self, x: Array, others: Iterable[int]) -> None:
        """Reject x, on this layer's workers and others, if any worker's block has another shape."""
        world, team = self.P_x.world, union(self.P_x.ranks, others)
        if world.rank in team:
            self.plan(exchange_shapes(world, team, f"the input, {self.P_x.describe()}", x))
