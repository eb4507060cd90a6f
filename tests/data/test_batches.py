"""The loader: the same samples in the same order on any number of workers, each its own blocks, from any place on."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.data import batches
from distdl_jax.data.reading import Order

IMAGES = np.arange(11 * 4 * 6, dtype=np.float64).reshape(11, 4, 6)
LABELS = np.arange(11, dtype=np.int32)
KEY = np.array([0, 42], np.uint32)


class DataSet:
    """As torch's Dataset and grain's MapDataset are."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": IMAGES[i], "y": LABELS[i]}


class Loader:
    """As torch's DataLoader and grain's IterDataset are; it uses one memory for all batches."""

    def __iter__(self) -> Any:
        buffer = np.empty((4, 4, 6))
        for start in range(0, 11, 4):
            size = len(LABELS[start : start + 4])
            buffer[:size] = IMAGES[start : start + 4]
            yield {"x": buffer[:size], "y": LABELS[start : start + 4]}


def spec(split_batch: bool) -> dict[str, TensorSpec]:
    """Images cut by columns, and by samples, too; labels on the last worker."""
    P = dj.Partition()
    last = P.create_partition_inclusive([P.size - 1])
    if split_batch:
        rows = 2 if P.size % 2 == 0 else 1
        P_x = P.grid([rows, 1, P.size // rows])
        return {"x": TensorSpec((4, 4, 6), P_x), "y": TensorSpec((4,), last)}
    P_x = P.grid([1, P.size])
    return {"x": TensorSpec((4, 6), P_x), "y": TensorSpec((), last)}


def source(kind: str) -> Any:
    return {"arrays": {"x": IMAGES, "y": LABELS}, "data set": DataSet(), "loader": Loader()}[kind]


def whole(its: dict[str, TensorSpec], batch: dict[str, Any], split_batch: bool) -> dict[str, Any]:
    """What all workers hold of a batch, put together by numpy on the last one."""
    P = dj.Partition()
    size = P.broadcast_data(len(batch["y"]), root=P.size - 1)
    spec_of = TensorSpec((size, 4, 6), its["x"].partition) if split_batch else its["x"]
    parts = P.allgather_data((spec_of.box, np.asarray(batch["x"])))
    images = np.full((size, 4, 6), np.nan)
    for box, part in parts:
        at = tuple(slice(*ends) for ends in box)
        images[at if split_batch else (slice(None), *at)] = part
    return {"x": images, "y": np.asarray(batch["y"])}


@pytest.mark.parametrize("split_batch", [False, True])
@pytest.mark.parametrize("kind", ["arrays", "data set", "loader"])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_every_sample_once_in_an_order_that_all_share(workers: int, kind: str, split_batch: bool) -> None:
    keyed = kind != "loader"

    def program() -> list[list[int]]:
        its = spec(split_batch)
        found = []
        arguments = {"batch_size": 4, "key": KEY} if keyed else {}
        for batch in batches(source(kind), its, **arguments, epochs=2):
            assert all(isinstance(leaf, jax.Array) for leaf in batch.values())
            assert (batch["x"].dtype, batch["y"].dtype) == (IMAGES.dtype, LABELS.dtype)
            together = whole(its, batch, split_batch)
            if dj.Partition().rank == dj.Partition().size - 1:
                np.testing.assert_array_equal(together["x"], IMAGES[together["y"]])
                found.append(together["y"].tolist())
            else:
                assert (batch["y"].size == 0 and len(together["x"]) == batch["y"].shape[0]) or split_batch
        return found

    found = dj.simulate(workers, program)[-1]
    order = Order(11, 4, KEY.tolist(), False)
    epochs = [order.epoch(n) if keyed else np.arange(11) for n in range(2)]
    assert found == [rows[start : start + 4].tolist() for rows in epochs for start in (0, 4, 8)]


def test_the_order() -> None:
    """Fixed for ever by key and epoch: some are written down here; each is another permutation, as each word of a key
    makes one."""
    order = Order(11, 4, [0, 42], False)
    assert [sorted(order.epoch(n).tolist()) for n in range(4)] == [list(range(11))] * 4
    assert len({tuple(order.epoch(n).tolist()) for n in range(4)} | {tuple(Order(11, 4, [1, 42], False).epoch(0))}) == 5
    assert order.epoch(0).tolist() == FIRST
    assert order.epoch(1).tolist() == SECOND
    long = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 4, 4], [1, 3, 3, 4], [2, 2, 3, 4]]
    assert len({tuple(Order(11, 4, words, False).epoch(0).tolist()) for words in long}) == 5
    assert Order(11, 4, long[0], False).epoch(0).tolist() == OF_FOUR_WORDS


FIRST = [10, 4, 6, 2, 1, 0, 8, 5, 9, 7, 3]
SECOND = [6, 9, 3, 8, 4, 10, 5, 0, 1, 2, 7]
OF_FOUR_WORDS = [2, 4, 1, 0, 3, 5, 7, 8, 6, 10, 9]


