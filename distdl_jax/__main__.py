"""`python -m distdl_jax`: runs programs, and diagnoses problems.

`mpiexec -n 4 python -m distdl_jax program.py` runs a program on each worker like `python program.py`, but under a
supervisor that sees whatever ends the worker. `-m module` and `-c code` are like Python's.

`python -m distdl_jax --simulate 4 program.py` runs a program on four workers in one process, without mpirun.

`python -m distdl_jax doctor`, with or without mpiexec, checks the installation, the launch and the machine.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[0] == __file__ and not sys.flags.safe_path:
    del sys.path[0]  # Python's -m: the working folder, whose socket.py, for instance, is not the standard library's

import argparse
from collections.abc import Sequence
from pathlib import Path

from distdl_jax.watchdog.launch.supervisor import supervise, worker_command

SECONDS = 60.0
"""For MPI's start in `doctor`, in place of DISTDL_JAX_TIMEOUT."""

# Commands of the version before, and what to do in place of them. They go with the next version.
_REMOVED = {
    "advise": "time a few partitions in the job, as docs/how-to/choose-a-partition.md shows",
    "machine": "print dj.cost(network, x_spec).table(bandwidth='10 GB/s', latency='2 us')",
}


def main(arguments: Sequence[str]) -> int:
    """Run a command line; return the exit status."""
    if len(arguments) > 1 and arguments[0] in ("-m", "-c"):
        supervise(worker_command(arguments))
    if arguments[:1] == ["doctor"] and any(word.startswith("--simulate") for word in arguments):
        from distdl_jax.tools.doctor.__main__ import main as look  # like simulated programs: without a supervisor

        return look(arguments[1:])
    if arguments[:1] == ["doctor"]:
        supervise(worker_command(["-m", "distdl_jax.tools.doctor", *arguments[1:]]), SECONDS)
    parser = argparse.ArgumentParser(
        prog="python -m distdl_jax",
        usage="%(prog)s [--simulate N] program.py ... | -m module ... | -c code ... | doctor ...",
        description="Run a program as one worker of a job that a launcher (mpirun, mpiexec, srun) has started; or, "
        "with --simulate, on several workers in this process, each a thread, without a launcher. Or "
        "check an installation, a launch and a machine: see doctor --help.",
    )
    parser.add_argument("--simulate", metavar="N", type=_workers, help="the number of workers, 1 or more")
    parser.add_argument("program", help="the program's file; or -m and a module, or -c and code")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments in sys.argv, after its name")
    options = parser.parse_args(arguments)
    if options.program in _REMOVED:
        parser.error(f"{options.program} has been removed: {_REMOVED[options.program]}.")
    if options.simulate is None:
        supervise(worker_command([options.program, *options.arguments]))
    if not Path(options.program).is_file():
        parser.error(f"there is no file {options.program!r}.")
    from distdl_jax.transports.threads.simulate import simulate_script  # imports JAX, which no supervisor needs
    from distdl_jax.watchdog.error_text import error_text

    try:
        simulate_script(options.simulate, options.program, options.arguments)
    except Exception as error:
        if sys.excepthook is not sys.__excepthook__:
            raise
        sys.stderr.write(error_text(error))
        return 1
    return 0


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of workers, 1 or more.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
