"""`python -m distdl_jax doctor`: problems of an installation, a launch or a machine, and what to do about them.

Each worker reports its findings (`worker`), worker 0 adds those about several (`job`), and prints all (`findings`).
"""
