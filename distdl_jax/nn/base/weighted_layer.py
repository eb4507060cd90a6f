"""The bases of layers that multiply with a weight: linear layers, convolutions, embeddings."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.weights import WeightPartitions, WeightPlan, plan_weights
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, of_name, spec_shapes
from distdl_jax.partitions.initialization import Initializer, UniformFanIn, initialize_params
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.alike import ByClass
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.worker_ranks import union
from distdl_jax.transports.world import Workers


class AffineLayer(PartitionedLayer):
    """A layer with a weight and optionally a bias, with random initial values."""

    @property
    @abstractmethod
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shapes of the parameters, by name: "weight", and "bias" if there is one."""

    def init(
        self,
        key: Array,
        dtype: DTypeLike = jnp.float32,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> Params:
        """Return this worker's block of the initial parameters; global values depend on the key, not on partitions.

        **Arguments:**

        - `key`: a JAX random key, the same on every worker.
        - `dtype`: of the parameters.
        - `weight_init`, `bias_init`: functions of (key, shape, dtype) like the `jax.nn.initializers`. They see the
          global shape, in PyTorch's layout. Functions that count fans need that layout: for a linear layer's weight,
          pass `in_axis=-1, out_axis=-2`; for a convolution's, `in_axis=1, out_axis=0`. Default: uniform in
          ±1/sqrt(fan_in) as in PyTorch, where fan_in is the product of all dimensions of the weight but the first.

        **Returns:** `{"weight": ..., "bias": ...}` (no "bias" without one), zero-volume if this worker holds none.
        """
        default = UniformFanIn(math.prod(self._shapes["weight"][1:]))
        initializers = {"weight": weight_init or default, "bias": bias_init or default}
        return initialize_params(self.param_specs(), key, dtype, initializers)


class WeightedLayer(AffineLayer):
    """A layer with a weight and optionally a bias, which live on some of the workers that multiply with them.

    - `sharded`: whether they are cut over all workers that use the same block instead.
    """

    P_W: Any
    sharded: bool

    @cached_property
    def _work(self) -> Partition:
        """The workers that multiply, P_n x P_out x P_in x features."""
        return self.P_W.create_cartesian_topology_partition((1, *self.P_W.shape)[-3:])

    @cached_property
    def _parameters(self) -> WeightPartitions:
        return WeightPartitions(self._work, self.sharded)

    def _plan_weights(self, params: ParamShapeDtypes) -> WeightPlan:
        """Plan the movement of the parameters to the workers that multiply."""
        return plan_weights({name: of_name(name, params) for name in self._shapes}, self._parameters)

    @cached_property
    def _team(self) -> Workers:
        return union(self._work.ranks, self.input_partition.ranks, self.output_partition.ranks)

    def _param_shapes(self, dtype: np.dtype) -> ParamShapeDtypes:
        work, specs = self._work, self.param_specs()
        if self.sharded or union(work.ranks) != self._team:
            return super()._param_shapes(dtype)
        # Parameters are on the first workers along the batch and the features, in blocks along the channels.
        along = (range(p) if d in (1, 2) else [min(i, 1) for i in range(p)] for d, p in enumerate(work.shape))
        return ByClass(work.ranks, along, lambda worker: spec_shapes(specs, (worker,), dtype)[worker])

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter: a pytree like the parameters."""
        return {name: TensorSpec(shape, getattr(self._parameters, name)) for name, shape in self._shapes.items()}


# --- the partition of a weight, derived from the partitions of input and output ---------------------------------------


def weight_partition(
    P_x: Partition, P_y: Partition, axis: int, split: str | None, widths: dict[str, int], grouped: bool = False
) -> CartesianPartition:
    """Return P_n x P_out x P_in x features, without P_n if it is 1, for a layer that cuts one side of its weight.

    - `axis`: the dimension of P_x and P_y along the inputs, or outputs, of the weight; they agree in the others.
    - `split`: the side that is cut over the workers; None to derive it, or to choose the side that moves less.
    - `widths`: the numbers of inputs and of outputs, by the names that the user knows, in this order.
    - `grouped`: whether each output reads only inputs of its own worker.
    """
    (inputs, n_in), (outputs, n_out) = widths.items()
    p_in, p_out = P_x.shape[axis], P_y.shape[axis]
    shown = f"`P_x` is {shape_text(P_x.shape)}, `P_y` {shape_text(P_y.shape)}"
    if split not in (None, inputs, outputs):
        raise InvalidArgumentError(f"`split` (={split!r}) must be {inputs!r}, {outputs!r}, or None.")
    if p_in > 1 and p_out > 1 and P_x.ranks != P_y.ranks:
        raise InvalidArgumentError(
            f"`P_W` is not given, and can't be derived from `P_x`, {P_x.describe()}, and `P_y`, {P_y.describe()}: both "
            "cut their features, on different workers. Give `P_W`, or one partition for both, followed by a "
            "Repartition."
        )
    if grouped or p_in == 1:
        side = outputs
    elif p_out == 1:
        side = inputs
    else:
        side = split or (outputs if n_in <= n_out else inputs)
    if split not in (None, side) and max(p_in, p_out) > 1:
        raise InvalidArgumentError(
            f"`split` (={split!r}) must be {side!r} or None if {shown}{' and there are groups' if grouped else ''}."
        )
    on, cells = (P_x, (1, p_in)) if side == inputs else (P_y, (p_out, 1))
    shape = (P_x.shape[0], *cells, *P_x.shape[axis:][1:])
    return on.create_cartesian_topology_partition(shape if shape[0] > 1 else shape[1:])


def check_not_split(split: str | None) -> None:
    """Reject a `split` in addition to a P_W, which determines it."""
    if split is not None:
        raise InvalidArgumentError(f"`split` (={split!r}) must be None if `P_W` is given, which determines the split.")
