"""What optimisers refuse of numbers, found by looking at all arguments of all of them; and what of states."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj

NUMBERS = ("ArrayLike", "ArrayLike | None", "float", "int")
REQUIRED = {"specs": dj.TensorSpec((2,), dj.planning_world(1).grid([1]))}
REQUIRED |= {"max_norm": 1.0, "clipping": 0.1}  # type: ignore[dict-item]
FOUND = [
    (function, name)
    for function in map(vars(dj.optim).get, dj.optim.__all__)
    for name, parameter in inspect.signature(function).parameters.items()  # type: ignore[arg-type]
    if parameter.annotation in NUMBERS
]


def made(function: Callable[..., Any], name: str, number: Any) -> Any:
    required = {its: REQUIRED[its] for its in inspect.signature(function).parameters if its in REQUIRED}
    return function(**{**required, name: number})


@pytest.mark.parametrize(("function", "name"), FOUND)
def test_numbers_that_are_none_or_out_of_range(function: Callable[..., Any], name: str) -> None:
    bad: list[Any] = [math.nan, np.float32(math.nan), "a", 1j]
    if name != "learning_rate":  # below 0 it goes up
        bad += [-1, -1e-9]
    if name not in ("period", "memory_size"):
        made(function, name, 1.5)
    if function is not dj.optim.LossScale:
        bad += [jnp.asarray(math.nan), jnp.ones(2)]
    for number in bad:
        with pytest.raises((dj.InvalidArgumentError, dj.InvalidTypeError), match=rf"`{name}` \(="):
            made(function, name, number)


def test_all_of_them_are_looked_at() -> None:
    names = {(function.__name__, name) for function, name in FOUND}  # type: ignore[union-attr]
    assert {("scale_by_trust_ratio", "eps"), ("lbfgs", "learning_rate"), ("LossScale", "initial")} <= names
    assert len(FOUND) >= 11


@pytest.mark.parametrize("initial", [math.inf, 1e300, 1e-60, 0])
def test_a_scale_that_float32_does_not_have(initial: float) -> None:
    with pytest.raises(dj.InvalidArgumentError, match=r"`initial` .* must be a number above 0 that float32"):
        dj.optim.LossScale(initial=initial)


def test_traced_numbers_may_be_any() -> None:
    for name in ("min_norm", "trust_coefficient", "eps"):
        jax.eval_shape(lambda number, name=name: made(dj.optim.scale_by_trust_ratio, name, number) and number, 1.0)
    jax.eval_shape(lambda rate: made(dj.optim.lbfgs, "learning_rate", rate) and rate, 1.0)


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
    with pytest.raises(dj.InvalidArgumentError, match="`state` must hold a value and a gradient, from one line search"):
        dj.optim.value_and_grad_from_state(loss)(params, state=optax.sgd(1.0).init(params))
