"""A pytest plugin that runs tests in MPI worlds and ends every hang as a failed test with stacks. See README.md.

- `plugin`: pytest's hooks; they start one of the two halves below.
- `hooks`: the hooks by which a project says what its ranks need.
- `parent`: the ordinary pytest process. It runs the plain tests, and reports for all.
- `lane`: a thread of the parent that has all tests of one size run, in one world after the other.
- `world`: one `mpiexec` with its ranks, seen from its lane.
- `worker`: one rank of a world. It runs the items it is told to and writes down what happened.
- `costs`: processor seconds of tests and of files, and which are over the budget.
- `pace`: how slow this machine is now, by which limits grow.
- `mpiexec`: which MPI this is, and its command line.
- `reports`: the reports of all ranks of one item made into one.
- `stacks`: faulthandler's output, shortened and merged.
- `guard`: the time limit for tests that run in the parent itself.
- `settings`: the environment variables.
- `examples`: hypothesis settings under which every rank draws the same.
"""
