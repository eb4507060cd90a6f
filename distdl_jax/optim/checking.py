"""Which transformations of optax see a block where they mean a whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import InvalidTypeError
from distdl_jax.optim.optional import optax_for

WRONG_ON_BLOCKS = {
    "adaptive_grad_clip": "dj.optim.adaptive_grad_clip",
    "add_noise": None,
    "apply_if_finite": None,
    "centralize": None,
    "clip_by_block_rms": None,
    "clip_by_global_norm": "dj.optim.clip_by_global_norm",
    "contrib.dadapt_adamw": None,
    "contrib.differentially_private_aggregate": None,
    "contrib.dog": None,
    "contrib.dowg": None,
    "contrib.hutchinson_estimator_diag_hessian": None,
    "contrib.mechanize": None,
    "contrib.momo": None,
    "contrib.momo_adam": None,
    "contrib.normalize": None,
    "contrib.prodigy": None,
    "contrib.scale_by_galore": None,
    "contrib.scale_by_muon": None,
    "normalize_by_update_norm": None,
    "scale_by_backtracking_linesearch": "dj.optim.line_search",
    "scale_by_distance_over_gradients": None,
    "scale_by_factored_rms": None,
    "scale_by_lbfgs": "dj.optim.scale_by_lbfgs",
    "scale_by_novograd": None,
    "scale_by_param_block_norm": None,
    "scale_by_param_block_rms": None,
    "scale_by_polyak": None,
    "scale_by_sm3": None,
    "scale_by_trust_ratio": "dj.optim.scale_by_trust_ratio",
    "scale_by_zoom_linesearch": "dj.optim.line_search",
}
"""What in optax looks at a whole tensor, or at all of them, and what to write instead, where there is something."""


def check(optimiser: Any) -> tuple[str, ...]:
    """What in an optimiser would be wrong on blocks of tensors, as far as can be seen; nothing where all is well.

    An optimiser gets this worker's blocks. What it does element by element is right on them; what takes the norm of a
    tensor, a mean, or a decision for all of it is not. Two things are looked at: which of optax's transformations it
    is made of, and whether, on small tensors, it makes the same of a tensor as of its halves.

    **Arguments:**

    - `optimiser`: an `optax.GradientTransformation`, or anything else with `init` and `update`.

    **Returns:** a sentence for each thing that was found. None does not prove that all is well: a rule that asks for
    more than gradients and parameters is known by its name alone. Nothing is communicated.

    **Raises:** `SetupError` where optax is not installed, `InvalidTypeError` for what is no optimiser.

    >>> import optax
    >>> check(optax.adamw(1e-3))
    ()
    >>> print(*check(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))))
    optax.clip_by_global_norm would see this worker's blocks only: use dj.optim.clip_by_global_norm.
    """
    optax_for("check")
    if not (hasattr(optimiser, "init") and hasattr(optimiser, "update")):
        raise InvalidTypeError(f"`optimiser` (={optimiser!r}) must have `init` and `update`, as those of optax have.")
    made_of = {function.__qualname__.split(".")[0]: function.__module__ for function in _functions(optimiser)}
    found = []
    for name in sorted(WRONG_ON_BLOCKS):
        room = "optax.contrib" if name.startswith("contrib.") else "optax"
        if made_of.get(name.removeprefix("contrib."), "").startswith(room):
            instead = WRONG_ON_BLOCKS[name]
            advice = f": use {instead}." if instead else "; nothing in dj.optim does it for whole tensors."
            found.append(f"optax.{name} would see this worker's blocks only{advice}")
    ours = any(module.startswith("distdl_jax") for module in made_of.values())
    if not found and not ours and _differs_on_halves(optimiser):
        found.append(
            "`optimiser` makes something else of a tensor than of its halves, so it would be wrong on blocks; it is "
            f"made of {', '.join(sorted(made_of)) or 'nothing that has a name'}."
        )
    return tuple(found)


def _functions(value: Any, seen: set[int] | None = None) -> Iterator[Callable[..., Any]]:
    """The functions that something is made of: those in closures, in tuples, in partial functions."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, FunctionType):
        yield value
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        inside += [getattr(value, "__wrapped__", None), *(value.__defaults__ or ())]
    elif isinstance(value, MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, tuple | list):
        inside = [*value]
    elif isinstance(value, dict):
        inside = [*value.values()]
    elif hasattr(value, "init") and hasattr(value, "update"):
        inside = [value.init, value.update, *getattr(value, "__dict__", {}).values()]
    for each in inside:
        yield from _functions(each, seen)


def _differs_on_halves(optimiser: Any) -> bool:
    """Whether updates of two small tensors are other ones where each is cut in two; False if it can't be tried."""
    draw = np.random.default_rng(0)

    def tensors(*lead: int) -> dict[str, Any]:
        shapes = {"matrix": (*lead, 4, 6), "column": (*lead, 4, 1)}
        return {name: jnp.asarray(draw.normal(size=shape), float) for name, shape in shapes.items()}

    def halves(tree: Any, axis: int) -> list[Any]:
        return [
            {name: jnp.array_split(x, 2, axis)[number] if x.shape[axis] > 1 else x for name, x in tree.items()}
            for number in (0, 1)
        ]

    @jax.jit
    def updates(params: Any, gradients: Any) -> Any:
        state, found = optimiser.init(params), []
        for number in range(3):
            gradient = {name: x[number] for name, x in gradients.items()}
            update, state = _update(optimiser, gradient, state, params)
            params = jax.tree.map(jnp.add, params, update)
            found.append(update)
        return {name: jnp.stack([update[name] for update in found]) for name in params}

    def equal(ours: Any, want: Any) -> bool:
        steps = [step for name in ours for step in zip(*map(np.asarray, (ours[name], want[name])), strict=True)]
        return all(np.allclose(a, b, 1e-3, 1e-4 * np.max(np.abs(b), initial=0)) for a, b in steps)

    # Small gradients and large ones, for what has a threshold.
    params, gradients = tensors(), jax.tree.map(lambda x: x * jnp.array([0.01, 1, 100]).reshape(3, 1, 1), tensors(3))
    try:
        whole = updates(params, gradients)
        of_halves = [
            equal(updates(its_params, its_gradients), want)
            for axis in (0, 1)
            for its_params, its_gradients, want in zip(
                halves(params, axis), halves(gradients, axis + 1), halves(whole, axis + 1), strict=True
            )
        ]
    except Exception:
        return False
    return not all(of_halves)


def _update(optimiser: Any, gradient: Any, state: Any, params: Any) -> Any:
    """A step, with what some rules ask for besides: the value of the loss, alike on all workers."""
    try:
        return optimiser.update(gradient, state, params)
    except TypeError:
        return optimiser.update(gradient, state, params, value=jnp.asarray(2.0))
