"""What all examples take: `--simulate N` runs them on N workers in one process, without mpirun."""

import sys

from distdl_jax.__main__ import main


def simulate_if_asked() -> None:
    """With `--simulate N` on the command line, run the program on N workers in this process instead, and exit."""
    if "--simulate" in sys.argv:
        place = sys.argv.index("--simulate")
        how, rest = sys.argv[place : place + 2], sys.argv[1:place] + sys.argv[place + 2 :]
        sys.exit(main([*how, sys.argv[0], *rest]))
