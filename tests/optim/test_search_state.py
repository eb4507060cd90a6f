"""What a line search has found is known by its state, whatever else is called the same."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import distdl_jax as dj


@pytest.mark.simulated(1)
def test_a_search_of_parameters_that_are_called_as_what_it_keeps() -> None:
    """As attention's `value` is: what was found is that of the search, whatever the optimiser remembers beside."""
    spec = dj.TensorSpec((2,), dj.Partition().grid([1]))
    params = {name: jnp.arange(1.0, 3.0) for name in ("value", "grad", "learning_rate")}

    def loss(params: Any) -> Any:
        return sum(jnp.sum((x - 3) ** 2) for x in params.values())

    for wrapped in (lambda its: its, lambda its: optax.chain(optax.identity(), its)):
        optimiser = wrapped(dj.optim.lbfgs(dict.fromkeys(params, spec)))
        state = optimiser.init(params)
        value, gradient = dj.optim.value_and_grad_from_state(loss)(params, state=state)
        assert value == loss(params)
        _, state = optimiser.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        found, _ = dj.optim.value_and_grad_from_state(loss)(params, state=state)
        assert found < value
    with pytest.raises(dj.InvalidArgumentError, match="`state` must hold a value and a gradient, of one line search"):
        dj.optim.value_and_grad_from_state(loss)(params, state=optax.sgd(1.0).init(params))
