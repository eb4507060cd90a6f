"""Masks that look at a worker's arrays differ between workers: refused, and masks from the specs are right."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj
from distdl_jax import nn

pytestmark = pytest.mark.simulated(2)

REFUSED = r"masked on worker \d, but not on worker \d.*len\(spec\.global_shape\) > 1, specs"


def layer_on_the_first() -> nn.DistributedLinear:
    """A layer whose parameters are on worker 0; the other has placeholders."""
    return nn.DistributedLinear(
        dj.Partition().create_partition_inclusive([0]).grid([1, 1]), in_features=3, out_features=2
    )


def by_arrays(params: Any) -> Any:
    return jax.tree.map(lambda param: param.ndim > 1, params)


def by_specs(specs: Any) -> Any:
    return jax.tree.map(lambda spec: len(spec.global_shape) > 1, specs)


OPTIMISERS: dict[str, Callable[[Any], Any]] = {
    "masked": lambda mask: optax.masked(optax.adam(0.1), mask),
    "in a chain": lambda mask: optax.chain(optax.sgd(0.1), optax.masked(optax.trace(0.9), mask)),
    "adamw": lambda mask: optax.adamw(0.1, mask=mask),
    "partition": lambda mask: optax.partition(
        {True: optax.adam(0.1), False: optax.sgd(0.1, 0.9)},
        mask if not callable(mask) else lambda params: mask(params),
    ),
}
WITHOUT_STATE = ("adamw",)  # what decays has none, and a placeholder nothing that decays


@pytest.mark.parametrize("name", OPTIMISERS)
def test_masks_by_arrays(name: str) -> None:
    layer, optimiser = layer_on_the_first(), OPTIMISERS[name](by_arrays)
    params = layer.init(jax.random.key(0))
    gradient = jax.tree.map(jnp.ones_like, params)
    state = optimiser.init(params)
    if name in WITHOUT_STATE:
        dj.jit(optimiser.update)(gradient, state, params)
        return
    with pytest.raises(dj.PlanError, match=REFUSED):
        dj.jit(optimiser.init)(params)
    with pytest.raises(dj.PlanError, match=REFUSED):
        dj.jit(optimiser.update)(gradient, state, params)
    with pytest.raises(dj.PlanError, match=REFUSED):
        dj.specs_like(state, params, layer.param_specs())


def after_two_steps(optimiser: Any, params: Any) -> tuple[Any, Any]:
    """The parameters and the state, where the gradient is the cosine."""
    state = optimiser.init(params)
    for _ in range(2):
        updates, state = optimiser.update(jax.tree.map(jnp.cos, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", OPTIMISERS)
def test_masks_by_specs(name: str) -> None:
    layer = layer_on_the_first()
    specs, params = layer.param_specs(), layer.init(jax.random.key(0))
    optimiser = OPTIMISERS[name](by_specs(specs))
    found, state = dj.jit(lambda params: after_two_steps(optimiser, params))(params)
    dj.gather(state, dj.specs_like(state, params, specs))
    if dj.Partition().rank == 0:
        expected, _ = after_two_steps(OPTIMISERS[name](by_arrays), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_norms_of_masked_trees() -> None:
    layer = layer_on_the_first()
    specs, params = layer.param_specs(), layer.init(jax.random.key(0))
    for mask, accepted in ((by_specs(specs), True), (by_arrays, False)):
        clip = optax.masked(dj.optim.clip_by_global_norm(0.5, specs), mask)
        state = clip.init(params)
        if accepted:
            dj.jit(clip.update)(params, state)
            continue
        for update in (clip.update, dj.jit(clip.update)):
            with pytest.raises(dj.PlanError, match=REFUSED):
                update(params, state)
