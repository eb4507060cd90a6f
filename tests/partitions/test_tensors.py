"""Global tensors and their blocks: gather, scatter, specs, and the placeholder for nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import on_all, refusal
from partitions.compiling import compiled

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.tracing.tie import tie

WHOLE = np.arange(7 * 5).reshape(7, 5)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.complex64, jnp.bfloat16, bool])
def test_a_worker_cuts_its_block_out_of_a_whole_array(kind, dtype):
    """Uneven blocks are numpy's pieces; a worker outside has a placeholder with the batch size, of the same dtype."""
    order, whole = [3, 5, 0, 1, 4, 2], kind(WHOLE.astype(dtype))
    pieces = [piece for rows in np.array_split(np.asarray(whole), 2) for piece in np.array_split(rows, 3, axis=1)]

    def check(P):
        spec = TensorSpec([7, np.int64(5)], P.grid([2, 3], order))
        found = spec.block(whole)
        assert isinstance(found, jax.Array) and found.dtype == dtype and spec.global_shape == (7, 5)
        if P.rank == 6:
            assert (found.shape, spec.box, spec.local_shape) == ((7, 0), None, (0,))
        else:
            assert spec.local_shape == found.shape
            np.testing.assert_array_equal(found, pieces[order.index(P.rank)])

    on_all(7, check)


def test_blocks_of_a_replicated_tensor_are_copies():
    """Along dimension 0 of the partition: workers 0 and 2 have the first columns. A scalar is on all workers."""

    def check(P):
        P_x = P.grid([2, 2])
        found = TensorSpec((7, 5), P.grid([2, 1, 2]), replicated=0).block(WHOLE)
        np.testing.assert_array_equal(found, WHOLE[:, :3] if P.rank in (0, 2) else WHOLE[:, 3:])
        np.testing.assert_array_equal(TensorSpec((7, 5), P_x, replicated=True).block(WHOLE), WHOLE)
        assert TensorSpec((), P_x, replicated=True).block(np.float32(3)).shape == ()

    on_all(4, check)


def test_a_block_is_cut_inside_jit_and_differentiated():
    def check(P):
        spec = TensorSpec((4,), P.grid([2]))
        gradient = jax.jit(jax.grad(lambda whole: jnp.sum(spec.block(whole) ** 2)))(jnp.arange(4.0))
        np.testing.assert_array_equal(gradient, [0, 2, 0, 0] if P.rank == 0 else [0, 0, 4, 6])

    on_all(2, check)


def test_only_the_block_of_an_array_in_a_file_is_read():
    class Recorded:
        shape, dtype, read = WHOLE.shape, WHOLE.dtype, None

        def __getitem__(self, at):
            self.read = at
            return WHOLE[at]

    stored = Recorded()
    spec = TensorSpec((7, 5), dj.planning_world(2, rank=1).grid([2, 1]))
    np.testing.assert_array_equal(spec.block(stored), WHOLE[4:])
    assert stored.read == (slice(4, 7), slice(0, 5))


def test_a_block_does_not_change_with_the_whole_array():
    whole = WHOLE.copy()
    found = TensorSpec((7, 5), dj.planning_world(1).grid([1, 1])).block(whole)
    whole[:] = -1
    np.testing.assert_array_equal(found, WHOLE)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("array", "kind", "sentence"),
    [
        (np.ones((5, 7)), dj.InvalidArgumentError, "`array` (of shape (5, 7)) must have the global shape, (7, 5)."),
        (np.ones(7), dj.InvalidArgumentError, "`array` (of shape (7,)) must have the global shape, (7, 5)."),
        ([[1.0]], dj.InvalidTypeError, "`array` (=[[1.0]]) must be an array."),
        (np.full((7, 5), "a"), dj.InvalidTypeError, "`array.dtype` (=dtype('<U1')) must be a dtype of numbers"),
    ],
)
def test_another_array_is_refused_by_every_worker(rank, array, kind, sentence):
    spec = TensorSpec((7, 5), dj.planning_world(2, rank).grid([1, 1]))
    with pytest.raises(kind) as caught:
        spec.block(array)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "partition", "kind", "sentence"),
    [
        ((3,), lambda P: P.grid([2, 1]), dj.InvalidArgumentError, "`global_shape` (=(3,)) must have as many"),
        ((3, -1), lambda P: P.grid([2, 1]), dj.InvalidArgumentError, "`global_shape` (=(3, -1)) must not have"),
        ((3, 1.5), lambda P: P.grid([2, 1]), dj.InvalidTypeError, "`global_shape` (=(3, 1.5)) must be a sequ"),
        (3, lambda P: P, dj.InvalidTypeError, "`global_shape` (=3) must be a sequence of integers"),
        ((3,), lambda P: "world", dj.InvalidTypeError, "`partition` (='world') must be a partition"),
        ((3,), lambda P: P.create_partition_inclusive([]), dj.InvalidArgumentError, "`partition` has no workers"),
    ],
)
def test_wrong_specs_are_named_on_every_worker(shape, partition, kind, sentence):
    assert sentence in refusal(3, lambda P: TensorSpec(shape, partition(P)), kind)


@pytest.mark.world(1)
def test_zero_volume_tensors_have_no_elements_but_a_dtype():
    assert dj.zero_volume_tensor().shape == (0,) and dj.zero_volume_tensor().dtype == float
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, complex, "float16"):
        placeholder = dj.zero_volume_tensor(batch_size=3, dtype=dtype)
        assert (placeholder.shape, placeholder.size, placeholder.dtype) == ((3, 0), 0, jnp.dtype(dtype))
    assert dj.zero_volume_tensor(0).shape == (0, 0)
    assert float(jnp.sum(dj.zero_volume_tensor())) == 0
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(x**2))(dj.zero_volume_tensor(2)), np.zeros((2, 0)))


def test_placeholders_and_ties_of_new_shapes_compile_nothing() -> None:
    """Eagerly, JAX's zeros compile a program for each shape, and the shape of a placeholder changes with the batch."""
    with compiled() as names:
        jnp.zeros(1234)
    assert names  # they are heard of
    with compiled() as names:
        tie(dj.zero_volume_tensor(1235), dj.zero_volume_tensor(1236, jnp.bfloat16))
    assert not names
