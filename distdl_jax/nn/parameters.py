"""Where the weight and the bias of a layer live, and how they get to the workers that multiply with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.broadcasting import shape_text
from distdl_jax.primitives import broadcast
from distdl_jax.primitives.tie import tie
from distdl_jax.tensors import TensorSpec

Params = dict[str, Array]


@dataclass(frozen=True)
class ParameterPartitions:
    """The parameters of a layer whose workers form P_n x P_out x P_in x features, the partition `work`.

    Weights are the same along batch and features, so they live on the first slice of `work`, and are broadcast.
    """

    work: Partition

    @cached_property
    def stored(self) -> Partition:
        """The workers that hold the weight, in a shape that broadcasts to `work`: 1 x P_out x P_in x 1 x ... x 1."""
        return self.weight.create_cartesian_topology_partition([1, *self.weight.shape])

    @cached_property
    def weight(self) -> Partition:
        """P_out x P_in x 1 x ... x 1."""
        _, p_out, p_in, *features = self.work.shape
        step = math.prod(features)
        first = self.work.create_partition_inclusive(range(0, p_out * p_in * step, step))
        return first.create_cartesian_topology_partition([p_out, p_in, *(1,) * len(features)])

    @cached_property
    def bias(self) -> Partition:
        """P_out, the first column of `weight`."""
        p_out, p_in, *_ = self.weight.shape
        first = self.weight.create_partition_inclusive(range(0, p_out * p_in, p_in))
        return first.create_cartesian_topology_partition([p_out])

    def copies(self, params: Params, shape: tuple[int, ...], has_bias: bool) -> tuple[Array, Array | None]:
        """This worker's copy of its weight, of `shape`, and of its bias, which travel in one message.

        On workers with an index other than 0 along P_in the bias is empty. Outside `work`: two zero-volume arrays.
        """
        weight, bias = params["weight"], params["bias"] if has_bias else None
        if self.stored.ranks == self.work.ranks:
            return weight, bias
        flat = [weight.reshape(-1)] if bias is None else [weight.reshape(-1), bias.reshape(-1)]
        packed = broadcast(tie(jnp.concatenate(flat), *params.values()), self.stored, self.work, preserve_batch=False)
        if not self.work.active:
            return packed, packed
        size = math.prod(shape)
        copied = packed[:size].reshape(shape).astype(weight.dtype)
        return copied, None if bias is None else packed[size:].astype(bias.dtype)


def check_params(params: Params, specs: Mapping[str, TensorSpec]) -> None:
    """Refuse parameters that are not this worker's blocks."""
    for name, spec in specs.items():
        if name not in params:
            raise PlanError(f'`params` must hold "{name}" on every worker, but holds {sorted(params)}.')
        if spec.partition.active and jnp.shape(params[name]) != spec.local_shape:
            raise PlanError(
                f'`params["{name}"]` has shape {jnp.shape(params[name])}, but this worker\'s block of '
                f"{shape_text(spec.global_shape)} on {shape_text(spec.partition.shape)} workers is {spec.local_shape}."
            )
