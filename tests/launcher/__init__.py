"""A pytest plugin that runs tests in MPI worlds and ends every hang as a failed test with stacks. See README.md.

- `plugin`: pytest's hooks; they start one of the two halves below.
- `hooks`: the hooks by which a project says what its ranks need.
- `parent`: the ordinary pytest process. It runs the plain tests, and reports for all.
- `runner`: a thread of the parent that runs all tests of one size, in one world after the other.
- `world`: one `mpiexec` with its ranks, seen from its runner.
- `worker`: one rank of a world. It runs the items that it is given and writes down what happened.
- `ranks`: what the ranks of a world decide together.
- `costs`: processor seconds of tests and of files, and which are over the budget.
- `slowdown`: how much slower than usual this machine is now; limits grow by it.
- `mpiexec`: the MPI that is installed, and its command line.
- `forkserver`: programs that tests start as copies of a process with their modules imported.
- `reports`: the reports of all ranks of one item made into one.
- `stacks`: faulthandler's output, shortened and merged.
- `time_limit`: the time limit of tests that run in the parent itself.
- `settings`: the environment variables.
- `examples`: hypothesis settings under which every rank draws the same.
"""
