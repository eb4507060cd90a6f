"""What public functions ask of arguments that are neither data nor partitions: checked at the border, in words."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError


def check_function(name: str, value: Any) -> None:
    """Refuse what can't be called."""
    if not callable(value):
        raise InvalidTypeError(f"`{name}` (={value!r}) must be a function.")


def check_key(name: str, value: Any) -> None:
    """Refuse what is no single random key of JAX's, new or old."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if not value.shape:
            return
        raise InvalidArgumentError(f"`{name}` (of shape {value.shape}) must be one random key, not several.")
    if dtype != np.uint32 or getattr(value, "ndim", None) != 1:
        raise InvalidTypeError(f"`{name}` (={value!r}) must be a random key, as jax.random.key(0) makes one.")


def checked_dtype(name: str, value: DTypeLike | None) -> np.dtype:
    """The dtype that an argument names, as JAX has it."""
    try:
        found = np.dtype(jax.dtypes.canonicalize_dtype(value))  # type: ignore[arg-type, unused-ignore]
        if jnp.issubdtype(found, jnp.number) or jnp.issubdtype(found, jnp.bool_):
            return found
    except (TypeError, ValueError, AttributeError):
        pass
    raise InvalidTypeError(f"`{name}` (={value!r}) must be a dtype of numbers, as jnp.float32.")


def is_integer(value: Any, least: int | None = None) -> bool:
    """Whether it is an integer, Python's or numpy's, that is not below `least`; True is none."""
    return (
        isinstance(value, int | np.integer) and not isinstance(value, bool) and (least is None or bool(value >= least))
    )


def is_real(value: Any) -> bool:
    """Whether it is a real number, Python's or numpy's; True is none, and neither is a NaN."""
    return not isinstance(value, bool) and isinstance(value, Real) and bool(value == value)


def checked_weights(name: str, value: Any, each: str, *, or_one: bool = False) -> Any:
    """The argument `name`, a sequence of real numbers (or one number, with `or_one`), as floats that can be compared.

    `each` says of what there is one number each.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        raise InvalidTypeError(
            f"`{name}` (={value!r}) must be concrete numbers, but is traced; make them outside of jit."
        )
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):  # ragged, say
        found = np.asarray(None)
    is_number = jnp.issubdtype(found.dtype, jnp.integer) or jnp.issubdtype(found.dtype, jnp.floating)
    numbers = found.astype(float) if is_number else np.full(1, np.nan)
    if numbers.ndim > 1 or (numbers.ndim == 0 and not or_one) or np.isnan(numbers).any():
        kind = f"{'a real number, or ' * or_one}a sequence of real numbers, one for each {each}"
        raise InvalidTypeError(f"`{name}` (={value!r}) must be {kind}.")
    return tuple(numbers.tolist()) if numbers.ndim else float(numbers)


def check_number(name: str, value: Any) -> None:
    """Refuse what is no real number: a Python one, or a scalar array."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return
    dtype = getattr(value, "dtype", None)
    real = dtype is not None and jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    if not real or value.shape != ():
        raise InvalidTypeError(f"`{name}` (={value!r}) must be a real number, or a scalar array of one.")


def check_not_negative(name: str, value: Any) -> None:
    """Refuse what is no real number, or one below 0, or NaN; what is traced may be any number."""
    check_number(name, value)
    if not isinstance(value, Tracer) and not bool(value >= 0):
        raise InvalidArgumentError(f"`{name}` (={value!r}) must not be negative, nor NaN.")


def check_numbers(name: str, values: Sequence[Any], places: Sequence[int] | None = None) -> None:
    """Refuse arguments (those at `places`) that are not pytrees of arrays and numbers."""
    for place in range(len(values)) if places is None else places:
        for path, leaf in jax.tree.leaves_with_path(values[place]):
            if not (isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")):
                at = f"{name}[{place}]{jax.tree_util.keystr(path)}"
                raise InvalidTypeError(f"`{name}` must hold arrays or numbers, but {at} is {leaf!r}.")
