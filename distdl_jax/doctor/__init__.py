"""`python -m distdl_jax doctor`: what is wrong with an installation, a launch or a machine, and what to do.

Each worker collects facts (`collect_*.py`), worker 0 gathers them, and pure functions turn them into findings.
"""
