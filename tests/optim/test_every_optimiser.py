"""Every optimiser of optax on blocks, against itself on whole tensors: what the page says, and the state's specs."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launcher.examples import LONG
from optim.every_optimiser import OPTIMISERS, updates

import distdl_jax as dj

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
"""Right on blocks, but with a state that is no block of anything."""


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
        with pytest.raises(dj.PlanError, match="is no block of anything"):
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
