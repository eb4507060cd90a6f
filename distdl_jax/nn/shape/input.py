"""The block that a network is to get, said by a spec."""

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
    """Takes each worker's block of the tensor that a spec describes, and gives it back; another shape is refused.

    A layer can't tell a whole tensor, passed on every worker, from blocks of a larger one: the result is p copies glued
    together. As the first part of an `nn.Sequential` this compares shapes while JAX traces; nothing moves. The argument
    `x_spec` of `nn.Sequential` does the same, and leaves the parameters' tuple as it is. The first dimension, the
    batch, may have another length than the spec's, as the last batch of an epoch has; what has the whole one's length
    in place of the block's is refused.

    **Arguments:**

    - `spec`: the global shape and the partition of the input.

    **Raises:** `InvalidTypeError` where `spec` is no spec; when applied, `PlanError`, on every worker, where the block
    of one has another shape than `spec` says.

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

    def check(self, x: Array, others: Iterable[int]) -> None:
        """Refuse x, on this layer's workers and others, if the block of one of them has another shape."""
        world, team = self.P_x.world, union(self.P_x.ranks, others)
        if world.rank in team:
            self.plan(exchange_shapes(world, team, f"the input, {self.P_x.describe()}", x))
