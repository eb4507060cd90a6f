"""This worker's blocks of batches, from each kind of source, and the order of the samples.

The order depends only on a key, an epoch and the number of samples, so it is the same on every worker.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import PyTreeDef

from distdl_jax.data.common_batches import Samples
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partitions.formats.arrays import Halo, check_array, open_array, read, with_halo
from distdl_jax.partitions.formats.slices import as_numpy, plain, slice_dtype
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import Box, box_shape
from distdl_jax.transports.threads.one_reader import one_reader
from distdl_jax.validation import is_numeric


class Position(NamedTuple):
    """A position in the data: the epoch, its next batch, and the number of its order, 0 for none."""

    epoch: int
    batch: int
    order: int = 0


class Order(NamedTuple):
    """The order of `n` samples, in batches of `size`.

    - `words`: the random key's 32-bit words; None for the given order.
    - `drop_last`: whether an epoch ends before a smaller batch.

    >>> order = Order(5, 2, None, False)
    >>> order.batches, order.epoch(0).tolist(), order.after(Position(0, 2))
    (3, [0, 1, 2, 3, 4], Position(epoch=1, batch=0, order=1571550454))
    """

    n: int
    size: int
    words: Sequence[int] | None
    drop_last: bool

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return self.n // self.size if self.drop_last else -(-self.n // self.size)

    def epoch(self, epoch: int) -> np.ndarray[Any, Any]:
        """Return the numbers of all samples in the order of an epoch.

        Sorted by the raw numbers of a Philox generator, which numpy promises never to change.
        """
        if self.words is None:
            return np.arange(self.n)
        words = [*self.words, 0, 0, 0, 0][:4]
        key = [words[0] | words[1] << 32, words[2] | words[3] << 32]
        generator = np.random.Philox(counter=[0, 0, 0, epoch], key=np.array(key, np.uint64))
        return np.argsort(generator.random_raw(self.n), kind="stable")

    @property
    def number(self) -> int:
        """A number that distinguishes it from other orders, in which the same place has other samples."""
        return zlib.crc32(repr([int(self.n), self.size, self.words]).encode()) >> 1

    def after(self, place: Position) -> Position:
        """Return the place after a batch."""
        is_last = place.batch + 1 >= self.batches
        return Position(place.epoch + is_last, 0 if is_last else place.batch + 1, self.number)


class Layout(NamedTuple):
    """The tensors of a batch: their structure as a tree, with the spec and the halo of each.

    - `last`: the samples of each tensor in the last batch.
    """

    structure: PyTreeDef
    specs: Sequence[TensorSpec]
    halos: Sequence[Halo | None]
    batch_size: int | None
    last: dict[int, Samples]

    def part(self, n: int, shape: Sequence[int], m: int) -> tuple[Box | None, tuple[int, ...]]:
        """Return this worker's box, with its halo, of tensor `n` of a batch of `m` samples of `shape`, or None; and the
        shape of its placeholder."""
        spec, halo = self.specs[n], self.halos[n]
        whole = (m, *shape)
        cells = (p for d, p in enumerate(spec.partition.shape) if d not in spec.replicated)
        self.last[n] = Samples(m, next(cells, 1) if len(spec.global_shape) == len(whole) else 1)
        if len(spec.global_shape) == len(whole):
            _check_shape(n, spec, spec.global_shape[1:], shape)
            if self.batch_size is not None and spec.global_shape[0] != self.batch_size:
                raise InvalidArgumentError(
                    f"`spec` has {spec.global_shape[0]} samples in a batch, but `batch_size` is {self.batch_size}."
                )
            batch = TensorSpec(whole, spec.partition, spec.replicated)
            return None if batch.box is None else with_halo(batch.box, halo, whole), batch.zero_volume_shape
        _check_shape(n, spec, spec.global_shape, shape)
        if spec.box is None:
            return None, (m, 0)
        return ((0, m), *with_halo(spec.box, halo, shape)), (m, 0)

    def cut(self, n: int, batch: Any) -> np.ndarray[Any, Any]:
        """Return this worker's block of a tensor of a whole batch."""
        batch = plain("source", as_numpy("source", batch))
        box, nothing = self.part(n, batch.shape[1:], len(batch))
        if box is None:
            return np.zeros(nothing, batch.dtype)
        # A copy: the source may reuse the memory of a batch for the next one.
        return np.array(batch[tuple(slice(start, stop) for start, stop in box)], order="C")

    def leaves(self, tree: Any, what: str) -> list[Any]:
        try:
            leaves: list[Any] = self.structure.flatten_up_to(tree)
        except ValueError as error:
            raise InvalidArgumentError(f"{what} must have the structure of `spec`: {error}") from None
        return leaves


def _check_shape(n: int, spec: TensorSpec, expected: Sequence[int], shape: Sequence[int]) -> None:
    if tuple(expected) != tuple(shape):
        raise InvalidArgumentError(
            f"`spec` (number {n}) has global shape {spec.global_shape}, but a sample of `source` has the shape "
            f"{tuple(shape)}: both must be equal, but for a `batch_size` in front of the spec's."
        )


