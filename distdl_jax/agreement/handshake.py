"""The trace-time exchange: what each worker holds, told to the workers that are to receive it.

A worker outside the source partition knows neither the shape nor the dtype of what it will get. While a program is
traced, the workers of an operation tell each other over a control communicator; the compiled program has it built in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import DistDLError, InvalidTypeError
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.world import Workers, World

T = TypeVar("T")
U = TypeVar("U")


def shape_dtype_of(name: str, x: Any) -> ShapeDtype:
    """The shape and dtype of an argument that must be an array."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise InvalidTypeError(
            f"`{name}` (={x!r}) must be an array; a worker that holds no part of it passes zero_volume_tensor()."
        )
    try:
        dtype = np.dtype(jnp.result_type(x.dtype))
    except TypeError:
        is_key = isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        advice = "; give jax.random.key_data of random keys, and wrap what comes." if is_key else "."
        raise InvalidTypeError(f"`{name}` (of dtype {x.dtype}) must be an array of numbers{advice}") from None
    return ShapeDtype(tuple(x.shape), sendable_dtype(name, dtype))


def sendable_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """The dtype of an argument, which a message can be of; else raises `InvalidTypeError`."""
    if (bits := jax.dtypes.itemsize_bits(dtype)) < 8:
        raise InvalidTypeError(
            f"`{name}` (of dtype {dtype}) must be of a dtype of whole bytes, as messages are, not of {bits} bits. One "
            "of 8 bits holds the same numbers."
        )
    return dtype


def handshake(world: World, team: Workers, purpose: str, contribute: Callable[[], T]) -> dict[int, T]:
    """Each worker's contribution, by world rank; collective in `team` (world ranks, the same order on all).

    `purpose` says, in the same words on all workers, what it is for. Where `contribute` raises on some worker, all
    workers of the team raise, so that none waits for another for ever.
    """
    return concluded(world, team, purpose, contribute, lambda _: None)[0]


def concluded(
    world: World, team: Workers, purpose: str, contribute: Callable[[], T], conclude: Callable[[dict[int, T]], U]
) -> tuple[dict[int, T], U]:
    """The same, and what the team's first worker makes of it, which goes to all; `conclude` must not raise."""

    def decide(everyone: dict[int, Any]) -> tuple[dict[int, Any], Any]:
        failed = any(isinstance(theirs, DistDLError) for theirs in everyone.values())
        return everyone, None if failed else conclude(everyone)

    mine: T | DistDLError
    try:
        mine = contribute()
    except DistDLError as error:
        mine = error
    told: tuple[dict[int, Any], Any]
    told = world.agree(team, purpose, mine, decide) if len(team) > 1 else decide({world.rank: mine})
    everyone, conclusion = told
    for worker in team:
        if isinstance(theirs := everyone[worker], DistDLError):
            raise theirs if worker == world.rank else type(theirs)(f"On worker {worker}: {theirs}")
    return everyone, conclusion


def exchange_shape_dtypes(world: World, team: Workers, purpose: str, name: str, x: Array) -> dict[int, ShapeDtype]:
    """The shape and dtype of `x` on every worker of `team`, by world rank."""
    return handshake(world, team, purpose, lambda: shape_dtype_of(name, x))
