"""What a spec says of a whole value: VARIABLE, COPIES, PARTS, BLOCKS; and the specs of the leaves of pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from distdl_jax.distribute.layouts import Cut, Mesh, trimmed, uncut
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.text import quoted


@dataclass(frozen=True)
class Meaning:
    """What the copies of a value mean to a derivative that is taken outside of a distributed function.

    `meaning(spec)`: the same of the blocks of a `TensorSpec` with copies.
    """

    name: str
    spec: TensorSpec | None = None

    def __call__(self, spec: TensorSpec) -> Meaning:
        """Return the meaning of the copies of the blocks of `spec`."""
        if self.name not in ("VARIABLE", "COPIES"):
            raise InvalidTypeError(f"`dj.{self.name}` takes no spec.")
        if not isinstance(spec, TensorSpec):
            raise InvalidTypeError(f"`spec` (={quoted(spec)}) must be a TensorSpec.")
        return Meaning(self.name, spec)

    def __repr__(self) -> str:
        return f"dj.{self.name}" + (f"({self.spec!r})" if self.spec else "")


VARIABLE = Meaning("VARIABLE")
"""As the spec of an argument of `dj.distribute`: one variable, of which all workers have copies, such as a parameter.

A derivative from outside is the sum over the copies, the same on all workers.
"""
COPIES = Meaning("COPIES")
"""As a spec of `dj.distribute`: a whole value that all workers have, computed from other workers' data.

A derivative from outside is, or takes, each copy's own term.
"""
PARTS = Meaning("PARTS")
"""As the spec of a result of `dj.distribute`: this worker's term of a value, which is the sum of the terms: a loss."""
BLOCKS = Meaning("BLOCKS")
"""As the spec of a result of `dj.distribute`: this worker's block, cut as it falls; `f.output_specs` says how."""

Spec = TensorSpec | Meaning | None
_OF_ARGUMENTS, _OF_RESULTS = (None, VARIABLE, COPIES), (None, PARTS, COPIES, BLOCKS)


def is_spec(value: Any) -> bool:
    """Say whether a node of a tree of specs is a spec."""
    return value is None or isinstance(value, TensorSpec | Meaning)


def check_specs(name: str, specs: Any) -> None:
    """Reject a tree that holds anything but specs, or meanings that an argument, or a result, can't have."""
    accepted = _OF_ARGUMENTS if name == "in_specs" else _OF_RESULTS
    words = "a TensorSpec, None, " + ", ".join(f"dj.{meaning.name}" for meaning in accepted if meaning)
    for path, spec in jax.tree.leaves_with_path(specs, is_leaf=is_spec):
        if not is_spec(spec):
            raise InvalidTypeError(f"`{name}{jax.tree_util.keystr(path)}` (={quoted(spec)}) must be {words}.")
        if isinstance(spec, Meaning) and (spec.name not in [meaning.name for meaning in accepted if meaning]):
            raise InvalidArgumentError(f"`{name}{jax.tree_util.keystr(path)}` (={spec}) must be {words}.")


def per_leaf(name: str, specs: Any, tree: Any) -> list[Spec]:
    """Return the spec of each leaf of a tree; a spec in place of a subtree holds for all its leaves."""
    if is_spec(specs):
        return [specs] * len(jax.tree.leaves(tree))
    structure: PyTreeDef = jax.tree.structure(specs, is_leaf=is_spec)
    given: Sequence[Any] = jax.tree.leaves(specs, is_leaf=is_spec)
    try:
        parts = structure.flatten_up_to(tree)
    except ValueError as error:
        raise InvalidArgumentError(f"`{name}` must have the structure of what it describes: {error}") from None
    return [leaf for spec, part in zip(given, parts, strict=True) for leaf in per_leaf(name, spec, part)]


def spec_text(spec: Spec) -> str:
    """Return a spec as text, the same on all workers."""
    found = tensor_spec(spec)
    meaning = spec.name if isinstance(spec, Meaning) else ""
    return meaning if found is None else f"{meaning} {found.describe()}"


def tensor_spec(spec: Spec) -> TensorSpec | None:
    """Return the TensorSpec in a spec, if it has one."""
    return spec.spec if isinstance(spec, Meaning) else spec


def wanted_cut(mesh: Mesh, out: Any, spec: Spec) -> Cut | None:
    """Return the cut in which a result is given back, if that is known beforehand."""
    if spec is None:
        return uncut(out.shape)
    if not isinstance(spec, TensorSpec) or spec.global_shape != out.shape:
        return None
    return trimmed(mesh.raw_cut_of(spec), out.shape)
