"""Whole arguments, which are to be the same on all workers: compared by digests of their values.

Values that are known while a program is traced (of calls without jit, and of the first call under `dj.jit`) are part of
the workers' agreement on the program, so that a compiled step has no cost. With `DISTDL_JAX_DEBUG=1` traced values are
compared at each call, in the program itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from distdl_jax.distribute.digests import bits_of
from distdl_jax.distribute.meanings import Spec, tensor_spec
from distdl_jax.distribute.movements import Movements
from distdl_jax.errors import PlanError
from distdl_jax.settings import current_settings
from distdl_jax.tracing.known_values import known_value


def whole_digests(paths: Sequence[str], specs: Sequence[Spec], leaves: Sequence[Any]) -> dict[str, str]:
    """Return the digest of each whole argument whose value is known, by its path."""
    found = {}
    for path, spec, leaf in zip(paths, specs, leaves, strict=True):
        value = known_value(leaf) if tensor_spec(spec) is None else None
        if value is not None and not isinstance(value, jax.ShapeDtypeStruct):
            dtype = jax.typeof(value).dtype
            if isinstance(dtype, np.dtype):  # as JAX takes it: a double of NumPy may become a single
                value = np.asarray(value, dtype)
            found[path] = hashlib.sha256(bits_of(value)).hexdigest()[:16]
    return found


def refuse_different(digests: Mapping[int, Mapping[str, str]]) -> None:
    """Raise if a whole argument differs between workers, given each one's digests."""
    first = min(digests)
    for worker in sorted(digests):
        for path, digest in digests[worker].items():
            if digests[first].get(path, digest) != digest:
                raise PlanError(_sentence(path, first, worker))


def _sentence(path: str, first: int, worker: int) -> str:
    return (
        f"`{path}`, of which each worker passes the whole value, must be the same on all workers, but differs on "
        f"workers {first} and {worker}. Make it from the same random key, or send the first worker's by "
        "`P.broadcast_data`; or give it a TensorSpec in `in_specs`, if it is a block."
    )


def compare_while_running(
    movements: Movements, paths: Sequence[str], specs: Sequence[Spec], leaves: Sequence[Any]
) -> None:
    """Compare traced whole arguments each time that the program runs, with `DISTDL_JAX_DEBUG=1`.

    Each worker sends four bytes an argument; JAX raises the error after the run, on all workers.
    """
    traced = [
        (path, leaf)
        for path, spec, leaf in zip(paths, specs, leaves, strict=True)
        if tensor_spec(spec) is None and isinstance(leaf, Tracer)
    ]
    mesh = movements.mesh
    if not current_settings().debug or not traced or mesh.size(mesh.axes) == 1:
        return
    movements.asked_by = "", "DISTDL_JAX_DEBUG"
    own = jnp.stack([_words_digest(leaf) for _, leaf in traced])[None]
    every = tuple(sorted(mesh.axes))
    rows, _ = movements.gathered(own, (mesh.size(every), len(traced)), (every, ()), [0])
    compare = partial(_raise_if_different, [path for path, _ in traced], mesh.ranks.ravel().tolist())
    jax.debug.callback(compare, rows)


def _words_digest(x: Array) -> Array:
    """Return a number of 32 bits that depends on each bit of an array, and on its place."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = lax.stop_gradient(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        words = x.astype(np.uint32)
    else:
        bits = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
        words = lax.bitcast_convert_type(x, bits).astype(np.uint32)
    words = words.ravel()
    odd = 2 * lax.iota(np.uint32, words.size) + 1  # a factor that has an inverse, so that no change of a word is lost
    mixed = (words ^ (words >> 16)) * odd * np.uint32(0x9E3779B1)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=np.uint32)


def _raise_if_different(paths: Sequence[str], workers: Sequence[int], rows: Any) -> None:
    for path, column in zip(paths, np.asarray(rows).T, strict=True):
        different = np.flatnonzero(column != column[0])
        if len(different):
            raise PlanError(_sentence(path, workers[0], workers[int(different[0])]))
