"""The rules of JAX's primitives, by family: importing this package registers them."""

from distdl_jax.distribute.rules import (  # noqa: F401
    derivatives,
    dimensions,
    dynamic,
    elementwise,
    fourier,
    indexing,
    loops,
    pieces,
    products,
    reductions,
    windows,
)
