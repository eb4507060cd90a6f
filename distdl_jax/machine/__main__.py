"""`python -m distdl_jax machine`: measure this machine, and look at those whose files the library has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distdl_jax.errors import DistDLError
from distdl_jax.machine.machine import Machine, load, names
from distdl_jax.machine.measurement import measure
from distdl_jax.partition import Partition


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m distdl_jax machine")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure the machine that this job runs on, and write its file")
    measuring.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("machine.toml"), help="default: %(default)s"
    )
    measuring.add_argument("--quick", action="store_true", help="few sizes, once: for a first look")
    commands.add_parser("list", help="name the machines whose files the library has")
    showing = commands.add_parser("show", help="print a machine's file")
    showing.add_argument("machine", help="a name, or the path of a file")
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "measure":
                return _measure(options.out, options.quick)
            case "list":
                print(*(f"{name:<20}{load(name).about}" for name in names()), sep="\n")
            case "show":
                print(load(options.machine), end="")
    except DistDLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _measure(path: Path, quick: bool) -> int:
    """Measure with all workers of the job; worker 0 writes the file, and what it says of itself."""
    is_first = Partition().rank == 0
    try:
        machine = replace(measure(quick=quick), name=path.stem)
    except DistDLError as error:
        if is_first:  # the same on all workers
            print(error, file=sys.stderr)
        return 1
    if is_first:
        machine.save(path)
        print(_summary(machine, path))
    return 0


def _summary(machine: Machine, path: Path) -> str:
    quality = machine.quality
    rounds = "measured once, so that nothing says how far rounds differ"
    if quality.source.startswith("measured"):
        rounds = f"half of the numbers differ between rounds by {100 * quality.rounds_differ:.0f} % at most"
    return (
        f"{path}: {machine.about}.\nMessages ({', '.join(machine.levels)}) are within "
        f"{100 * quality.fit_error:.0f} % of their segments; {rounds}; times of arithmetic spread by "
        f"{100 * quality.noise:.0f} %. Guesses: {', '.join(machine.guesses) or 'none'}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
