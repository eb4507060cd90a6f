"""`python -m distdl_jax`: runs programs, and looks for what is wrong.

`mpiexec -n 4 python -m distdl_jax program.py` runs a program on each worker as `python program.py` would, but under a
supervisor that sees whatever ends the worker. `-m module` and `-c code` are as Python's.

`python -m distdl_jax --simulate 4 program.py` runs a program on four workers in one process, without mpirun.

`mpiexec -n 4 python -m distdl_jax machine` measures the machine, for `dj.cost` to estimate seconds.

`python -m distdl_jax advise network.py --workers 64` prints the partitions that the layers of a network should have.

`python -m distdl_jax doctor`, with or without mpiexec in front, looks at the installation, the launch and the machine.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[0] == __file__ and not sys.flags.safe_path:
    del sys.path[0]  # Python's -m: the working folder, whose socket.py, say, is not the standard library's

import argparse
from collections.abc import Sequence
from pathlib import Path

from distdl_jax.watchdog.launch.supervisor import supervise, worker_command

COMMANDS = {"machine": ("tools.cost", None), "doctor": ("tools.doctor", 60.0)}
"""Words in place of a program, for the modules of the library that they run; and within how many seconds MPI must have
started: None for DISTDL_JAX_TIMEOUT."""


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; return the exit status."""
    if len(arguments) > 1 and arguments[0] in ("-m", "-c"):
        supervise(worker_command(arguments))
    if arguments[:1] == ["advise"]:
        from distdl_jax.tools.advise.command import advise_on_file  # imports JAX, which no supervisor needs

        return advise_on_file(arguments[1:])
    if arguments[:1] == ["doctor"] and any(word.startswith("--simulate") for word in arguments):
        from distdl_jax.tools.doctor.__main__ import main as look  # as simulated programs run: without a supervisor

        return look(arguments[1:])
    if arguments and arguments[0] in COMMANDS:
        module, seconds = COMMANDS[arguments[0]]
        supervise(worker_command(["-m", f"distdl_jax.{module}", *arguments[1:]]), seconds)
    parser = argparse.ArgumentParser(
        prog="python -m distdl_jax",
        usage="%(prog)s [--simulate N] program.py ... | -m module ... | -c code ... | advise | doctor | machine ...",
        description="Run a program as one worker of a job that a launcher (mpirun, mpiexec, srun) has started; or, "
        "with --simulate, on several workers in this process, each a thread, without a launcher. Or look for what is "
        "wrong with an installation, a launch or a machine, or ask for the partitions of a network: doctor --help and "
        "advise --help say more.",
    )
    parser.add_argument("--simulate", metavar="N", type=_workers, help="how many workers, 1 or more")
    parser.add_argument("program", help="the program's file; or -m and a module, or -c and code")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it finds in sys.argv, after its name")
    options = parser.parse_args(arguments)
    if options.simulate is None:
        supervise(worker_command([options.program, *options.arguments]))
    if not Path(options.program).is_file():
        parser.error(f"there is no file {options.program!r}.")
    from distdl_jax.transports.threads.simulate import simulate_script  # imports JAX, which no supervisor needs

    simulate_script(options.simulate, options.program, options.arguments)
    return 0


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of workers, 1 or more.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
