"""Convolutions by oneDNN on CPUs, an extra: `make venv ONEDNN=1`, or `python -m distdl_jax.onednn` where oneDNN is."""
