"""Copies that must be equal are compared bit for bit, where that is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import replica_check
from distdl_jax.settings import Settings

DTYPES = ["bool", "int8", "float16", "bfloat16", "float32", "complex64", "float64"]


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setattr(replica_check, "current_settings", lambda: Settings(debug=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts_and_so_does_its_place(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray([1, 0, 0, 1, 0], dtype)
        raw = np.array(x).view(np.uint8)
        found = {int(replica_check.fingerprint(x))}
        changed = [raw ^ np.eye(1, raw.size, place, np.uint8)[0] * np.uint8(1) for place in range(raw.size)]
        changed = [raw, raw[::-1], *changed]
        distinct = {each.tobytes() for each in changed}
        found = {int(replica_check.fingerprint(jnp.asarray(each.view(x.dtype)))) for each in map(np.array, changed)}
        assert len(found) == len(distinct)


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
    monkeypatch.setattr(replica_check, "current_settings", lambda: Settings())
    P = dj.Partition().grid([4])
    spec = dj.TensorSpec((), P, replicated=True)
    jaxpr = jax.make_jaxpr(lambda x: dj.check_replicated(x, spec))(jnp.float32(P.rank)).jaxpr
    assert not jaxpr.eqns
