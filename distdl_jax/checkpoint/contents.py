"""The contents of a checkpoint: the stored leaves of a tree, agreed on by all workers.

Leaves are arrays of numbers, Python numbers and random keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.manifest import Form, volume
from distdl_jax.errors import CheckpointError, InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.partitions.formats.safetensors import dtype_named, is_storable
from distdl_jax.partitions.spec_trees import check_alike, check_shape, described, leaves_with_specs
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import Box
from distdl_jax.text import quoted
from distdl_jax.transports.world import World
from distdl_jax.validation import check_same, is_traced

_ALIGNED = 64
"""JAX uses an array on a CPU without a copy if its address is a multiple of this many bytes."""

Leaves = tuple[tuple[str, Form], ...]
"""The leaves of a tree: their paths and forms."""

Placeholders = Mapping[int, tuple[int, ...]]
"""The shapes of a worker's placeholders other than `(0,)`, by the number of the leaf."""


class LocalLeaf(NamedTuple):
    """A leaf on this worker: its path, spec, form and value.

    `counts` is whether the form is the data's, not a placeholder's.
    """

    path: str
    spec: TensorSpec
    form: Form
    value: Any
    counts: bool

    @property
    def placeholder(self) -> tuple[int, ...] | None:
        """The shape of this worker's placeholder; None if it has a block or no placeholder."""
        shape = tuple(np.shape(self.value))
        return shape if not self.spec.partition.active and 0 in shape else None

    def block(self) -> np.ndarray[Any, Any]:
        """Copy this worker's block to the host."""
        data = jax.random.key_data(self.value) if self.form.key is not None else self.value
        block = np.asarray(data)
        converted = block.astype(dtype_named(self.form.dtype), copy=False)
        if converted.dtype.kind in "iu" and not np.array_equal(converted, block):
            raise InvalidArgumentError(
                f"`tree{self.path}` (={quoted(self.value)}) has integers that don't fit into {converted.dtype.name}, "
                "to which JAX converts it; jax_enable_x64 allows 64 bits."
            )
        return converted


class OwnBlock(NamedTuple):
    """A block that this worker writes: its leaf's number, box and form, and a function that copies it to the host."""

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
    label: str,
    tree: Any,
    specs: Any,
    arguments: Callable[[], Mapping[str, Any]],
    decide: Callable[[Leaves, Mapping[str, Any]], Any],
    *,
    copied: bool = False,
) -> tuple[Any, list[OwnBlock], Placeholders]:
    """Return the first worker's decision on the leaves and arguments, and this worker's blocks and placeholders.

    Collective in the world. `arguments` checks and returns, by name, the public function's arguments that must be the
    same on all workers. With `copied`, blocks are copied to the host, so that the arrays may be changed or deleted.

    **Raises,** on all workers, if they disagree, or one of them has a value that can't be saved.
    """
    local: list[LocalLeaf] = []
    own: list[OwnBlock] = []

    def contribution(_: Any) -> Any:
        local.extend(
            _local(path, spec, value) for path, value, spec in leaves_with_specs(tree, specs) if spec is not None
        )
        if len({leaf.path for leaf in local}) < len(local):
            raise InvalidArgumentError("`tree` has two leaves with the same path; a file can't distinguish them.")
        for n, leaf in enumerate(local):
            box = stored_box(leaf.spec.box, leaf.form)
            if leaf.spec.counts and box is not None and volume(box):  # among copies, the first one
                block = OwnBlock(n, box, leaf.form, leaf.block)
                own.append(_copied(block) if copied else block)
        specs_by_leaf = [(leaf.path, described(leaf.spec)) for leaf in local]
        return arguments(), specs_by_leaf, [(leaf.form, leaf.counts) for leaf in local]

    def decided(contributions: dict[int, Any]) -> Any:
        check_same({worker: given for worker, (given, _, _) in contributions.items()})
        check_alike({worker: specs_by_leaf for worker, (_, specs_by_leaf, _) in contributions.items()})
        forms = {worker: forms for worker, (_, _, forms) in contributions.items()}
        leaves = tuple(
            (leaf.path, _agreed_form(leaf.path, {worker: forms[worker][n] for worker in forms}))
            for n, leaf in enumerate(local)
        )
        return leaves, decide(leaves, contributions[min(contributions)][0])

    leaves, decision = together(world, label, contribution, decided)
    placeholders = {n: shape for n, leaf in enumerate(local) if (shape := leaf.placeholder) not in (None, (0,))}
    return decision, [block._replace(form=leaves[block.leaf][1]) for block in own], placeholders


