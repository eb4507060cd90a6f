"""The leaves of a tree as they are stored: arrays of numbers, also random keys and Python numbers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from distdl_jax.checkpoint.layout import Form
from distdl_jax.checkpoint.tensor_file import dtype_named, is_storable
from distdl_jax.errors import CheckpointError, InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.plans.decomposition import Box
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.spec_trees import leaves_with_specs
from distdl_jax.tensors import TensorSpec

_ALIGNED = 64
"""JAX takes an array on a CPU as it is, without a copy, where it begins at a multiple of so many bytes."""


class Held(NamedTuple):
    """A leaf on this worker: its path, its spec, its form, and its value; `block` brings that to the host.

    `counts` is whether its form is that of the data, and not of a placeholder.
    """

    path: str
    spec: TensorSpec
    form: Form
    value: Any
    counts: bool

    @property
    def box(self) -> Box | None:
        """The part of the whole that this worker holds, as it is stored."""
        return stored_box(self.spec.box, self.form)

    @property
    def placeholder(self) -> tuple[int, ...] | None:
        """The shape of what this worker holds in place of a part; None where it holds one, or no placeholder."""
        shape = tuple(np.shape(self.value))
        return shape if not self.spec.partition.active and 0 in shape else None

    def block(self) -> np.ndarray[Any, Any]:
        """This worker's block."""
        data = jax.random.key_data(self.value) if self.form.key is not None else self.value
        block = np.asarray(data)
        found = block.astype(dtype_named(self.form.dtype), copy=False)
        if found.dtype.kind in "iu" and not np.array_equal(found, block):
            raise InvalidArgumentError(
                f"`tree{self.path}` (={self.value!r}) has integers that don't fit into {found.dtype.name}, which JAX "
                "makes of it; jax_enable_x64 allows 64 bits."
            )
        return found


def held_leaves(tree: Any, specs: Any) -> list[Held]:
    """The leaves of `tree` that have a spec.

    **Raises:** `InvalidTypeError` for what can't be stored, `PlanError` where a block does not have the shape that its
    spec says.
    """
    return [_held(path, spec, value) for path, value, spec in leaves_with_specs(tree, specs) if spec is not None]


def stored_box(box: Box | None, form: Form) -> Box | None:
    """A box of a leaf, with the dimensions that its elements are stored with."""
    return None if box is None else (*box, *((0, n) for n in form.shape[len(box) :]))


def _held(path: str, spec: TensorSpec, value: Any) -> Held:
    if isinstance(value, Tracer):
        raise InvalidTypeError(f"`tree{path}` (={value!r}) is traced: a checkpoint can't be saved inside jit or grad.")
    shape, form = _form(path, spec, value)
    if spec.partition.active and shape != spec.local_shape:
        copies = f", replicated along {spec.replicated}" if spec.replicated else ""
        raise PlanError(
            f"`tree{path}` has shape {shape}, but its spec ({shape_text(spec.global_shape)} on "
            f"{shape_text(spec.partition.shape)} workers{copies}) says {spec.local_shape} on this worker."
        )
    counts = spec.partition.active and (prod(spec.local_shape) > 0 or 0 in spec.global_shape)
    return Held(path, spec, form, value, counts)


def _form(path: str, spec: TensorSpec, value: Any) -> tuple[tuple[int, ...], Form]:
    """The local shape of a value, and the form of the whole."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, value)
        of_element = data.shape[value.ndim :]
        form = Form((*spec.global_shape, *of_element), data.dtype.name, key=str(jax.random.key_impl(value)))
        return tuple(value.shape), form
    try:
        number = np.dtype(jnp.result_type(value))
        shape, weak = np.shape(value), bool(jax.typeof(value).weak_type)
    except (TypeError, AttributeError, OverflowError):
        number = None
    if number is None or not is_storable(number.name):
        raise InvalidTypeError(
            f"`tree{path}` (={value!r}) must be an array of numbers, a number or a random key, of a dtype that "
            "safetensors files have. None in its place in `specs` leaves it out."
        )
    return shape, Form(spec.global_shape, number.name, weak)


def agreed_form(path: str, told: dict[int, tuple[Form, bool]]) -> Form:
    """The form of a leaf, from those on all workers, and whether they count.

    **Raises:** `PlanError` where two that count differ.
    """
    (first, form), *others = [(worker, form) for worker, (form, counts) in sorted(told.items()) if counts]
    for worker, its in others:
        if replace(its, weak=form.weak) != form:
            raise PlanError(
                f"`tree{path}` must be of one dtype on all workers that hold some of it, but is {_text(form)} on "
                f"worker {first} and {_text(its)} on worker {worker}."
            )
    return replace(form, weak=form.weak and all(its.weak for _, its in others))


def _text(form: Form) -> str:
    return f"a random key of {form.key}" if form.key is not None else form.dtype


def empty_block(form: Form, box: Box | None, ndim: int, placeholder: tuple[int, ...] = (0,)) -> np.ndarray[Any, Any]:
    """Where this worker's part of a leaf of `ndim` dimensions goes; of shape `placeholder` where it has none."""
    shape = (*placeholder, *form.shape[ndim:]) if box is None else tuple(stop - start for start, stop in box)
    dtype = dtype_named(form.dtype)
    nbytes = prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNED, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return memory[first : first + nbytes].view(dtype).reshape(shape)


def as_leaf(name: str, form: Form, block: np.ndarray[Any, Any]) -> Array:
    """What JAX gets: an array, or random keys."""
    if form.key is not None:
        return jax.random.wrap_key_data(jax.device_put(block), impl=form.key)
    found = np.dtype(jax.dtypes.canonicalize_dtype(block.dtype))
    if found != block.dtype:
        raise CheckpointError(
            f"`{name}` is {block.dtype.name} in the checkpoint, but JAX would make {found} of it here: set "
            "jax_enable_x64 (JAX_ENABLE_X64=1), as it was when the checkpoint was saved."
        )
    if form.weak and block.dtype.kind in "ifc":
        if not block.shape and jnp.asarray(block.item()).dtype == block.dtype:
            return jnp.asarray(block.item())
        # The one public way to a weakly typed array of given numbers.
        weak = jnp.full(block.shape, {"i": 0, "f": 0.0, "c": 0j}[block.dtype.kind])
        if weak.dtype == block.dtype:
            return weak.at[...].set(block)
    return jax.device_put(block)
