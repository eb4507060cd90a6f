"""`python -m distdl_jax advise FILE --workers 64`: the advice for the network that a file describes, as a table."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from distdl_jax.errors import DistDLError, InvalidArgumentError
from distdl_jax.tools.advise.advise import advise
from distdl_jax.tools.cost.cost import OPTIMISERS
from distdl_jax.tools.cost.machines import names


def advise_on_file(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distdl_jax advise",
        description="Print partitions that make a training step of a network fast. The file, a Python program, defines "
        "`network`, a list as for dj.advise, and `x_shape`, the global shape of the input.",
    )
    parser.add_argument("file", help="the Python file; what it does under `if __name__ == '__main__'` is not run")
    parser.add_argument("--workers", type=int, required=True, help="the number of workers")
    parser.add_argument("--memory", help='the most that a worker can store, such as "40GiB"')
    parser.add_argument("--machine", help=f"{', '.join(names())}")
    parser.add_argument("--optimiser", default="adam", choices=list(OPTIMISERS))
    parser.add_argument("--dtype", default="float32", help="of the input and of the parameters")
    options = parser.parse_args(arguments)
    if not Path(options.file).is_file():
        parser.error(f"there is no file {options.file!r}.")
    sys.path.insert(0, str(Path(options.file).resolve().parent))  # as if the file were run
    defined = runpy.run_path(options.file)
    try:
        if missing := [name for name in ("network", "x_shape") if name not in defined]:
            raise InvalidArgumentError(
                f"{options.file} must define `network`, a list of descriptions, and `x_shape`, but defines no "
                f"`{missing[0]}`."
            )
        advice = advise(
            defined["network"],
            defined["x_shape"],
            workers=options.workers,
            memory=options.memory,
            machine=options.machine,
            optimiser=options.optimiser,
            dtype=options.dtype,
        )
    except DistDLError as error:
        print(error, file=sys.stderr)
        return 1
    print(advice)
    return 0
