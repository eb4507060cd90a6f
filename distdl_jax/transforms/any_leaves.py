"""Jitted functions of pytrees with leaves that aren't arrays, such as modules of Equinox with their activations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import update_wrapper
from typing import Any

import jax

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.text import quoted


@jax.tree_util.register_static
class Rest:
    """A pytree without its arrays: part of a compiled program's key, compared by equality."""

    def __init__(self, tree: Any, others: dict[int, Hashable]) -> None:
        self.tree, self.others = tree, others
        self._key = tree, tuple(others.items())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rest) and self._key == other._key

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Return the pytree with these arrays."""
        given = iter(arrays)
        leaves = [self.others[n] if n in self.others else next(given) for n in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, leaves)


def is_array(leaf: Any) -> bool:
    """Say whether a leaf is an array, or a number, which becomes one."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, bool | int | float | complex)


def split(name: str, tree: Any) -> tuple[list[Any], Rest]:
    """Return the arrays of a pytree, and the rest; reject other leaves that can't be part of a key."""
    paths_and_leaves, structure = jax.tree.flatten_with_path(tree)
    others: dict[int, Hashable] = {}
    for n, (path, leaf) in enumerate(paths_and_leaves):
        if is_array(leaf):
            continue
        try:
            hash(leaf)
        except TypeError:
            raise InvalidTypeError(
                f"`{name}{jax.tree_util.keystr(path)}` (={quoted(leaf)}) must be an array, or hashable: it is part of "
                "the compiled program's key."
            ) from None
        others[n] = leaf
    return [leaf for _, leaf in paths_and_leaves if is_array(leaf)], Rest(structure, others)


class JittedOfAnyLeaves:
    """A jitted function, `checked`, that takes leaves of any kind; made by `dj.jit` of a distributed function."""

    def __init__(self, fun: Callable[..., Any], checked: Any, jit: Callable[..., Any], options: dict[str, Any]) -> None:
        self._checked, self._options = checked, options

        def of_arrays(arrays: list[Any], rest: Rest) -> tuple[list[Any], Rest]:
            return split("the result", fun(*rest.joined(arrays)))

        self._of_arrays = jit(update_wrapper(of_arrays, fun, updated=()))
        update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's results."""
        if kwargs or all(map(is_array, jax.tree.leaves(args))):
            return self._checked(*args, **kwargs)
        if self._options:
            raise InvalidArgumentError(
                f"`options` ({', '.join(self._options)}) of dj.jit are of arguments, and can't be used where leaves of "
                "these are no arrays."
            )
        arrays, rest = self._of_arrays(*split("args", args))
        return rest.joined(arrays)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the traced program of these arguments, as `jax.jit`'s."""
        if kwargs or all(map(is_array, jax.tree.leaves(args))):
            return self._checked.trace(*args, **kwargs)
        return self._of_arrays.trace(*split("args", args))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._checked, name)

    def __repr__(self) -> str:
        return repr(self._checked)
