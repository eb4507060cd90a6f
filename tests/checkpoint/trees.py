"""A tree of everything that can be saved, its specs on several partitions, and its blocks by numpy's own slicing."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec

DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "uint16", "int32", "int64", "bool"),
)


class Keys(NamedTuple):
    data: np.ndarray
    impl: str

    def wrapped(self) -> jax.Array:
        return jax.random.wrap_key_data(self.data, impl=self.impl)


def keys_of(keys: jax.Array) -> Keys:
    return Keys(np.asarray(jax.random.key_data(keys)), str(jax.random.key_impl(keys)))


def wholes(its_specs: dict[str, Any]) -> dict[str, Any]:
    """The whole tensors of these names."""
    return {name: _wholes()[name] for name in its_specs}


@cache
def _wholes() -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {
        "params": {
            "weight": draw.standard_normal((7, 5)),
            "bias": draw.standard_normal(9).astype(np.float32),
            "all": [np.asarray(jnp.asarray(draw.standard_normal((4, 3)) * 9, dtype)) for dtype in DTYPES],
        },
        "statistics": (np.float32(0.25), np.arange(3, dtype=np.int32)),
        "empty": np.zeros((0, 4), np.float32),
        "key": keys_of(jax.random.key(3)),
        "keys": keys_of(jax.random.split(jax.random.key(4, impl="rbg"), 5)),
        "old key": np.asarray(jax.random.PRNGKey(5)),
        "rate": 0.125,
        "step": 7,
        "function": jax.nn.relu,
        "nothing": None,
    }


def specs(P: dj.Partition, kind: int) -> dict[str, Any]:
    """Their specs on all workers, on some of them in another order, or replicated.

    2, on four workers: copies along some dimensions of grids, scalars on one worker, blocks that are uneven or empty.
    """
    n = P.size
    if kind == 0:
        rows, columns, line = P.grid([n, 1], [*range(n)]), P.grid([1, n], [*range(n)][::-1]), P
    elif kind == 1 and n > 2:
        columns, rows, line = P.grid([2, 1], [n - 1, 0]), P.grid([1, 1], [1]), P.grid([2], [2, 0])
    else:
        rows = columns = P.grid([1, 1])
        line = P.grid([1], [n - 1])
    everywhere = P.grid([n])
    its = {
        "params": {
            "weight": TensorSpec((7, 5), rows),
            "bias": TensorSpec((9,), everywhere, replicated=True) if kind == 0 else TensorSpec((9,), line),
            "all": [TensorSpec((4, 3), columns if place % 2 else rows) for place in range(len(DTYPES))],
        },
        "statistics": (TensorSpec((), line, replicated=True), TensorSpec((3,), line)),
        "empty": TensorSpec((0, 4), columns),
        "key": TensorSpec((), P, replicated=True),
        "keys": TensorSpec((5,), line),
        "old key": TensorSpec((2,), P, replicated=True),
        "rate": TensorSpec((), P, replicated=True),
        "step": TensorSpec((), P, replicated=True),
        "function": None,
        "nothing": None,
    }
    if kind == 2:
        one, empty = TensorSpec((), P.grid([1, 1], [1])), TensorSpec((4, 3), P.grid([1, 4], [2, 0, 3, 1]))
        copied = TensorSpec((4, 3), P.grid([2, 2, 1]), replicated=-3)
        pair = TensorSpec((4, 3), P.grid([1, 2], [3, 1]), replicated=(0, 1))
        bias = TensorSpec((9,), P.grid([2, 2], [2, 0, 3, 1]), replicated=0)
        leaves = [(empty, copied, pair)[place % 3] for place in range(len(DTYPES))]
        its["params"] = {"weight": TensorSpec((7, 5), P.grid([2, 2])), "bias": bias, "all": leaves}
        its["statistics"] = (one, TensorSpec((3,), P.create_partition_inclusive([1, 3, 0])))
    return its


def cut(whole: Any, spec: TensorSpec | None) -> Any:
    """This worker's block, by numpy's own rule, with the copied dimensions of the grid of workers left out."""
    if spec is None or isinstance(whole, int | float):
        return whole
    P, data = spec.partition, whole.data if isinstance(whole, Keys) else whole
    if P.rank is None:
        return jnp.zeros(0) if isinstance(whole, Keys) else np.zeros(0, whole.dtype)
    index = np.unravel_index(P.rank, P.shape)
    for axis, d in enumerate(d for d in range(P.dim) if d not in spec.replicated):
        data = np.array_split(data, P.shape[d], axis=axis)[int(index[d])]
    return whole._replace(data=data).wrapped() if isinstance(whole, Keys) else data


def blocks(its_specs: dict[str, Any]) -> dict[str, Any]:
    return _together(lambda spec, whole: cut(whole, spec), its_specs, wholes(its_specs))


def same(got: Any, its_specs: dict[str, Any], weak: bool = True) -> None:
    """Whether a tree holds this worker's blocks, to the bit and in their dtypes; None where there is no spec.

    `weak`: Python's numbers are weakly typed."""

    def compare(spec: TensorSpec | None, whole: Any, found: Any) -> None:
        if spec is None:
            assert found is None
            return
        assert isinstance(found, jax.Array) and found.shape == spec.local_shape
        assert jax.typeof(found).weak_type == (weak and isinstance(whole, int | float))
        want = cut(whole, spec)
        if isinstance(whole, Keys):
            assert str(jax.random.key_impl(found)) == whole.impl
            want, found = (jax.random.key_data(keys) if keys.size else keys for keys in (want, found))
        else:
            assert found.dtype == jnp.result_type(whole)
        if spec.partition.active:
            np.testing.assert_array_equal(np.asarray(found), np.asarray(want))

    _together(compare, its_specs, wholes(its_specs), got)


def _together(function: Any, *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=lambda x: x is None or isinstance(x, Keys | TensorSpec))


def refused(call: Callable[[], Any], sentence: str, kind: type[Exception] = dj.DistDLError) -> None:
    with pytest.raises(kind, match=sentence):
        call()
