"""`python -m distdl_jax machine`: measure the job's machine, and print it as a call that constructs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distdl_jax.errors import DistDLError
from distdl_jax.partitions.partition import Partition
from distdl_jax.tools.cost.machines import measure


def main(arguments: Sequence[str]) -> int:
    """Run a command line; return the exit status."""
    is_first = Partition().rank == 0
    if arguments:
        if is_first:
            print(f"machine takes no arguments, but got {' '.join(arguments)}.", file=sys.stderr)
        return 2
    try:
        machine = measure()
    except DistDLError as error:
        if is_first:  # the same on all workers
            print(error, file=sys.stderr)
        return 1
    if is_first:
        print(f"dj.{machine}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
