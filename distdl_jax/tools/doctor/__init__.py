"""`python -m distdl_jax doctor`: what is wrong with an installation, a launch or a machine, and what to do.

Each worker says what it finds (`worker`), worker 0 adds what concerns several (`job`), and prints it (`findings`).
"""
