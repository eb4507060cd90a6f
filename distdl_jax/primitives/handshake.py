"""The trace-time exchange: what each worker holds, told to the workers that are to receive it.

A worker outside the source partition knows neither the shape nor the dtype of what it will get. While a program is
traced, the workers of an operation tell each other over a control communicator; the compiled program has it built in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.backends.base import Workers, World
from distdl_jax.errors import DistDLError, InvalidTypeError, PlanError
from distdl_jax.plans.shape_dtype import ShapeDtype

T = TypeVar("T")


def shape_dtype_of(name: str, x: Any) -> ShapeDtype:
    """The structure of an argument that must be an array."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise InvalidTypeError(
            f"`{name}` (={x!r}) must be an array; a worker that holds no part of it passes zero_volume_tensor()."
        )
    return ShapeDtype(tuple(x.shape), np.dtype(jnp.result_type(x.dtype)))


def handshake(world: World, team: Workers, purpose: str, contribute: Callable[[], T]) -> dict[int, T]:
    """Each worker's contribution, by world rank; collective in `team` (world ranks, the same order on all).

    `purpose` says, in the same words on all workers, what it is for. Where `contribute` raises on some worker, all
    workers of the team raise, so that none waits for another for ever.
    """
    mine: T | DistDLError
    try:
        mine = contribute()
    except DistDLError as error:
        mine = error
    everyone: dict[int, Any] = world.agree(team, purpose, mine) if len(team) > 1 else {world.rank: mine}
    for worker in team:
        if isinstance(theirs := everyone[worker], DistDLError):
            raise theirs if worker == world.rank else type(theirs)(f"On worker {worker}: {theirs}")
    return everyone


def exchange_shape_dtypes(world: World, team: Workers, purpose: str, name: str, x: Array) -> dict[int, ShapeDtype]:
    """The structure of `x` on every worker of `team`, by world rank."""
    return handshake(world, team, purpose, lambda: shape_dtype_of(name, x))


def common_shape_dtype(name: str, structures: dict[int, ShapeDtype]) -> ShapeDtype:
    """The one structure that all of `structures` (by world rank) are; an error that lists them where they differ."""
    found = set(structures.values())
    if len(found) > 1:
        listed = ", ".join(f"{structure} on worker {worker}" for worker, structure in sorted(structures.items()))
        raise PlanError(f"`{name}` must have the same shape and dtype on all workers that are summed, but is {listed}.")
    return found.pop()


def checked_kinds(name: str, structures: dict[int, ShapeDtype], dtype: np.dtype) -> None:
    """Refuse a placeholder that carries no derivative where the data does, or the other way: JAX would differentiate
    on some workers only, and the job would hang."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    for worker, structure in sorted(structures.items()):
        if jnp.issubdtype(structure.dtype, jnp.inexact) != inexact:
            raise PlanError(
                f"`{name}` is {structure} on worker {worker}, but the data is {dtype}: on the workers that hold no "
                "part of it, pass a zero-volume tensor of the data's dtype (zero_volume_tensor(dtype=...))."
            )


def zero_volume_shape(shape: tuple[int, ...], preserve_batch: bool) -> tuple[int, ...]:
    """The shape of the placeholder for a subtensor of `shape`: empty, with the batch dimension kept if wanted."""
    return (shape[0], 0) if preserve_batch and shape else (0,)
