"""Which transformations of optax see a block where they mean a whole tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import InvalidTypeError
from distdl_jax.optim.norms import optax_for

INSTEAD = {
    "adaptive_grad_clip": "dj.optim.adaptive_grad_clip",
    "clip_by_global_norm": "dj.optim.clip_by_global_norm",
    "scale_by_backtracking_linesearch": "dj.optim.line_search",
    "scale_by_lbfgs": "dj.optim.scale_by_lbfgs",
    "scale_by_trust_ratio": "dj.optim.scale_by_trust_ratio",
    "scale_by_zoom_linesearch": "dj.optim.line_search",
}
"""What to write in place of a transformation of optax."""


NOT_SHOWN = {
    "optax.contrib.hutchinson_estimator_diag_hessian",  # random probes, the same on all workers
    "optax.scale_by_factored_rms",  # factored for large tensors only
}
"""Wrong on blocks in ways that a trial on a small matrix does not show."""


def check(optimiser: Any) -> tuple[str, ...]:
    """Return what in an optimiser would be wrong on blocks of tensors, as far as can be seen; nothing if all is well.

    An optimiser gets this worker's blocks. What it does element by element is right on them; what takes the norm of a
    tensor, a mean, or a decision for all of it is not. It is tried on small tensors: whole, and cut in two. Where the
    updates differ, the transformations of optax that it is made of are tried one by one.

    **Arguments:**

    - `optimiser`: an `optax.GradientTransformation`, or anything else with `init` and `update`.

    **Returns:** a sentence for each thing that was found. None does not prove that all is well: a rule that asks for
    arguments of its own, or for a certain tree of parameters, can't be tried. Nothing is communicated.

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
    made_of = {_name(function) for function in _functions(optimiser)}
    differs = differs_on_halves(optimiser)
    wrong = made_of & NOT_SHOWN | (set() if differs is False else _wrong_parts(optimiser))
    if differs and not wrong:
        names = ", ".join(sorted(name.rpartition(".")[2] for name in made_of)) or "nothing that has a name"
        return (
            "`optimiser` makes something else of a tensor than of its halves, so it would be wrong on blocks; it is "
            f"made of {names}.",
        )
    instead = {name: INSTEAD.get(name.removeprefix("optax.")) for name in sorted(wrong)}
    return tuple(
        f"{name} would see this worker's blocks only"
        + (f": use {ours}." if ours else "; nothing in dj.optim does it for whole tensors.")
        for name, ours in instead.items()
    )


class _Transformation(NamedTuple):
    init: Callable[..., Any]
    update: Callable[..., Any]


def _wrong_parts(optimiser: Any) -> set[str]:
    """Return the names of optax's transformations in an optimiser that are wrong on blocks, the innermost ones."""
    functions = list(_functions(optimiser))
    inits = [function for function in functions if _parameters(function)[:1] == ["params"]]
    parts: dict[Callable[..., Any], _Transformation] = {}
    for update in functions:
        if _parameters(update)[1:2] == ["state"]:
            init = next((init for init in inits if _name(init) == _name(update)), optax_for("check").init_empty_state)
            if init in inits:
                inits.remove(init)
            parts[update] = _Transformation(init, update)
    wrong: dict[Callable[..., Any], set[str]] = {}
    for function, part in sorted(parts.items(), key=lambda part: len([*_functions(part[0])])):
        inside = {*_functions(function)}
        if not wrong.keys() & inside and differs_on_halves(part):
            # A transformation may be made anew in each step, of a function that is inside.
            wrong[function] = {_name(each) for each in inside} & {f"optax.{name}" for name in INSTEAD}
            wrong[function] = wrong[function] or {_name(function)}
    return {name for names in wrong.values() for name in names if name.startswith("optax.")}


def _name(function: Callable[..., Any]) -> str:
    """Return the public name of the function that has made this one."""
    room = "optax.contrib" if function.__module__.startswith("optax.contrib") else function.__module__.split(".")[0]
    return f"{room}.{function.__qualname__.split('.')[0]}"


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _functions(value: Any, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """Return the functions that something is made of, outer ones first: in closures, tuples and partial functions."""
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


_SIZES = (0.01, 1, 100, 1, 1e6)
"""The sizes of the gradients of each step, for rules that have a threshold. One of the fourth step is no number."""


def differs_on_halves(optimiser: Any) -> bool | None:
    """Return whether updates of a matrix change where it is cut in two; None where it can't be tried.

    A transformation of the library's own communicates, and so is not tried.
    """
    if any(_name(function).startswith("distdl_jax.") for function in _functions(optimiser)):
        return None
    for samples in ((), (2,)):  # some rules want the gradient of each sample
        with suppress(Exception):
            return _differs_on_halves(optimiser, samples)
    return None


def _differs_on_halves(optimiser: Any, samples: tuple[int, ...]) -> bool:
    draw, step = np.random.default_rng(0), jax.jit(partial(_step, optimiser))
    params = draw.normal(size=(4, 6))
    gradients = [size * draw.normal(size=(*samples, 4, 6)) for size in _SIZES]
    gradients[3][..., 0, 0] = np.nan

    def updates(params: Any, gradients: Any) -> list[Any]:
        params, found = jnp.asarray(params, float), []
        state = optimiser.init(params)
        for gradient in gradients:
            update, state, params = step(jnp.asarray(gradient, float), state, params)
            found.append(np.asarray(update))
        return found

    def close(a: Any, b: Any) -> bool:
        largest = np.max(np.abs(b), initial=0, where=np.isfinite(b))
        return np.allclose(a, b, 1e-3, 1e-4 * largest, equal_nan=True)

    whole = updates(params, gradients)
    for axis, number in product((-2, -1), (0, 1)):
        half, *halves = (np.split(x, 2, axis)[number] for x in (params, *gradients))
        want = [np.split(x, 2, axis)[number] for x in whole]
        if not all(map(close, updates(half, halves), want)):
            return True
    return False


def _step(optimiser: Any, gradient: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
    """Return an update, the state and the parameters after it.

    Rules that ask for a loss get a value that is the same on all workers, and a function whose gradient is
    elementwise.
    """
    extra = {"value": jnp.asarray(2.0), "grad": gradient, "value_fn": lambda x: jnp.sum(jnp.sqrt(1 + x * x))}
    parameters = inspect.signature(optimiser.update).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        extra = {name: given for name, given in extra.items() if name in parameters}
    update, state = optimiser.update(gradient, state, params, **extra)
    return update, state, params + update