class RowReader(ABC):
    """A source of `samples` samples, any of which may be in a batch."""

    samples: int

    @abstractmethod
    def batch(self, rows: np.ndarray[Any, Any]) -> Any:
        """Return this worker's blocks of the batch of these samples."""


class ArrayReader(RowReader):
    """Arrays with a sample in each row, of which only this worker's boxes are read."""

    def __init__(self, layout: Layout, arrays: Sequence[Any]) -> None:
        self._layout = layout
        self._arrays = [open_array(array) if isinstance(array, str | os.PathLike) else array for array in arrays]
        for array in self._arrays:
            check_array("source", array)
        self._dtypes = [slice_dtype("source", array) for array in self._arrays]
        for n, (array, dtype) in enumerate(zip(self._arrays, self._dtypes, strict=True)):
            if not is_numeric(dtype):
                raise InvalidTypeError(f"`source` must hold numbers, but has an array of dtype {dtype}.")
            if not array.shape:
                raise InvalidArgumentError("`source` has an array without dimensions; it must have samples in rows.")
            self._layout.part(n, array.shape[1:], self._layout.batch_size or 1)
        lengths = {array.shape[0] for array in self._arrays}
        if len(lengths) > 1:
            raise InvalidArgumentError(
                f"`source` has arrays of {sorted(lengths)} samples; all must have the same number."
            )
        self.samples = lengths.pop()
        self._shapes = [tuple(array.shape[1:]) for array in self._arrays]

    def batch(self, rows: np.ndarray[Any, Any]) -> Any:
        return self._layout.structure.unflatten([self._block(n, array, rows) for n, array in enumerate(self._arrays)])

    def _block(self, n: int, array: Any, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        box, nothing = self._layout.part(n, self._shapes[n], len(rows))
        if box is None:
            return np.zeros(nothing, self._dtypes[n])
        (first, last), *within = box
        rows = rows[first:last]
        block = np.empty(box_shape(box), self._dtypes[n])
        places = np.argsort(rows, kind="stable")
        for start, stop, where in runs_of(rows):
            values = read(array, ((start, stop), *within))
            if not np.can_cast(values.dtype, block.dtype):
                raise InvalidTypeError(
                    f"`source` has slices of several dtypes: its first element is of {block.dtype}, its samples "
                    f"{start} to {stop - 1} are of {values.dtype}. All must have one, on all workers."
                )
            block[places[where]] = values
        return block


class SampleReader(RowReader):
    """A data set of samples, which are loaded as a whole and cut."""

    def __init__(self, layout: Layout, source: Any) -> None:
        self._layout, self._source = layout, source
        self.samples = len(source)

    def batch(self, rows: np.ndarray[Any, Any]) -> Any:
        samples = [self._sample(int(row)) for row in rows]
        return self._layout.structure.unflatten(
            [
                self._layout.cut(n, _stacked(rows, [sample[n] for sample in samples]))
                for n in range(len(self._layout.specs))
            ]
        )

    def _sample(self, row: int) -> list[np.ndarray[Any, Any]]:
        with one_reader():  # the data set may call any library
            leaves = self._layout.leaves(self._source[row], "A sample of `source`")
            return [plain("source", as_numpy("source", leaf)) for leaf in leaves]


def _stacked(rows: np.ndarray[Any, Any], samples: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    for row, sample in zip(rows, samples, strict=True):
        if sample.shape != samples[0].shape:
            raise InvalidArgumentError(
                f"`source` has samples of different shapes, {samples[0].shape} (number {rows[0]}) and {sample.shape} "
                f"(number {row}): all must match `spec`."
            )
    return np.stack(samples)


class BatchReader:
    """An iterable over batches, which are loaded as a whole and cut."""

    def __init__(self, layout: Layout, source: Any) -> None:
        self._layout, self._source = layout, source

    def all_batches(self) -> Iterator[Any]:
        """Yield this worker's blocks of all batches of the source."""
        for batch in self._source:
            leaves = self._layout.leaves(batch, "A batch of `source`")
            yield self._layout.structure.unflatten([self._layout.cut(n, leaf) for n, leaf in enumerate(leaves)])


def runs_of(rows: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, slice]]:
    """Yield the runs of consecutive numbers among the rows: first, last + 1, and their slice of the sorted rows.

    >>> list(runs_of(np.array([7, 2, 3])))
    [(2, 4, slice(0, 2, None)), (7, 8, slice(2, 3, None))]
    """
    ascending = np.sort(rows)
    ends = [*(np.flatnonzero(np.diff(ascending) != 1) + 1).tolist(), len(ascending)]
    begin = 0
    for end in ends:
        if end > begin:
            yield int(ascending[begin]), int(ascending[end - 1]) + 1, slice(begin, end)
        begin = end
