"""A pytest plugin that runs tests in MPI worlds and ends every hang as a failed test with stacks.

- `plugin`: the hooks that `conftest.py` exports; they start one of the two halves below.
- `parent`: the ordinary pytest process. It starts worlds, waits for them, and reports.
- `worker`: one rank of a world. It runs the items it is told to and writes down what happened.
- `world`: one `mpiexec` with its ranks, seen from the parent.
- `mpiexec`: which MPI this is, its command line, and the environment of the ranks.
- `reports`: the reports of all ranks of one item made into one.
- `stacks`: faulthandler's output, shortened and merged.
- `guard`: the time limit for tests that run in the parent itself.
- `examples`: hypothesis settings under which every rank draws the same.
"""
