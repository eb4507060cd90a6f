"""Runs tests in MPI worlds of several sizes, from one ordinary pytest command: see tests/README.md.

- `plugin`: pytest's hooks. The pytest process runs the plain tests itself, and reports for all.
- `world`: a thread of it for each world size, which starts `mpiexec` and tells the ranks what to run.
- `rank`: one process of a world, which runs the tests that it is told to.
- `reports`: the reports of all ranks of one test made into one.
- `forkserver`: programs that tests start as copies of a process with JAX imported.
"""
