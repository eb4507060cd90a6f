"""Random tensors whose numbers do not depend on the partition: for dropout, noise and synthetic data.

With one key, the blocks of all workers together equal `jax.random`'s for the global shape and that key, whatever the
partition: threefry, JAX's default generator, computes the n-th number from n alone, so each worker generates only its
block's numbers. (With keys of another generator each worker generates the whole tensor, and cuts it.)

    keep = dj.random.bernoulli(key, 0.9, spec)
    x = jnp.where(keep, x / 0.9, 0)

The key must be the same on every worker, and another one at each step: `key, now = jax.random.split(key)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partitions.initialization import init_block
from distdl_jax.partitions.tensors import TensorSpec, check_spec, zero_volume_tensor
from distdl_jax.validation import check_key, checked_dtype

__all__ = ["bernoulli", "normal", "uniform"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


@dataclass(frozen=True)
class _Standard:
    """A function of `jax.random` as an initializer: a value, so that equal calls compile once."""

    name: str

    def __call__(self, key: Array, shape: Sequence[int], dtype: DTypeLike) -> Array:
        numbers: Array = getattr(jax.random, self.name)(key, tuple(shape), dtype)
        return numbers


standard_uniform = _Standard("uniform")
"""`jax.random.uniform` as an initializer."""


def uniform(
    key: Array, spec: TensorSpec, dtype: DTypeLike = float, minval: ArrayLike = 0.0, maxval: ArrayLike = 1.0
) -> Array:
    """Return this worker's block of uniform random numbers: of `jax.random.uniform(key, spec.global_shape, dtype)`.

    **Arguments:**

    - `key`: a JAX random key, the same on every worker.
    - `spec`: the tensor. Copies of a block get the same numbers.
    - `dtype`: a floating one. Default: JAX's default float.
    - `minval`, `maxval`: the range, [minval, maxval): numbers, or arrays that broadcast with the block.

    **Returns:** the block; zero-volume if this worker holds none. Bit for bit the same numbers for every partition.

    **Raises:** `InvalidTypeError` for a dtype that is not floating, or a spec that is not a `TensorSpec`.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> dj.random.uniform(jax.random.key(0), dj.TensorSpec((2, 3), P)).shape
    (2, 3)
    """
    block = _block("uniform", key, spec, dtype)
    if _is_number(minval, 0) and _is_number(maxval, 1):
        return block
    low, high = (jnp.asarray(bound, block.dtype) for bound in (minval, maxval))
    return block if spec.box is None else jnp.maximum(low, block * (high - low) + low)


def normal(key: Array, spec: TensorSpec, dtype: DTypeLike = float) -> Array:
    """Return this worker's block of standard normal numbers: of `jax.random.normal(key, spec.global_shape, dtype)`.

    **Arguments:**

    - `key`: a JAX random key, the same on every worker.
    - `spec`: the tensor. Copies of a block get the same numbers.
    - `dtype`: a floating or complex one. Default: JAX's default float.

    **Returns:** the block; zero-volume if this worker holds none. They are computed from the same random bits for every
    partition; the last bit or two of a result may differ, as XLA orders arithmetic by shape.

    **Raises:** as in `uniform`.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> dj.random.normal(jax.random.key(0), dj.TensorSpec((2, 3), P)).shape
    (2, 3)
    """
    return _block("normal", key, spec, dtype)


def bernoulli(key: Array, p: ArrayLike | TensorSpec = 0.5, spec: TensorSpec | None = None) -> Array:
    """Return this worker's block of the random booleans `jax.random.bernoulli(key, p, global_shape)`, true with p.

    **Arguments:**

    - `key`: a JAX random key, the same on every worker.
    - `p`: the probability, a number or a floating array that broadcasts with the block. May be omitted.
    - `spec`: the tensor. Copies of a block get the same booleans.

    **Returns:** the block; zero-volume if this worker holds none. Exactly the same for every partition.

    **Raises:** `InvalidArgumentError` for a number outside [0, 1]; `InvalidTypeError` if there is no spec.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> bool(dj.random.bernoulli(jax.random.key(0), 1.0, dj.TensorSpec((5,), P)).all())
    True
    """
    if isinstance(p, TensorSpec):
        return bernoulli(key, 0.5, p)
    check_spec(spec)
    assert spec is not None
    check_key("key", key)
    if not (isinstance(p, int | float) or jnp.issubdtype(getattr(p, "dtype", bool), jnp.floating)):
        raise InvalidTypeError(f"`p` (={p!r}) must be a probability, a number or a floating array.")
    if isinstance(p, int | float | np.number) and not 0 <= p <= 1:
        raise InvalidArgumentError(f"`p` (={p}) must be a probability, 0 to 1.")
    if spec.box is None:
        return zero_volume_tensor(dtype=bool)
    dtype = jnp.result_type(p, float) if isinstance(p, int | float) else jnp.result_type(p)  # as in jax.random
    return _block("uniform", key, spec, dtype) < jnp.asarray(p, dtype)


def _block(name: str, key: Array, spec: TensorSpec, dtype: DTypeLike) -> Array:
    check_spec(spec)
    check_key("key", key)
    np_dtype = checked_dtype("dtype", dtype)
    if not jnp.issubdtype(np_dtype, jnp.inexact if name == "normal" else jnp.floating):
        raise InvalidTypeError(f"`dtype` (={np_dtype}) must be floating{' or complex' * (name == 'normal')}.")
    return init_block(_Standard(name), key, spec, np_dtype)


def _is_number(x: ArrayLike, number: float) -> bool:
    return isinstance(x, int | float) and x == number
