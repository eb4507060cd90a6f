"""Copies that must be equal are compared, to rounding, where that is asked for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj
from distdl_jax.functional import copies
from distdl_jax.settings import Settings

DTYPES = ["bool", "int8", "float16", "bfloat16", "float32", "complex64", "float64"]


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setattr(copies, "current_settings", lambda: Settings(debug=True))


@pytest.mark.simulated(2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_pass_by_rounding_and_raise_beyond_it(dtype, world_size):
    """Of three, the one that differs is neither the first nor the last."""
    P = dj.Partition().grid([world_size, 1])
    spec, special = dj.TensorSpec((3,), P, replicated=True), [1.0, np.nan, np.inf]
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    x = jnp.asarray(special if inexact else [1, 0, 1], dtype)
    dj.check_replicated(x, spec)
    if inexact:
        dj.check_replicated(x * (1 + 2 * P.rank * float(jnp.finfo(dtype).eps)), spec)
    others = [x.at[0].set(0)]
    if inexact:
        others += [x * (1 + 4 * float(jnp.finfo(dtype).eps) ** 0.5), x.at[1].set(1), x.at[0].set(np.nan), -x]
    for other in others:
        with pytest.raises(dj.PlanError, match=r"must be the same .* not on workers 0 and 1"):
            dj.check_replicated(other if P.rank == 1 else x, spec)


@pytest.mark.simulated(2)
def test_drifting_copies_raise_and_rounding_copies_pass():
    """Adam beside other parameters on each worker, which rounds otherwise; then without the sum of the gradients."""
    P = dj.Partition().grid([2])
    specs, adam = {"scale": dj.TensorSpec((5,), P, replicated=0), "own": None}, optax.adam(1e-3)
    x = jnp.linspace(0.1, 1, 5) + P.rank

    def loss(params, together):
        scale = dj.replicated(params["scale"], P) if together else params["scale"]
        return jnp.sum(jnp.sin(scale * x)) + jnp.sum(params["own"] ** 2)

    @partial(dj.jit, static_argnums=2)
    def step(params, state, together):
        gradient = dj.grad(loss)(params, together)
        if P.rank and together:  # what another order of the same operations gives
            gradient = {**gradient, "scale": gradient["scale"] * (1 + jnp.finfo(x.dtype).eps)}
        updates, state = adam.update(gradient, state, params)
        return dj.check_replicated(optax.apply_updates(params, updates), specs), state

    params = {"scale": jnp.ones(5), "own": jnp.ones(3 + 4 * P.rank)}
    state = adam.init(params)
    for _ in range(50):
        params, state = step(params, state, True)
    jax.block_until_ready(params)
    assert len({scale.tobytes() for scale in P.allgather_data(np.asarray(params["scale"]))}) == 2
    with pytest.raises(Exception, match=r"`tree\['scale'\]` must be the same .* not on workers 0 and 1"):
        for _ in range(5):
            params, state = step(params, state, False)
            jax.block_until_ready(params)
            jax.effects_barrier()


@pytest.mark.world(4)
def test_copies_are_compared_within_their_team():
    """2 x 2 workers: each row holds copies of its block of `rows`, all hold copies of `rate`."""
    P_world = dj.Partition()
    P = P_world.grid([2, 2])
    specs = {"rows": dj.TensorSpec((4,), P, replicated=1), "rate": dj.TensorSpec((), P, replicated=True), "own": None}
    row = P.index[0]
    tree = {"rows": jnp.full(2, row + 1.0), "rate": 0.5, "own": jnp.float32(P_world.rank)}
    assert dj.check_replicated(tree, specs) is tree
    loss = dj.jit(dj.value_and_grad(lambda tree: jnp.sum(dj.check_replicated(tree, specs)["rows"] ** 2)))
    value, gradient = loss(tree)
    assert value == 2 * (2 * 1 + 2 * 4) and np.array_equal(gradient["rows"], 2 * tree["rows"])
    spoilt = {**tree, "rows": tree["rows"] + (P_world.rank == 3)}
    if row == 0:
        dj.check_replicated(spoilt, {**specs, "rate": None})
    else:
        with pytest.raises(dj.PlanError, match=r"`tree\['rows'\]` must be the same .* not on workers 2 and 3"):
            dj.check_replicated(spoilt, {**specs, "rate": None})


@pytest.mark.world(4)
def test_nothing_is_sent_without_the_setting(monkeypatch):
    monkeypatch.setattr(copies, "current_settings", lambda: Settings())
    P = dj.Partition().grid([4])
    spec = dj.TensorSpec((), P, replicated=True)
    jaxpr = jax.make_jaxpr(lambda x: dj.check_replicated(x, spec))(jnp.float32(P.rank)).jaxpr
    assert not jaxpr.eqns
