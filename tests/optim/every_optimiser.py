"""Every public function of optax that makes a transformation of gradients, found by looking, with plain arguments."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import optax

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
