"""Checks of public functions' arguments.

Checks of arrays import numpy and JAX when called, so that the plans, which check integers, don't need them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import BoundArguments, Signature, signature
from itertools import chain, repeat
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.text import brief, quoted

if TYPE_CHECKING:
    import numpy as np

Sizes = int | Sequence[int]
MOST_WORKERS: Final = 2**24
"""Plans name workers one by one; this many take 2 GB."""
MOST_ALONG: Final = 2**27
"""The longest output for which a plan lists the inputs of each entry; this many take 10 GB."""
Padding = int | str | Sequence[int | tuple[int, int]]


def bound_arguments(
    function: str, signature: Signature, args: Sequence[Any], options: Mapping[str, Any]
) -> BoundArguments:
    """Return a call's arguments by name; reject names that the function called `function` doesn't have."""
    try:
        return signature.bind(*args, **options)
    except TypeError as error:  # names neither the function nor its arguments
        reason = str(error)
    names = list(signature.parameters)
    listed = f"{', '.join(f'`{name}`' for name in names[:-1])} and `{names[-1]}`"
    if wrong := [name for name in options if name not in names]:
        near = "".join(f" Did you mean `{name}`?" for name in get_close_matches(wrong[0], names, 1))
        raise InvalidTypeError(f"{function} has no argument `{wrong[0]}`.{near} It takes {listed}.")
    raise InvalidTypeError(f"{function} takes {listed}, but was called otherwise: {reason}.")


def check_function(name: str, value: Any) -> None:
    """Reject a value that can't be called."""
    if not callable(value):
        raise InvalidTypeError(f"`{name}` (={quoted(value)}) must be a function.")


def checked_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return the argument `name` as an int not below `least`, nor above `most`; True is not an integer."""
    try:
        number = _integer(value)
    except TypeError:
        raise InvalidTypeError(f"`{name}` (={quoted(value)}) must be an integer.") from None
    if least is not None and number < least:
        raise InvalidArgumentError(f"`{name}` (={quoted(number)}) must be {least} or more.")
    if most is not None and number > most:
        raise InvalidArgumentError(f"`{name}` (={quoted(number)}) must be at most {most}.")
    return number


def check_length(name: str, value: Any, length: int) -> None:
    """Reject the argument `name` if it gives a tensor too large a `length` along a dimension for planning."""
    if length > MOST_ALONG:
        raise InvalidArgumentError(
            f"`{name}` (={quoted(value)}) makes a dimension {length} long, but at most {MOST_ALONG} can be planned."
        )


def checked_integers(name: str, values: Any, *, or_one: bool = False) -> tuple[int, ...]:
    """Return the argument `name`, a sequence of integers (or one integer, with `or_one`), as a tuple."""
    if isinstance(values, range) and len(values) > MOST_WORKERS:
        raise InvalidArgumentError(f"`{name}` (={quoted(values)}) must be at most {MOST_WORKERS} integers.")
    try:
        return tuple(map(_integer, (values,) if or_one and not isinstance(values, Iterable) else values))
    except TypeError:
        kind = f"{'an integer or ' * or_one}a sequence of integers"
        raise InvalidTypeError(f"`{name}` (={quoted(values)}) must be {kind}.") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def python_integers(value: Any) -> Any:
    """Return numpy's integers, and JAX's if they are concrete, as Python's, including in tuples and lists."""
    if type(value) in (tuple, list):
        return type(value)(map(python_integers, value))
    if getattr(getattr(value, "dtype", None), "kind", None) in ("i", "u") and not value.shape and not is_traced(value):
        return operator.index(value)
    return value


def python_value(name: str, value: Any, flag: bool) -> Any:
    """Return the argument `name`, a truth value if it is a flag, otherwise with Python's integers for numpy's."""
    return checked_boolean(name, value) if flag else python_integers(value)


def is_flag(annotation: Any) -> bool:
    """Return whether an argument with this annotation must be a truth value."""
    return annotation in (bool, "bool")


