"""The library's contexts in the keys of all JAX caches: a jitted function has a program for each of their values.

They are made together. JAX counts them, too: a function that was traced before another one is made is traced again in
its next call, and if the module that makes it is imported on one worker only, on that worker alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import jax

simulated_world = jax.make_user_context(None)
to_be_transposed = jax.make_user_context(False)
batch_sizes = jax.make_user_context(None)

_noted: dict[int, tuple[ref[Any], int | None]] = {}  # by identity, of arrays that exist
_NOTHING = nullcontext()
_is_needed = False


def note_size(array: jax.Array, size: int | None) -> None:
    """Have functions of `dj.jit` that are called with `array` itself be compiled for this size of the whole tensor.

    None for a size that differs from all such sizes on every worker, whose block's shape then says enough.
    """
    global _is_needed
    identity = id(array)
    _noted[identity] = ref(array, lambda _: _noted.pop(identity, None)), size
    _is_needed = _is_needed or size is not None


def sizes_in_key(arguments: Any) -> AbstractContextManager[Any]:
    """Return a context with the sizes of noted arguments in the key, in place of the sizes of current batches.

    As long as no size was needed, the key stays as it is, and the arguments aren't looked at, which would take time.
    """
    if not _is_needed or not _noted:
        return _NOTHING
    found = [(place, _noted.get(id(leaf))) for place, leaf in enumerate(jax.tree.leaves(arguments))]
    sizes = [(place, noted[1]) for place, noted in found if noted is not None]
    return batch_sizes(tuple(each for each in sizes if each[1] is not None) or None) if sizes else _NOTHING
