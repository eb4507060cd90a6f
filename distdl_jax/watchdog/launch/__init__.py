"""`python -m distdl_jax program.py`: the supervisor of one worker, and how it starts the worker. Imports no JAX."""
