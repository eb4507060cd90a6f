"""What `dj.optim.check` says of optax's optimisers, alone and as parts of others."""

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import distdl_jax as dj
from distdl_jax.optim.checking import INSTEAD, NOT_SHOWN, differs_on_halves

RIGHT: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2),
    "clip": lambda: optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1), optax.ema(0.9)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "masked": lambda: optax.masked(optax.adam(0.1), {"matrix": True, "vector": False}),
}

MADE_OF: dict[str, Callable[[], Any]] = {
    "scale_by_trust_ratio": lambda: optax.lamb(0.1),
    "clip_by_global_norm": lambda: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), 2),
    "scale_by_factored_rms": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "scale_by_novograd": lambda: optax.novograd(0.1),
    "scale_by_sm3": lambda: optax.sm3(0.1),
    "scale_by_zoom_linesearch": lambda: optax.lbfgs(),
    "add_noise": lambda: optax.masked(optax.noisy_sgd(0.1), {"matrix": True, "vector": True}),
    "adaptive_grad_clip": lambda: optax.inject_hyperparams(optax.adaptive_grad_clip)(0.1),
}

ALONE: dict[str, Callable[[], Any]] = {
    "add_noise": lambda: optax.add_noise(1.0, 0.5, key=0),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "centralize": optax.centralize,
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "normalize_by_update_norm": optax.normalize_by_update_norm,
    "scale_by_distance_over_gradients": optax.scale_by_distance_over_gradients,
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "scale_by_lbfgs": optax.scale_by_lbfgs,
    "scale_by_novograd": optax.scale_by_novograd,
    "scale_by_param_block_norm": optax.scale_by_param_block_norm,
    "scale_by_param_block_rms": optax.scale_by_param_block_rms,
    "scale_by_polyak": optax.scale_by_polyak,
    "scale_by_sm3": optax.scale_by_sm3,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_what_is_right(name: str) -> None:
    assert dj.optim.check(RIGHT[name]()) == ()


@pytest.mark.parametrize("name", MADE_OF)
def test_names_are_found_wherever_they_are(name: str) -> None:
    said = dj.optim.check(MADE_OF[name]())
    assert any(sentence.startswith(f"optax.{name} would see") for sentence in said), said


@pytest.mark.parametrize("name", ALONE)
def test_each_differs_on_halves(name: str) -> None:
    """By what it does alone: nothing knows it by name."""
    assert differs_on_halves(ALONE[name]())
    (sentence,) = dj.optim.check(ALONE[name]())
    assert sentence.startswith(f"optax.{name} would see this worker's blocks only"), sentence


def test_names_that_are_known_are_there() -> None:
    assert all(attrgetter(name)(optax) and attrgetter(ours.removeprefix("dj."))(dj) for name, ours in INSTEAD.items())
    assert all(attrgetter(name.removeprefix("optax."))(optax) for name in NOT_SHOWN)
    found = dj.optim.check(optax.chain(optax.contrib.hutchinson_estimator_diag_hessian(0), optax.adafactor(0.1)))
    assert all(any(sentence.startswith(name) for sentence in found) for name in NOT_SHOWN), found


def test_a_threshold_that_small_gradients_do_not_reach() -> None:
    assert dj.optim.check(optax.chain(optax.clip_by_global_norm(1e4), optax.sgd(0.1)))


def test_wrappers_are_not_blamed_for_what_is_in_them() -> None:
    """Twice the same one, of which one is right."""
    inner = optax.chain(optax.clip(1.0), optax.centralize())
    (sentence,) = dj.optim.check(optax.chain(optax.masked(optax.adam(0.1), True), optax.masked(inner, True)))
    assert sentence.startswith("optax.centralize would see")


def test_a_rule_of_ones_own() -> None:
    """By what it does; one that can't be tried, or that dj.optim made, is not accused."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda x: x / jnp.max(jnp.abs(x)), updates), state

    own = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    (sentence,) = dj.optim.check(optax.chain(own, optax.sgd(0.1)))
    assert "makes something else of a tensor than of its halves" in sentence and "test_a_rule_of_ones_own" in sentence

    def asks(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        return updates, state

    assert dj.optim.check(optax.GradientTransformationExtraArgs(own.init, asks)) == ()
    spec = dj.TensorSpec((4,), dj.planning_world(1).grid([1]))
    assert dj.optim.check(optax.chain(dj.optim.clip_by_global_norm(1.0, spec), optax.sgd(0.1))) == ()


def test_without_optax_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes a transformation of optax's says so; nothing else needs it."""
    monkeypatch.setitem(sys.modules, "optax", None)
    spec = dj.TensorSpec((4,), dj.planning_world(1).grid([1]))
    makers: dict[str, Callable[[], Any]] = {
        "clip_by_global_norm": lambda: dj.optim.clip_by_global_norm(1.0, spec),
        "adaptive_grad_clip": lambda: dj.optim.adaptive_grad_clip(1.0, spec),
        "scale_by_trust_ratio": lambda: dj.optim.scale_by_trust_ratio(spec),
        "scale_by_lbfgs": lambda: dj.optim.scale_by_lbfgs(spec),
        "lbfgs": lambda: dj.optim.lbfgs(spec),
        "line_search": lambda: dj.optim.line_search(None, spec),
        "value_and_grad_from_state": lambda: dj.optim.value_and_grad_from_state(jnp.sum),
        "check": lambda: dj.optim.check(None),
    }
    for name, make in makers.items():
        with pytest.raises(dj.SetupError, match=rf"dj\.optim\.{name} needs optax, which is not installed: pip install"):
            make()
    ours = dj.planning_world(1)
    assert float(dj.optim.global_norm(jnp.array([3.0, 4.0, 0.0, 0.0]), spec, partition=ours)) == 5.0