@pytest.mark.simulated(1)
def test_the_order_is_that_of_the_key() -> None:
    """New ones and old ones, and those of another generator, which are longer."""
    for key in (jax.random.key(7), jax.random.PRNGKey(7), jax.random.key(7, impl="rbg")):
        is_new = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
        words = np.asarray(jax.random.key_data(key) if is_new else key).tolist()
        assert labels(batch_size=11, key=key) == [Order(11, 11, words, False).epoch(0).tolist()]


def labels(**arguments: Any) -> list[list[int]]:
    P = dj.Partition().create_partition_inclusive([0])
    return [batch.tolist() for batch in batches(LABELS, TensorSpec((), P), **arguments)]


@pytest.mark.simulated(1)
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_batches_continue_from_any_state(prefetch: int) -> None:
    """Also across the end of an epoch, and whatever has been read ahead."""
    everything = labels(batch_size=4, key=KEY, epochs=3, prefetch=prefetch)
    P = dj.Partition().create_partition_inclusive([0])
    for place in range(10):
        first = batches(LABELS, TensorSpec((), P), 4, KEY, epochs=3, prefetch=prefetch)
        for _ in range(place):
            next(first)
        state = first.state
        first.close()
        assert state == {"epoch": place // 3, "batch": place % 3, "order": state["order"]}
        del state["order"]  # older ones have none
        rest = labels(batch_size=4, key=KEY, epochs=3, prefetch=prefetch, state=state)
        assert everything[place:] == rest
    loader = Loader()
    its = {"x": TensorSpec((4, 6), P.grid([1, 1])), "y": TensorSpec((), P)}
    state = {"epoch": np.int64(0), "batch": np.asarray(2)}  # as other libraries restore numbers
    found = [batch["y"].tolist() for batch in batches(loader, its, epochs=2, state=state)]
    assert found == [[8, 9, 10], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.simulated(2)
def test_the_state_in_a_checkpoint(tmp_path: Path) -> None:
    P = dj.Partition()
    its = batches(LABELS, TensorSpec((), P, replicated=True), 4, KEY)
    next(its)
    dj.checkpoint.save(tmp_path, its.state, its.state_spec(P))
    state = dj.checkpoint.restore(tmp_path, its.state_spec(P))
    again = batches(LABELS, TensorSpec((), P, replicated=True), 4, KEY, state=state)
    assert again.state == its.state == {"epoch": 0, "batch": 1, "order": its.state["order"]}
    assert next(again).tolist() == next(its).tolist()


@pytest.mark.simulated(1)
def test_the_last_batch() -> None:
    assert [len(batch) for batch in labels(batch_size=4)] == [4, 4, 3]
    assert [len(batch) for batch in labels(batch_size=4, drop_last=True)] == [4, 4]
    assert [len(batch) for batch in labels(batch_size=20)] == [11]
    (batch,) = batches(IMAGES.astype(">f8"), one((4, 6)), 11)
    np.testing.assert_array_equal(batch, IMAGES)


@pytest.mark.simulated(1)
@pytest.mark.limit(20)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_end(prefetch: int) -> None:
    """However often one asks; an iterator can't be gone through again, not even by who would go on for ever."""
    its = batches(LABELS, one(()), 4, prefetch=prefetch)
    assert [len(list(its)) for _ in range(3)] == [3, 0, 0]
    spec = {"x": one((4, 6)), "y": one(())}
    assert len(list(batches(iter(Loader()), spec, epochs=None, prefetch=prefetch))) == 3


@pytest.mark.simulated(4)
def test_a_halo() -> None:
    """Around the block of each sample, clipped at its boundary; of a batch that is split as well."""
    its = spec(False)["x"]
    (start, stop) = its.box[1]
    (batch,) = batches(IMAGES, its, 11, halo=[(0, 0), (1, 2)])
    np.testing.assert_array_equal(batch, IMAGES[:, :, max(0, start - 1) : stop + 2])
    its = spec(True)["x"]
    rows, _, (start, stop) = its.box
    first, *_ = batches(IMAGES, its, 4, halo=[(1, 0), (0, 0), (2, 1)])
    np.testing.assert_array_equal(first, IMAGES[max(0, rows[0] - 1) : rows[1], :, max(0, start - 2) : stop + 1])


@pytest.mark.simulated(4)
def test_copies_of_a_batch_that_is_split() -> None:
    """Both workers of a row have its samples."""
    P = dj.Partition().grid([2, 2])
    (batch, _) = batches(LABELS[:8], TensorSpec((4,), P, replicated=1), 4)
    assert batch.tolist() == ([0, 1] if P.rank < 2 else [2, 3])


def one(shape: tuple[int, ...]) -> TensorSpec:
    P = dj.Partition().create_partition_inclusive([0])
    return TensorSpec(shape, P.grid([1] * len(shape)))


@pytest.mark.simulated(1)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"source": IMAGES, "spec": (4, 5), "batch_size": 2}, r"has global shape \(4, 5\), but a sample .* \(4, 6\)"),
        ({"source": IMAGES, "spec": (3, 4, 6), "batch_size": 2}, "has 3 samples in a batch, but `batch_size` is 2"),
        ({"source": IMAGES, "spec": (4, 6)}, r"`batch_size` \(=None\) must be an integer"),
        ({"source": IMAGES, "spec": (4, 6), "batch_size": 12, "drop_last": True}, "leaves no batch of the 11 samples"),
        ({"source": iter([]), "spec": (4, 6), "batch_size": 2}, "must be None if `source` is an iterable"),
        ({"source": 3, "spec": (4, 6), "batch_size": 2}, r"`source` \(=3\) must be arrays like `spec`"),
        ({"source": IMAGES, "spec": (4, 6), "batch_size": 2, "key": 3}, r"`key` \(=3\) must be a random key"),
        ({"source": IMAGES, "spec": (4, 6), "batch_size": 2, "state": {}}, r"`state` \(=\{\}\) must be the `state`"),
        *(
            (
                {"source": IMAGES, "spec": (4, 6), "batch_size": 2, "state": {"epoch": epoch, "batch": batch}},
                r"`state` \(=\{.*\}\) must be the `state` of another such iterator: .*, integers of 0 or more",
            )
            for epoch, batch in ((0.7, 1), (0, 1.9), (0, np.asarray(1.0)), ("0", 1), (0, -1))
        ),
        *(
            ({"source": array, "spec": (), "batch_size": 2}, rf"`source` must hold numbers, .* of dtype {dtype}")
            for array, dtype in ((np.array(["a", "b"]), "<U1"), (np.array([None, 3]), "object"))
        ),
        ({"source": IMAGES, "spec": (4, 6), "batch_size": 2, "epochs": -1}, r"`epochs` \(=-1\) must be 0 or more"),
    ],
)
def test_wrong_arguments(arguments: dict, sentence: str) -> None:
    with pytest.raises(dj.DistDLError, match=sentence):
        batches(**arguments | {"spec": one(arguments["spec"])})


