"""Agreements of workers while they trace a program: on shapes, dtypes, choices; if one raises, all do.

They use a control communicator. The results are built into the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import DistDLError, InvalidTypeError, PlanError
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.context import trace_context
from distdl_jax.transports.world import Workers, World

T = TypeVar("T")


class MovesDataError(PlanError):
    """A function of whole arrays moves data itself."""

    @classmethod
    def by(cls, what: str) -> MovesDataError:
        """Return the error for a function that calls `what`."""
        return cls(
            f"A function of whole arrays is written for a single process, but this one calls {what} of distdl_jax, "
            "which communicates. Call it outside of dj.distribute, or use JAX's own functions: on whole arrays, which "
            "dj.distribute divides itself."
        )


class _Failed(NamedTuple):
    """The decision of a team of which a worker raised."""

    error: DistDLError


def agree(
    world: World,
    team: Workers,
    what: str,
    contribute: Callable[[], T],
    decide: Callable[[dict[int, T]], Any] = dict,
) -> Any:
    """Return the first worker's decision on all contributions of `team`, by world rank; default: all of them.

    Collective in `team` (world ranks, in the same order on all workers), for use while tracing. `what` is the subject
    of the agreement, with the same text on all workers: it holds all plain arguments of a function or layer, so that
    workers with different ones find that out, and raise. If `contribute` raises a `DistDLError` on some worker, all
    workers of the team raise it, so that none waits for ever. `decide` must not raise.

    `world.agree` is the layer below: it handles contributions that can't raise.
    """
    if trace_context.whole_program:
        raise MovesDataError.by(f"`{what.split('(')[0].split(' ')[0]}`")
    if world.records:
        return world.known(what, contribute())  # type: ignore[attr-defined]
    value: T | DistDLError
    try:
        value = contribute()
    except DistDLError as error:
        value = error

    def decide_unless_failed(values: dict[int, Any]) -> Any:
        if failures := {worker: values[worker] for worker in team if isinstance(values[worker], DistDLError)}:
            return _failed(failures, len(values))
        return decide(values)

    decision = (
        world.agree(team, what, value, decide_unless_failed)
        if len(team) > 1
        else decide_unless_failed({world.rank: value})
    )
    if isinstance(decision, _Failed):
        failure = decision.error
        if type(value) is type(failure) and str(failure).endswith(str(value)):
            value.args = failure.args  # the same sentence on all, and this worker's own lines
            raise value
        raise failure
    return decision


def _failed(failures: Mapping[int, DistDLError], workers: int) -> _Failed:
    """Return the error that all raise, the same sentence on all: the first one's, with its worker, unless all are
    equal."""
    worker, first = next(iter(failures.items()))
    if len(failures) == workers and len({(type(error), str(error)) for error in failures.values()}) == 1:
        return _Failed(first)
    return _Failed(type(first)(f"On worker {worker}: {first}"))


# --- shapes and dtypes ------------------------------------------------------------------------------------------------


def exchange_shapes(world: World, team: Workers, what: str, x: Array) -> dict[int, ShapeDtype]:
    """Return the shape and dtype of `x` on every worker of `team`, by world rank."""
    shapes: dict[int, ShapeDtype] = agree(world, team, what, lambda: shape_dtype_of("x", x))
    return shapes


def exchange_named_shapes(
    world: World, team: Workers, what: str, arrays: Mapping[str, Any]
) -> dict[int, dict[str, ShapeDtype]]:
    """Return the shape and dtype of each of `arrays` on every worker of `team`, by world rank and name."""
    shapes: dict[int, dict[str, ShapeDtype]]
    shapes = agree(world, team, what, lambda: {name: shape_dtype_of(name, x) for name, x in arrays.items()})
    return shapes


def shape_dtype_of(name: str, x: Any) -> ShapeDtype:
    """Return the shape and dtype of the argument `name`, which must be an array."""
    if not is_array(x):
        text = repr(x)
        text = text if len(text) <= 80 else structure_text(x)
        raise InvalidTypeError(
            f"`{name}` (={text}) must be an array; a worker without a part of it passes zero_volume_tensor()."
        )
    try:
        dtype = np.dtype(jnp.result_type(x.dtype))
    except TypeError:
        is_key = isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        advice = "; for random keys, pass jax.random.key_data, and wrap the result." if is_key else "."
        raise InvalidTypeError(f"`{name}` (of dtype {x.dtype}) must be an array of numbers{advice}") from None
    return ShapeDtype(tuple(x.shape), sendable_dtype(name, dtype))


def is_array(value: Any) -> bool:
    """Return whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def structure_text(tree: Any) -> str:
    """Describe a value in the place of an array, or of a tree, without its numbers.

    >>> structure_text({"a": 1}), structure_text((1, 2)), structure_text(np.ones((2, 3), np.float32))
    ("a dictionary of ['a']", 'a tuple of 2', 'float32[2, 3]')
    """
    if is_array(tree):
        return str(ShapeDtype(tuple(tree.shape), np.dtype(tree.dtype)))
    if isinstance(tree, Mapping):
        return f"a dictionary of {[*tree][:8]}"
    if isinstance(tree, tuple | list):
        return f"a {type(tree).__name__} of {len(tree)}"
    return repr(tree)[:80]


def sendable_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return `dtype`, the dtype of the argument `name`; reject one of less than a byte, which messages can't carry."""
    if (bits := jax.dtypes.itemsize_bits(dtype)) < 8:
        raise InvalidTypeError(
            f"`{name}` (of dtype {dtype}) must have a dtype of whole bytes, like messages, not of {bits} bits. An "
            "8-bit one holds the same numbers."
        )
    return dtype
