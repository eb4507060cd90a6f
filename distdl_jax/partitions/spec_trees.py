"""Pytrees of specs, and their pairing with the leaves of the trees that they describe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.tree_util import keystr

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.text import brief, quoted

Path = tuple[Any, ...]
P = TypeVar("P", bound=tuple[Any, ...] | str)


class Leaf(NamedTuple):
    """A leaf of a tree: its path, in the form of `jax.tree_util.keystr`, its value, its spec; None if `specs` omits
    it."""

    path: str
    value: Any
    spec: TensorSpec | None


def is_spec(spec: Any) -> bool:
    """Return whether it is a leaf of a pytree of specs: a `TensorSpec`, or None."""
    return spec is None or isinstance(spec, TensorSpec)


def specs_by_path(specs: Any, name: str = "specs") -> dict[Path, TensorSpec | None]:
    """Return the leaves of a pytree of specs, the argument `name`, by path.

    **Raises:** `InvalidTypeError` if one is neither a spec nor None, or a partition is given for all of them.
    """
    if isinstance(specs, Partition):  # a pytree without leaves for JAX, like those in a module's fields
        raise InvalidTypeError(
            f"`{name}` (={quoted(specs)}) must be a TensorSpec, or a pytree of them, but is a partition: "
            "TensorSpec(global_shape, P) describes a tensor on it."
        )
    leaves = dict(jax.tree.leaves_with_path(specs, is_leaf=is_spec))
    for path, spec in leaves.items():
        if not is_spec(spec):
            raise InvalidTypeError(
                f"`{name}{brief(keystr(path))}` (={quoted(spec)}) must be a TensorSpec, or None to leave the leaf "
                "unchanged."
            )
    return leaves


def like_specs(specs: Any, leaves: Iterable[Any]) -> Any:
    """Return a pytree with the structure of `specs` and these leaves."""
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def match(paths: Iterable[P], specs: Mapping[P, TensorSpec | None]) -> tuple[dict[P, P], list[P]]:
    """Return, by the leaf's path, the path of each leaf's spec, its own or one above; and TensorSpecs without a leaf.

    Leaves without a spec are omitted. Paths are JAX's, or their texts from `keystr`.

    >>> match(["['a']", ".b[0]", ".b[1]", ".by"], {"['a']": None, ".b": None})
    ({"['a']": "['a']", '.b[0]': '.b', '.b[1]': '.b'}, [])
    """
    lengths = {len(path) for path in specs}
    spec_paths = {path: above for path in paths for above in _and_above(path, lengths) if above in specs}
    used = set(spec_paths.values())
    return spec_paths, [path for path, spec in specs.items() if spec is not None and path not in used]


def leaves_with_specs(
    tree: Any, specs: Any, names: tuple[str, str] = ("tree", "specs"), masked: type | tuple[()] = ()
) -> list[Leaf]:
    """Return the leaves of `tree`, each with its spec; `specs` has the structure of `tree`, or of a prefix.

    Every leaf must have a spec or None, and every TensorSpec a leaf, so that nothing is omitted silently; None for a
    whole tree would omit everything. `names`: of the two arguments, for messages. Values of the type `masked` are
    omitted.

    **Raises:** `InvalidArgumentError` if that is violated, `InvalidTypeError` if a leaf of `specs` is not a spec.
    """
    by_path = specs_by_path(specs, names[1])
    values = jax.tree.leaves_with_path(tree, is_leaf=lambda value: isinstance(value, masked))
    spec_paths, unused = match((path for path, _ in values), by_path)
    left_out: dict[Path, None] = {path: None for path, value in values if isinstance(value, masked)}
    values = [(path, value) for path, value in values if path not in left_out]
    below, _ = match(unused, left_out)
    problem = None
    if specs is None and values:
        problem = f"is None. Omit the call if all of `{names[0]}` is to stay unchanged."
    elif without := [path for path, _ in values if path not in spec_paths]:
        problem = f"has none for `{names[0]}{brief(keystr(without[0]))}`."
    elif unused := [path for path in unused if path not in below]:
        problem = (
            f"`{names[1]}{brief(keystr(unused[0]))}` is a TensorSpec, but `{names[0]}` has no leaf there (None and "
            "empty containers are not leaves). None in its place omits it."
        )
    if problem:
        raise InvalidArgumentError(
            f"`{names[1]}` must have the structure of `{names[0]}`, with a TensorSpec or None for each leaf or "
            f"subtree, but {problem}"
        )
    return [Leaf(keystr(path), value, by_path[spec_paths[path]]) for path, value in values]


def _and_above(path: Any, lengths: Iterable[int]) -> Iterator[Any]:
    """Yield the path of a leaf, and the paths of the containers around it, of these lengths."""
    for n in lengths:  # not of all: a path from a file may be megabytes long
        if n == len(path) or (n < len(path) and (not isinstance(path[n], str) or path[n] in "[.")):
            yield path[:n]


def described(spec: TensorSpec) -> tuple[Any, ...]:
    """Describe a spec, with the same text on every worker."""
    return spec.global_shape, spec.partition.describe(), spec.replicated


def check_alike(trees: Mapping[int, Sequence[tuple[str, Any]]], name: str = "tree") -> None:
    """Reject trees that differ between workers, given by rank as the paths of the leaves and their described specs.

    **Raises:** `PlanError`, which names a leaf and two workers.
    """
    (first, expected), *others = sorted(trees.items())
    for worker, tree in others:
        here, there = dict(expected), dict(tree)
        if [*tree] == [*expected]:
            continue
        path = [*(path for path in (*here, *there) if here.get(path, "") != there.get(path, "")), *here][0]
        texts = [
            f"missing from `{name}`" if path not in specs else f"of the spec {specs[path]}" if specs[path] else "there"
            for specs in (here, there)
        ]
        raise PlanError(
            f"`{name}` must have the same leaves with the same specs on all workers (zero-volume arrays where a worker "
            f"holds nothing), but `{name}{brief(path)}` is {texts[0]} on worker {first} and {texts[1]} on worker "
            f"{worker}."
        )


def check_shape(name: str, shape: tuple[int, ...], spec: TensorSpec, expected: tuple[int, ...], on: str = "") -> None:
    """Reject an array without the shape of its spec; `on`: the worker that has it, for messages."""
    if shape != expected:
        copies = f", replicated along {spec.replicated}" if spec.replicated else ""
        raise PlanError(
            f"{on}`{name}` has shape {shape}, but its spec ({shape_text(spec.global_shape)} on "
            f"{shape_text(spec.partition.shape)} workers{copies}) gives {expected} on this worker."
        )


def masked_places(**trees: Any) -> tuple[str, ...]:
    """Return the paths in `trees`, such as an optimiser's state, of the leaves that an optax mask has omitted."""
    masked = getattr(sys.modules.get("optax"), "MaskedNode", None)
    if masked is None:
        return ()
    return tuple(
        f"{name}{keystr(path)}"
        for name, tree in trees.items()
        for path, value in jax.tree.leaves_with_path(tree, is_leaf=lambda value: isinstance(value, masked))
        if isinstance(value, masked)
    )


def different_masks(places: Mapping[int, Sequence[str]]) -> str | None:
    """Return an error if masks, given by rank as in `masked_places`, differ between workers; None if they are equal."""
    (first, expected), *others = sorted(places.items())
    for worker, found in others:
        if different := sorted({*expected} ^ {*found}):
            has, lacks = (worker, first) if different[0] in found else (first, worker)
            return (
                f"`{different[0]}` is masked on worker {has}, but not on worker {lacks}. A mask that inspects this "
                "worker's arrays differs, since a placeholder has one dimension. Make it from the specs: "
                "jax.tree.map(lambda spec: len(spec.global_shape) > 1, specs)."
            )
    return None
