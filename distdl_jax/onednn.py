"""`python -m distdl_jax.onednn`: compile oneDNN's convolutions into this environment, and test them."""

from __future__ import annotations

import sys

from distdl_jax.kernels.onednn_build import main

if __name__ == "__main__":
    sys.exit(main())
