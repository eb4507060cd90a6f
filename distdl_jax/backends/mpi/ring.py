"""The last operations of this worker, noted while compiled programs run, where `DISTDL_JAX_DEBUG=1` asks for it.

A note costs a call of Python from the compiled program, some 100 us; without the setting programs are compiled without.
"""

from __future__ import annotations

import os
from collections import deque
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.backends.mpi.tie import tie

OPERATIONS_REMEMBERED = 64

noting = os.environ.get("DISTDL_JAX_DEBUG", "0") not in ("", "0")
"""Whether operations are noted; read once, when the library is imported."""

_notes: deque[tuple[float, str, bool]] = deque(maxlen=2 * OPERATIONS_REMEMBERED)


def noted(x: Array, operation: str, done: bool) -> Array:
    """`x`, on whose way the beginning or the end of an operation is noted."""
    if not noting:
        return x

    def note(_: Any) -> Any:
        _notes.append((monotonic(), operation, done))
        return np.zeros(1, np.bool_)

    # Not of size 0: XLA drops calls that give nothing.
    seen = jax.pure_callback(note, jax.ShapeDtypeStruct((1,), np.bool_), tie(jnp.zeros(1, jnp.bool_), x))
    return tie(x, seen)


def last_operations() -> list[str]:
    """A line for each operation that is remembered, the last one last: how long ago it began, and how it went on."""
    now, lines = monotonic(), []
    notes = list(_notes)
    for place, (at, operation, done) in enumerate(notes):
        if done:
            continue
        ended = next((then for then, other, done in notes[place:] if done and other == operation), None)
        went_on = "goes on" if ended is None else f"took {1e3 * (ended - at):.3f} ms"
        lines.append(f"{now - at:10.3f} s ago  {operation}: {went_on}")
    return lines
