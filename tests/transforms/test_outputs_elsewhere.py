"""jax.grad where a layer's output is moved to workers that hold none of its parameters: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import nn

pytestmark = pytest.mark.simulated(2)


class Case:
    """A linear layer on worker 0, and its output on worker 1."""

    def __init__(self) -> None:
        P = dj.Partition()
        self.a, self.b = P.grid([1, 1], [0]), P.grid([1, 1], [1])
        self.network = nn.Sequential(
            nn.DistributedLinear(self.a, in_features=3, out_features=2), nn.Repartition(self.a, self.b)
        )
        self.params = self.network.init(jax.random.key(0))
        self.x = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3) if self.a.active else dj.zero_volume_tensor(4)

    def total(self, params: Any) -> jax.Array:
        return jnp.sum(self.network(params, self.x) ** 2)


def _on_outputs(case: Case, params: Any) -> Any:
    total = case.total(params)  # all workers call the layers
    return total if case.b.active else 0.0


def test_a_loss_of_some_workers_is_refused_with_jax_grad_and_right_with_dj_grad() -> None:
    case = Case()
    with pytest.raises(dj.PlanError, match=r"take gradients with dj\.grad or dj\.value_and_grad"):
        dj.jit(jax.grad(lambda params: _on_outputs(case, params)))(case.params)
    _check(case, dj.jit(dj.grad(lambda params: _on_outputs(case, params)))(case.params))


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"])
def test_a_loss_that_uses_every_output_is_right_with_jax_grad(around: Callable[..., Any]) -> None:
    case = Case()
    _check(case, dj.jit(jax.grad(around(case.total)))(case.params))


def _check(case: Case, found: Any) -> None:
    weight, bias = (np.asarray(case.params[0][name]) for name in ("weight", "bias"))
    if not case.a.active:
        assert all(gradient.size == 0 for gradient in jax.tree.leaves(found))
        return
    dy = 2 * (case.x @ weight.T + bias)
    np.testing.assert_allclose(found[0]["weight"], dy.T @ case.x, rtol=1e-5)
    np.testing.assert_allclose(found[0]["bias"], dy.sum(0), rtol=1e-5)


def _in_scan(case: Case) -> Callable[[Any], Any]:
    def step(total: Any, _: None) -> Any:
        return total + lax.stop_gradient(case.total(case.params)), None

    return lambda params: lax.scan(step, jnp.sum(params[0]["bias"] ** 2), None, length=2)[0]


HEALTHY: dict[str, Callable[[Case], Callable[[Any], Any]]] = {
    "stop_gradient": lambda c: jax.grad(lambda p: lax.stop_gradient(c.total(p)) + jnp.sum(p[0]["bias"] ** 2)),
    "of other arguments": lambda c: lambda p: jax.grad(lambda q, p: c.total(p) * 0 + q**2)(1.0, p),
    "a metric": lambda c: jax.grad(lambda p: (jnp.sum(p[0]["bias"] ** 2), c.total(p)), has_aux=True),
    "a metric of some": lambda c: jax.grad(lambda p: (jnp.sum(p[0]["bias"] ** 2), _on_outputs(c, p)), has_aux=True),
    "a pullback that is not called": lambda c: lambda p: jax.vjp(c.total, p)[0],
    "a scan": lambda c: jax.grad(_in_scan(c)),
    "no loss": lambda c: jax.grad(lambda p: jnp.sum(jax.tree.leaves(p)[0]) + 0 * jnp.argmax(jnp.sum(p[0]["bias"]))),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_needs_no_adjoint_is_accepted(name: str) -> None:
    case = Case()
    fun = HEALTHY[name](case)
    assert dj.check(fun, case.params).problem is None
    jax.tree.map(np.testing.assert_allclose, dj.jit(fun)(case.params), jax.jit(fun)(case.params))
