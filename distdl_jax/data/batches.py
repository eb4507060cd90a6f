"""The loader: batches of which every worker reads its own blocks, ahead of time, in a common order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import finalize

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distdl_jax.data.common_batches import Samples, agree_on_order, current_sizes
from distdl_jax.data.reading import ArrayReader, BatchReader, Layout, Order, Position, RowReader, SampleReader
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, SetupError
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.spec_trees import specs_by_path
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.transports.threads.one_reader import one_reader
from distdl_jax.validation import check_key, checked_boolean, checked_integer
from distdl_jax.watchdog.watch.status import worker_status

_Read = Generator[tuple[Any, Position, Sequence[Samples]]]
"""A reader of batches, each with the place after it, and the samples of its tensors."""


def batches(
    source: Any,
    spec: Any,
    batch_size: int | None = None,
    key: Any = None,
    *,
    halo: Any = None,
    epochs: int | None = 1,
    drop_last: bool = False,
    prefetch: int = 2,
    state: Mapping[str, Any] | None = None,
) -> Batches:
    """Return an iterator over batches of samples: this worker's blocks of them, as JAX arrays.

    **Arguments:**

    - `source`: the samples. One of

      - an array with a sample in each row: any source of `dj.data.read`, of which only this worker's boxes are read,
        after one element that tells the dtype of its slices;
      - a data set with `len(source)` and `source[i]`, a sample: torch's Dataset, grain's MapDataset. Every worker loads
        whole samples, one thread of a process at a time (`dj.data.one_reader`), and keeps its boxes;
      - an iterable over whole batches: torch's DataLoader, grain's IterDataset. It decides on size and order, which
        must be the same on all workers; each keeps its boxes. If it calls a library that isn't safe in threads, it must
        do so within `dj.data.one_reader`.

      Masked entries (`numpy.ma`) become NaN. Arrays may be in a pytree, and so may samples and batches: images and
      labels, for instance.
    - `spec`: a pytree like it, with a `TensorSpec` for each array: of one sample, so that all of its workers get all
      samples of a batch; or of one batch, of `batch_size` samples, so that the batch may be split, too.
    - `batch_size`: the number of samples in a batch. Not for an iterable.
    - `key`: a random key, the same on all workers; each epoch has its own order, which does not depend on the number of
      workers. Default: the given order.
    - `halo`: a pytree like `spec` with `(left, right)` for each dimension of a spec, by which a block extends beyond
      its box; clipped at the tensor's boundary. None for none.
    - `epochs`: the number of passes through the samples; None for no limit. An iterable is iterated again for each.
    - `drop_last`: whether to omit a smaller last batch of an epoch.
    - `prefetch`: the number of batches that a thread reads ahead; 0 for none.
    - `state`: where to continue: the `state` of another such iterator. In the middle of an epoch, that must have the
      same number of samples, `batch_size` and `key`.

    **Returns:** `Batches`. Making it is not collective. Its first `next` is, among the workers of `spec`: they agree on
    the order of the samples, once. A worker without a part of a spec gets zero-volume arrays.

    **Raises:** `InvalidArgumentError`, `InvalidTypeError` if the arguments are invalid; `PlanError`, with the first
    batch on all workers of `spec`, if their number of samples, `batch_size`, `key`, `drop_last`, `epochs` or `state`
    differs; later, an error for a batch with masked entries in a dtype without NaN, or with slices of another dtype
    than the first.

    >>> import distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> [batch.tolist() for batch in batches(np.arange(10).reshape(5, 2), dj.TensorSpec((2,), P), 2)]
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    """
    specs_by_path(spec, "spec")
    drop_last = checked_boolean("drop_last", drop_last)
    words = None
    if key is not None:
        check_key("key", key)
        is_new = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
        words = [int(word) for word in np.asarray(jax.random.key_data(key) if is_new else key).reshape(-1)]
    # The samples of each tensor in the last batch: dj.jit compares the workers' (data/common_batches.py).
    last: dict[int, Samples] = {}
    with one_reader():
        reader = _reader(source, spec, batch_size, halo, last)
    epochs = None if epochs is None else checked_integer("epochs", epochs, 0)
    samples = None
    place, order_before = _place(state)
    shown = f"`state` (epoch {place.epoch}, batch {place.batch})"
    left = None
    if isinstance(reader, RowReader):
        order = Order(reader.samples, checked_integer("batch_size", batch_size, 1), words, drop_last)
        if not order.batches:
            raise InvalidArgumentError(
                f"`batch_size` (={batch_size}) leaves no batch of the {reader.samples} samples of `source`."
            )
        place, samples = place._replace(order=order.number), reader.samples
        if place.batch >= order.batches:
            raise InvalidArgumentError(f"{shown} is beyond the {order.batches} batches of an epoch.")
        read = _of_rows(reader, order, place, epochs, last)
        if epochs is not None:
            left = max(0, (epochs - place.epoch) * order.batches - place.batch)
    elif batch_size is not None or key is not None:
        raise InvalidArgumentError("`batch_size` and `key` must be None if `source` is an iterable over batches.")
    else:
        read = _as_they_come(reader, place, epochs, last)
    if place.batch and order_before not in (None, place.order):
        raise InvalidArgumentError(
            f"{shown} belongs to an iterator with another `batch_size`, `key` or number of samples: it would continue "
            f"elsewhere. {{'epoch': {place.epoch}, 'batch': 0}} starts with an epoch."
        )
    if epochs is not None and place[:2] > (epochs, 0):
        raise InvalidArgumentError(f"{shown} is beyond the last of the `epochs` (={epochs}).")
    # Everything on which the order depends: a worker with another key would read other samples in silence.
    terms = {
        "number of samples in the `source`": samples,
        "`batch_size`": batch_size,
        "`key`, as 32-bit words,": None if words is None else tuple(words),
        "`drop_last`": drop_last,
        "`epochs`": epochs,
        "`state`": f"epoch {place.epoch}, batch {place.batch}",
    }
    agree = partial(agree_on_order, [spec.partition for spec in jax.tree.leaves(spec)], terms)
    return Batches(read, place, checked_integer("prefetch", prefetch, 0), left, agree, batch_size)


class Batches:
    """An iterator over batches, made by `dj.data.batches`.

    - `state`: the position of the next batch, three integers in a dict, for checkpoints: `{"epoch": 0, "batch": 3,
      "order": ...}`. The last one distinguishes this order of the samples from others, such as of another batch size.

    It may be closed before its end, as by `with`, and by another thread; that ends its thread, and the wait for a
    batch. A forked process must make its own iterator.

    >>> import distdl_jax as dj
    >>> spec = dj.TensorSpec((2,), dj.Partition().grid([1]))
    >>> with dj.data.batches(np.arange(10).reshape(5, 2), spec, 2) as batches:
    ...     next(batches).tolist(), batches.state
    ([[0, 1], [2, 3]], {'epoch': 0, 'batch': 1, 'order': 1571550454})
    """

    def __init__(
        self,
        read: _Read,
        place: Position,
        prefetch: int,
        left: int | None,
        agree: Callable[[], None],
        batch_size: int | None,
    ) -> None:
        self._place = place
        self._left = left
        self._read = read
        self._agree: Callable[[], None] | None = agree
        self._batch_size = batch_size
        self._ahead = _Ahead(self._read, prefetch) if prefetch else None
        if self._ahead is not None:
            finalize(self, self._ahead.close)  # at exit, too, when Python has yet to clear the modules

    @property
    def state(self) -> dict[str, int]:
        """The position of the next batch, regardless of batches read ahead."""
        return self._place._asdict()

    @staticmethod
    def state_spec(P: Partition) -> dict[str, TensorSpec]:
        """Return the specs of `state`, for checkpoints of the workers of `P`."""
        return {name: TensorSpec((), P, replicated=True) for name in Position._fields}

    def __iter__(self) -> Batches:
        return self

    def __length_hint__(self) -> int:
        """Return the number of remaining batches, for `dj.progress`; `NotImplemented` if that is not known."""
        return NotImplemented if self._left is None else self._left

    def __next__(self) -> Any:
        if worker_status().is_beside_the_program:  # it must not wait for others, and calls nothing that does
            return self._next()[0]
        if self._agree is not None:
            self._agree()
        try:
            batch, samples = self._next()
        except StopIteration:
            current_sizes().change(self, None)
            raise
        if self._agree is not None:
            current_sizes().begin([its._replace(number=self._batch_size or its.number) for its in samples])
            self._agree = None
        current_sizes().change(self, samples, jax.tree.leaves(batch))
        return batch

    def _next(self) -> tuple[Any, Sequence[Samples]]:
        batch, self._place, samples = next(self._read if self._ahead is None else self._ahead)
        if self._left is not None:
            self._left -= 1
        return jax.tree.map(jax.device_put, batch), samples

    def close(self) -> None:
        """End the iterator, and its thread; a thread that waits for a batch gets no more."""
        if self._ahead is not None:
            self._ahead.close()
            return
        read, self._read = self._read, _nothing()
        with suppress(ValueError):  # another thread is in it: it gets this batch, but no further one
            read.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_rows(
    reader: RowReader, order: Order, place: Position, epochs: int | None, last: Mapping[int, Samples]
) -> _Read:
    """Yield the batches in this order, each with the place after it, and its samples."""
    while epochs is None or place.epoch < epochs:
        rows = order.epoch(place.epoch)
        for number in range(place.batch, order.batches):
            batch = reader.batch(rows[number * order.size : (number + 1) * order.size])
            yield batch, order.after(Position(place.epoch, number)), tuple(last.values())
        place = Position(place.epoch + 1, 0)


def _nothing() -> _Read:
    yield from ()


def _as_they_come(reader: BatchReader, place: Position, epochs: int | None, last: Mapping[int, Samples]) -> _Read:
    """Yield the batches of the source, each with the place after it, and its samples."""
    while epochs is None or place.epoch < epochs:
        number = -1
        for number, batch in enumerate(reader.all_batches()):
            if number >= place.batch:
                yield batch, Position(place.epoch, number + 1), tuple(last.values())
        if number < 0 and not place.batch:
            return  # an exhausted iterator
        if number + 1 < place.batch:
            raise InvalidArgumentError(
                f"`state` (batch {place.batch}) is beyond the last of the {number + 1} batches of `source`."
            )
        place = Position(place.epoch + 1, 0)


class _Ahead:
    """A daemon thread that reads ahead, so that a blocking source does not keep the program from ending.

    An error in it is raised when its batch is requested.
    """

    def __init__(self, read: Iterator[Any], count: int) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(count)
        self._closed = threading.Event()
        self._end: tuple[str, Any] | None = None
        self._process = os.getpid()
        work = (read, self._queue, self._closed)
        threading.Thread(target=_fill_queue, args=work, name="batches read ahead", daemon=True).start()

    def __next__(self) -> Any:
        if os.getpid() != self._process:
            raise SetupError(
                f"This iterator over batches belongs to process {self._process}: process {os.getpid()}, which was "
                "forked from it, has no thread that reads ahead. Make the iterator there, or with `prefetch=0`."
            )
        kind, value = self._end or self._queue.get()
        if self._closed.is_set():
            self._wake()  # the next waiting thread
            raise StopIteration
        if kind == "batch":
            return value
        self._end = kind, value
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread, and wake threads that wait for a batch."""
        if os.getpid() == self._process:  # in a forked process no thread holds the locks
            self._closed.set()
            self._wake()

    def _wake(self) -> None:
        with suppress(queue.Full):  # so that there is something to get
            self._queue.put_nowait(("end", None))


