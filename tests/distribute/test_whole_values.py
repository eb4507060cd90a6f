"""Whole arguments are compared between workers, when a program is traced, or at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import run

import distdl_jax as dj
from distdl_jax import TensorSpec

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def loss_of(params: Any, x: Any) -> Any:
    return jnp.mean((x * params["w"]) ** 2) + params["b"]


def ways(spec: TensorSpec) -> dict[str, Callable[..., Any]]:
    inside = dj.distribute(jax.value_and_grad(loss_of), (None, spec))
    outside = dj.value_and_grad(dj.distribute(loss_of, (dj.VARIABLE, spec), dj.PARTS))
    return {
        "eager": inside,
        "dj.jit": dj.jit(inside),
        "within dj.jit": dj.jit(lambda params, x: inside(params, x)),
        "from outside": outside,
        "dj.jit, from outside": dj.jit(outside),
    }


@pytest.mark.parametrize("way", ["eager", "dj.jit", "within dj.jit", "from outside", "dj.jit, from outside"])
def test_a_whole_argument_that_differs_is_named_on_all_workers(way: str) -> None:
    def program() -> None:
        spec = TensorSpec(X.shape, dj.Partition().grid([2, 1]))
        params = {"w": jnp.arange(3.0), "b": jnp.float32(spec.partition.rank)}
        f = ways(spec)[way]
        with pytest.raises(dj.PlanError, match=r"`args\[0\]\['b'\]`.*differs on workers 0 and 1.*broadcast_data"):
            f(params, spec.block(X))
        # Caught by the user, it is over: the workers go on together.
        value, _ = f({**params, "b": jnp.float32(0)}, spec.block(X))
        np.testing.assert_allclose(value, loss_of({"w": np.arange(3.0), "b": 0}, X), rtol=1e-5)

    dj.simulate(2, program)


def test_equal_values_of_any_kind_pass() -> None:
    """NaN, -0, keys, scalars and NumPy arrays: their bits are compared, in the dtype in which JAX takes them."""

    def program() -> None:
        spec = TensorSpec(X.shape, dj.Partition().grid([2, 1]))
        args = {"nan": np.float32(np.nan), "zero": -0.0, "key": jax.random.key(3), "n": 3, "empty": np.zeros((0, 2))}
        f = dj.distribute(lambda args, x: x.sum() * args["n"] + jax.random.normal(args["key"]), (None, spec))
        expected = X.sum() * 3 + jax.random.normal(jax.random.key(3))
        for g in (f, dj.jit(f)):
            np.testing.assert_allclose(g(args, spec.block(X)), expected, rtol=1e-5)
        with jax.enable_x64(False):
            array = np.arange(3.0) if spec.partition.rank else jnp.arange(3.0)
            dj.jit(dj.distribute(lambda w, x: (w * x).sum(), (None, spec)))(array, spec.block(X))
        key = jax.random.key(3 + spec.partition.rank)
        with pytest.raises(dj.PlanError, match=r"`args\[0\]\['key'\]`"):
            dj.jit(f)({**args, "key": key}, spec.block(X))

    dj.simulate(2, program)


AT_EACH_CALL = """
import jax, jax.numpy as jnp, numpy as np, distdl_jax as dj
P = dj.Partition()
spec = dj.TensorSpec((4, 3), P.grid([2, 1]))
f = jax.jit(dj.distribute(lambda w, x: (w["a"] * x).sum() + w["b"].sum(), (None, spec)))
w = {"a": jnp.float32(2), "b": jnp.arange(4, dtype=jnp.bfloat16)}
np.testing.assert_allclose(f(w, jnp.ones((2, 3))), 24 + 6)
# The second call is traced no more, and one entry of one worker differs.
try:
    jax.block_until_ready(f({**w, "b": w["b"].at[2].add(P.rank)}, jnp.ones((2, 3))))
except Exception as error:
    assert "`args[0]['b']`" in str(error) and "workers 0 and 1" in str(error), error
    print(f"told on {P.rank}", flush=True)
"""


def test_at_each_call_with_debug() -> None:
    status, output = run(2, "-c", AT_EACH_CALL, settings={"DISTDL_JAX_DEBUG": "1"})
    assert status == 0 and "told on 0" in output and "told on 1" in output, output
