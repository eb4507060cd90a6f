"""Blocks put side by side are numpy's, whichever way the compiler is told to do it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distdl_jax.functional.box_exchange import side_by_side

WIDTHS = [(1, 20), (20, 1), (1, 20, 1), (2, 20), (1, 20, 2), (2, 20, 2), (0, 20, 1), (1, 20, 0), (1, 16, 1, 1), (1, 3),
          (20,)]  # fmt: skip


def blocks_of(widths, axis, dtype="float32"):
    rng = np.random.default_rng(len(widths))
    shapes = (tuple(width if d == axis else n for d, n in enumerate((2, 3, 4))) for width in widths)
    blocks = [rng.integers(0, 2, shape).astype(bool) if dtype == "bool" else rng.normal(size=shape) for shape in shapes]
    return [jnp.asarray(3 * block, dtype) for block in blocks]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("axis", [0, 2])
def test_widths(widths, axis):
    blocks = blocks_of(widths, axis)
    expected = np.concatenate([np.asarray(block) for block in blocks], axis)
    np.testing.assert_array_equal(side_by_side(blocks, axis), expected)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64", "float64"])
def test_dtypes_and_what_is_no_number(dtype):
    blocks = blocks_of((1, 20, 1), 2, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        blocks = [block.at[0, 0, 0].set(value) for block, value in zip(blocks, (jnp.nan, jnp.inf, -0.0), strict=True)]
    got = jax.jit(lambda *blocks: side_by_side(blocks, 2))(*blocks)
    assert got.dtype == dtype
    expected = np.concatenate([np.asarray(block) for block in blocks], 2)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected.view(np.uint8))


def test_only_narrow_columns_are_chosen():
    def written(widths, axis):
        return str(jax.make_jaxpr(lambda *blocks: side_by_side(blocks, axis))(*blocks_of(widths, axis)))

    assert "concatenate" not in written((1, 20, 1), 2) and "concatenate" not in written((2, 20), 2)
    for widths, axis in (((1, 20), 0), ((10, 10), 2), ((2, 20, 2), 2), ((1, 16, 1, 1), 2)):
        assert "concatenate" in written(widths, axis)