def accepting_numpy(init: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor `init`, whose arguments are converted by `python_value` first."""
    parameters = list(signature(init).parameters.values())[1:]
    flags = {parameter.name for parameter in parameters if is_flag(parameter.annotation)}
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @wraps(init)
    def converted(self: Any, *args: Any, **options: Any) -> None:
        placed = zip(chain(names, repeat("")), args, strict=False)  # further ones belong to `*layers`
        given = [python_value(name, value, name in flags) for name, value in placed]
        init(self, *given, **{name: python_value(name, value, name in flags) for name, value in options.items()})

    return converted


def checked_boolean(name: str, value: Any) -> bool:
    """Return the argument `name`, a bool or one of the integers 0 and 1, as a bool.

    Scalar arrays of numpy and JAX are accepted, unless they are traced.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if isinstance(value, int) or (kind in ("b", "i", "u") and value.shape == ()):
        try:
            if (truth := bool(value)) == value:
                return truth
        except TypeError:  # JAX's, of a tracer
            raise InvalidTypeError(
                f"`{name}` (={quoted(value)}) must be True or False, but is traced; it must be known while tracing: "
                "make it a static argument of the jit."
            ) from None
    raise InvalidTypeError(f"`{name}` (={quoted(value)}) must be True or False.")


def checked_booleans(name: str, values: Any) -> tuple[bool, ...]:
    """Return the argument `name`, a sequence of truth values as for `checked_boolean`, as a tuple of bools."""
    try:
        given = tuple(values)
    except TypeError:
        raise InvalidTypeError(f"`{name}` (={quoted(values)}) must be a sequence of booleans.") from None
    return tuple(checked_boolean(f"{name}[{place}]", value) for place, value in enumerate(given))


def checked_axes(name: str, axes: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the argument `name`, dimensions of a partition of `shape`, ascending; negative ones count from the end."""
    axes = checked_integers(name, axes, or_one=True)
    if wrong := [axis for axis in axes if not -len(shape) <= axis < len(shape)]:
        extents = " x ".join(map(str, shape)) or "()"
        raise InvalidArgumentError(
            f"`{name}` (={axes}) names dimension {wrong[0]}, but the partition (shape {extents}) has dimensions 0 to "
            f"{len(shape) - 1}."
        )
    positive = [axis % len(shape) for axis in axes]
    if len(set(positive)) < len(positive):
        raise InvalidArgumentError(f"`{name}` (={axes}) names a dimension twice; name each at most once.")
    return tuple(sorted(positive))


def checked_axis(name: str, axis: object, shape: tuple[int, ...]) -> int:
    """Return the argument `name`, one dimension of a partition of `shape`; a negative one counts from the end."""
    return checked_axes(name, checked_integer(name, axis), shape)[0]


def is_integer(value: Any, least: int | None = None) -> bool:
    """Return whether `value` is an integer, Python's or numpy's, not below `least`; True is not an integer."""
    is_one = isinstance(value, Integral) and not isinstance(value, bool)
    return is_one and (least is None or bool(value >= least))


def is_real(value: Any) -> bool:
    """Return whether `value` is a real number, Python's or numpy's, except True and NaN."""
    return not isinstance(value, bool) and isinstance(value, Real) and bool(value == value)


def check_number(name: str, value: Any) -> None:
    """Reject a value that is neither a real Python number nor a scalar array of one."""
    import jax.numpy as jnp

    if isinstance(value, int | float) and not isinstance(value, bool):
        return
    dtype = getattr(value, "dtype", None)
    real = dtype is not None and jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    if not real or value.shape != ():
        raise InvalidTypeError(f"`{name}` (={quoted(value)}) must be a real number, or a scalar array of one.")


def check_not_negative(name: str, value: Any) -> None:
    """Reject a value that is not a real number, is below 0 or NaN; a traced one may be any number."""
    check_number(name, value)
    if not is_traced(value) and not bool(value >= 0):
        raise InvalidArgumentError(f"`{name}` (={quoted(value)}) must not be negative, nor NaN.")


def is_traced(value: Any) -> bool:
    """Return whether JAX traces `value`, so that its number is not known."""
    from jax.core import Tracer

    return isinstance(value, Tracer)


def check_numbers(name: str, values: Sequence[Any], places: Sequence[int] | None = None) -> None:
    """Reject arguments (the ones at `places`) that are not pytrees of arrays and numbers."""
    import jax

    for place in range(len(values)) if places is None else places:
        for path, leaf in jax.tree.leaves_with_path(values[place]):
            if not (isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")):
                at = f"{name}[{place}]{jax.tree_util.keystr(path)}"
                raise InvalidTypeError(f"`{name}` must hold arrays or numbers, but {at} is {quoted(leaf)}.")


def checked_weights(name: str, value: Any, each: str, *, or_one: bool = False) -> Any:
    """Return the argument `name`, a sequence of real numbers (or one number, with `or_one`), as hashable floats.

    `each`: the object with one number each, for messages.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    if any(map(is_traced, jax.tree.leaves(value))):
        raise InvalidTypeError(
            f"`{name}` (={quoted(value)}) must be concrete numbers, but is traced; make them outside of jit."
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # e.g. ragged
        array = np.asarray(None)
    is_number = jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
    numbers = array.astype(float) if is_number else np.full(1, np.nan)
    if numbers.ndim > 1 or (numbers.ndim == 0 and not or_one) or np.isnan(numbers).any():
        kind = f"{'a real number, or ' * or_one}a sequence of real numbers, one for each {each}"
        raise InvalidTypeError(f"`{name}` (={quoted(value)}) must be {kind}.")
    return tuple(numbers.tolist()) if numbers.ndim else float(numbers)


def checked_dtype(name: str, value: Any) -> np.dtype:
    """Return the dtype that the argument `name` denotes, as JAX has it."""
    import jax
    import numpy as np

    try:
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(value))
        if is_numeric(dtype):
            return dtype
    except (TypeError, ValueError, AttributeError):
        pass
    raise InvalidTypeError(f"`{name}` (={quoted(value)}) must be a dtype of numbers, such as jnp.float32.")


def is_numeric(dtype: Any) -> bool:
    """Return whether `dtype` is a dtype of numbers or truth values, but not another library's."""
    import jax.numpy as jnp

    try:
        return bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))
    except TypeError:
        return False


