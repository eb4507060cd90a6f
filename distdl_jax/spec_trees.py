"""Pytrees of specs: checked, and brought together with the leaves of the tree that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from jax.tree_util import keystr

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.tensors import TensorSpec

Path = tuple[Any, ...]
P = TypeVar("P")


class Leaf(NamedTuple):
    """A leaf of a tree: its path, as `jax.tree_util.keystr` writes it, its value, and its spec; None where `specs`
    leaves it out."""

    path: str
    value: Any
    spec: TensorSpec | None


def is_spec(spec: Any) -> bool:
    """Return whether it is a leaf of a pytree of specs: a `TensorSpec`, or None."""
    return spec is None or isinstance(spec, TensorSpec)


def specs_by_path(specs: Any, name: str = "specs") -> dict[Path, TensorSpec | None]:
    """Return the leaves of a pytree of specs, the argument `name`, by their paths.

    **Raises:** `InvalidTypeError` where one is neither a spec nor None.
    """
    found = dict(jax.tree.leaves_with_path(specs, is_leaf=is_spec))
    for path, spec in found.items():
        if not is_spec(spec):
            raise InvalidTypeError(
                f"`{name}{keystr(path)}` (={spec!r}) must be a TensorSpec, or None for what is to be left as it is."
            )
    return found


def match(paths: Iterable[P], specs: Mapping[P, TensorSpec | None]) -> tuple[dict[P, P], list[P]]:
    """Return, by the path of a leaf, the path of its spec, its own or one above it; and the TensorSpecs of no leaf.

    A leaf that is not in the first has no spec. Paths are those of JAX, or what `keystr` makes of them.

    >>> match(["['a']", ".b[0]", ".b[1]", ".by"], {"['a']": None, ".b": None})
    ({"['a']": "['a']", '.b[0]': '.b', '.b[1]': '.b'}, [])
    """
    found = {path: its for path in paths for its in _and_above(path) if its in specs}
    used = set(found.values())
    return found, [path for path, spec in specs.items() if spec is not None and path not in used]


def leaves_with_specs(
    tree: Any, specs: Any, names: tuple[str, str] = ("tree", "specs"), masked: type | tuple[()] = ()
) -> list[Leaf]:
    """Return the leaves of `tree`, each with its spec; `specs` has the structure of `tree`, or that of a prefix.

    Every leaf has a spec or None, and every TensorSpec is of a leaf: what it is to describe would be left out in
    silence else. `names`: of the two arguments, for messages. A value of the type `masked` is left out, on purpose.

    **Raises:** `InvalidArgumentError` where that is not so, `InvalidTypeError` where a leaf of `specs` is no spec.
    """
    by_path = specs_by_path(specs, names[1])
    values = jax.tree.leaves_with_path(tree, is_leaf=lambda value: isinstance(value, masked))
    found, unused = match((path for path, _ in values), by_path)
    left_out: dict[Path, None] = {path: None for path, value in values if isinstance(value, masked)}
    values = [(path, value) for path, value in values if path not in left_out]
    below, _ = match(unused, left_out)
    problem = None
    if without := [path for path, _ in values if path not in found]:
        problem = f"has none for `{names[0]}{keystr(without[0])}`."
    elif unused := [path for path in unused if path not in below]:
        problem = (
            f"`{names[1]}{keystr(unused[0])}` is a TensorSpec, and `{names[0]}` has no leaf there (None and empty "
            "containers are none). None in its place leaves it out."
        )
    if problem:
        raise InvalidArgumentError(
            f"`{names[1]}` must have the structure of `{names[0]}`, with a TensorSpec or None for each leaf or "
            f"subtree, but {problem}"
        )
    return [Leaf(keystr(path), value, by_path[found[path]]) for path, value in values]


def _and_above(path: Any) -> list[Any]:
    """Return the path of a leaf, and those of the containers that it is in."""
    return [path, *(path[:n] for n, its in enumerate(path) if not isinstance(its, str) or its in "[.")]
