"""Functions and layers of this library inside of a distributed function: formulas, and what sends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import TensorSpec, nn

Partition = Any


def pooled(x: Any, start: Any, operation: Any, size: int, stride: int, padding: int) -> Any:
    windows = (1, 1, size, size), (1, 1, stride, stride), [(0, 0), (0, 0), (padding,) * 2, (padding,) * 2]
    return lax.reduce_window(x, start, operation, *windows)


def network(P: Partition, P_flat: Partition) -> nn.Sequential:
    return nn.Sequential(
        nn.Repartition(P, P),
        nn.DistributedAvgPool2d(P, 3, stride=1, padding=1, count_include_pad=False),
        nn.Residual(nn.Sequential(jnp.tanh), nn.DistributedMaxPool2d(P, 3, stride=1, padding=1)),
        nn.Skip(nn.DistributedAvgPool2d(P, 3, stride=1, padding=1)),
        lambda x: jax.nn.softmax(x, 2),
        nn.DistributedGlobalMaxPool(P),
        nn.Flatten(P, P_flat),
    )


def formula(x: Any) -> Any:
    ones = jnp.ones_like(x)
    x = pooled(x, 0.0, lax.add, 3, 1, 1) / pooled(ones, 0.0, lax.add, 3, 1, 1)
    x = jnp.tanh(x) + pooled(x, -jnp.inf, lax.max, 3, 1, 1)
    x = jnp.concatenate([x, pooled(x, 0.0, lax.add, 3, 1, 1) / 9], 1)
    return jax.nn.softmax(x, 2).max((2, 3))


@pytest.mark.parametrize("grid", [[1, 1, 3, 1], [2, 1, 1, 2]])
def test_layers_that_are_formulas(grid: list[int]) -> None:
    """A network of them and a loss, inside of a function whose gradient is taken inside."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x, t = random.normal(size=(3, 2, 7, 5)), random.normal(size=(3, 4))

        def expected(x: Any) -> Any:
            return jnp.mean(jnp.abs(formula(x) - t))

        value, gradient = jax.value_and_grad(expected)(jnp.asarray(x))

        def program() -> None:
            P = dj.Partition()
            spec = TensorSpec(x.shape, P.grid(grid))
            P_flat = P.grid([P.size, 1])
            layers, of_pair = network(spec.partition, P_flat), nn.DistributedL1Loss(P_flat)
            params = layers.init(jax.random.key(0))
            doubled = dj.distribute(lambda x: 2 * x, (spec,), spec)  # its plain function
            scaled = dj.map_blocks(lambda x: 0.5 * x, spec.partition)
            step = jax.value_and_grad(lambda x: of_pair(layers(params, scaled(doubled(x))), t))
            f = dj.distribute(step, (spec,), (None, spec), gather=0)
            found, slope = f(spec.block(x))
            np.testing.assert_allclose(found, value, rtol=1e-12)
            np.testing.assert_allclose(slope, spec.block(gradient), rtol=1e-10, atol=1e-12)

        dj.simulate(int(np.prod(grid)), program)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda P, x: nn.AllSumReduce(P, (1,))(x), "the layer `AllSumReduce`"),
        (lambda P, x: dj.functional.roll(x, P, 1, 1), "`roll`"),
        (lambda P, x: nn.DistributedCrossEntropyLoss(P)(x, x), "the loss `DistributedCrossEntropyLoss`"),
        (lambda P, x: dj.all_reduce(x, P), "`all_reduce`"),
        (lambda P, x: nn.Sequential(jnp.sin, nn.AllReduce(P))(({}, {}), x), "the layer `AllReduce`"),
    ],
)  # fmt: skip
def test_what_sends_is_refused_by_name(call: Any, words: str) -> None:
    def program() -> None:
        spec = TensorSpec((4, 3), dj.Partition().grid([2, 1]))
        with pytest.raises(dj.PlanError, match=f"calls {words} of distdl_jax, which communicates"):
            dj.distribute(lambda x: call(spec.partition, x), (spec,))(spec.block(jnp.ones((4, 3))))

    dj.simulate(2, program)