@pytest.mark.simulated(1)
@pytest.mark.parametrize(
    "changed", [{"batch_size": 3}, {"key": KEY + 1}, {"key": None}, {"source": LABELS[:10]}, {"batch_size": 1}]
)
@pytest.mark.parametrize("batch", [0, 2])
def test_the_state_of_another_iterator(batch: int, changed: dict[str, Any]) -> None:
    """In the middle of an epoch it is refused; at its beginning it says what it said."""
    arguments = {"source": LABELS, "spec": one(()), "batch_size": 4, "key": KEY, "epochs": 3}
    its = batches(**arguments)
    for _ in range(3 + batch):
        next(its)
    state = {name: jax.numpy.asarray(number) for name, number in its.state.items()}
    assert len([*batches(**arguments, state=state)]) == 6 - batch
    assert its.state["order"] == batches(**arguments | {"key": jax.random.wrap_key_data(KEY)}).state["order"]
    if batch == 0:
        next(batches(**arguments | changed, state=state))
        return
    with pytest.raises(dj.InvalidArgumentError, match=r"`state` \(epoch 1, batch 2\) belongs to an iterator with"):
        batches(**arguments | changed, state=state)


@pytest.mark.simulated(1)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_state_beyond_the_end(prefetch: int) -> None:
    """It is refused, and not that of an iterator which was gone through."""
    its = batches(LABELS, one(()), 4, epochs=2)
    assert len([*its]) == 6 and [*batches(LABELS, one(()), 4, epochs=2, state=its.state)] == []
    for epoch, batch in ((0, 3), (2, 1), (3, 0)):
        with pytest.raises(dj.InvalidArgumentError, match=r"`state` \(.*\) is beyond the"):
            batches(LABELS, one(()), 4, epochs=2, state={"epoch": epoch, "batch": batch})
    spec = {"x": one((4, 6)), "y": one(())}
    assert [*batches(Loader(), spec, state={"epoch": 0, "batch": 3}, prefetch=prefetch)] == []
    with pytest.raises(dj.InvalidArgumentError, match="is beyond the last of the 3 batches of `source`"):
        next(batches(Loader(), spec, state={"epoch": 0, "batch": 4}, prefetch=prefetch))


@pytest.mark.simulated(1)
def test_samples_of_different_shapes() -> None:
    samples = [np.ones(5 if n == 3 else 4) for n in range(6)]
    for size in (2, 4):
        with pytest.raises(
            dj.InvalidArgumentError, match=r"`source` has samples of different shapes, \(4,\) .*\(number 3"
        ):
            list(batches(samples, one((4,)), size))


@pytest.mark.simulated(1)
def test_arrays_of_different_lengths() -> None:
    with pytest.raises(dj.InvalidArgumentError, match=r"`source` has arrays of \[10, 11\] samples"):
        batches({"x": IMAGES, "y": LABELS[:10]}, {"x": one((4, 6)), "y": one(())}, 2)
