"""Global tensors and their local blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, Removed
from distdl_jax.partitions.formats.slices import reader_of, slice_dtype, sliced
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.partitions.static import Immutable
from distdl_jax.plans.alike import ByClass
from distdl_jax.plans.decomposition import Box, balanced_box, balanced_sizes, box_shape, index_of
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.worker_ranks import positions
from distdl_jax.validation import checked_axes, checked_dtype, checked_integer, checked_integers


@dataclass(frozen=True, init=False)
class TensorSpec(Immutable):
    """A distributed tensor as a whole: its global shape and its partition.

    **Arguments:**

    - `global_shape`: of the whole tensor, n_0 x ... x n_{D-1}; `()` for a scalar.
    - `partition`: its workers hold the balanced blocks, all others zero-volume arrays.
    - `replicated`: the dimensions of the partition along which workers hold copies of one block; the others, D of them,
      cut the tensor. True for all dimensions: every worker of the partition holds the whole tensor. Default: none, so
      there are no copies.

    A scalar is on one worker, or replicated.

    **Raises:** `InvalidArgumentError` if the dimensions don't fit.

    >>> import distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> TensorSpec((6,), P, replicated=(0,)).local_shape, TensorSpec((6, 5, 4), P, replicated=True).local_shape
    ((6,), (6, 5, 4))
    """

    global_shape: tuple[int, ...]
    partition: Partition
    replicated: tuple[int, ...]
    _placeholders: Mapping[int, tuple[int, ...]] = field(init=False, compare=False)
    """Placeholder shapes that differ from the default, by world rank."""

    def __init__(
        self, global_shape: Sequence[int], partition: Partition, replicated: bool | int | Sequence[int] = False
    ) -> None:
        if not isinstance(partition, Partition):
            raise InvalidTypeError(f"`partition` (={partition!r}) must be a partition.")
        if partition.size == 0:
            raise InvalidArgumentError("`partition` has no workers, so none can hold a block.")
        shape = checked_integers("global_shape", global_shape)
        if any(n < 0 for n in shape):
            raise InvalidArgumentError(f"`global_shape` (={shape}) must not have negative lengths.")
        on_one = not shape and partition.size == 1
        axes = _replicated_axes(partition, True if on_one else replicated)
        everywhere = bool(axes) and len(axes) == partition.dim
        if not everywhere and len(shape) != partition.dim - len(axes):
            raise InvalidArgumentError(
                f"`global_shape` (={shape}) must have as many dimensions as `partition` "
                f"({shape_text(partition.shape)})" + (f" in addition to the replicated ones, {axes}." if axes else ".")
            )
        self._store(global_shape=shape, partition=partition, replicated=axes, _placeholders={})

    def _store(self, **values: Any) -> None:
        """Set fields during construction, normalised so that equal specs compare equal."""
        vars(self).update(values)

    @property
    def box(self) -> Box | None:
        """The ranges of the whole tensor that this worker's block covers; None if it holds none."""
        return None if self.partition.rank is None else self._box(self.partition.rank)

    @cached_property
    def block_shapes(self) -> Mapping[int, tuple[int, ...]]:
        """The shape of the block of each worker of the partition, by world rank; computed on demand."""
        P, cut = self.partition, iter(self.global_shape)
        labels = ((0,) * p if d in self.replicated else balanced_sizes(next(cut), p) for d, p in enumerate(P.shape))
        place_of = positions(P.ranks)
        return ByClass(P.ranks, labels, lambda worker: box_shape(self._box(place_of[worker])))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this worker's block; `(0,)` if it holds none."""
        return (0,) if self.box is None else box_shape(self.box)

    def shape_on(self, worker: int) -> tuple[int, ...]:
        """Return the shape of the block, or placeholder, of the worker of a world rank."""
        return self.block_shapes[worker] if worker in self.block_shapes else self._placeholder(worker)

    def block(self, array: Any) -> Array:
        """Return this worker's block of a whole array, or its placeholder if it holds no block.

        There is no communication: every worker has the array, or reads it from a file. (`dj.scatter` cuts an array on a
        single worker, `dj.data.read` reads blocks.)

        **Arguments:**

        - `array`: of the shape `global_shape` and any dtype of numbers: a numpy or JAX array (also inside jit), or one
          in a file that is sliced like numpy's (a memory map; a data set of h5py, zarr, netCDF4 or xarray), of which
          only the block is read.

        **Returns:** a JAX array of the dtype of the array's slices, as JAX has it: the block, of `local_shape`, with
        NaN for masked entries; outside the partition a zero-volume array, of `zero_volume_shape`. Along `replicated`
        dimensions workers get copies.

        **Raises:** `InvalidTypeError` if `array` is not one, or doesn't hold numbers; `InvalidArgumentError` if it has
        another shape, or entries are masked in a dtype without NaN.

        >>> import numpy as np, distdl_jax as dj
        >>> rows = dj.TensorSpec((5, 2), dj.planning_world(3, rank=1).grid([2, 1]))
        >>> rows.block(np.arange(10).reshape(5, 2)).tolist()
        [[6, 7], [8, 9]]
        >>> dj.TensorSpec((5, 2), dj.planning_world(3, rank=2).grid([2, 1])).block(np.zeros((5, 2))).shape
        (5, 0)
        """
        with reader_of(array):
            return self._block(array)

    def _block(self, array: Any) -> Array:
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise InvalidTypeError(f"`array` (={array!r}) must be an array.")
        if tuple(array.shape) != self.global_shape:
            raise InvalidArgumentError(
                f"`array` (of shape {tuple(array.shape)}) must have the global shape, {self.global_shape}."
            )
        if self.box is None or isinstance(array, Array):
            dtype = checked_dtype("array.dtype", slice_dtype("array", array))
            if self.box is None:
                return zero_volume_tensor(like=self, dtype=dtype)
            return array[tuple(slice(*bounds) for bounds in self.box)]
        block = sliced("array", array, self.box)
        return device_array(block.astype(checked_dtype("array.dtype", block.dtype), copy=False))

    draw = Removed("dj.draw(spec)")

    @property
    def zero_volume_shape(self) -> tuple[int, ...]:
        """The shape of this worker's placeholder, if it has one: `(batch size, 0)`, or `(0,)` for a scalar.

        The batch size is the length of the first dimension: of this worker's block, or of the whole tensor. For the
        output of a layer (`layer.output_spec`) it is the shape that the layer returns on this worker.
        """
        return self._placeholder(self.partition.world.rank)

    @property
    def known_placeholder(self) -> tuple[int, ...] | None:
        """The shape given for this worker by `with_placeholders`; None if there is none."""
        return self._placeholders.get(self.partition.world.rank)

    @cached_property
    def first_copies(self) -> CartesianPartition:
        """The workers that hold the first copy of each block, on a grid with the tensor's dimensions."""
        P = self.partition
        ranks = [rank for rank in range(P.size) if not any(index_of(rank, P.shape)[d] for d in self.replicated)]
        return P.grid(self._grid, ranks)

    @property
    def counts(self) -> bool:
        """Whether this worker's block counts in sums over all workers: if it is the first copy of a block."""
        return self.first_copies.active

    def _placeholder(self, worker: int) -> tuple[int, ...]:
        default = self.block_shapes.get(worker, self.global_shape)[:1]
        return self._placeholders.get(worker, (*default, 0))

    def with_placeholders(self, shapes: Mapping[int, tuple[int, ...]]) -> TensorSpec:
        """Return an equal spec whose placeholders on other workers have the given shapes, by world rank."""
        spec = object.__new__(TensorSpec)
        spec._store(**{f.name: getattr(self, f.name) for f in fields(self)} | {"_placeholders": dict(shapes)})
        return spec

    @cached_property
    def _grid(self) -> tuple[int, ...]:
        """The number of blocks in each dimension of the tensor."""
        cut = tuple(p for d, p in enumerate(self.partition.shape) if d not in self.replicated)
        return cut or (1,) * len(self.global_shape)

    def _box(self, rank: int) -> Box:
        index = index_of(rank, self.partition.shape)
        cut = tuple(i for d, i in enumerate(index) if d not in self.replicated)
        return balanced_box(self.global_shape, self._grid, cut or (0,) * len(self.global_shape))

    def __repr__(self) -> str:
        return self._text(repr(self.partition))

    def describe(self) -> str:
        """Describe the spec, with the same text on every worker."""
        return self._text(self.partition.describe())

    def _text(self, partition: str) -> str:
        copies = f", replicated={self.replicated}" if self.replicated else ""
        return f"TensorSpec({self.global_shape}, {partition}{copies})"


