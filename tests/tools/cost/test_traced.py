"""What layers do that are traced for all workers, without any of them: operation by operation what programs do."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from every_layer import LAYERS as EVERY_LAYER
from every_layer import spec_of_x
from predicted import FLOAT32, blocks, communicated

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.plan import Plan
from distdl_jax.tools.cost.traced import traced_by_all
from distdl_jax.tools.cost.traces import traced_classes

WORKERS = 4


def linear(P: dj.Partition) -> nn.DistributedLinear:
    return nn.DistributedLinear(P.grid([1, 2]), P.grid([1, 2]), P.grid([2, 2]), 7, 7)


@pytest.mark.parametrize("name", ["DistributedConv2d", "DistributedGroupNorm", "DistributedMaxPool1d"])
def test_one_worker_s_trace_says_what_is_traced_on_all(name: str) -> None:
    """On the same workers, in the same order, with the gradient of x and without."""
    layer = EVERY_LAYER[name](dj.planning_world(WORKERS))
    x, world = blocks(spec_of_x(name, layer), FLOAT32), layer.input_partition.world
    by_all = traced_by_all(layer, x, world, FLOAT32)
    for workers, trace in traced_classes(layer, layer.plan(x), x, world, FLOAT32):
        for worker in workers.tolist():
            other = by_all[worker].trace
            for direction in ("forward", "of_params", "of_both"):
                mine, of_all = (list(communicated(getattr(each, direction), worker)) for each in (trace, other))
                assert mine == of_all


def test_a_recomputed_layer_computes_again_what_gradients_read() -> None:
    """The first product of two with a tanh between them, on worker 0, whose blocks are 3 x 4 and 4 x 4."""
    P = dj.planning_world(WORKERS)
    body = nn.Sequential(linear(P), jnp.tanh, linear(P))
    plain, again = (
        dj.cost(network, dj.TensorSpec((3, 7), P.grid([1, 2]))).workers for network in (body, nn.Remat(body))
    )
    of_product = 2 * 3 * 4 * 4
    for found in (plain, again):
        assert 2 * of_product <= found.flops_forward[0] <= 4 * of_product
    assert again.flops[0] - again.flops_forward[0] >= plain.flops[0] - plain.flops_forward[0] + of_product


@dataclass(frozen=True)
class Borrowed:
    """A layer of a user's own, with the plan of a function that leaves blocks as they are, as in docs/own-layers.md."""

    P: dj.Partition

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        return {}

    def param_specs(self) -> dict[str, dj.TensorSpec]:
        return {}

    def plan(self, x: Any, params: Any = None) -> Plan:
        return nn.Sequential(lambda x: x).plan(x)

    def __call__(self, params: Any, x: jax.Array) -> jax.Array:
        return dj.functional.all_sum_reduce(x, self.P, axes_reduce=1)


def test_a_plan_that_is_another_network_s_says_shapes_only() -> None:
    """What the layer moves is traced, alone and in a network."""
    P = dj.planning_world(WORKERS).grid([1, 4])
    spec = dj.TensorSpec((3, 8), P)
    for network in (Borrowed(P), nn.Sequential(jnp.tanh, nn.Residual(Borrowed(P)))):
        assert dj.cost(network, spec, backward=False).bytes.tolist() == [3 * 2 * 4] * WORKERS
