"""Random numbers and initial blocks that do not depend on the partition: the blocks of jax.random's whole tensors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from blocks import block_of
from jax.nn import initializers
from matrix.partitions import On, on

import distdl_jax as dj
from distdl_jax.partitions.initialization import initialize_block

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


def test_blocks_are_those_of_the_whole_tensor() -> None:
    """For each spec on one worker or another; uniform numbers and booleans exactly, others to the last bits."""
    ways: tuple[tuple[Any, Any, float], ...] = (
        (lambda key, spec: dj.random.uniform(key, spec), lambda key, n: jax.random.uniform(key, n), 0),
        (lambda *args: dj.random.uniform(*args, "float16"), lambda *args: jax.random.uniform(*args, "float16"), 0),
        (
            lambda key, spec: dj.random.uniform(key, spec, minval=-1, maxval=3),
            lambda key, n: jax.random.uniform(key, n, minval=-1, maxval=3),
            1e-6,
        ),
        (lambda key, spec: dj.random.normal(key, spec), lambda key, n: jax.random.normal(key, n), 1e-6),
        (lambda key, spec: dj.random.bernoulli(key, 0.3, spec), lambda key, n: jax.random.bernoulli(key, 0.3, n), 0),
        (lambda key, spec: dj.random.bernoulli(key, spec), lambda key, n: jax.random.bernoulli(key, 0.5, n), 0),
        (
            lambda key, spec: dj.init_block(initializers.normal(), key, spec, float),
            lambda key, n: initializers.normal()(key, n, float),
            1e-6,
        ),
    )
    shapes = dict.fromkeys(n for n, _, _ in SPECS)
    pairs = [(spec, way) for spec in SPECS for way in ways]
    specs = [spec_of(dj.planning_world(4, 3 * (place % 2)), *spec) for place, (spec, _) in enumerate(pairs)]
    wholes = jax.jit(lambda key: {n: [whole(key, n) for _, whole, _ in ways] for n in shapes})(KEY)
    blocks = jax.jit(lambda key: [way[0](key, spec) for spec, (_, way) in zip(specs, pairs, strict=True)])(KEY)
    for got, spec, (_, way) in zip(blocks, specs, pairs, strict=True):
        want = wholes[spec.global_shape][ways.index(way)]
        assert got.dtype == want.dtype and got.shape == spec.local_shape
        np.testing.assert_allclose(np.asarray(got, float), np.asarray(block_of(want, spec), float), atol=way[2])


def test_a_range_of_which_one_end_is_given() -> None:
    """And arrays of bounds, which broadcast with the block; no number is below the lower one."""
    spec = spec_of(dj.planning_world(2, 1), (7,), on(2), ())
    for bounds in ({"maxval": 3.0}, {"minval": -1}, {"minval": np.arange(7.0), "maxval": 9}):
        want = block_of(jax.random.uniform(KEY, (7,), **bounds), spec)
        mine = {name: np.asarray(x)[4:] if np.ndim(x) else x for name, x in bounds.items()}
        np.testing.assert_allclose(dj.random.uniform(KEY, spec, **mine), want, rtol=1e-15)
    elsewhere = spec_of(dj.planning_world(3, 2), (7,), on(2), ())
    assert dj.random.uniform(KEY, elsewhere, minval=np.zeros(3)).shape == (0,)
    assert (dj.random.bernoulli(KEY, elsewhere).dtype, dj.random.normal(KEY, elsewhere, "float16").dtype) == (
        np.dtype(bool),
        np.dtype("float16"),
    )


def test_a_number_that_equals_its_probability() -> None:
    """Is not below it; numbers are drawn in the dtype of the probabilities, as JAX draws them."""
    spec = spec_of(dj.planning_world(2, 1), (7,), on(2), ())
    drawn = jax.random.uniform(KEY, (7,), "float32")
    want = block_of(jax.random.bernoulli(KEY, drawn, (7,)), spec)
    np.testing.assert_array_equal(dj.random.bernoulli(KEY, jnp.asarray(block_of(drawn, spec)), spec), want)
    assert not want.any()


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


def test_arguments_are_named() -> None:
    def spec(P: dj.Partition) -> dj.TensorSpec:
        return dj.TensorSpec((3,), P)

    for call, kind, sentence in (
        (lambda P: dj.random.uniform(KEY, (3,)), dj.InvalidTypeError, "`spec` (=(3,)) must be a TensorSpec."),
        (lambda P: dj.random.normal(KEY, spec(P), int), dj.InvalidTypeError, "must be floating or complex."),
        (lambda P: dj.random.uniform(KEY, spec(P), complex), dj.InvalidTypeError, "(=complex128) must be floating."),
        (lambda P: dj.random.bernoulli(KEY, 1.5, spec(P)), dj.InvalidArgumentError, "`p` (=1.5) must be a probability"),
        (lambda P: dj.random.bernoulli(KEY, 0.5), dj.InvalidTypeError, "`spec` (=None) must be a TensorSpec."),
        (lambda P: dj.init_block("he", KEY, spec(P)), dj.InvalidTypeError, "`initializer` (='he') must be a function"),
        (lambda P: dj.init_block(initializers.zeros, KEY, 3), dj.InvalidTypeError, "`spec` (=3) must be a TensorSpec."),
    ):
        assert sentence in refusal(3, call, kind)
