"""Convolutions by oneDNN on CPUs, an extra: `make venv`, or `python -m distdl_jax.onednn` if oneDNN is installed."""
