"""What is to be saved: agreed on by all workers, and which of it this worker writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.layout import Form, volume
from distdl_jax.checkpoint.leaves import Held, agreed_form, held_leaves
from distdl_jax.checkpoint.tensor_file import dtype_named
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.plans.decomposition import Box
from distdl_jax.spec_trees import check_alike, described
from distdl_jax.world import World

Leaves = tuple[tuple[str, Form], ...]
"""The leaves of a tree: their paths, and what they are made of."""

Placeholders = Mapping[int, tuple[int, ...]]
"""The shapes of a worker's placeholders, by the number of the leaf; those that are not here are `(0,)`."""


class Own(NamedTuple):
    """What this worker writes of one leaf: which leaf, its box, its form, and what brings its block to the host."""

    leaf: int
    box: Box
    form: Form
    block: Callable[[], np.ndarray[Any, Any]]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_named(self.form.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return volume(self.box) * self.itemsize


def agree_on_contents(
    world: World,
    purpose: str,
    tree: Any,
    specs: Any,
    arguments: Callable[[], Mapping[str, Any]],
    decide: Callable[[Leaves, Mapping[str, Any]], Any],
    *,
    copied: bool = False,
) -> tuple[Any, list[Own], Placeholders]:
    """What the first worker decides, from the leaves and arguments; what this one writes, and its placeholders.

    Collective in the world. `arguments`: checks those of the public function that must be the same on all workers, and
    returns them by name.
    `copied`: this worker's blocks are copied to the host, so that what happens to its arrays from then on does not
    matter.

    **Raises,** on all workers, where they disagree, or what one of them has can't be saved.
    """
    held: list[Held] = []
    own: list[Own] = []

    def mine() -> Any:
        held.extend(held_leaves(tree, specs))
        if len({leaf.path for leaf in held}) < len(held):
            raise InvalidArgumentError("`tree` has two leaves of one path; a file can't tell them apart.")
        own.extend(_copied(each) if copied else each for each in _own(held))
        told = [(leaf.path, described(leaf.spec)) for leaf in held]
        forms = [(leaf.form, leaf.counts) for leaf in held]
        return arguments(), told, forms

    def decided(told: dict[int, Any]) -> Any:
        _check_arguments(told)
        check_alike({worker: its[1] for worker, its in told.items()})
        leaves = tuple(
            (leaf.path, agreed_form(leaf.path, {worker: its[2][n] for worker, its in told.items()}))
            for n, leaf in enumerate(held)
        )
        return leaves, decide(leaves, told[min(told)][0])

    leaves, decision = together(world, purpose, mine, decided)
    placeholders = {n: shape for n, leaf in enumerate(held) if (shape := leaf.placeholder) not in (None, (0,))}
    return decision, [each._replace(form=leaves[each.leaf][1]) for each in own], placeholders


def _own(held: Sequence[Held]) -> list[Own]:
    """What this worker writes: of copies the first one counts."""
    return [
        Own(n, leaf.box, leaf.form, leaf.block)
        for n, leaf in enumerate(held)
        if leaf.spec.counts and leaf.box is not None and volume(leaf.box)
    ]


def _copied(own: Own) -> Own:
    block = np.array(own.block())  # asarray may share the memory of what is donated next
    return own._replace(block=lambda: block)


def _check_arguments(told: dict[int, Any]) -> None:
    (first, of_first), *others = sorted(told.items())
    for worker, its in others:
        for name, value in its[0].items():
            if value != of_first[0][name]:
                raise PlanError(
                    f"`{name}` must be the same on all workers, but is {of_first[0][name]!r} on worker {first} and "
                    f"{value!r} on worker {worker}."
                )
