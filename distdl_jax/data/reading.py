"""This worker's blocks of batches, from each kind of source."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from distdl_jax.data.order import runs_of
from distdl_jax.data.sources import check_array, open_array, read, with_halo
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.plans.decomposition import Box, box_shape
from distdl_jax.tensors import TensorSpec


class Reader:
    """What batches come from: their structure, and for each of their tensors the spec and the halo."""

    def __init__(
        self, structure: Any, specs: Sequence[TensorSpec], halos: Sequence[Any], batch_size: int | None
    ) -> None:
        self._structure, self._specs, self._halos, self._batch_size = structure, specs, halos, batch_size

    def _part(self, n: int, shape: Sequence[int], m: int) -> tuple[Box | None, tuple[int, ...]]:
        """The box, with its halo, that this worker has of tensor `n` of a batch of `m` samples of `shape`; and the
        shape of its placeholder, where it has none."""
        spec, halo = self._specs[n], self._halos[n]
        whole = (m, *shape)
        if len(spec.global_shape) == len(whole):
            _check_shape(n, spec, spec.global_shape[1:], shape)
            if self._batch_size is not None and spec.global_shape[0] != self._batch_size:
                raise InvalidArgumentError(
                    f"`spec` says {spec.global_shape[0]} samples in a batch, but `batch_size` is {self._batch_size}."
                )
            its = TensorSpec(whole, spec.partition, spec.replicated)
            return None if its.box is None else with_halo(its.box, halo, whole), its.zero_volume_shape
        _check_shape(n, spec, spec.global_shape, shape)
        if spec.box is None:
            return None, (m, 0)
        return ((0, m), *with_halo(spec.box, halo, shape)), (m, 0)

    def _cut(self, n: int, batch: Any) -> np.ndarray[Any, Any]:
        """This worker's block of a tensor of a whole batch."""
        batch = np.asarray(batch)
        box, nothing = self._part(n, batch.shape[1:], len(batch))
        if box is None:
            return np.zeros(nothing, batch.dtype)
        # A copy: the source may use the memory of a batch for the next one.
        return np.array(batch[tuple(slice(start, stop) for start, stop in box)], order="C")

    def _leaves(self, tree: Any, what: str) -> list[Any]:
        try:
            leaves: list[Any] = self._structure.flatten_up_to(tree)
        except ValueError as error:
            raise InvalidArgumentError(f"{what} must have the structure of `spec`: {error}") from None
        return leaves


def _check_shape(n: int, spec: TensorSpec, expected: Sequence[int], shape: Sequence[int]) -> None:
    if tuple(expected) != tuple(shape):
        raise InvalidArgumentError(
            f"`spec` (number {n}) is of global shape {spec.global_shape}, but a sample of `source` has the shape "
            f"{tuple(shape)}: it must be that, or that with `batch_size` in front."
        )


class RowReader(Reader, ABC):
    """A source of `samples` samples, any of which a batch can be made of."""

    samples: int

    @abstractmethod
    def batch(self, rows: np.ndarray[Any, Any]) -> Any:
        """This worker's blocks of the batch of these samples."""


class ArrayReader(RowReader):
    """From arrays with a sample in each row: only this worker's boxes are read."""

    def __init__(
        self, structure: Any, specs: Sequence[TensorSpec], halos: Sequence[Any], batch_size: int | None, arrays: Any
    ) -> None:
        super().__init__(structure, specs, halos, batch_size)
        self._arrays = [open_array(array) if isinstance(array, str | os.PathLike) else array for array in arrays]
        for n, array in enumerate(self._arrays):
            check_array("source", array)
            _check_dtype(array.dtype)
            if not array.shape:
                raise InvalidArgumentError("`source` has an array without dimensions; it must have samples in rows.")
            self._part(n, array.shape[1:], batch_size or 1)
        lengths = {array.shape[0] for array in self._arrays}
        if len(lengths) > 1:
            raise InvalidArgumentError(
                f"`source` has arrays of {sorted(lengths)} samples; they must be as many in all."
            )
        self.samples = lengths.pop()

    def batch(self, rows: np.ndarray[Any, Any]) -> Any:
        return self._structure.unflatten([self._block(n, array, rows) for n, array in enumerate(self._arrays)])

    def _block(self, n: int, array: Any, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        box, nothing = self._part(n, array.shape[1:], len(rows))
        if box is None:
            return np.zeros(nothing, np.dtype(array.dtype).newbyteorder("="))
        (first, last), *within = box
        rows = rows[first:last]
        block = np.empty(box_shape(box), np.dtype(array.dtype).newbyteorder("="))
        places = np.argsort(rows, kind="stable")
        for start, stop, where in runs_of(rows):
            block[places[where]] = read(array, ((start, stop), *within))
        return block


def _check_dtype(dtype: Any) -> None:
    """Refuse what JAX has no arrays of."""
    try:
        is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    except TypeError:  # another library's dtype
        is_number = False
    if not is_number:
        raise InvalidTypeError(f"`source` must hold numbers, but has an array of dtype {dtype}.")


class SampleReader(RowReader):
    """From a data set of samples: they are loaded whole, and cut."""

    def __init__(
        self, structure: Any, specs: Sequence[TensorSpec], halos: Sequence[Any], batch_size: int | None, source: Any
    ) -> None:
        super().__init__(structure, specs, halos, batch_size)
        self._source = source
        self.samples = len(source)

    def batch(self, rows: np.ndarray[Any, Any]) -> Any:
        samples = [self._leaves(self._source[int(row)], "A sample of `source`") for row in rows]
        return self._structure.unflatten(
            [
                self._cut(n, _stacked(rows, [np.asarray(sample[n]) for sample in samples]))
                for n in range(len(self._specs))
            ]
        )


def _stacked(rows: np.ndarray[Any, Any], samples: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    for row, sample in zip(rows, samples, strict=True):
        if sample.shape != samples[0].shape:
            raise InvalidArgumentError(
                f"`source` has samples of different shapes, {samples[0].shape} (number {rows[0]}) and {sample.shape} "
                f"(number {row}): all must be as `spec` says."
            )
    return np.stack(samples)


class BatchReader(Reader):
    """From an iterable over batches: they are made whole, and cut."""

    def __init__(
        self, structure: Any, specs: Sequence[TensorSpec], halos: Sequence[Any], batch_size: int | None, source: Any
    ) -> None:
        super().__init__(structure, specs, halos, batch_size)
        self._source = source

    def all_batches(self) -> Iterator[Any]:
        """This worker's blocks of all batches that the source makes."""
        for batch in self._source:
            leaves = self._leaves(batch, "A batch of `source`")
            yield self._structure.unflatten([self._cut(n, leaf) for n, leaf in enumerate(leaves)])
