"""`python -m distdl_jax`: runs programs.

`python -m distdl_jax --simulate 4 program.py` runs a program on four workers in one process, without mpirun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distdl_jax.backends.inprocess.script import simulate_script


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distdl_jax",
        description="Run a program on several workers in this process, each a thread, without mpirun.",
    )
    parser.add_argument("--simulate", metavar="N", type=_workers, required=True, help="how many workers, 1 or more")
    parser.add_argument("program", type=_program, help="the program's file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it finds in sys.argv, after its name")
    options = parser.parse_args(arguments)
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
