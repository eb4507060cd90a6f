"""Random numbers and initial blocks that do not depend on the partition: the blocks of jax.random's whole tensors."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from imaginary import partition_of, refusal
from jax.nn import initializers
from matrix.partitions import On, on

import distdl_jax as dj
from distdl_jax.initialization import initialize_block

KEY = jax.random.key(5)
SPECS: tuple[tuple[tuple[int, ...], On, Any], ...] = (
    ((7, 5), on(2, 2, ranks=(3, 1, 2, 0)), ()),
    ((6, 5), on(2, 2, 1), 0),
    ((5,), on(2, 2), 1),
    ((3, 4), on(4), True),
    ((), on(4), True),
    ((2, 3), on(4, 1), ()),
)


def spec_of(P: dj.Partition, n: tuple[int, ...], P_x: On, copied: Any) -> dj.TensorSpec:
    return dj.TensorSpec(n, P_x.partition(P), copied)


def block(whole: Any, spec: dj.TensorSpec) -> Any:
    return np.asarray(whole)[tuple(slice(*side) for side in spec.box)] if spec.box is not None else np.zeros(0)


def test_blocks_are_those_of_the_whole_tensor() -> None:
    """For each worker and spec; uniform numbers and booleans exactly, what is computed from bits to the last bits."""
    for rank, (n, P_x, copied) in itertools.product((0, 3), SPECS):
        spec = spec_of(partition_of(rank, 4), n, P_x, copied)
        for got, want, tolerance in (
            (dj.random.uniform(KEY, spec), jax.random.uniform(KEY, n), 0),
            (dj.random.uniform(KEY, spec, "float16"), jax.random.uniform(KEY, n, "float16"), 0),
            (dj.random.uniform(KEY, spec, minval=-1, maxval=3), jax.random.uniform(KEY, n, minval=-1, maxval=3), 1e-6),
            (dj.random.normal(KEY, spec), jax.random.normal(KEY, n), 1e-6),
            (dj.random.bernoulli(KEY, 0.3, spec), jax.random.bernoulli(KEY, 0.3, n), 0),
            (dj.random.bernoulli(KEY, spec), jax.random.bernoulli(KEY, 0.5, n), 0),
            (dj.init_block(initializers.normal(), KEY, spec, float), initializers.normal()(KEY, n, float), 1e-6),
        ):
            assert got.dtype == want.dtype and got.shape == spec.local_shape
            np.testing.assert_allclose(np.asarray(got, float), np.asarray(block(want, spec), float), atol=tolerance)


@pytest.mark.simulated(4)
def test_a_key_is_traced_and_mapped_over() -> None:
    """Under dj.jit, vmap and a scan over steps, on workers with and without a block."""
    P = dj.Partition()
    spec = spec_of(P, (6,), on(3), ())
    keys = jax.random.split(KEY, 3)

    @dj.jit
    def drawn(keys: Any) -> Any:
        stepped = jax.lax.scan(lambda _, key: (None, dj.random.uniform(key, spec)), None, keys)[1]
        return stepped, jax.vmap(lambda key: dj.random.uniform(key, spec))(keys)

    whole = jax.vmap(lambda key: jax.random.uniform(key, (6,)))(keys)
    for got in drawn(keys):
        want = np.asarray(whole)[:, slice(*spec.box[0])] if spec.box else np.zeros((3, 0))
        np.testing.assert_allclose(got, want, rtol=1e-15)


def test_memory_is_that_of_the_block() -> None:
    """A block of 1/256 of a tensor of 1 GiB."""
    n, part = 16384, 1024
    lowered = initialize_block.lower(
        dj.random._Standard("normal"), KEY, (n, n), ((2 * part, 3 * part), (0, part)), np.dtype("float32")
    )
    used = lowered.compile().memory_analysis()
    assert used.temp_size_in_bytes + used.output_size_in_bytes < 10 * 4 * part**2


@pytest.mark.simulated(3)
def test_dropout_is_the_same_whatever_the_partition() -> None:
    """The gathered result of dropping a split tensor is that of dropping the whole one."""
    P = dj.Partition()
    spec = dj.TensorSpec((4, 8), P.create_cartesian_topology_partition([1, 3]))
    whole = np.arange(32.0).reshape(4, 8)
    x = jax.device_put(block(whole, spec))
    dropped = jax.jit(lambda key, x: jnp.where(dj.random.bernoulli(key, 0.7, spec), x / 0.7, 0))(KEY, x)
    got = dj.gather(dropped, spec)
    if P.rank == 0:
        want = np.where(jax.random.bernoulli(KEY, 0.7, (4, 8)), whole / 0.7, 0)
        np.testing.assert_allclose(got, want, rtol=1e-14)


def test_arguments_are_named() -> None:
    def spec(P: dj.Partition) -> dj.TensorSpec:
        return dj.TensorSpec((3,), P)

    for call, kind, sentence in (
        (lambda P: dj.random.uniform(KEY, (3,)), dj.InvalidTypeError, "`spec` (=(3,)) must be a TensorSpec."),
        (lambda P: dj.random.normal(KEY, spec(P), int), dj.InvalidTypeError, "must be floating or complex."),
        (lambda P: dj.random.bernoulli(KEY, 1.5, spec(P)), dj.InvalidArgumentError, "`p` (=1.5) must be a probability"),
        (lambda P: dj.random.bernoulli(KEY, 0.5), dj.InvalidTypeError, "`spec` (=None) must be a TensorSpec."),
        (lambda P: dj.init_block("he", KEY, spec(P)), dj.InvalidTypeError, "`initializer` (='he') must be a function"),
        (lambda P: dj.init_block(initializers.zeros, KEY, 3), dj.InvalidTypeError, "`spec` (=3) must be a TensorSpec."),
    ):
        assert sentence in refusal(3, call, kind)