def _copied(own: OwnBlock) -> OwnBlock:
    block = np.array(own.block())  # asarray may share memory that will be donated next
    return own._replace(block=lambda: block)


def stored_box(box: Box | None, form: Form) -> Box | None:
    """Return a box of a leaf, extended by the dimensions in which its elements are stored."""
    return None if box is None else (*box, *((0, n) for n in form.shape[len(box) :]))


def _local(path: str, spec: TensorSpec, value: Any) -> LocalLeaf:
    if is_traced(value):
        raise InvalidTypeError(
            f"`tree{path}` (={quoted(value)}) is traced: a checkpoint can't be saved inside jit or grad."
        )
    shape, form = _form(path, spec, value)
    if spec.partition.active:
        check_shape(f"tree{path}", shape, spec, spec.local_shape)
    counts = spec.partition.active and (prod(spec.local_shape) > 0 or 0 in spec.global_shape)
    return LocalLeaf(path, spec, form, value, counts)


def _form(path: str, spec: TensorSpec, value: Any) -> tuple[tuple[int, ...], Form]:
    """Return the local shape of a value, and the form of the whole tensor."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, value)
        key_shape = data.shape[value.ndim :]
        form = Form((*spec.global_shape, *key_shape), data.dtype.name, key=str(jax.random.key_impl(value)))
        return tuple(value.shape), form
    try:
        number = np.dtype(jnp.result_type(value))
        shape, weak = np.shape(value), bool(jax.typeof(value).weak_type)
    except (TypeError, AttributeError, OverflowError):
        number = None
    if number is None or not is_storable(number.name):
        raise InvalidTypeError(
            f"`tree{path}` (={quoted(value)}) must be an array of numbers, a number or a random key, with a dtype that "
            "safetensors files support. None in its place in `specs` omits it."
        )
    return shape, Form(spec.global_shape, number.name, weak)


def _agreed_form(path: str, forms: dict[int, tuple[Form, bool]]) -> Form:
    """Return the form of a leaf, from the forms on all workers, and whether they count.

    **Raises:** `PlanError` if two that count differ.
    """
    (first, form), *others = [(worker, form) for worker, (form, counts) in sorted(forms.items()) if counts]
    for worker, other in others:
        if replace(other, weak=form.weak) != form:
            raise PlanError(
                f"`tree{path}` must have one dtype on all workers that hold a part of it, but is {_text(form)} on "
                f"worker {first} and {_text(other)} on worker {worker}."
            )
    return replace(form, weak=form.weak and all(other.weak for _, other in others))


def _text(form: Form) -> str:
    return f"a random key of {form.key}" if form.key is not None else form.dtype


def empty_block(form: Form, box: Box | None, ndim: int, placeholder: tuple[int, ...] = (0,)) -> np.ndarray[Any, Any]:
    """Return memory for this worker's block of a leaf of `ndim` dimensions; of shape `placeholder` without one."""
    shape = (*placeholder, *form.shape[ndim:]) if box is None else tuple(stop - start for start, stop in box)
    dtype = dtype_named(form.dtype)
    nbytes = prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNED, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return memory[first : first + nbytes].view(dtype).reshape(shape)


def as_leaf(name: str, form: Form, block: np.ndarray[Any, Any]) -> Array:
    """Return a block as a JAX array, or as random keys."""
    if form.key is not None:
        return jax.random.wrap_key_data(jax.device_put(block), impl=form.key)
    jax_dtype = np.dtype(jax.dtypes.canonicalize_dtype(block.dtype))
    if jax_dtype != block.dtype:
        raise CheckpointError(
            f"`{name or 'specs'}` is {block.dtype.name} in the checkpoint, but JAX would convert it to {jax_dtype} "
            "here: set jax_enable_x64 (JAX_ENABLE_X64=1), as when the checkpoint was saved."
        )
    if form.weak and block.dtype.kind in "ifc":
        if not block.shape and jnp.asarray(block.item()).dtype == block.dtype:
            return jnp.asarray(block.item())
        # The only public way to a weakly typed array of given numbers.
        weak = jnp.full(block.shape, {"i": 0, "f": 0.0, "c": 0j}[block.dtype.kind])
        if weak.dtype == block.dtype:
            return weak.at[...].set(block)
    return jax.device_put(block)
