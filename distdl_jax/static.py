"""Values that JAX takes as they are: partitions and layers."""

from __future__ import annotations

from typing import Any

import jax


class Static:
    """The base of immutable, hashable values without arrays in them, which JAX is to take for static.

    An instance can be an argument of a jitted function, a leaf of a pytree, of an equinox module, say, or an attribute
    of a flax module, without a wrapper: to JAX it is a pytree without leaves, and part of the key of its caches.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_static(cls)