def _replicated_axes(partition: Partition, replicated: bool | int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(replicated, bool):
        return tuple(range(partition.dim)) if replicated else ()
    return checked_axes("replicated", replicated, partition.shape)


def check_spec(spec: object, name: str = "spec") -> None:
    """Reject an argument that is not a `TensorSpec`."""
    if not isinstance(spec, TensorSpec):
        is_partition = ", but is a partition: TensorSpec(global_shape, P) describes a tensor on it"
        advice = is_partition if isinstance(spec, Partition) else ""
        raise InvalidTypeError(f"`{name}` (={spec!r}) must be a TensorSpec{advice}.")


def zero_volume_tensor(batch_size: int | None = None, dtype: DTypeLike | None = None, *, like: Any = None) -> Array:
    """Return a zero-volume array, the placeholder of a tensor on a worker that owns no part of it.

    **Arguments:**

    - `batch_size`: the length of the first dimension, if the placeholder keeps it; otherwise it has one dimension. If
      the batch is split, it is this worker's share: the first dimension of a layer's output is as long as its input's
      on this worker. `like` avoids computing it.
    - `dtype`: the dtype of the data; only its kind matters (floating, complex, or neither). Default: the dtype of
      `like`, if it has one, otherwise JAX's default float.
    - `like`: instead of `batch_size`, an array on this worker with the placeholder's first dimension; or a
      `TensorSpec`, for the placeholder of that tensor: with `layer.output_spec(x_spec)`, in the shape that the layer
      returns on this worker.

    **Returns:** an array of shape `(batch_size, 0)`, or `(0,)`.

    **Raises:** `InvalidArgumentError` if both `batch_size` and `like` are given, or `batch_size` is negative;
    `InvalidTypeError` for another kind of any argument.

    >>> import jax.numpy as jnp
    >>> zero_volume_tensor(batch_size=4).shape, zero_volume_tensor(like=jnp.ones((3, 5), jnp.bfloat16))
    ((4, 0), Array([], shape=(3, 0), dtype=bfloat16))
    """
    if like is None:
        return _empty((0,) if batch_size is None else (checked_integer("batch_size", batch_size, 0), 0), dtype)
    if batch_size is not None:
        raise InvalidArgumentError(
            f"Give only one of `batch_size` (={batch_size}) and `like`, which has a batch size itself."
        )
    if isinstance(like, TensorSpec):
        return _empty(like.zero_volume_shape, dtype)
    if not (hasattr(like, "shape") and hasattr(like, "dtype")):
        raise InvalidTypeError(f"`like` (={like!r}) must be an array or a TensorSpec.")
    return _empty((*like.shape[:1], 0), like.dtype if dtype is None else dtype)


def _empty(shape: tuple[int, ...], dtype: DTypeLike | None) -> Array:
    return device_array(np.zeros(shape, jnp.result_type(float) if dtype is None else checked_dtype("dtype", dtype)))


def device_array(values: np.ndarray[Any, Any]) -> Array:
    """Copy `values` to a JAX array, which is a constant in a trace, too.

    Nothing is compiled, unlike in JAX's own `asarray` and `zeros`, which compile for each shape. `device_put` alone
    would share the memory of `values`.
    """
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.array(values))
