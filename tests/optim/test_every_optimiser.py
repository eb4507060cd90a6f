"""Every optimiser of optax on blocks, against itself on whole tensors: what the page says, and the state's specs."""

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launcher.examples import LONG

import distdl_jax as dj

ARGUMENTS: dict[str, Any] = {
    "adv_optimizer": optax.chain(optax.contrib.normalize(), optax.sgd(0.1)),
    "base_optimizer": optax.sgd(0.1),
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "gamma": 0.5,
    "inner": optax.adam(0.1),
    "inner_factory": optax.sgd,
    "key": 0,
    "l2_norm_clip": 0.1,
    "learning_rate": 0.1,
    "mask": {"matrix": True, "column": False, "vector": True},
    "max_backtracking_steps": 5,
    "max_consecutive_errors": 3,
    "max_delta": 0.1,
    "max_linesearch_steps": 5,
    "max_norm": 0.1,
    "noise_multiplier": 0.1,
    "optimizer": optax.sgd(0.1),
    "seed": 0,
    "step_size": 0.1,
    "step_size_fn": lambda step: 0.1,
    "threshold": 0.1,
    "tx": optax.sgd(0.1),
}
"""What their required arguments get, by name."""

OPTIONS: dict[str, dict[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 2},
    "scale_by_factored_rms": {"min_dim_size_to_factor": 2},
    "prodigy": {"estim_lr0": 1e-3},
}
"""Where small tensors, or few steps, would not show what it does."""


def made(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """The transformation; None where the function makes none, or wants other arguments."""
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not set(required) <= set(ARGUMENTS):
        return None
    try:
        result = function(**{name: ARGUMENTS[name] for name in required}, **options)
    except (TypeError, ValueError):
        return None
    return result if hasattr(result, "init") and hasattr(result, "update") else None


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    rooms: tuple[ModuleType, ...] = (optax, optax.contrib)
    seen = set()
    for room in rooms:
        for name, value in sorted(vars(room).items()):
            if not name.startswith("_") and name not in seen and inspect.isfunction(value):
                seen.add(name)
                yield name, value


OPTIMISERS = {
    name: optimiser
    for name, function in public_functions()
    if (optimiser := made(function, OPTIONS.get(name, {}))) is not None
}


def updates(optimiser: Any, params: Any, gradients: list[Any]) -> tuple[list[Any], Any]:
    """What it makes of some steps, with what some of them ask for besides, alike for blocks and wholes; its state."""

    def total(params: Any) -> Any:
        return sum(jnp.sum(jnp.cosh(x)) for x in params.values())

    state, found = optimiser.init(params), []
    asks_for = inspect.signature(optimiser.update).parameters
    for gradient in gradients:
        known = {"value": jnp.asarray(2.0), "grad": gradient, "value_fn": total}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in asks_for.values())
        extra = known if takes_all else {name: known[name] for name in known if name in asks_for}
        update, state = optimiser.update(gradient, state, params, **extra)
        params = optax.apply_updates(params, update)
        found.append(update)
    return found, state


LISTED = {
    "apply_if_finite",  # decides for all, but only where something is not finite
    "differentially_private_aggregate",  # wants a gradient for each sample
    "dpsgd",
    "hutchinson_estimator_diag_hessian",  # wants the loss
    "scale_by_backtracking_linesearch",  # takes the first step that it tries, here
    "scale_by_muon",  # wants to know what is a matrix
    "sophia",
}
"""What the page knows to be wrong, and plain steps don't show."""

CHOSEN = {
    "chain of a trace and an average": optax.chain(optax.trace(0.5), optax.ema(0.9)),
    "accumulating": optax.MultiSteps(optax.adam(0.1), 2),
    "masked": optax.masked(optax.adam(0.1), {"matrix": True, "column": False, "vector": True}),
    "hyperparameters": optax.inject_hyperparams(optax.rmsprop)(0.1),
    "adamw with a schedule": optax.adamw(optax.linear_schedule(0.1, 0.0, 5)),
}
"""Kinds of states that are looked at in every run."""

NO_SPECS = {"flatten"}
"""Right on blocks, but with a state that is not a block of any tensor."""


PAGE = Path(__file__).parents[2] / "docs" / "optimisers.md"


def wrong_on_blocks() -> set[str]:
    """The names in the first column of the page's table."""
    section = PAGE.read_text().split("## What is wrong on blocks")[1]
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {name for column in first for name in re.findall("`([a-z_0-9]+)`", column)}


WRONG = wrong_on_blocks()


def test_all_are_there() -> None:
    """Those that are known are found, so that the test below means something."""
    assert set(OPTIMISERS) >= WRONG >= LISTED
    assert len(OPTIMISERS) >= 100 and {"adam", "lamb", "adafactor", "sam", "momo", "prodigy"} <= set(OPTIMISERS)
    assert set(OPTIMISERS) > LISTED | NO_SPECS


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", [*CHOSEN, *[*OPTIMISERS][:: 1 if LONG > 1 else 16]])
def test_the_page_agrees_with_the_specs_of_the_state(name: str) -> None:
    """What differs from the update of whole tensors is on the page; where nothing does, the state is gathered."""
    P = dj.Partition()
    optimiser = (OPTIMISERS | CHOSEN)[name]
    specs = {
        "matrix": dj.TensorSpec((4, 6), P.grid([2, 1])),
        "column": dj.TensorSpec((4, 3), P.grid([1, 2])),
        "vector": dj.TensorSpec((3,), P.create_partition_inclusive([1])),
    }
    draw = np.random.default_rng(0)

    slope = {name: draw.normal(size=spec.global_shape) for name, spec in specs.items()}

    def tensors(size: float) -> Any:
        whole = {name: size * (x + draw.normal(size=x.shape) / 4) for name, x in slope.items()}
        own = {n: jnp.asarray(x[tuple(slice(*r) for r in specs[n].box or ((0, 0),))]) for n, x in whole.items()}
        return whole, own

    every = [tensors(size) for size in (1, 0.01, 1, 100, 100, 100)]
    run = jax.jit(partial(updates, optimiser))
    if name in LISTED:
        return
    found, state = run(every[0][1], [own for _, own in every[1:]])
    gathered = dj.gather(found, [specs] * len(found))
    differs = None
    if P.rank == 0:
        want, whole_state = run(every[0][0], [whole for whole, _ in every[1:]])
        pairs = zip(jax.tree.leaves(gathered), jax.tree.leaves(want), strict=True)
        differs = not all(np.allclose(a, b, 1e-7, 1e-9 * np.max(np.abs(b))) for a, b in pairs)
        assert (name in WRONG) == differs
    if P.allgather_data(differs)[0]:
        return
    if name in NO_SPECS:
        with pytest.raises(dj.PlanError, match="is not a block of any tensor"):
            dj.specs_like(state, every[0][1], specs)
        return
    of_state = dj.specs_like(state, every[0][1], specs)
    gathered_state = dj.gather(state, of_state)
    jax.tree.map(np.testing.assert_array_equal, dj.scatter(gathered_state, of_state), state)
    if P.rank == 0:
        assert jax.tree.structure(gathered_state) == jax.tree.structure(whole_state)
        for a, b in zip(jax.tree.leaves(gathered_state), jax.tree.leaves(whole_state), strict=True):
            if jnp.issubdtype(jnp.result_type(a), jnp.number):
                np.testing.assert_allclose(a, b, rtol=1e-9)
