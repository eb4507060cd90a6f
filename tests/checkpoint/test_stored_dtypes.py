"""Of which dtype a leaf is that was saved: its own, whatever placeholders have, and whatever JAX's default is now."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.trees import refused

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint


@pytest.mark.simulated(1)
def test_64_bits_need_them(tmp_path: Path) -> None:
    """Nothing is rounded in silence."""
    spec, big = TensorSpec((2,), dj.Partition()), np.array([2**40, 1])
    checkpoint.save(tmp_path, np.arange(2.0), spec)
    with jax.enable_x64(False):
        refused(lambda: checkpoint.restore(tmp_path, spec), "is float64 in the .*, but JAX would convert it to")
        refused(lambda: checkpoint.save(tmp_path, big, spec, 1), r"has integers that don't fit into int32")


@pytest.mark.simulated(2)
@pytest.mark.parametrize("wide", [False, True])
def test_numbers_without_a_dtype(wide: bool, tmp_path: Path) -> None:
    """Also arrays of them, of which one worker has another kind: they are so again; but of the dtype that was saved,
    where that is no longer JAX's default."""

    P = dj.Partition()
    its = [TensorSpec((), P, replicated=True)] * 2 + [TensorSpec((2,), P, replicated=True)]
    with jax.enable_x64(False):
        checkpoint.save(tmp_path, [7, 7 if P.rank == 0 else np.int32(7), jnp.full(2, 7)], its)
    with jax.enable_x64(wide):
        got = checkpoint.restore(tmp_path, its)
        assert [leaf.tolist() for leaf in got] == [7, 7, [7, 7]]
        assert {leaf.dtype for leaf in got} == {np.dtype("int32")}
        assert [jax.typeof(leaf).weak_type for leaf in got] == [not wide, False, not wide]


@pytest.mark.simulated(3)
def test_placeholders_have_any_dtype(tmp_path: Path) -> None:
    """Of a worker outside, and of one whose block is empty; what is restored is of the data's dtype on all."""
    P = dj.Partition()
    its = [TensorSpec((1,), P), TensorSpec((2,), P.grid([1], [2]))]
    held = [jnp.ones(n) if P.rank == i else jnp.zeros(0, "int8") for i, n in ((0, 1), (2, 2))]
    checkpoint.save(tmp_path, held, its)
    got = checkpoint.restore(tmp_path, its)
    assert [(leaf.dtype, leaf.tolist()) for leaf in got] == [
        (np.dtype(float), [1.0] * (n * (P.rank == i))) for i, n in ((0, 1), (2, 2))
    ]
