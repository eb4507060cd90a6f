"""`python -m distdl_jax.onednn`: compiles oneDNN's convolutions into this environment, and tries them."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import SetupError
from distdl_jax.kernels import conv_onednn, conv_plain
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.onednn.build import build
from distdl_jax.kernels.onednn.compiled import DIRECTIONS, version


def main() -> int:
    """Build and try; the exit status."""
    try:
        path = build()
        _try()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"-- {path} is ready: oneDNN {version()}")
    return 0


def _try() -> None:
    """Raise `SetupError` unless one convolution, and its gradients, are what XLA computes."""
    window, draw = Placement((1, 2), ((1, 1), (0, 1)), (1, 1)), np.random.default_rng(0).standard_normal
    shapes = x, weight, _ = (2, 6, 9, 8), (20, 3, 3, 2), (2, 20, 9, 4)
    arrays = [jnp.asarray(draw(shape), jnp.float32) for shape in shapes]
    for direction in DIRECTIONS:
        if not conv_onednn.can_compute(direction, *shapes, window, 2):
            raise SetupError(f"oneDNN {version()} can't compute a small convolution ({direction}: {x} by {weight}).")
        operands = arrays[:2] if direction == "forward" else arrays
        got, wanted = (getattr(forms, direction)(*operands, window, 2) for forms in (conv_onednn, conv_plain))
        if not jnp.allclose(got, wanted, rtol=1e-4, atol=1e-4):
            raise SetupError(f"oneDNN {version()} computes something else than XLA ({direction}: {x} by {weight}).")


if __name__ == "__main__":
    sys.exit(main())
