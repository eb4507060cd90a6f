"""`python -m distdl_jax`: runs programs.

`mpiexec -n 4 python -m distdl_jax program.py` runs a program on each worker as `python program.py` would, but with MPI
started, and every way to end the job installed, before its first line. `-m module` and `-c code` are as Python's.

`python -m distdl_jax --simulate 4 program.py` runs a program on four workers in one process, without mpirun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distdl_jax.backends.inprocess.script import simulate_script
from distdl_jax.process.run_program import run_code, run_file, run_module


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; the exit status."""
    if len(arguments) > 1 and arguments[0] in ("-m", "-c"):
        run = run_module if arguments[0] == "-m" else run_code
        run(arguments[1], arguments[2:])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m distdl_jax",
        usage="%(prog)s [--simulate N] program.py ... | -m module ... | -c code ...",
        description="Run a program as one worker of a job that a launcher (mpirun, mpiexec, srun) has started; or, "
        "with --simulate, on several workers in this process, each a thread, without a launcher.",
    )
    parser.add_argument("--simulate", metavar="N", type=_workers, help="how many workers, 1 or more")
    parser.add_argument("program", type=_program, help="the program's file; or -m and a module, or -c and code")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it finds in sys.argv, after its name")
    options = parser.parse_args(arguments)
    if options.simulate is None:
        run_file(options.program, options.arguments)
    else:
        simulate_script(options.simulate, options.program, options.arguments)
    return 0


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of workers, 1 or more.")
    return int(text)


def _program(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}.")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