def check_key(name: str, value: Any) -> None:
    """Reject a value that is not a single JAX random key, new or old."""
    import jax

    dtype = getattr(value, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        if not value.shape:
            return
        raise InvalidArgumentError(f"`{name}` (of shape {value.shape}) must be one random key, not several.")
    if dtype != "uint32" or getattr(value, "ndim", None) != 1:
        raise InvalidTypeError(f"`{name}` (={quoted(value)}) must be a random key, such as jax.random.key(0).")


def difference(what: str, values: Mapping[int, Hashable]) -> str | None:
    """Return a sentence if `what` is not the same on all workers, whose values are given by rank; None if it is."""
    usual, count = Counter(values.values()).most_common(1)[0]
    for worker, value in sorted(values.items()):
        if value != usual:
            first = min(rank for rank, value in values.items() if value == usual)
            where = f"worker {first}" if count == 1 else f"{count} of {len(values)} workers"
            return (
                f"All workers must have the same {what}, but it is {brief(str(usual))} on {where} and "
                f"{brief(str(value))} on worker {worker}."
            )
    return None


def check_same(arguments: Mapping[int, Mapping[str, Hashable]]) -> None:
    """Reject arguments, by worker and name, that are not the same on all workers."""
    (first, *_) = arguments.values()
    for name in first:
        if text := difference(f"`{name}`", {worker: given[name] for worker, given in arguments.items()}):
            raise PlanError(text)


def per_feature(name: str, value: Any, dims: int) -> tuple[int, ...]:
    """Return one integer, 1 or more, for each of `dims` feature dimensions, from one for all or a sequence."""
    values = tuple(value) if isinstance(value, Iterable) else (value,) * dims
    if len(values) != dims or not all(is_integer(v, least=1) for v in values):
        raise InvalidArgumentError(f"`{name}` (={quoted(value)}) must be an integer, 1 or more, or {dims} of them.")
    return tuple(map(int, values))


def padding_pairs(padding: Any, dims: int) -> tuple[tuple[int, int], ...]:
    """Return the (low, high) padding of each of `dims` feature dimensions, from integers or pairs of integers."""
    entries = padding if isinstance(padding, Iterable) else (padding,) * dims
    pairs = [tuple(entry) if isinstance(entry, Iterable) else (entry, entry) for entry in entries]
    if len(pairs) == dims and all(len(pair) == 2 and all(is_integer(p, least=0) for p in pair) for pair in pairs):
        return tuple((int(low), int(high)) for low, high in pairs)
    raise InvalidArgumentError(
        f"`padding` (={quoted(padding)}) must be 'same', 'valid', an integer of 0 or more, or for each of {dims} "
        "feature dimensions an integer or a pair (low, high)."
    )