def _fill_queue(read: Iterator[Any], batches: queue.Queue[tuple[str, Any]], closed: threading.Event) -> None:
    def put(what: tuple[str, Any]) -> None:
        while not closed.is_set():
            try:
                batches.put(what, timeout=0.1)
                return
            except queue.Full:
                pass

    try:
        for batch in read:
            put(("batch", batch))
            if closed.is_set():
                return
    except BaseException as error:
        put(("error", error))
    else:
        put(("end", None))


def _place(state: Mapping[str, Any] | None) -> tuple[Position, int | None]:
    """Return the place in a state, and the number of its order, which older states lack."""
    if state is None:
        return Position(0, 0), None
    try:
        names = Position._fields if "order" in state else Position._fields[:2]
        epoch, batch, *order = (checked_integer(f"state[{name!r}]", state[name], 0) for name in names)
        return Position(epoch, batch), order[0] if order else None
    except (KeyError, TypeError, ValueError):
        raise InvalidTypeError(
            f"`state` (={state!r}) must be the `state` of another such iterator: {{'epoch', 'batch', 'order'}}, "
            "integers of 0 or more."
        ) from None


def _reader(
    source: Any, spec: Any, batch_size: int | None, halo: Any, last: dict[int, Samples]
) -> RowReader | BatchReader:
    structure: PyTreeDef = jax.tree.structure(spec)
    specs = jax.tree.leaves(spec)
    if not specs:
        raise InvalidArgumentError(f"`spec` (={spec!r}) must hold a TensorSpec for each array of a sample or batch.")
    try:
        halos = [None] * len(specs) if halo is None else structure.flatten_up_to(halo)
    except ValueError as error:
        raise InvalidArgumentError(f"`halo` must have the structure of `spec`: {error}") from None
    try:
        arrays = structure.flatten_up_to(source)
    except ValueError as error:
        if isinstance(source, Mapping) and 0 not in source:  # not a data set, then
            raise InvalidArgumentError(f"`source` must have the structure of `spec`: {error}") from None
        arrays = []
    layout = Layout(structure, specs, halos, batch_size, last)
    if arrays and all(isinstance(array, str | os.PathLike) or hasattr(array, "shape") for array in arrays):
        return ArrayReader(layout, arrays)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return SampleReader(layout, source)
    if isinstance(source, Iterable):
        return BatchReader(layout, source)
    raise InvalidTypeError(f"`source` (={source!r}) must be arrays like `spec`, a data set, or an iterable.")
