"""The leaves of pytrees that vary in a directional derivative, and their tangents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.tracing.adjoint_order import is_inexact
from distdl_jax.validation import check_numbers


@dataclass(frozen=True)
class Varying:
    """The floating and complex leaves of a pytree, which have derivatives, separated from the others.

    - `like`: the pytree whose leaves determine which ones these are. Default: `tree` itself.
    """

    tree: Any
    like: Any = None

    @property
    def leaves(self) -> list[Array]:
        """The leaves that have derivatives."""
        like = self.tree if self.like is None else self.like
        pairs = zip(jax.tree.leaves(self.tree), jax.tree.leaves(like), strict=True)
        return [jnp.asarray(leaf) for leaf, other in pairs if is_inexact(other)]

    def filled(self, leaves: Sequence[Array]) -> Any:
        """Return the pytree with other leaves in place of the varying ones."""
        rest = iter(leaves)
        return jax.tree.map(lambda leaf: next(rest) if is_inexact(leaf) else leaf, self.tree)

    def tangent(self, leaves: Sequence[Array]) -> Any:
        """Return the pytree with `leaves`, and empty tangents in place of leaves without a derivative."""
        rest = iter(leaves)
        return jax.tree.map(
            lambda leaf: next(rest) if is_inexact(leaf) else np.zeros(jnp.shape(leaf), jax.dtypes.float0),
            self.tree,
        )


def check_tangents(primals: Any, tangents: Any) -> None:
    """Reject `primals` that are not a point, and `tangents` that are not a direction there."""
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise InvalidTypeError(f"`{name}` must be a tuple or a list of arguments, but is {described(given)}.")
    check_numbers("primals", tuple(primals))
    expected = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            jnp.shape(leaf), jnp.result_type(leaf) if is_inexact(leaf) else jax.dtypes.float0
        ),
        tuple(primals),
    )
    check_alike("`tangents`", tuple(tangents), expected)


def check_alike(name: str, given: Any, expected: Any) -> None:
    """Reject a pytree without the structure, shapes and dtypes of another."""
    found: Any = jax.tree.structure(given)
    wanted: Any = jax.tree.structure(expected)
    if found != wanted:
        raise InvalidTypeError(f"{name} must have the structure {wanted}, but has {found}.")
    for (path, leaf), like in zip(jax.tree.leaves_with_path(given), jax.tree.leaves(expected), strict=True):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        but = f" at {jax.tree_util.keystr(path) or 'its top'}, but has {described(leaf)} there."
        if jnp.shape(leaf) != like.shape:
            raise InvalidArgumentError(f"{name} must hold an array of shape {like.shape}{but}")
        if dtype != like.dtype:
            raise InvalidTypeError(f"{name} must hold {like.dtype}{but}")


def described(leaf: Any) -> str:
    """Return a leaf's name for errors."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"an array of shape {tuple(leaf.shape)} and dtype {leaf.dtype}"
    return repr(leaf)
